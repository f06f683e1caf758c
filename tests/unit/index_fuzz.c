/* Bytes of the index of what is on disk flipped under its readers, and records under recovery, for AddressSanitizer and UBSan
 * (tests/sanitize.sh):
 *
 *     cc -std=c11 -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -Icext -Icext/vendor -Ischemas tests/unit/index_fuzz.c \
 *         cext/index.c cext/index_check.c cext/hash.c -o /tmp/index_fuzz -pthread && /tmp/index_fuzz 30 [SEED]
 *
 * Each round drives a writer through verbs in any order, with every invariant looked at, and keeps the records of what it wrote. Readers of a
 * spoiled copy may find or miss what they like, also while another thread goes on spoiling. Spoiled records, cut anywhere, some with a seal that
 * is right whatever they say, are recovered by a new writer that must hold every invariant, then and after more verbs. The copies are on
 * the heap, exactly as long as they must be, so that a step outside is seen. A round depends on the seed alone, but for when the other thread
 * runs. Exit status 0: nothing was wrong. */
#define _GNU_SOURCE
#include "index.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PAGE = 4096, SLAB = 6 * PAGE, SLABS = 3, KEYS = 64, VERBS = 300, FLIGHT = 8, SLOTS = SLAB / PAGE };

static uint8_t keys[KEYS][32];
static uint64_t seed, rounds, recovered, refused, verbs_done;
static uint64_t state;

static uint64_t next_random(uint64_t *of) {
    *of = *of * 6364136223846793005u + 1442695040888963407u;
    uint64_t y = *of;
    y ^= y >> 33;
    y *= 0xff51afd7ed558ccdu;
    return y ^ y >> 29;
}

static unsigned pick(unsigned below) {
    return (unsigned)(next_random(&state) % below);
}

static void wrong(void *context, const char *sentence) {
    fprintf(stderr, "seed %llu, round %llu, %s: %s\n", (unsigned long long)seed, (unsigned long long)rounds, (const char *)context,
            sentence);
    exit(1);
}

/* ---- a writer's verbs, any of them in any order ---------------------------------------------------------------------------------- */

struct writer {
    struct hkv_index *x;
    uint8_t *memory;
    struct flight {
        struct hkv_place place;
        unsigned key;
    } writes[FLIGHT], reads[FLIGHT];
    unsigned writing, reading;
    struct hkv_record records[SLABS][SLOTS]; /* of directory 0 */
};

static uint32_t pages_of(uint32_t namespace_number) {
    return (uint32_t[]){1, 2, 5}[namespace_number % 3];
}

static struct writer start(uint64_t max_blocks) {
    struct writer w = {0};
    struct hkv_index_header layout;
    hkv_index_layout(max_blocks, &layout);
    w.memory = aligned_alloc(PAGE, layout.index_bytes);
    memset(w.memory, 0, layout.index_bytes);
    w.x = hkv_index_create(w.memory, max_blocks, SLAB);
    hkv_index_enable(hkv_index_directory(w.x, hkv_index_add_directory(w.x, SLABS)), true);
    return w;
}

static void finish(struct writer *w) {
    hkv_index_free(w->x);
    free(w->memory);
}

static void settle(struct writer *w, unsigned n) {
    struct flight f = w->writes[n];
    uint64_t checksum = next_random(&state);
    if (!hkv_index_settle(w->x, f.place.entry, pick(8) ? &checksum : NULL)) wrong("settle", "what was placed is not being written");
    w->writes[n] = w->writes[--w->writing];
    if (f.place.directory != 0) return;
    struct hkv_record *record = &w->records[f.place.slab][f.place.slot];
    *record = (struct hkv_record){
        .checksum = checksum, .sequence = f.place.sequence, .namespace_number = f.key % 3, .slot_pages = pages_of(f.key)};
    memcpy(record->key, keys[f.key], 32);
    record->seal = hkv_record_seal(record, f.place.slab, f.place.slot);
}

