/* The member lock and its heartbeat: how others tell that a process is gone, or hangs. See lock.c. */
#ifndef HOSTKV_LOCK_H
#define HOSTKV_LOCK_H
#include <stdint.h>

/* Both return 0 or an errno. take: after an error nothing is left; a success is for the life of the process. */
int hkv_lock_take(const char *path);
/* *pid: -1 nobody, 0 somebody whom this PID namespace cannot name. *beat: 0 where there is none. */
int hkv_lock_look(const char *path, long *pid, uint64_t *beat);
#endif
