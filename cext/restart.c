/* What happens to the sidecar when ZeroMQ aborts: it does so in a thread of its own where it cannot accept a connection for want of a
 * descriptor, and may in other corners. The process is then replaced by a fresh start of the same command, as at SIGHUP: pool and tables
 * are files, so nothing that counts is lost. An abort of the thread that asked for this, or of any code of ours that it runs, is a
 * fault of ours and ends the process as ever. */
#define _GNU_SOURCE
#include "restart.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char **command;
static pthread_t faithful; /* the thread whose aborts are ours */

static void restart(int number) {
    static const char says[] = "hostkv: ZeroMQ ended itself; restarting on the same pool\n";
    if (pthread_equal(pthread_self(), faithful)) return; /* abort() goes on to end the process */
    ssize_t ignored = write(STDERR_FILENO, says, sizeof says - 1);
    (void)ignored;
    sigset_t later; /* the mask outlives exec, and ZeroMQ's threads block every signal; these the successor unblocks when it knows them */
    sigemptyset(&later);
    sigaddset(&later, SIGTERM);
    sigaddset(&later, SIGINT);
    sigaddset(&later, SIGHUP);
    sigprocmask(SIG_SETMASK, &later, NULL);
    execv(command[0], command);
}

int hkv_restart_on_abort(char **words) {
    command = words;
    faithful = pthread_self();
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = restart;
    return sigaction(SIGABRT, &action, NULL) < 0 ? errno : 0;
}
