/* Bytes of the tables flipped under those who read and adopt them, for AddressSanitizer and UBSan (tests/sanitize.sh):
 *
 *     cc -std=c11 -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -Icext -Icext/vendor -Ischemas tests/unit/reader_fuzz.c \
 *         cext/tables.c cext/tables_repair.c cext/tables_check.c cext/hash.c -o /tmp/reader_fuzz -pthread && /tmp/reader_fuzz 30 [SEED]
 *
 * Each round fills tables with the real writer and spoils copies of them. Readers that attached before may find or miss what they like,
 * also while another thread goes on spoiling. A new writer adopts such a copy or refuses its header; what it has repaired must hold every invariant,
 * then and after a few hundred verbs. The copies are on the heap, exactly as long as the tables, so that a step outside is seen.
 * A round depends on the seed alone, but for when the other thread runs. Exit status 0: nothing was wrong. */
#define _GNU_SOURCE
#include "tables.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PAGE = 4096, KEYS = 48, MOST_KEYS = 40, CHAINS = 64, VERBS = 300 };

static uint8_t keys[KEYS][32];
static uint64_t seed, rounds, adopted, refused, bad, verbs_done;
static uint64_t state;

static uint64_t next_random(uint64_t *of) {
    *of = *of * 6364136223846793005u + 1442695040888963407u;
    uint64_t x = *of;
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdu;
    return x ^ x >> 29;
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
    struct hkv_tables *tables;
    uint64_t generations[KEYS];
    struct hkv_chain chains[CHAINS];
    size_t chain_count;
};

static uint32_t any_member(const struct hkv_tables *t) {
    uint32_t from = pick((unsigned)t->fixed.member_capacity);
    for (uint32_t n = 0; n < t->fixed.member_capacity; n++) {
        uint32_t i = (from + n) % (uint32_t)t->fixed.member_capacity;
        if (t->members[i].used) return i;
    }
    return HKV_NIL;
}

static uint32_t any_namespace(const struct hkv_tables *t) {
    uint32_t from = pick((unsigned)t->fixed.namespace_capacity);
    for (uint32_t n = 0; n < t->fixed.namespace_capacity; n++) {
        uint32_t i = (from + n) % (uint32_t)t->fixed.namespace_capacity;
        if (t->namespaces[i].used) return i;
    }
    return HKV_NIL;
}

static void add_member(struct writer *w) {
    struct hkv_member member = {.session = pick((unsigned)w->tables->fixed.member_capacity), .lock_name = {1}};
    uint64_t client = next_random(&state);
    memcpy(member.client_id, &client, sizeof client);
    member.session_id[0] = (uint8_t)(member.session + 1);
    hkv_member_add(w->tables, &member);
}

static void add_namespace(struct writer *w) {
    static const struct {
        uint32_t shards;
        uint64_t shard_bytes;
    } kinds[] = {{1, 2 * PAGE}, {2, 2 * PAGE}, {1, 8 * PAGE}, {64, 100}, {3, 1}};
    unsigned n = pick(sizeof kinds / sizeof *kinds);
    struct hkv_namespace each = {.shards = kinds[n].shards, .shard_bytes = kinds[n].shard_bytes, .fingerprint = {(uint8_t)(n + 1)}};
    each.slot_bytes = hkv_slot_bytes(each.shard_bytes, each.shards);
    hkv_namespace_add(w->tables, &each);
}

static void acquire(struct writer *w, uint32_t namespace_index) {
    struct hkv_chain wanted = {.session = pick((unsigned)w->tables->fixed.member_capacity), .tag = pick(3), .head = HKV_NIL}, *chain = NULL;
    for (size_t i = 0; i < w->chain_count; i++)
        if (w->chains[i].session == wanted.session && w->chains[i].tag == wanted.tag) chain = &w->chains[i];
    if (chain == NULL && w->chain_count == CHAINS) return;
    if (chain == NULL) *(chain = &w->chains[w->chain_count++]) = wanted;
    uint64_t mark = hkv_acquire_begin(w->tables, chain->head), generation;
    uint32_t page;
    for (unsigned n = pick(6) + 1; n > 0; n--)
        hkv_acquire(w->tables, namespace_index, chain->session, chain->tag, mark, keys[pick(KEYS)], &chain->head, &page, &generation);
    if (chain->head == HKV_NIL) w->chain_count--; /* it is the last one: it was new */
}

