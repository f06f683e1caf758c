/* The I/O engine of the disk tier: moves blocks between files and one mapping (the pool). See io.c. */
#ifndef HOSTKV_IO_H
#define HOSTKV_IO_H
#include "layout.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define HKV_IO_MAX_DEPTH 1024
#define HKV_IO_MAX_WORKERS 16
#define HKV_IO_QUEUE 4 /* a device holds so many ops for each unit of depth, from submit until they are reaped */
#define HKV_IO_RUN 16  /* ops that are moved together, at most, */
#define HKV_IO_RUN_BYTES (4 << 20)
#define HKV_IO_PIECE (UINT64_C(64) << 20) /* out of one such piece of the mapping */
#define HKV_IO_DEVICES 32                 /* those that come later share the last one's queue, workers and depth */

enum { HKV_IO_READ = 0, HKV_IO_WRITE = 1 };
enum { HKV_IO_CORRUPT = -1 }; /* a result: the payload has another checksum than the one expected */

struct hkv_io_op {
    uint64_t token;
    int kind; /* HKV_IO_READ or HKV_IO_WRITE */
    /* The caller keeps both open until the op is reaped. record_fd -1: no record. */
    int fd, record_fd;
    uint64_t offset, at, size; /* in the file, in the mapping; bytes. Multiples of HKV_PAGE */
    uint64_t shard_bytes;
    uint32_t shards;
    bool expects; /* `checksum` is what the payload must have */
    uint64_t checksum;
    uint64_t record_offset;
    struct hkv_record record; /* without checksum; in the place of its seal the seed of it */

    /* ---- the engine's part ---- */
    int result; /* 0, HKV_IO_CORRUPT, or an errno */
    unsigned retries;
    uint64_t sum;   /* the checksum of the payload, once it is known */
    uint64_t moved; /* bytes of the payload, so far */
    bool alone;     /* a transfer together with others did not move it whole */
    struct iovec parts[HKV_IO_RUN];
    struct hkv_io_device *device;
    struct hkv_io_op *with; /* the next one of the same transfer, which lies behind it in the file */
    struct hkv_io_op *next;
};

struct hkv_io_done {
    uint64_t token, checksum;
    int result;
};

struct hkv_io;

/* Maps `size` bytes of `fd` and makes an engine on them: "io_uring", "threads", or "auto", the first of them that works here. An errno;
 * with `why` (of HKV_IO_WHY bytes) filled whenever io_uring was wanted and does not work. */
#define HKV_IO_WHY 96
int hkv_io_open(int fd, size_t size, const char *engine, unsigned depth, unsigned workers, struct hkv_io **io, char *why);
const char *hkv_io_engine(const struct hkv_io *io);
int hkv_io_event(const struct hkv_io *io); /* an eventfd, readable while there is something to reap */

/* Takes ops in their order until one has no room with its device, and returns how many. Does not block, whatever the devices do. Each op
 * that was taken is reaped once. The caller has checked that its bytes lie inside of the mapping, and its shards inside of its bytes. */
size_t hkv_io_submit(struct hkv_io *io, const struct hkv_io_op *ops, size_t count);
size_t hkv_io_reap(struct hkv_io *io, struct hkv_io_done *done, size_t most);

/* The depth that each device is at, as (st_dev, depth); returns how many devices there are. */
struct hkv_io_depth {
    uint64_t device;
    unsigned depth;
};
size_t hkv_io_depths(struct hkv_io *io, struct hkv_io_depth depths[HKV_IO_DEVICES]);

/* Waits for what the devices have in hand, ends what they have not begun with ECANCELED, and unmaps. What is not reaped yet still can be. */
void hkv_io_close(struct hkv_io *io);
void hkv_io_free(struct hkv_io *io); /* after it was closed */

/* ---- how deep: io_depth.c ------------------------------------------------------------------------------------------------------ */

struct hkv_depth {
    unsigned now, most;
    unsigned before;  /* the depth that a trial is compared with */
    double rate;      /* bytes a nanosecond, at the depth before the trial */
    bool trying, up;  /* a trial runs; the direction of this or the next one */
    unsigned rest;    /* windows until the next trial */
    unsigned skip;    /* transfers that began under another depth than this */
    unsigned count;   /* of this window: transfers, */
    uint64_t bytes;   /* what they moved, */
    uint64_t busy_ns; /* and how long they took together while more were waiting */
    uint64_t last_ns; /* when the last transfer ended with others waiting; 0: none was */
};
void hkv_depth_start(struct hkv_depth *depth, unsigned most);
/* A transfer ended at now_ns. `waiting`: others could not begin before, because of the depth. */
void hkv_depth_ended(struct hkv_depth *depth, uint64_t bytes, uint64_t now_ns, bool waiting);

#define HKV_IO_RETRY_NS 1000000 /* before what the kernel had no resources for is tried again */

/* ---- between io.c and the two engines -------------------------------------------------------------------------------------------- */

struct hkv_io_worker {
    struct hkv_io_device *device;
    uint8_t *memory; /* the mapping, */
    size_t size;     /* and its bytes */
    pthread_t thread;
    pthread_cond_t wake;
    int wake_fd;           /* of an io_uring worker, an eventfd which its ring reads; else -1, and `wake` is waited for */
    bool scatters;         /* one transfer may have several places in memory */
    bool idle;             /* wants to be woken when there is something to take */
    unsigned flying, most; /* transfers it has begun and not ended; how many of them there may be */
};

/* The next op that may begin its transfer, and `with` it those that are moved together with it, or NULL: nothing to do for now (not `wait`),
 * or ever again (`wait`). */
struct hkv_io_op *hkv_io_take(struct hkv_io_worker *worker, bool wait);
bool hkv_io_closing(struct hkv_io_worker *worker);

/* The steps of an op and those with it, in this order. Checks what is to be written; false: one of them has failed. */
bool hkv_io_check(struct hkv_io_op *op);
unsigned hkv_io_parts(struct hkv_io_op *op); /* fills its `parts` with where the next bytes are, and returns how many parts */
/* What came of one transfer: a number of bytes or a negative errno. True: the next one is to move the rest, or to try again. */
bool hkv_io_moved(struct hkv_io_op *op, int64_t moved);
void hkv_io_transfer(struct hkv_io_op *op); /* moves all the rest, blocking */
/* The transfer has ended: another may begin. Those that have ended with it, linked by `next`; the others wait to be moved each by itself. */
struct hkv_io_op *hkv_io_landed(struct hkv_io_worker *worker, struct hkv_io_op *op);
void hkv_io_finish(struct hkv_io_op *op); /* verifies or records, and hands it to reap() */

void hkv_io_run_threads(struct hkv_io_worker *worker);
void hkv_io_run_uring(struct hkv_io_worker *worker);
/* 0, or an errno with the reason in `why`. */
int hkv_io_uring_works(char why[HKV_IO_WHY]);
#endif
