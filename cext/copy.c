/* Batch gather and scatter.
 *
 * A block is contiguous in the pool and lies outside it in pieces (one per layer and K/V half, say). What is copied will not be read
 * again from this core's caches, so all but small pieces are written with streaming (non-temporal) stores: they skip the read of the
 * destination that a normal store begins with, a third of the traffic, and leave the caches to the engine. The source is prefetched a
 * little ahead, across the gap to the next piece too, where the hardware's own prefetching cannot follow. Threads take work from one
 * counter, so a thread that starts late or is preempted costs one portion of work, not half of the batch. They live as long as the
 * batch: a pool of them would have to survive fork, and gains little on batches that are worth a second thread.
 *
 * Where checksums are asked for, every byte takes a way that nobody else can write to: it is read once, into the thread's own stack, hashed
 * there and stored from there. So a checksum is that of the bytes that arrived, whatever happens to the source meanwhile.
 *
 * This file knows no Python and no pool: addresses are the caller's to vouch for. */
#define _GNU_SOURCE
#include "copy.h"
#include "hash.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum {
    LINE = 64,
    /* Measured on Zen 3 with 64 MiB batches, pieces in the order of layers: streaming beats memcpy from 256 bytes up where pieces fill
     * whole lines (1 KiB: 10 against 7 GB/s gathering, 14 against 7 scattering). A piece that does not ends in two partial lines, which
     * streaming gains nothing on, so it has to have some whole ones between them. */
    STREAM_MIN = 1024,
    /* How far ahead of the loads a piece is prefetched. 256 to 1024 are equal within noise, 2048 and more lose 10 %. */
    AHEAD = 512,
    /* How much of a piece's end is spent on prefetching the next one instead. More than AHEAD, since the hardware helps only inside of
     * a page: gathering 4 KiB pieces gains 10 to 20 % from it, scattering and larger pieces nothing. */
    NEXT_AHEAD = 2048,
    /* What a thread takes at a time: 30 to 60 us of work, so that the end of a batch is even and the counter is cold. */
    PORTION = 512 << 10,
    /* A thread for so much of a batch: one costs about 100 us here until it runs, and two threads break even at 4 MiB. */
    THREAD_SHARE = 2 << 20,
    /* How much is hashed at a time. As much as copy_piece prefetches of what comes next, so that all of a block is prefetched. Larger ones
     * hash faster in themselves, but 4 to 32 KiB were never faster as a whole, with blocks of 1 MiB in pieces of 4 KiB and up. */
    STAGE = NEXT_AHEAD,
};

/* Kernels copy `size` bytes, a multiple of LINE, to a destination that is aligned to LINE; the source may have any alignment. While
 * at it they prefetch as many bytes at `ahead`. Their stores are ordered by store_fence(), once per portion. */
typedef void kernel_function(uint8_t *to, const uint8_t *from, size_t size, const uint8_t *ahead);

static void kernel_plain(uint8_t *to, const uint8_t *from, size_t size, const uint8_t *ahead) {
    memcpy(to, from, size);
}

#if defined(__x86_64__)
#define FOR_EACH_LINE for (; size > 0; size -= LINE, to += LINE, from += LINE, ahead += LINE)

static void store_fence(void) {
    _mm_sfence();
}

__attribute__((target("avx512f"))) static void kernel_avx512(uint8_t *to, const uint8_t *from, size_t size, const uint8_t *ahead) {
    FOR_EACH_LINE {
        _mm_prefetch((const void *)ahead, _MM_HINT_T0);
        _mm512_stream_si512((void *)to, _mm512_loadu_si512(from));
    }
}

__attribute__((target("avx2"))) static void kernel_avx2(uint8_t *to, const uint8_t *from, size_t size, const uint8_t *ahead) {
    FOR_EACH_LINE {
        _mm_prefetch((const void *)ahead, _MM_HINT_T0);
        __m256i a = _mm256_loadu_si256((const void *)from), b = _mm256_loadu_si256((const void *)(from + 32));
        _mm256_stream_si256((void *)to, a);
        _mm256_stream_si256((void *)(to + 32), b);
    }
}