static void verb(struct writer *w) {
    struct hkv_tables *t = w->tables;
    uint32_t member = any_member(t), space = any_namespace(t), page;
    if (member == HKV_NIL) add_member(w);
    if (space == HKV_NIL) add_namespace(w);
    member = any_member(t);
    space = any_namespace(t);
    unsigned k = pick(KEYS), what = pick(20);
    uint32_t shards = t->namespaces[space].shards;
    uint64_t tag = pick(3);
    verbs_done++;
    if (what < 8) {
        for (uint32_t shard = 0; shard < shards; shard++) { /* one whole block */
            if (hkv_reserve(t, space, member, tag, keys[k], shard, pick(4) == 0, &page, &w->generations[k]) != HKV_OK) continue;
            if (pick(20)) hkv_commit(t, member, tag, keys[k], shard, w->generations[k], next_random(&state));
        }
    } else if (what < 10) {
        hkv_reserve(t, space, member, tag, keys[k], pick(shards), false, &page, &w->generations[k]);
    } else if (what < 12) {
        hkv_commit(t, member, tag, keys[k], pick(shards), w->generations[k], next_random(&state));
    } else if (what < 14) {
        acquire(w, space);
    } else if (what < 16) {
        if (w->chain_count == 0) return;
        size_t n = pick((unsigned)w->chain_count);
        if (!hkv_chain_is(t, w->chains[n].head, w->chains[n].session, w->chains[n].tag)) wrong("release", "a chain was lost");
        hkv_release(t, w->chains[n].head);
        w->chains[n] = w->chains[--w->chain_count];
    } else if (what == 16) {
        hkv_abort(t, member, (uint64_t[]){tag, pick(3)}, 2);
    } else if (what == 17) {
        hkv_discard(t, space, keys[k], w->generations[k]);
    } else if (what == 18) {
        if (pick(2)) hkv_clear(t, space);
        else hkv_member_remove(t, member);
    } else if (pick(2)) {
        add_member(w);
    } else {
        add_namespace(w);
    }
}

/* ---- spoiling -------------------------------------------------------------------------------------------------------------------- */

static struct {
    size_t at, size, record;
} parts[10];

static void find_parts(const struct hkv_header *h) {
    size_t n = 0;
#define PART(start, length, width) \
    parts[n].at = start;           \
    parts[n].size = length;        \
    parts[n++].record = width
    PART(0, HKV_STATIC_BYTES, 8);
    PART(HKV_STATIC_BYTES, 64, 8);
    PART(h->blocks_offset, h->block_capacity * sizeof(struct hkv_block), sizeof(struct hkv_block));
    PART(h->aux_offset, h->block_capacity * sizeof(struct hkv_aux), sizeof(struct hkv_aux));
    PART(h->shards_offset, h->shard_capacity * sizeof(struct hkv_shard), sizeof(struct hkv_shard));
    PART(h->pins_offset, h->pin_capacity * sizeof(struct hkv_pin), sizeof(struct hkv_pin));
    PART(h->members_offset, h->member_capacity * sizeof(struct hkv_member), sizeof(struct hkv_member));
    PART(h->namespaces_offset, h->namespace_capacity * sizeof(struct hkv_namespace), sizeof(struct hkv_namespace));
    PART(h->extents_offset, h->extent_capacity * sizeof(struct hkv_extent), sizeof(struct hkv_extent));
    PART(h->slots_offset, h->pool_bytes / PAGE * sizeof(uint32_t), sizeof(uint32_t));
}

