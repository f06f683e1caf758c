/* The index of what is on disk, of all directories of a tier together: which block is in which slot of which slab. Pure C: no Python, no
 * files; the caller maps the memory. The bytes that readers see are in schemas/layout.h.
 *
 * A reader only follows numbers that it compares with those of a header that was checked, so whatever the bytes hold can make it miss, or
 * find what is not there, but never read outside the mapping. The writer (struct hkv_index) is one thread of one process; which slots of
 * which slabs are free is known to it alone, outside of the shared memory.
 *
 * A block is placed (WRITING), settled (ON_DISK), and ends by eviction, by a failed read or because somebody removes it. While it is
 * written or read its slot is nobody else's, whatever happens to the block: it becomes DOOMED or GONE until that has ended. */
#ifndef HOSTKV_INDEX_H
#define HOSTKV_INDEX_H
#include "layout.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

enum { HKV_MAX_DIRECTORIES = 64, HKV_MAX_SLOT_SIZES = 32 }; /* at a time */

/* ---- layout ---------------------------------------------------------------------------------------------------------------------- */

#define HKV_MOST_BLOCKS (UINT64_C(1) << 30)
void hkv_index_layout(uint64_t max_blocks, struct hkv_index_header *header); /* max_blocks is 1..HKV_MOST_BLOCKS */
const char *hkv_index_header_differs(const struct hkv_index_header *header); /* name of the first field that is wrong, NULL for none */
uint64_t hkv_record_seal(const struct hkv_record *record, uint32_t slab, uint32_t slot);

/* ---- readers --------------------------------------------------------------------------------------------------------------------- */

struct hkv_index_reader {
    const uint64_t *table; /* NULL: there is no index, which is one where nothing is found */
    const struct hkv_index_entry *entries;
    uint64_t mask, max_blocks;
};

/* `checked`: a private copy of the header that hkv_index_header_differs() accepted. */
static inline void hkv_index_attach(struct hkv_index_reader *reader, const uint8_t *memory, const struct hkv_index_header *checked) {
    reader->table = (const uint64_t *)(memory + checked->table_offset);
    reader->entries = (const struct hkv_index_entry *)(memory + checked->entries_offset);
    reader->mask = checked->table_capacity - 1;
    reader->max_blocks = checked->max_blocks;
}

static inline uint32_t hkv_index_tag(const uint8_t key[32]) {
    uint32_t first;
    memcpy(&first, key, sizeof first);
    return first;
}

/* The entry that a word names, if it is one of a key with this tag, else NULL. Neither 0 nor a tombstone names one. */
static inline const struct hkv_index_entry *hkv_index_named(const struct hkv_index_reader *reader, uint64_t word, uint32_t tag) {
    uint32_t number = (uint32_t)word - 1;
    return word >> 32 == tag && number < reader->max_blocks ? &reader->entries[number] : NULL;
}

static inline bool hkv_index_entry_is(const struct hkv_index_entry *entry, const uint8_t key[32]) {
    typedef uint64_t __attribute__((may_alias)) word64;
    const word64 *found = (const word64 *)entry->key;
    uint64_t wanted[4];
    if (__atomic_load_n(&entry->state, __ATOMIC_ACQUIRE) != HKV_ON_DISK) return false;
    memcpy(wanted, key, sizeof wanted);
    for (int i = 0; i < 4; i++)
        if (__atomic_load_n(&found[i], __ATOMIC_RELAXED) != wanted[i]) return false;
    return true;
}

/* Words move toward where their search starts: one that moves past this search is missed. That is a miss too many, once. */
static inline bool hkv_index_has(const struct hkv_index_reader *reader, const uint8_t key[32]) {
    uint32_t tag = hkv_index_tag(key);
    uint64_t at = tag & reader->mask;
    for (uint32_t n = 0; n < HKV_MAX_PROBE; n++, at = (at + 1) & reader->mask) {
        uint64_t word = __atomic_load_n(&reader->table[at], __ATOMIC_ACQUIRE);
        const struct hkv_index_entry *entry = hkv_index_named(reader, word, tag);
        if (entry != NULL && hkv_index_entry_is(entry, key)) return true;
        if (word == 0) return false;
    }
    return false;
}

/* What a later hkv_index_has() will touch: first the table, then, when that has come, the entry. */
static inline void hkv_index_prefetch(const struct hkv_index_reader *reader, const uint8_t key[32]) {
    __builtin_prefetch(&reader->table[hkv_index_tag(key) & reader->mask]);
}
static inline void hkv_index_prefetch_entry(const struct hkv_index_reader *reader, const uint8_t key[32]) {
    uint32_t tag = hkv_index_tag(key);
    uint64_t at = tag & reader->mask;
    for (int n = 0; n < 8; n++, at = (at + 1) & reader->mask) {
        uint64_t word = __atomic_load_n(&reader->table[at], __ATOMIC_RELAXED);
        const struct hkv_index_entry *entry = hkv_index_named(reader, word, tag);
        if (entry != NULL) {
            __builtin_prefetch(entry);
            __builtin_prefetch(&entry->state); /* mostly in the next line of the cache */
        }
        if (entry != NULL || word == 0) return;
    }
}

/* ---- the writer ------------------------------------------------------------------------------------------------------------------ */

struct hkv_links {
    uint32_t prev, next;
};

