/* The member lock: how the kernel tells that a process is gone. See lock.c. */
#ifndef HOSTKV_LOCK_H
#define HOSTKV_LOCK_H

/* Both return 0 or an errno. */
int hkv_lock_take(const char *path);
int hkv_lock_holder(const char *path, long *pid); /* *pid: -1 nobody, 0 somebody whom this PID namespace cannot name */
#endif
