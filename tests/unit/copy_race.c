/* Threaded copies for ThreadSanitizer, without Python around them:
 *
 *     cc -std=c11 -g -O1 -fsanitize=thread -Icext -Icext/vendor tests/unit/copy_race.c cext/copy.c cext/hash.c -o /tmp/copy_race \
 *         -pthread && /tmp/copy_race
 *
 * Two callers at once, each with helpers, gather into disjoint blocks of one pool and scatter them back, every other time with
 * checksums. Exit status 0: the bytes and the checksums are right, and the sanitizer saw no race. */
#define _GNU_SOURCE
#include "copy.h"
#include "hash.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CALLERS = 2, BLOCKS = 24, PIECES = 3, ROUNDS = 4 };
static const uint64_t piece_ends[PIECES] = {4096, 4096 + 300001, 4096 + 300001 + 333};
enum { BLOCK = 4096 + 300001 + 333 };

static uint8_t *pool;

static void *caller(void *argument) {
    size_t mine = (size_t)argument;
    uint8_t *memory = malloc((size_t)BLOCKS * BLOCK), *before = malloc((size_t)BLOCKS * BLOCK);
    uint64_t offsets[BLOCKS], addresses[BLOCKS * PIECES], seeds[BLOCKS], sums[2][BLOCKS] = {0};
    for (size_t i = 0; i < (size_t)BLOCKS * BLOCK; i++) memory[i] = before[i] = (uint8_t)(i * 31 + i / 251 + mine);
    for (size_t i = 0; i < BLOCKS; i++) {
        seeds[i] = i;
        offsets[i] = (i * CALLERS + mine) * BLOCK; /* the callers' blocks are neighbours */
        for (size_t j = 0; j < PIECES; j++) addresses[i * PIECES + j] = (uintptr_t)memory + i * BLOCK + (j == 0 ? 0 : piece_ends[j - 1]);
    }
    struct hkv_batch batch = {.pool = pool,
                              .offsets = offsets,
                              .addresses = (const uint8_t *)addresses,
                              .piece_ends = piece_ends,
                              .blocks = BLOCKS,
                              .pieces = PIECES};
    int wrong = 0;
    for (int round = 0; round < ROUNDS; round++) {
        batch.seeds = round % 2 == 0 ? NULL : seeds;
        for (int into_pool = 1; into_pool >= 0; into_pool--) {
            batch.checksums = sums[into_pool];
            hkv_copy_batch(&batch, into_pool, 3);
            if (into_pool) memset(memory, 0, (size_t)BLOCKS * BLOCK);
        }
        wrong |= memcmp(memory, before, (size_t)BLOCKS * BLOCK);
    }
    for (size_t i = 0; i < BLOCKS; i++) {
        struct hkv_xxh3 sum;
        hkv_xxh3_start(&sum, seeds[i]);
        hkv_xxh3_add(&sum, before + i * BLOCK, BLOCK);
        wrong |= sums[0][i] != hkv_xxh3_end(&sum) || sums[1][i] != sums[0][i];
    }
    free(memory);
    free(before);
    return (void *)(uintptr_t)(wrong != 0);
}

int main(void) {
    static const char *const kernels[] = {"avx512", "avx2", "sse2", "neon", "plain"};
    int failed = 0;
    pool = malloc((size_t)CALLERS * BLOCKS * BLOCK);
    for (size_t k = 0; k < sizeof kernels / sizeof kernels[0]; k++) {
        if (!hkv_copy_set_kernel(kernels[k])) continue;
        pthread_t threads[CALLERS];
        for (size_t i = 0; i < CALLERS; i++) pthread_create(&threads[i], NULL, caller, (void *)i);
        for (size_t i = 0; i < CALLERS; i++) {
            void *wrong;
            pthread_join(threads[i], &wrong);
            failed |= wrong != NULL;
        }
        printf("%s: %s\n", kernels[k], failed ? "WRONG BYTES OR CHECKSUMS" : "ok");
    }
    free(pool);
    return failed;
}