struct hkv_slab {
    uint64_t used;               /* sequence of the tier when a block of it was last written or read */
    uint32_t *map;               /* of a slab that has a slot size, for each slot: see index.c */
    uint32_t slots, taken, busy; /* how many there are, hold a block, hold one that is written or read */
    uint32_t fresh, free_head;   /* slots never used since the slab got its size start here; list of those that were */
    struct hkv_links kind, open; /* in the list of its slot size or of free slabs; in the list of those with free slots */
    uint32_t size;               /* which slot size, HKV_NIL: none, it is free */
};

struct hkv_sized {            /* the slabs of one slot size in one directory */
    uint32_t slabs, open;     /* lists, linked through `kind` and `open` */
    uint32_t hand, hand_slot; /* the clock's hand; HKV_NIL: at the start of the list */
    uint32_t until_look;      /* evictions until a colder slab of another size is looked for */
};

struct hkv_directory {
    uint32_t number, first_slab, slabs;
    bool enabled, dropped;
    uint32_t free_slabs;   /* list, linked through `kind` */
    uint32_t busy, blocks; /* entries that are written or read; that are ON_DISK */
    uint64_t used_bytes, placed, evicted;
    int64_t credit; /* whose turn it is when all are full */
    struct hkv_slab *slab;
    struct hkv_sized sized[HKV_MAX_SLOT_SIZES];
};

struct hkv_index_counts {
    uint64_t states[5]; /* entries by state; of FREE ones those that were in use once */
    uint64_t placed, evicted, failed, slabs_taken_back;
};

struct hkv_index {
    uint8_t *memory;
    struct hkv_index_header fixed;
    uint64_t *table;
    struct hkv_index_entry *entries;
    uint64_t mask, max_blocks, slab_bytes;
    uint64_t sequence;                /* of the last write, or of the highest record seen */
    uint32_t fresh_entry, free_entry; /* as the slots of a slab */
    uint32_t next_number, next_slab;
    uint32_t directories;
    uint64_t slot_bytes[HKV_MAX_SLOT_SIZES]; /* 0: unused */
    uint32_t slabs_of_size[HKV_MAX_SLOT_SIZES];
    struct hkv_directory *directory[HKV_MAX_DIRECTORIES];
    struct hkv_index_counts counts;
};

struct hkv_listed { /* a namespace in the list of a directory */
    uint32_t number, namespace_number;
    uint64_t slot_bytes;
};

struct hkv_place {
    uint32_t entry, directory, slab, slot;
    uint64_t sequence, checksum;
};

/* `memory` has the index_bytes of the layout, all zero. NULL when there is no memory for the private part. slab_bytes is a multiple of 4096. */
struct hkv_index *hkv_index_create(uint8_t *memory, uint64_t max_blocks, uint64_t slab_bytes);
void hkv_index_free(struct hkv_index *index);

uint32_t hkv_index_add_directory(struct hkv_index *index, uint32_t slabs);                 /* its number; HKV_NIL: too many, or no memory */
struct hkv_directory *hkv_index_directory(const struct hkv_index *index, uint32_t number); /* NULL: there is none, or it is dropped */
uint32_t hkv_index_drop(struct hkv_index *index, struct hkv_directory *directory);
void hkv_index_enable(struct hkv_directory *directory, bool on);
/* `listed` is in order of `number`. The slab is free. False: no memory. */
bool hkv_index_load(struct hkv_index *index, struct hkv_directory *directory, uint32_t slab, const uint8_t *records, size_t bytes,
                    const struct hkv_listed *listed, size_t count, uint32_t *loaded);

bool hkv_index_place(struct hkv_index *index, const uint8_t key[32], uint32_t namespace_number, uint64_t slot_bytes,
                     struct hkv_place *place);
bool hkv_index_settle(struct hkv_index *index, uint32_t entry, const uint64_t *checksum); /* false: it is not being written */
void hkv_index_hold(const struct hkv_index *index, const uint8_t *keys, size_t count, uint32_t namespace_number, uint8_t *held);
bool hkv_index_open(struct hkv_index *index, const uint8_t key[32], uint32_t namespace_number, struct hkv_place *place);
bool hkv_index_close(struct hkv_index *index, uint32_t entry, bool keep); /* false: it is not being read */
bool hkv_index_remove(struct hkv_index *index, const uint8_t key[32], uint32_t namespace_number);
uint32_t hkv_index_remove_namespace(struct hkv_index *index, uint32_t namespace_number);
uint64_t hkv_index_memory(const struct hkv_index *index); /* bytes, of the shared and of the private part */

/* Fetches what a later call on this key will touch. */
static inline void hkv_index_expect(const struct hkv_index *index, const uint8_t key[32]) {
    const uint64_t *word = &index->table[hkv_index_tag(key) & index->mask];
    __builtin_prefetch(word, 1);
    __builtin_prefetch(word + 5, 1); /* where runs that start late in a line of the cache go on */
}

/* index_check.c: reports each invariant that does not hold. */
void hkv_index_check(const struct hkv_index *index, void (*report)(void *context, const char *sentence), void *context);

/* ---- shared by index*.c ---------------------------------------------------------------------------------------------------------- */

enum { HKV_FREE_SLOT = 0x80000000u }; /* in a slab's map, with the number of the next free slot plus one; else the entry's plus one */

struct hkv_directory *hkv_index_directory_of(const struct hkv_index *index, uint32_t slab);
static inline bool hkv_index_busy(const struct hkv_index_entry *entry) {
    return entry->state == HKV_ON_DISK_WRITING || entry->state == HKV_ON_DISK_DOOMED || entry->readers > 0;
}
uint64_t hkv_index_find(const struct hkv_index *index, const uint8_t key[32], uint64_t *place);
#endif
