/* Batch copies between a contiguous area (the pool) and scattered memory (an engine's tensors). See copy.c. */
#ifndef HOSTKV_COPY_H
#define HOSTKV_COPY_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HKV_COPY_MAX_THREADS 64

struct hkv_batch {
    uint8_t *pool;              /* block i lies at pool + offsets[i], its pieces one after the other */
    const uint64_t *offsets;    /* [blocks] */
    const uint8_t *addresses;   /* uint64[blocks * pieces], of any alignment: where the pieces are outside the pool */
    const uint64_t *piece_ends; /* [pieces] running sums of the piece sizes; the last one is the size of a block */
    size_t blocks, pieces;
    const uint64_t *seeds; /* [blocks], or NULL: no checksums */
    uint64_t *checksums;   /* [blocks], where there are seeds: xxh3-64 of the bytes of each block as they were stored or delivered */
};

/* Copies the batch into the pool, or out of it. The caller has checked that every block lies inside the pool and that
 * blocks * block size does not overflow, and that there are pieces where there are seeds. 1 <= threads <= HKV_COPY_MAX_THREADS, the calling
 * thread included. */
void hkv_copy_batch(const struct hkv_batch *batch, bool into_pool, int threads);

/* One flat copy through the same code: what the batch is measured against. */
void hkv_copy_flat(void *destination, const void *source, size_t size, int threads);

/* The kernel that large pieces go through, e.g. "avx2". Setting it is for tests: false when this CPU lacks it. */
const char *hkv_copy_kernel(void);
bool hkv_copy_set_kernel(const char *name);
#endif
