/* The member lock: a POSIX record lock over one whole file, which the kernel drops the instant its process ends, however it ends.
 *
 * A record lock belongs to a process, not to a descriptor, and closing any descriptor of the file drops it. So a member's file is
 * opened once, by nobody else in that process, and its descriptor is left open for good; exec and exit close it. A fork's child
 * inherits the descriptor but not the lock, and cannot drop its parent's by closing it. */
#define _GNU_SOURCE
#include "lock.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

int hkv_lock_take(const char *path) {
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return errno;
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    if (fcntl(fd, F_SETLK, &whole) == 0) return 0;
    int error = errno;
    unlink(path);
    close(fd);
    return error;
}

int hkv_lock_holder(const char *path, long *pid) {
    *pid = -1;
    /* O_NONBLOCK: a client that puts a FIFO here must not stop the sidecar. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) return errno == ENOENT ? 0 : errno;
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    int error = fcntl(fd, F_GETLK, &whole) < 0 ? errno : 0;
    close(fd);
    if (error == 0 && whole.l_type != F_UNLCK) *pid = whole.l_pid > 0 ? whole.l_pid : 0;
    return error;
}
