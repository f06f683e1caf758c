/* The engine on io_uring. */
#include "io.h"

#include <errno.h>
#include <stdio.h>

int hkv_io_uring_works(char why[HKV_IO_WHY]) {
    snprintf(why, HKV_IO_WHY, "built without liburing");
    return ENOSYS;
}

void hkv_io_run_uring(struct hkv_io_worker *worker) {
    hkv_io_run_threads(worker);
}