/* One thing that goes wrong in memory, or that somebody hostile does to it. `first`: 1 leaves the static part of the header alone. */
static void spoil(uint8_t *memory, uint64_t *of, unsigned first) {
    static const uint8_t likely[] = {0, 1, 2, 3, 4, 15, 16, 30, 31, 63, 64, 127, 128, 255};
    uint64_t r = next_random(of);
    unsigned part = first + (unsigned)(r % (10 - first)), kind = (unsigned)(r >> 32) % 8;
    size_t size = parts[part].size, record = parts[part].record;
    uint8_t *start = memory + parts[part].at;
    uint64_t value = next_random(of), where = next_random(of), from = next_random(of);
    _Atomic uint8_t *byte = (_Atomic uint8_t *)(start + where % size);
    _Atomic uint8_t *to = (_Atomic uint8_t *)(start + where % (size / record) * record);
    if (kind < 2) {
        atomic_fetch_xor_explicit(byte, (uint8_t)(1u << value % 8), memory_order_relaxed);
    } else if (kind < 4) {
        atomic_store_explicit(byte, likely[value % sizeof likely], memory_order_relaxed);
    } else if (kind == 4) {
        atomic_store_explicit(byte, (uint8_t)value, memory_order_relaxed);
    } else if (kind == 5) { /* one record over another: two entries of a key, two pins of a block, ... */
        _Atomic uint8_t *copied = (_Atomic uint8_t *)(start + from % (size / record) * record);
        for (size_t i = 0; i < record; i++)
            atomic_store_explicit(to + i, atomic_load_explicit(copied + i, memory_order_relaxed), memory_order_relaxed);
    } else if (kind == 6) {
        for (size_t i = 0; i < record; i++) atomic_store_explicit(to + i, (uint8_t)next_random(of), memory_order_relaxed);
    } else {
        uint8_t fill = from % 2 ? 0 : 0xff;
        for (size_t i = 0; i < record; i++) atomic_store_explicit(to + i, fill, memory_order_relaxed);
    }
}

/* ---- readers --------------------------------------------------------------------------------------------------------------------- */

/* Every call of a reader, with keys that are there and others. All buffers are exactly as long as they must be. */
static void read_all(const struct hkv_reader *reader) {
    size_t count = pick(MOST_KEYS + 1);
    uint8_t *wanted = malloc(count * 32), *pages = malloc(count * 4), *generations = malloc(count * 8), *sums = malloc(count * 8);
    uint8_t *found = malloc(count);
    for (size_t i = 0; i < count; i++) {
        uint64_t value = next_random(&state), generation = pick(400);
        uint32_t page = pick(60);
        memcpy(wanted + 32 * i, keys[pick(KEYS)], 32);
        if (pick(8) == 0) memcpy(wanted + 32 * i, &value, 8);
        memcpy(pages + 4 * i, pick(8) ? (void *)&page : (void *)&value, 4);
        memcpy(generations + 8 * i, pick(8) ? &generation : &value, 8);
        memcpy(sums + 8 * i, &value, 8);
    }
    uint32_t namespace_index = pick(8) ? pick(5) : (uint32_t)next_random(&state);
    hkv_lookup(reader, namespace_index, wanted, count, found);
    for (size_t i = 0; i < count; i++)
        if (found[i] > 1) wrong("lookup", "neither found nor missed");
    if (hkv_lookup_prefix(reader, namespace_index, wanted, count) > count) wrong("lookup_prefix", "more than there are");
    ptrdiff_t last = hkv_lookup_reverse(reader, namespace_index, wanted, count);
    if (last < -1 || last >= (ptrdiff_t)count) wrong("lookup_reverse", "out of range");
    hkv_locate(reader, namespace_index, wanted, count, found, pages, generations);
    for (size_t i = 0; i < count; i++)
        if (found[i] != HKV_OK && found[i] != HKV_MISS) wrong("locate", "no such answer");
    hkv_verify(reader, wanted, pages, generations, pick(2) ? sums : NULL, count, found);
    for (size_t i = 0; i < count; i++)
        if (found[i] > 2) wrong("verify", "no such answer");
    free(wanted);
    free(pages);
    free(generations);
    free(sums);
    free(found);
}

struct spoiler {
    uint8_t *memory;
    uint64_t state;
    atomic_bool done;
};

static void *keep_spoiling(void *argument) {
    struct spoiler *s = argument;
    for (int i = 0; i < 3000; i++) {
        spoil(s->memory, &s->state, 0);
        if (i % 16 == 0) { /* or nobody reads any more */
            atomic_store_explicit((_Atomic uint32_t *)(s->memory + offsetof(struct hkv_header, pool_state)), HKV_POOL_LIVE,
                                  memory_order_relaxed);
        }
    }
    atomic_store(&s->done, true);
    return NULL;
}

