/* The engine on io_uring: a worker has a ring of its own, and hashes one block while others are on their way. What it does first is always
 * what keeps the device busy: it takes note of transfers that ended, begins new ones, and only then finishes one of those that ended.
 *
 * The mapping is registered with each ring, in pieces, when there is nothing else to do or at their first use. The kernel then need not
 * look up, hold and let go of a block's pages at each transfer, which is half of its work: 60 ms of CPU a GB instead of 115, fio's own
 * measured on a virtual disk with blocks of 1 MiB. In exchange it holds 4 MiB of its own memory for each GiB and ring. Where it refuses a
 * piece, as it does once RLIMIT_MEMLOCK is used up, transfers go on without. One of several ops takes its memory out of one piece; before
 * Linux 6.15 it must lie together there, since going without costs more than it saves. Files are not registered: what that saves counts by
 * transfer, and these are of a megabyte.
 *
 * A file system that cannot begin a transfer without waiting for its end (FUSE) makes the worker wait, which is the device's own: as many are
 * under way then as it has workers. */
#define _GNU_SOURCE
#include "io.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef HKV_HAVE_LIBURING
#include <liburing.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

enum {
    MOST_PIECES = 1 << 14,
    READV_FIXED = 60, /* since Linux 6.15; older headers do not have it */
    WRITEV_FIXED = 61,
};
#define PIECE HKV_IO_PIECE /* 2 ms to register, while transfers go on */

struct ring {
    struct io_uring uring;
    uint8_t *memory;
    size_t size;
    bool *registered; /* by piece; NULL: none is */
    bool full;        /* no more of them */
    size_t prepared;  /* so many, from the first, were registered ahead */
};

static int refused(char why[HKV_IO_WHY], const char *what, int error) {
    snprintf(why, HKV_IO_WHY, "%s: %s", what, strerror(error));
    return error;
}

/* Sets up a ring and reads with it: either may be refused, by a seccomp profile, a sysctl or an old kernel. */
int hkv_io_uring_works(char why[HKV_IO_WHY]) {
    struct io_uring ring;
    struct io_uring_cqe *done;
    eventfd_t value;
    int error = -io_uring_queue_init(2, &ring, 0);
    if (error != 0) return refused(why, "io_uring_setup", error);
    int fd = eventfd(1, EFD_CLOEXEC);
    io_uring_prep_read(io_uring_get_sqe(&ring), fd, &value, sizeof value, 0);
    int submitted = fd < 0 ? -errno : io_uring_submit_and_wait(&ring, 1);
    if (submitted < 0) error = refused(why, "io_uring_enter", -submitted);
    else if (io_uring_peek_cqe(&ring, &done) < 0 || done->res != sizeof value) error = refused(why, "io_uring's read", EOPNOTSUPP);
    io_uring_queue_exit(&ring);
    if (fd >= 0) close(fd);
    return error;
}

static bool knows(struct io_uring *ring, int opcode) {
    struct io_uring_probe *probe = io_uring_get_probe_ring(ring);
    bool does = probe != NULL && io_uring_opcode_supported(probe, opcode);
    io_uring_free_probe(probe);
    return does;
}

static int set_up(struct ring *ring, struct hkv_io_worker *worker) {
    *ring = (struct ring){.memory = worker->memory, .size = worker->size};
    int error = io_uring_queue_init(worker->most + 1, &ring->uring, 0);
    if (error < 0) return error;
    io_uring_ring_dontfork(&ring->uring);
    size_t pieces = (ring->size + PIECE - 1) / PIECE;
    if (pieces <= MOST_PIECES && io_uring_register_buffers_sparse(&ring->uring, (unsigned)pieces) == 0)
        ring->registered = calloc(pieces, sizeof *ring->registered);
    worker->scatters = ring->registered == NULL || knows(&ring->uring, WRITEV_FIXED);
    return 0;
}

static void tear_down(struct ring *ring) {
    io_uring_queue_exit(&ring->uring);
    free(ring->registered);
}

static bool registers(struct ring *ring, size_t piece) {
    if (!ring->registered[piece] && !ring->full) {
        size_t start = piece * PIECE, size = ring->size - start < PIECE ? ring->size - start : PIECE;
        struct iovec memory = {.iov_base = ring->memory + start, .iov_len = size};
        ring->registered[piece] = io_uring_register_buffers_update_tag(&ring->uring, (unsigned)piece, &memory, &(__u64){0}, 1) == 1;
        ring->full = !ring->registered[piece];
    }
    return ring->registered[piece];
}