static void kernel_sse2(uint8_t *to, const uint8_t *from, size_t size, const uint8_t *ahead) {
    FOR_EACH_LINE {
        _mm_prefetch((const void *)ahead, _MM_HINT_T0);
        for (int i = 0; i < LINE; i += 16) _mm_stream_si128((void *)(to + i), _mm_loadu_si128((const void *)(from + i)));
    }
}

static bool has_avx512(void) {
    return __builtin_cpu_supports("avx512f");
}
static bool has_avx2(void) {
    return __builtin_cpu_supports("avx2");
}
#elif defined(__aarch64__)
static void store_fence(void) {
    __asm__ volatile("dmb ishst" ::: "memory");
}

static void kernel_neon(uint8_t *to, const uint8_t *from, size_t size, const uint8_t *ahead) {
    for (; size > 0; size -= LINE, to += LINE, from += LINE, ahead += LINE)
        __asm__ volatile(
            "prfm pldl1strm, [%2]\n\t"
            "ldp q0, q1, [%1]\n\t"
            "ldp q2, q3, [%1, #32]\n\t"
            "stnp q0, q1, [%0]\n\t"
            "stnp q2, q3, [%0, #32]"
            :
            : "r"(to), "r"(from), "r"(ahead)
            : "v0", "v1", "v2", "v3", "memory");
}
#else
static void store_fence(void) {
    atomic_thread_fence(memory_order_release);
}
#endif

static bool always(void) {
    return true;
}

/* Best first. */
static const struct {
    const char *name;
    kernel_function *copy;
    bool (*supported)(void);
} kernels[] = {
#if defined(__x86_64__)
    {"avx512", kernel_avx512, has_avx512},
    {"avx2", kernel_avx2, has_avx2},
    {"sse2", kernel_sse2, always},
#elif defined(__aarch64__)
    {"neon", kernel_neon, always},
#endif
    {"plain", kernel_plain, always},
};
enum { KERNELS = sizeof kernels / sizeof kernels[0] };
static size_t chosen = KERNELS - 1;

__attribute__((constructor)) static void choose_kernel(void) {
    for (chosen = 0; !kernels[chosen].supported();) chosen++;
}

const char *hkv_copy_kernel(void) {
    return kernels[chosen].name;
}

bool hkv_copy_set_kernel(const char *name) {
    for (size_t i = 0; i < KERNELS; i++)
        if (strcmp(kernels[i].name, name) == 0 && kernels[i].supported()) {
            chosen = i;
            return true;
        }
    return false;
}

/* `next` is where the source goes on after this piece; it is only prefetched. */
static void copy_piece(uint8_t *to, const uint8_t *from, size_t size, const uint8_t *next) {
    if (size >= STREAM_MIN) {
        size_t head = -(uintptr_t)to % LINE;
        memcpy(to, from, head);
        to += head, from += head, size -= head;
        size_t lines = size - size % LINE, last = lines < NEXT_AHEAD ? lines : NEXT_AHEAD;
        kernels[chosen].copy(to, from, lines - last, from + AHEAD);
        to += lines - last, from += lines - last;
        kernels[chosen].copy(to, from, last, next);
        to += last, from += last, size -= lines;
    }
    memcpy(to, from, size);
}

static void copy_piece_hashed(uint8_t *to, const uint8_t *from, size_t size, const uint8_t *next, struct hkv_xxh3 *sum) {
    _Alignas(LINE) uint8_t stage[STAGE];
    while (size > 0) {
        size_t part = size < STAGE ? size : STAGE;
        memcpy(stage, from, part);
        hkv_xxh3_add(sum, stage, part);
        from += part, size -= part;
        copy_piece(to, stage, part, size > 0 ? from : next);
        to += part;
    }
}

struct work {
    const struct hkv_batch *batch;
    bool into_pool;
    size_t block_bytes, total;
    size_t portion;      /* PORTION; where there are checksums about as much, in whole blocks */
    _Atomic size_t next; /* the first byte of the batch, in order of blocks, that nobody has taken */
};

