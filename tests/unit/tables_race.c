/* Readers beside the writer of the tables, for ThreadSanitizer (tests/sanitize.sh):
 *
 *     cc -std=c11 -g -O1 -fsanitize=thread -Wno-tsan -Icext -Icext/vendor -Ischemas tests/unit/tables_race.c cext/tables.c \
 *         cext/tables_repair.c cext/tables_check.c cext/hash.c -o /tmp/tables_race -pthread && /tmp/tables_race 10 [SEED]
 *
 * The writer saves, gives up, pins, dooms and evicts blocks and moves them in the table. What it stores, it notes in an array that is not
 * atomic, by generation, before the commit. A reader asks about a handle that it was given without any order, and if the tables say that it is
 * READY, looks into the array: the note must be that of the key, and the sanitizer must see that it was written before. So a missing release or
 * acquire is a race. The fences, which the sanitizer does not know, order accesses that are atomic each: no report depends on them (-Wno-tsan).
 * Exit status 0: everything found was right, and much was found. */
#define _GNU_SOURCE
#include "tables.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PAGE = 4096, KEYS = 64, READERS = 2, NOTES = 1 << 22, NEVER = 8, SOME = 6, MANY = 100 };

struct note { /* written once, before the block of that generation can be READY */
    uint32_t key;
    uint64_t checksum;
};

static struct hkv_tables *tables;
static struct note *notes;             /* by generation */
static _Atomic uint64_t handles[KEYS]; /* generation << 16 | page of the last grant of each key */
static atomic_bool done;
static _Atomic unsigned lacking = READERS + 1; /* threads that have not done enough */
static uint8_t keys[KEYS + NEVER][32]; /* the last ones are written, but never committed */
static uint64_t seed;

static uint64_t next_random(uint64_t *of) {
    *of = *of * 6364136223846793005u + 1442695040888963407u;
    uint64_t x = *of;
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdu;
    return x ^ x >> 29;
}

static void wrong(void *context, const char *what) {
    fprintf(stderr, "seed %llu: %s%s\n", (unsigned long long)seed, (const char *)context, what);
    exit(1);
}

static void enough(bool *said, bool is) {
    if (!*said && is) atomic_fetch_sub_explicit(&lacking, 1, memory_order_relaxed);
    *said |= is;
}

/* ---- the writer ------------------------------------------------------------------------------------------------------------------ */

static void save(uint64_t *of, uint32_t namespace_index, uint32_t k) {
    uint32_t page = 0, shards = tables->namespaces[namespace_index].shards;
    uint64_t generation = 0, left = 0;
    for (uint32_t shard = 0; shard < shards; shard++) {
        if (hkv_reserve(tables, namespace_index, 0, 1, keys[k], shard, false, &page, &generation) != HKV_OK) return;
        if (k >= KEYS) continue;
        if (shard == 0) {
            left = next_random(of);
            notes[generation] = (struct note){k, left};
            atomic_store_explicit(&handles[k], generation << 16 | page, memory_order_relaxed);
        }
        uint64_t part = shard + 1 < shards ? next_random(of) : left; /* they XOR to what was noted */
        left ^= part;
        hkv_commit(tables, 0, 1, keys[k], shard, generation, part);
    }
}

static void *write_all(void *argument) {
    uint64_t state = seed;
    uint32_t heads[4] = {HKV_NIL, HKV_NIL, HKV_NIL, HKV_NIL};
    bool did_enough = false;
    while (!atomic_load_explicit(&done, memory_order_relaxed) && tables->header->generation < NOTES - 16) {
        uint64_t r = next_random(&state), generation;
        uint32_t k = (uint32_t)(r >> 8) % KEYS, session = (uint32_t)(r >> 40) % 4, page;
        unsigned what = (unsigned)(r % 32);
        if (what < 20) {
            save(&state, k % 3, k);
        } else if (what < 23) {
            save(&state, k % 3, KEYS + k % NEVER);
        } else if (what < 25) {
            hkv_abort(tables, 0, (uint64_t[]){1}, 1);
        } else if (what < 28) {
            uint64_t mark = hkv_acquire_begin(tables, heads[session]);
            hkv_acquire(tables, k % 3, session, session, mark, keys[k], &heads[session], &page, &generation);
        } else if (what < 30) {
            if (heads[session] != HKV_NIL) hkv_release(tables, heads[session]);
            heads[session] = HKV_NIL;
        } else if (what == 30) {
            hkv_discard(tables, k % 3, keys[k], atomic_load_explicit(&handles[k], memory_order_relaxed) >> 16);
        } else if (k == 0) {
            hkv_clear(tables, session % 3);
        }
        hkv_set_heartbeat(tables, r);
        enough(&did_enough, tables->counts.evicted >= MANY && tables->counts.moved >= MANY);
    }
    atomic_store_explicit(&done, true, memory_order_relaxed);
    return NULL;
}

/* ---- readers --------------------------------------------------------------------------------------------------------------------- */

struct reader {
    uint64_t state, hits, looks;
    bool did_enough;
};