static void verb(struct writer *w) {
    unsigned k = pick(KEYS), what = pick(32);
    struct flight *next;
    verbs_done++;
    if (what < 12) {
        next = &w->writes[w->writing];
        next->key = k;
        if (w->writing < FLIGHT && hkv_index_place(w->x, keys[k], k % 3, (uint64_t)pages_of(k) * PAGE, &next->place)) w->writing++;
    } else if (what < 20) {
        if (w->writing > 0) settle(w, pick(w->writing));
    } else if (what < 24) {
        next = &w->reads[w->reading];
        if (w->reading < FLIGHT && hkv_index_open(w->x, keys[k], k % 3, &next->place)) w->reading++;
    } else if (what < 28) {
        if (w->reading == 0) return;
        unsigned n = pick(w->reading);
        if (!hkv_index_close(w->x, w->reads[n].place.entry, pick(4))) wrong("close", "what was opened is not being read");
        w->reads[n] = w->reads[--w->reading];
    } else if (what < 30) {
        hkv_index_remove(w->x, keys[k], k % 3);
    } else if (what == 30) {
        hkv_index_remove_namespace(w->x, k % 3);
    } else if (k % 4 == 0) {
        uint32_t number = w->x->directory[pick(w->x->directories)]->number;
        if (number != 0 && hkv_index_directory(w->x, number) != NULL) hkv_index_drop(w->x, hkv_index_directory(w->x, number));
    } else if (k % 4 == 1 && w->x->directories < 4) {
        hkv_index_enable(hkv_index_directory(w->x, hkv_index_add_directory(w->x, 1 + pick(SLABS))), true);
    } else {
        hkv_index_enable(w->x->directory[0], pick(4) && !w->x->directory[0]->dropped);
    }
}

static void run_verbs(struct writer *w, unsigned count) {
    for (unsigned i = 0; i < count; i++) {
        verb(w);
        if (i % 50 == 0) hkv_index_check(w->x, wrong, "after a verb");
    }
    hkv_index_check(w->x, wrong, "after the verbs");
}

/* ---- spoiling -------------------------------------------------------------------------------------------------------------------- */

/* One thing that goes wrong in memory, or that somebody hostile does to it. */
static void spoil(uint8_t *memory, size_t size, size_t record, uint64_t *of) {
    static const uint8_t likely[] = {0, 1, 2, 3, 4, 15, 16, 30, 31, 63, 64, 127, 128, 255};
    unsigned kind = (unsigned)(next_random(of) % 6);
    uint64_t value = next_random(of), where = next_random(of), from = next_random(of);
    _Atomic uint8_t *byte = (_Atomic uint8_t *)(memory + where % size),
                    *to = (_Atomic uint8_t *)(memory + where % (size / record) * record);
    _Atomic uint8_t *copied = (_Atomic uint8_t *)(memory + from % (size / record) * record);
    if (kind < 2) {
        atomic_fetch_xor_explicit(byte, (uint8_t)(1u << value % 8), memory_order_relaxed);
    } else if (kind == 2) {
        atomic_store_explicit(byte, likely[value % sizeof likely], memory_order_relaxed);
    } else {
        for (size_t i = 0; i < record; i++) {
            uint8_t filled = kind == 3   ? atomic_load_explicit(copied + i, memory_order_relaxed)
                             : kind == 4 ? (uint8_t)next_random(of)
                             : from % 2  ? 0
                                         : 0xff;
            atomic_store_explicit(to + i, filled, memory_order_relaxed);
        }
    }
}

static void spoil_index(uint8_t *memory, const struct hkv_index_header *h, uint64_t *of) {
    size_t table = h->table_capacity * sizeof(uint64_t), entries = h->max_blocks * sizeof(struct hkv_index_entry);
    unsigned part = (unsigned)(next_random(of) % 8);
    if (part == 0) spoil(memory, 56, 8, of);
    else if (part < 4) spoil(memory + h->table_offset, table, sizeof(uint64_t), of);
    else spoil(memory + h->entries_offset, entries, sizeof(struct hkv_index_entry), of);
}

/* ---- readers --------------------------------------------------------------------------------------------------------------------- */

static void read_all(const struct hkv_index_reader *reader) {
    for (unsigned k = 0; k < KEYS; k++) {
        uint8_t *key = malloc(32);
        uint32_t first = (uint32_t)next_random(&state);
        memcpy(key, keys[k], 32);
        if (pick(8) == 0) memcpy(key, &first, 4);
        hkv_index_prefetch(reader, key);
        hkv_index_prefetch_entry(reader, key);
        hkv_index_has(reader, key);
        free(key);
    }
}

struct spoiler {
    uint8_t *memory;
    const struct hkv_index_header *header;
    uint64_t state;
    atomic_bool done;
};

