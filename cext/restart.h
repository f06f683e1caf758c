/* See restart.c. `words` ends with NULL and is kept for good. Returns 0 or an errno. */
#ifndef HOSTKV_RESTART_H
#define HOSTKV_RESTART_H
int hkv_restart_on_abort(char **words);
#endif
