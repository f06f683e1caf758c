/* The engine that works everywhere: one transfer at a time in each of a device's threads. */
#define _GNU_SOURCE
#include "io.h"

#include <errno.h>

void hkv_io_transfer(struct hkv_io_op *op) {
    int64_t moved;
    do {
        int parts = (int)hkv_io_parts(op);
        off_t offset = (off_t)(op->offset + op->moved);
        moved = op->kind == HKV_IO_READ ? preadv2(op->fd, op->parts, parts, offset, 0) : pwritev2(op->fd, op->parts, parts, offset, 0);
    } while (hkv_io_moved(op, moved < 0 ? -errno : moved));
}

void hkv_io_run_threads(struct hkv_io_worker *worker) {
    for (struct hkv_io_op *op; (op = hkv_io_take(worker, true)) != NULL;) {
        if (hkv_io_check(op)) hkv_io_transfer(op);
        for (struct hkv_io_op *ended = hkv_io_landed(worker, op); (op = ended) != NULL;) {
            ended = op->next;
            hkv_io_finish(op);
        }
    }
}