/* The first piece that ends after `at`. */
static size_t piece_at(const struct hkv_batch *batch, size_t at) {
    size_t low = 0, high = batch->pieces;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (batch->piece_ends[middle] > at) high = middle;
        else low = middle + 1;
    }
    return low;
}

static uint8_t *outside(const struct hkv_batch *batch, size_t block, size_t piece) {
    uint64_t address;
    memcpy(&address, batch->addresses + (block * batch->pieces + piece) * sizeof address, sizeof address);
    return (uint8_t *)(uintptr_t)address;
}

static void copy_range(const struct work *work, size_t from, size_t to) {
    const struct hkv_batch *batch = work->batch;
    size_t block = from / work->block_bytes, at = from % work->block_bytes, left = to - from;
    size_t piece = piece_at(batch, at);
    uint8_t *out = outside(batch, block, piece) + (piece == 0 ? at : at - batch->piece_ends[piece - 1]);
    struct hkv_xxh3 sum;
    while (left > 0) {
        if (batch->seeds != NULL && at == 0) hkv_xxh3_start(&sum, batch->seeds[block]);
        uint8_t *in = batch->pool + batch->offsets[block] + at;
        size_t size = batch->piece_ends[piece] - at;
        if (size > left) size = left;
        left -= size;
        at += size;
        if (++piece == batch->pieces) piece = 0, at = 0, block++;
        uint8_t *next_in = left > 0 ? batch->pool + batch->offsets[block] + at : in;
        uint8_t *next_out = left > 0 ? outside(batch, block, piece) : out;
        uint8_t *to = work->into_pool ? in : out;
        const uint8_t *source = work->into_pool ? out : in, *next = work->into_pool ? next_out : next_in;
        if (batch->seeds == NULL) copy_piece(to, source, size, next);
        else copy_piece_hashed(to, source, size, next, &sum);
        if (batch->seeds != NULL && at == 0) batch->checksums[block - 1] = hkv_xxh3_end(&sum);
        out = next_out;
    }
}

static void *copy_portions(void *argument) {
    struct work *work = argument;
    for (;;) {
        size_t from = atomic_fetch_add_explicit(&work->next, work->portion, memory_order_relaxed);
        if (from >= work->total) return NULL;
        copy_range(work, from, work->total - from < work->portion ? work->total : from + work->portion);
        store_fence();
    }
}

void hkv_copy_batch(const struct hkv_batch *batch, bool into_pool, int threads) {
    if (batch->blocks == 0 || batch->pieces == 0) return;
    struct work work = {.batch = batch, .into_pool = into_pool, .block_bytes = batch->piece_ends[batch->pieces - 1], .portion = PORTION};
    work.total = work.block_bytes * batch->blocks;
    if (batch->seeds != NULL) work.portion = work.block_bytes < PORTION ? PORTION / work.block_bytes * work.block_bytes : work.block_bytes;
    pthread_t helpers[HKV_COPY_MAX_THREADS];
    size_t started = 0;
    size_t useful = work.total / THREAD_SHARE, portions = (work.total - 1) / work.portion + 1;
    if (useful > portions) useful = portions;
    if (useful > (size_t)threads) useful = (size_t)threads;
    if (useful > 1) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before); /* a helper must not take a signal that is meant for Python's main thread */
        while (started < useful - 1 && pthread_create(&helpers[started], NULL, copy_portions, &work) == 0) started++;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    copy_portions(&work); /* does all of it where no helper could be started */
    while (started > 0) pthread_join(helpers[--started], NULL);
}

void hkv_copy_flat(void *destination, const void *source, size_t size, int threads) {
    uint64_t offset = 0, end = size, address = (uintptr_t)source;
    struct hkv_batch flat = {.pool = destination,
                             .offsets = &offset,
                             .addresses = (const uint8_t *)&address,
                             .piece_ends = &end,
                             .blocks = 1,
                             .pieces = size > 0};
    hkv_copy_batch(&flat, true, threads);
}