/* The number of the piece that these bytes lie in and that is registered, or -1. */
static int piece_of(struct ring *ring, const uint8_t *from, size_t bytes) {
    size_t at = (size_t)(from - ring->memory), piece = at / PIECE;
    if (ring->registered == NULL || (at + bytes - 1) / PIECE != piece) return -1;
    return registers(ring, piece) ? (int)piece : -1;
}

/* Registers one more piece, where one is left: no transfer waits for that then, nor for its pages, which are mapped by it. */
static bool prepares(struct ring *ring) {
    if (ring->registered == NULL || ring->full || ring->prepared * PIECE >= ring->size) return false;
    return registers(ring, ring->prepared++);
}

static void begin(struct ring *ring, struct hkv_io_op *op) {
    static const int opcodes[2][2][2] = {{{IORING_OP_READ, IORING_OP_READ_FIXED}, {IORING_OP_READV, READV_FIXED}},
                                         {{IORING_OP_WRITE, IORING_OP_WRITE_FIXED}, {IORING_OP_WRITEV, WRITEV_FIXED}}};
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring); /* there is one: the ring has an entry for each that may be under way */
    unsigned parts = hkv_io_parts(op);
    int piece = piece_of(ring, op->parts[0].iov_base, op->parts[0].iov_len); /* all of them are in one */
    int opcode = opcodes[op->kind == HKV_IO_WRITE][parts > 1][piece >= 0];
    if (parts > 1) io_uring_prep_rw(opcode, sqe, op->fd, op->parts, parts, op->offset + op->moved);
    else io_uring_prep_rw(opcode, sqe, op->fd, op->parts[0].iov_base, (unsigned)op->parts[0].iov_len, op->offset + op->moved);
    if (piece >= 0) sqe->buf_index = (uint16_t)piece;
    if (op->retries > 0) io_uring_sqe_set_flags(sqe, IOSQE_ASYNC); /* in a thread of the kernel, which may wait where this one would not */
    io_uring_sqe_set_data(sqe, op);
    io_uring_submit(&ring->uring); /* what it does not take now goes along with the next */
}

static bool goes_on(struct hkv_io_op *op, int moved) {
    if (op->with != NULL || (moved != -EINVAL && moved != -EOPNOTSUPP)) return hkv_io_moved(op, moved);
    hkv_io_transfer(op); /* refused as an operation of io_uring, or in itself: the system call tells */
    return false;
}

void hkv_io_run_uring(struct hkv_io_worker *worker) {
    struct ring ring;
    struct hkv_io_op *op, *landed = NULL, **last = &landed;
    eventfd_t woken;
    bool listening = false;
    if (set_up(&ring, worker) < 0) {
        hkv_io_run_threads(worker);
        return;
    }
    for (;;) {
        for (struct io_uring_cqe *done; io_uring_peek_cqe(&ring.uring, &done) == 0;) {
            int moved = done->res;
            op = io_uring_cqe_get_data(done);
            io_uring_cqe_seen(&ring.uring, done);
            if (op == NULL) listening = false;
            else if (goes_on(op, moved)) begin(&ring, op);
            else {
                *last = hkv_io_landed(worker, op);
                while (*last != NULL) last = &(*last)->next;
            }
        }
        bool closing = hkv_io_closing(worker);
        if (!listening && !closing) {
            struct io_uring_sqe *sqe = io_uring_get_sqe(&ring.uring);
            io_uring_prep_read(sqe, worker->wake_fd, &woken, sizeof woken, 0);
            io_uring_sqe_set_data(sqe, NULL);
            listening = true;
        }
        if ((op = hkv_io_take(worker, false)) != NULL) {
            if (hkv_io_check(op)) {
                begin(&ring, op);
            } else {
                *last = hkv_io_landed(worker, op);
                while (*last != NULL) last = &(*last)->next;
            }
        } else if ((op = landed) != NULL) {
            landed = op->next;
            if (landed == NULL) last = &landed;
            hkv_io_finish(op);
        } else if (closing && worker->flying == 0 && !listening) {
            break;
        } else if (!closing && worker->flying == 0 && prepares(&ring)) {
            continue;
        } else if (io_uring_submit_and_wait(&ring.uring, 1) < 0) {
            nanosleep(&(struct timespec){.tv_nsec = HKV_IO_RETRY_NS}, NULL);
        }
    }
    tear_down(&ring);
}
#else
int hkv_io_uring_works(char why[HKV_IO_WHY]) {
    snprintf(why, HKV_IO_WHY, "built without liburing");
    return ENOSYS;
}

void hkv_io_run_uring(struct hkv_io_worker *worker) {
    hkv_io_run_threads(worker);
}
#endif
