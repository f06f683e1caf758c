/* The member lock: a POSIX record lock over one whole file, which the kernel drops the instant its process ends, however it ends; and
 * the member's heartbeat, a number at the start of that file that moves every second.
 *
 * A record lock belongs to a process, not to a descriptor, and closing any descriptor of the file drops it. So a member's file is
 * opened once, by nobody else in that process, and its descriptor is left open for good; exec and exit close it. A fork's child
 * inherits the descriptor but neither lock nor thread, and cannot drop its parent's lock by closing it. */
#define _GNU_SOURCE
#include "lock.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Enough for a sleep and a write, and for what libraries of the process keep per thread on the stack (static TLS). */
enum { STACK_BYTES = 256 << 10 };

static int write_beat(int fd, uint64_t beat) {
    ssize_t written = pwrite(fd, &beat, sizeof beat, 0);
    return written == (ssize_t)sizeof beat ? 0 : written < 0 ? errno : ENOSPC;
}

struct start {
    int fd;
    dev_t device;
    ino_t inode;
    sem_t taken; /* by the thread, which holds no lock of the process from then on that a fork could leave taken in the child */
};

/* Needs nothing of the rest of the process. A write that fails is a beat left out. Ends when somebody closed the descriptor, which
 * dropped the lock: the number may be another file's by then, where not one byte of ours may go. */
static void *keep_beating(void *argument) {
    struct start *start = argument;
    const int fd = start->fd;
    const dev_t device = start->device;
    const ino_t inode = start->inode;
    pthread_setname_np(pthread_self(), "hostkv-beat");
    sem_post(&start->taken);
    const struct timespec second = {.tv_sec = 1};
    for (uint64_t beat = 2;; beat++) {
        nanosleep(&second, NULL);
        struct stat now;
        if (fstat(fd, &now) < 0 || now.st_dev != device || now.st_ino != inode) return NULL;
        write_beat(fd, beat);
    }
}

/* Signals are for the threads of the process: this one blocks all, so that no handler runs on its stack. */
static int start_beating(int fd) {
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    struct stat now;
    if (fstat(fd, &now) < 0) return errno;
    struct start start = {.fd = fd, .device = now.st_dev, .inode = now.st_ino};
    int error = pthread_attr_init(&attributes);
    if (error != 0) return error;
    sem_init(&start.taken, 0, 0);
    sigfillset(&all);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&thread, &attributes, keep_beating, &start);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    while (error == 0 && sem_wait(&start.taken) < 0 && errno == EINTR) {}
    sem_destroy(&start.taken);
    return error;
}

int hkv_lock_take(const char *path) {
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return errno;
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    int error = fcntl(fd, F_SETLK, &whole) < 0 || fchmod(fd, 0640) < 0 ? errno : write_beat(fd, 1);
    if (error == 0) error = start_beating(fd);
    if (error == 0) return 0;
    unlink(path);
    close(fd);
    return error;
}

int hkv_lock_look(const char *path, long *pid, uint64_t *beat) {
    *pid = -1;
    *beat = 0;
    /* O_NONBLOCK: a client that puts a FIFO here must not stop the sidecar. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) return errno == ENOENT ? 0 : errno;
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    int error = fcntl(fd, F_GETLK, &whole) < 0 ? errno : 0;
    uint64_t found;
    if (pread(fd, &found, sizeof found, 0) == (ssize_t)sizeof found) *beat = found;
    close(fd);
    if (error == 0 && whole.l_type != F_UNLCK) *pid = whole.l_pid > 0 ? whole.l_pid : 0;
    return error;
}