static void *read_all(void *argument) {
    struct reader *r = argument;
    uint8_t found[SOME];
    while (!atomic_load_explicit(&done, memory_order_relaxed)) {
        uint32_t k = (uint32_t)next_random(&r->state) % KEYS;
        uint64_t handle = atomic_load_explicit(&handles[k], memory_order_relaxed), generation = handle >> 16, sum = 0;
        uint32_t page = (uint32_t)handle & 0xffff;
        r->looks++;
        enough(&r->did_enough, r->hits >= MANY && r->looks - r->hits > MANY);
        hkv_verify(&tables->reader, keys[k], (uint8_t *)&page, (uint8_t *)&generation, NULL, 1, found);
        if (found[0]) {
            struct note note = notes[generation];
            r->hits++;
            if (note.key != k) wrong("verify: ", "a generation of another key");
            hkv_verify(&tables->reader, keys[k], (uint8_t *)&page, (uint8_t *)&generation, (uint8_t *)&note.checksum, 1, found);
            if (found[0] == 2) wrong("verify: ", "READY without all of its checksum");
            sum = ~note.checksum;
            hkv_verify(&tables->reader, keys[k], (uint8_t *)&page, (uint8_t *)&generation, (uint8_t *)&sum, 1, found);
            if (found[0] == 1) wrong("verify: ", "a wrong checksum is taken for right");
        }
        uint32_t from = (uint32_t)next_random(&r->state) % (KEYS + NEVER - SOME);
        hkv_lookup(&tables->reader, k % 3, keys[from], SOME, found);
        for (uint32_t n = from; n < from + SOME; n++)
            if (found[n - from] && (n >= KEYS || n % 3 != k % 3)) wrong("lookup: ", n < KEYS ? "in another namespace" : "never READY");
        if (hkv_lookup_prefix(&tables->reader, 3, keys[from], 1) != 0) wrong("lookup_prefix: ", "in an unknown namespace");
        if (hkv_lookup_reverse(&tables->reader, k % 3, keys[KEYS + k % NEVER], 1) != -1) wrong("lookup_reverse: ", "never READY");
    }
    return NULL;
}

int main(int argc, char **argv) {
    const struct hkv_geometry geometry = {54 * PAGE, 16 * PAGE, 32, 24, 24, 4, 4};
    const uint8_t instance[16] = {1};
    struct timespec now, length = {.tv_sec = argc > 1 ? atoi(argv[1]) : 10}, pause = {.tv_nsec = 10000000};
    clock_gettime(CLOCK_REALTIME, &now);
    seed = argc > 2 ? strtoull(argv[2], NULL, 10) : (uint64_t)now.tv_nsec ^ (uint64_t)now.tv_sec << 20;
    printf("seed %llu\n", (unsigned long long)seed);
    struct hkv_header layout;
    hkv_layout(&geometry, &layout);
    uint8_t *memory = aligned_alloc(PAGE, layout.tables_bytes);
    memset(memory, 0, layout.tables_bytes);
    notes = calloc(NOTES, sizeof *notes);
    for (unsigned k = 0; k < KEYS + NEVER; k++) {
        uint64_t home = (uint64_t[]){0, 1, 62, 63}[k % 4]; /* searches run into each other and over the end of the table */
        memset(keys[k], (int)k + 1, 32);
        memcpy(keys[k], &home, 8);
    }
    tables = hkv_tables_create(memory, &layout, instance, true);
    tables->keeps_reused = true;
    struct hkv_member member = {.lock_name = {1}};
    hkv_member_add(tables, &member);
    for (uint32_t n = 0; n < 3; n++) {
        struct hkv_namespace each = {.shards = n + 1, .shard_bytes = n == 1 ? 2 * PAGE : PAGE, .fingerprint = {(uint8_t)(n + 1)}};
        each.slot_bytes = hkv_slot_bytes(each.shard_bytes, each.shards);
        hkv_namespace_add(tables, &each);
    }
    pthread_t writer, threads[READERS];
    struct reader readers[READERS] = {0};
    for (int i = 0; i < READERS; i++) {
        readers[i].state = seed + 1 + (uint64_t)i;
        if (pthread_create(&threads[i], NULL, read_all, &readers[i]) != 0) wrong("", "a thread does not start");
    }
    if (pthread_create(&writer, NULL, write_all, NULL) != 0) wrong("", "a thread does not start");
    nanosleep(&length, NULL);
    while (atomic_load_explicit(&lacking, memory_order_relaxed) > 0 && !atomic_load_explicit(&done, memory_order_relaxed))
        nanosleep(&pause, NULL);
    atomic_store_explicit(&done, true, memory_order_relaxed);
    pthread_join(writer, NULL);
    for (int i = 0; i < READERS; i++) pthread_join(threads[i], NULL);
    hkv_tables_check(tables, wrong, "check: ");
    const struct hkv_counts *counts = &tables->counts;
    for (int i = 0; i < READERS; i++) {
        printf("reader %d: %llu of %llu handles were READY\n", i, (unsigned long long)readers[i].hits,
               (unsigned long long)readers[i].looks);
        if (readers[i].hits < MANY || readers[i].looks - readers[i].hits < MANY) wrong("", "too little was found, or missed");
    }
    printf("%llu grants, %llu evicted, %llu moved\n", (unsigned long long)tables->header->generation, (unsigned long long)counts->evicted,
           (unsigned long long)counts->moved);
    if (counts->evicted < MANY || counts->moved < MANY) wrong("", "the writer did not do enough");
    hkv_tables_free(tables);
    free(memory);
    free(notes);
    return 0;
}
