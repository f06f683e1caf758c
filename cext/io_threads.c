/* The engine that works everywhere: one transfer at a time in each of a device's threads. */
#define _GNU_SOURCE
#include "io.h"

#include <errno.h>
#include <sys/uio.h>

void hkv_io_transfer(struct hkv_io_op *op) {
    int64_t moved;
    do {
        struct iovec part = {.iov_base = hkv_io_memory(op), .iov_len = op->size - op->moved};
        off_t offset = (off_t)(op->offset + op->moved);
        moved = op->kind == HKV_IO_READ ? preadv2(op->fd, &part, 1, offset, 0) : pwritev2(op->fd, &part, 1, offset, 0);
    } while (hkv_io_moved(op, moved < 0 ? -errno : moved));
}

void hkv_io_run_threads(struct hkv_io_worker *worker) {
    for (struct hkv_io_op *op; (op = hkv_io_take(worker, true)) != NULL; hkv_io_finish(op)) {
        if (hkv_io_check(op)) hkv_io_transfer(op);
        hkv_io_landed(worker, op);
    }
}