static void fuzz_readers(uint8_t *memory, const struct hkv_header *checked) {
    struct hkv_reader reader;
    hkv_reader_attach(&reader, memory, checked);
    for (int i = 0; i < 40; i++) {
        spoil(memory, &state, 0);
        if (pick(2)) ((struct hkv_header *)memory)->pool_state = HKV_POOL_LIVE;
        read_all(&reader);
    }
    if (rounds % 8) return;
    struct spoiler spoiler = {.memory = memory, .state = next_random(&state)};
    pthread_t thread;
    if (pthread_create(&thread, NULL, keep_spoiling, &spoiler) != 0) wrong("thread", "does not start");
    while (!atomic_load(&spoiler.done)) read_all(&reader);
    pthread_join(thread, NULL);
}

/* ---- adoption -------------------------------------------------------------------------------------------------------------------- */

static void fuzz_adoption(uint8_t *memory) {
    char message[HKV_MESSAGE_BYTES];
    struct hkv_header header;
    const uint8_t instance[16] = {7};
    unsigned first = pick(16) ? 1 : 0;
    for (unsigned n = 1u << pick(9); n > 0; n--) spoil(memory, &state, first);
    memcpy(&header, memory, sizeof header);
    if (!hkv_header_check(&header, NULL, NULL, message)) {
        refused++;
        return;
    }
    struct writer w = {.tables = hkv_tables_adopt(memory, &header, instance, pick(2))};
    uint32_t dead = pick((unsigned)header.member_capacity);
    struct hkv_chain *chains;
    if (w.tables == NULL || !hkv_tables_repair(w.tables, &dead, pick(2), &chains, &w.chain_count)) wrong("adopt", "no memory");
    if (w.chain_count > CHAINS) wrong("adopt", "more chains than pins");
    memcpy(w.chains, chains, w.chain_count * sizeof *chains);
    free(chains);
    bad += w.tables->counts.bad_blocks + w.tables->counts.bad_records;
    if (!hkv_tables_check(w.tables, wrong, "after repair")) wrong("check", "no memory");
    for (int i = 0; i < VERBS; i++) {
        verb(&w);
        if (i % 75 == 0) hkv_tables_check(w.tables, wrong, "after a verb");
    }
    hkv_tables_check(w.tables, wrong, "after the verbs");
    hkv_tables_free(w.tables);
    adopted++;
}

int main(int argc, char **argv) {
    const struct hkv_geometry geometry = {54 * PAGE, 16 * PAGE, 16, 12, 40, 4, 4};
    const uint8_t instance[16] = {1};
    double seconds = argc > 1 ? strtod(argv[1], NULL) : 10;
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    seed = argc > 2 ? strtoull(argv[2], NULL, 10) : (uint64_t)start.tv_nsec ^ (uint64_t)time(NULL) << 20;
    printf("seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
    state = seed;
    struct hkv_header layout;
    hkv_layout(&geometry, &layout);
    find_parts(&layout);
    size_t size = layout.tables_bytes;
    uint8_t *memory = aligned_alloc(PAGE, size), *copy = aligned_alloc(PAGE, size);
    do {
        for (unsigned k = 0; k < KEYS; k++) {
            uint64_t home = (uint64_t[]){0, 1, 30, 31}[pick(4)]; /* searches run into each other and over the end of the table */
            memset(keys[k], (int)k + 1, 32);
            memcpy(keys[k], &home, 8);
        }
        memset(memory, 0, size);
        struct writer w = {.tables = hkv_tables_create(memory, &layout, instance, true)};
        w.tables->keeps_reused = true;
        for (unsigned n = pick(200); n > 0; n--) verb(&w);
        hkv_tables_check(w.tables, wrong, "before anything was spoiled");
        struct hkv_header checked = w.tables->fixed;
        memcpy(copy, memory, size);
        fuzz_readers(copy, &checked);
        for (int i = 0; i < 4; i++) {
            memcpy(copy, memory, size);
            fuzz_adoption(copy);
        }
        hkv_tables_free(w.tables);
        rounds++;
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((double)(now.tv_sec - start.tv_sec) + (double)(now.tv_nsec - start.tv_nsec) / 1e9 < seconds);
    printf("%llu rounds, %llu copies adopted and %llu refused, %llu entries and records found bad, %llu verbs\n",
           (unsigned long long)rounds, (unsigned long long)adopted, (unsigned long long)refused, (unsigned long long)bad,
           (unsigned long long)verbs_done);
    free(memory);
    free(copy);
    return 0;
}
