/* Readers beside the writer of the index of what is on disk, for ThreadSanitizer (tests/sanitize.sh):
 *
 *     cc -std=c11 -g -O1 -fsanitize=thread -Wno-tsan -Icext -Icext/vendor -Ischemas tests/unit/index_race.c cext/index.c \
 *         cext/index_check.c cext/hash.c -o /tmp/index_race -pthread && /tmp/index_race 10 [SEED]
 *
 * The writer writes, reads, removes and evicts blocks, each key once; searches for them cross, so that words move. Before a write is settled it
 * notes that in an array that is not atomic. A reader that finds a key looks into the array: the note must be there, and the sanitizer must see
 * that it was written before. So a missing release or acquire is a race. Some writes fail, and keys that nobody has written yet are looked
 * for, too: they must never be found. Exit status 0: everything found was right, and much was found. */
#define _GNU_SOURCE
#include "index.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { READERS = 2, BLOCKS = 96, SLAB = 8 * 4096, NOTES = 1 << 23, RECENT = 128, AHEAD = 8, MANY = 1000, HOMES = 6 };

static struct hkv_index *x;
static struct hkv_index_reader reader;
static uint8_t *notes; /* by number of the key; written once, before its block can be found */
static _Atomic uint32_t latest;
static atomic_bool done;
static _Atomic unsigned lacking = READERS + 1; /* threads that have not done enough */
static uint64_t seed;

static uint64_t next_random(uint64_t *of) {
    *of = *of * 6364136223846793005u + 1442695040888963407u;
    uint64_t y = *of;
    y ^= y >> 33;
    y *= 0xff51afd7ed558ccdu;
    return y ^ y >> 29;
}

static void wrong(void *context, const char *what) {
    fprintf(stderr, "seed %llu: %s%s\n", (unsigned long long)seed, (const char *)context, what);
    exit(1);
}

static void make_key(uint32_t n, uint8_t key[32]) {
    uint32_t home = (uint32_t[HOMES]){0, 1, 40, 41, 126, 127}[n % HOMES]; /* searches run into each other and over the end of the table */
    memset(key, (int)n, 32);
    memcpy(key, &home, 4);
    memcpy(key + 8, &n, 4);
}

static void enough(bool *said, bool is) {
    if (!*said && is) atomic_fetch_sub_explicit(&lacking, 1, memory_order_relaxed);
    *said |= is;
}

static bool fails(uint32_t n) {
    return n % 8 == 7;
}

static void *write_all(void *argument) {
    uint64_t state = seed;
    struct hkv_place place, opened[16];
    unsigned readers = 0;
    bool did_enough = false;
    uint8_t key[32];
    for (uint32_t n = 0; n + AHEAD < NOTES && !atomic_load_explicit(&done, memory_order_relaxed); n++) {
        uint64_t r = next_random(&state), checksum = r;
        make_key(n, key);
        if (hkv_index_place(x, key, n % 3, 4096u << n % 3, &place)) {
            if (r % 32 == 0) hkv_index_remove(x, key, n % 3);
            if (!fails(n)) notes[n] = 1;
            hkv_index_settle(x, place.entry, fails(n) ? NULL : &checksum);
        }
        atomic_store_explicit(&latest, n, memory_order_relaxed);
        make_key(n - (uint32_t)(r >> 32) % RECENT, key);
        if (readers < 16 && r % 3 == 0 && hkv_index_open(x, key, (n - (uint32_t)(r >> 32) % RECENT) % 3, &opened[readers])) readers++;
        if (readers > 0 && r % 5 == 0) hkv_index_close(x, opened[--readers].entry, r % 2);
        if (r % 64 == 0) hkv_index_remove(x, key, n % 3);
        if (r % 4096 == 1) hkv_index_remove_namespace(x, n % 3);
        enough(&did_enough, x->counts.evicted >= MANY);
    }
    while (readers > 0) hkv_index_close(x, opened[--readers].entry, true);
    atomic_store_explicit(&done, true, memory_order_relaxed);
    return NULL;
}

struct looker {
    uint64_t state, hits, looks;
    bool did_enough;
};

static void *look_all(void *argument) {
    struct looker *l = argument;
    uint8_t key[32];
    while (!atomic_load_explicit(&done, memory_order_relaxed)) {
        uint32_t n = atomic_load_explicit(&latest, memory_order_relaxed) + AHEAD - (uint32_t)next_random(&l->state) % (RECENT + AHEAD);
        if (n >= NOTES) continue;
        make_key(n, key);
        hkv_index_prefetch(&reader, key);
        hkv_index_prefetch_entry(&reader, key);
        l->looks++;
        enough(&l->did_enough, l->hits >= MANY && l->looks - l->hits > MANY);
        if (!hkv_index_has(&reader, key)) continue;
        l->hits++;
        if (fails(n)) wrong("has: ", "a block whose write failed");
        if (!notes[n]) wrong("has: ", "a block that was not settled");
    }
    return NULL;
}

int main(int argc, char **argv) {
    struct timespec now, length = {.tv_sec = argc > 1 ? atoi(argv[1]) : 10}, pause = {.tv_nsec = 10000000};
    clock_gettime(CLOCK_REALTIME, &now);
    seed = argc > 2 ? strtoull(argv[2], NULL, 10) : (uint64_t)now.tv_nsec ^ (uint64_t)now.tv_sec << 20;
    printf("seed %llu\n", (unsigned long long)seed);
    struct hkv_index_header layout;
    hkv_index_layout(BLOCKS, &layout);
    uint8_t *memory = aligned_alloc(4096, layout.index_bytes);
    memset(memory, 0, layout.index_bytes);
    notes = calloc(NOTES, 1);
    x = hkv_index_create(memory, BLOCKS, SLAB);
    hkv_index_attach(&reader, memory, &layout);
    for (unsigned n = 0; n < 2; n++) hkv_index_enable(hkv_index_directory(x, hkv_index_add_directory(x, 8 * (n + 1))), true);
    pthread_t writer, threads[READERS];
    struct looker lookers[READERS] = {0};
    for (int i = 0; i < READERS; i++) {
        lookers[i].state = seed + 1 + (uint64_t)i;
        if (pthread_create(&threads[i], NULL, look_all, &lookers[i]) != 0) wrong("", "a thread does not start");
    }
    if (pthread_create(&writer, NULL, write_all, NULL) != 0) wrong("", "a thread does not start");
    nanosleep(&length, NULL);
    while (atomic_load_explicit(&lacking, memory_order_relaxed) > 0 && !atomic_load_explicit(&done, memory_order_relaxed))
        nanosleep(&pause, NULL);
    atomic_store_explicit(&done, true, memory_order_relaxed);
    pthread_join(writer, NULL);
    for (int i = 0; i < READERS; i++) pthread_join(threads[i], NULL);
    hkv_index_check(x, wrong, "check: ");
    for (int i = 0; i < READERS; i++) {
        printf("reader %d: %llu of %llu found\n", i, (unsigned long long)lookers[i].hits, (unsigned long long)lookers[i].looks);
        if (lookers[i].hits < MANY || lookers[i].looks - lookers[i].hits < MANY) wrong("", "too little was found, or missed");
    }
    printf("%llu placed, %llu evicted\n", (unsigned long long)x->counts.placed, (unsigned long long)x->counts.evicted);
    if (x->counts.evicted < MANY) wrong("", "the writer did not do enough");
    hkv_index_free(x);
    free(memory);
    free(notes);
    return 0;
}