static void *keep_spoiling(void *argument) {
    struct spoiler *s = argument;
    for (int i = 0; i < 3000; i++) spoil_index(s->memory, s->header, &s->state);
    atomic_store(&s->done, true);
    return NULL;
}

static void fuzz_readers(const struct writer *w) {
    const struct hkv_index_header *h = &w->x->fixed;
    size_t used = h->entries_offset + h->max_blocks * sizeof(struct hkv_index_entry);
    uint8_t *copy = malloc(used);
    struct hkv_index_reader reader;
    memcpy(copy, w->memory, used);
    hkv_index_attach(&reader, copy, h);
    for (int i = 0; i < 40; i++) {
        spoil_index(copy, h, &state);
        read_all(&reader);
    }
    struct hkv_index_header spoiled;
    memcpy(&spoiled, copy, sizeof spoiled);
    if (hkv_index_header_differs(&spoiled) != NULL) refused++;
    /* A few more or less blocks in the same pages are believed. */
    else if (memcmp(&spoiled.table_capacity, &h->table_capacity, 32) != 0) wrong("header", "another one is taken for right");
    if (rounds % 8 == 0) {
        struct spoiler spoiler = {.memory = copy, .header = h, .state = next_random(&state)};
        pthread_t thread;
        if (pthread_create(&thread, NULL, keep_spoiling, &spoiler) != 0) wrong("thread", "does not start");
        while (!atomic_load(&spoiler.done)) read_all(&reader);
        pthread_join(thread, NULL);
    }
    free(copy);
}

/* ---- recovery -------------------------------------------------------------------------------------------------------------------- */

static void fuzz_recovery(const struct writer *old) {
    const struct hkv_listed listed[] = {{0, 0, PAGE}, {1, 1, 2 * PAGE}, {2, 2, 5 * PAGE}, {3, 3, 7 * PAGE}, {0xffffffff, 0, PAGE}};
    struct writer w = start(1 + pick(40));
    for (uint32_t s = 0; s < SLABS; s++) {
        struct hkv_record records[SLOTS + 2];
        memcpy(records, old->records[s], sizeof old->records[s]);
        memset(records + SLOTS, 0, 2 * sizeof *records);
        for (unsigned n = pick(6); n > 0; n--) spoil((uint8_t *)records, sizeof records, sizeof *records, &state);
        for (unsigned n = pick(3); n > 0; n--) {
            unsigned slot = pick(SLOTS + 2);
            if (pick(2)) records[slot].slot_pages = pick(9);
            records[slot].seal = hkv_record_seal(&records[slot], s, slot);
        }
        size_t size = pick(4) ? sizeof records : pick(sizeof records + 1);
        uint8_t *copy = malloc(size);
        uint32_t loaded;
        memcpy(copy, records, size);
        if (!hkv_index_load(w.x, w.x->directory[0], s, copy, size, listed, pick(6), &loaded)) wrong("load", "no memory");
        recovered += loaded;
        free(copy);
        hkv_index_check(w.x, wrong, "after recovery");
    }
    run_verbs(&w, VERBS);
    finish(&w);
}

int main(int argc, char **argv) {
    double seconds = argc > 1 ? strtod(argv[1], NULL) : 10;
    struct timespec begin, now;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    seed = argc > 2 ? strtoull(argv[2], NULL, 10) : (uint64_t)begin.tv_nsec ^ (uint64_t)time(NULL) << 20;
    printf("seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
    state = seed;
    do {
        for (unsigned k = 0; k < KEYS; k++) {
            uint32_t home = (uint32_t[]){0, 1, 30, 31}[pick(4)]; /* searches run into each other and over the end of the table */
            memset(keys[k], (int)k + 1, 32);
            memcpy(keys[k], &home, 4);
        }
        struct writer w = start(4 + pick(40));
        run_verbs(&w, VERBS + pick(VERBS));
        fuzz_readers(&w);
        for (int i = 0; i < 4; i++) fuzz_recovery(&w);
        finish(&w);
        rounds++;
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((double)(now.tv_sec - begin.tv_sec) + (double)(now.tv_nsec - begin.tv_nsec) / 1e9 < seconds);
    printf("%llu rounds, %llu blocks recovered, %llu headers refused, %llu verbs\n", (unsigned long long)rounds,
           (unsigned long long)recovered, (unsigned long long)refused, (unsigned long long)verbs_done);
    return 0;
}
