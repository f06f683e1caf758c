/* The tables of one pool: layout, readers, the writer. Pure C: no Python, no files; the caller maps the memory. The format and its
 * validity rules are in schemas/layout.h and PROTOCOL.md.
 *
 * A reader (struct hkv_reader) only ever follows offsets from a header that was checked against this file's own arithmetic and copied,
 * so whatever the mutable bytes hold can make it miss but never read outside the mapping. The writer (struct hkv_tables) is one
 * thread of one process; what it keeps outside the shared memory is derived from it. */
#ifndef HOSTKV_TABLES_H
#define HOSTKV_TABLES_H
#include "index.h"
#include "layout.h"

#include <stdbool.h>
#include <stddef.h>

/* schemas/errors.py: Status */
enum { HKV_OK = 0, HKV_EXISTS = 1, HKV_BUSY = 2, HKV_FULL = 3, HKV_THROTTLED = 4, HKV_NOT_HELD = 5, HKV_MISS = 6 };

/* ---- layout ---------------------------------------------------------------------------------------------------------------------- */

struct hkv_geometry {
    uint64_t pool_bytes, extent_bytes, max_blocks, max_shards, max_pins, max_members, max_namespaces;
};

#define HKV_MESSAGE_BYTES 256

/* False with a message when a number is out of range. */
bool hkv_geometry_check(const struct hkv_geometry *geometry, char message[HKV_MESSAGE_BYTES]);

/* The static part of the header for a checked geometry; ids and checksum are left zero. tables_bytes is the size of the file. */
void hkv_layout(const struct hkv_geometry *geometry, struct hkv_header *header);

/* Whether `header` (a copy: at least HKV_STATIC_BYTES of it are read) is of this version and describes exactly the layout that this
 * build computes; where given, also for this geometry and host. The message names the first field that differs, with both values. */
bool hkv_header_check(const struct hkv_header *header, const struct hkv_geometry *geometry, const uint8_t *host_boot_id,
                      char message[HKV_MESSAGE_BYTES]);

/* ---- readers --------------------------------------------------------------------------------------------------------------------- */

struct hkv_reader {
    const struct hkv_header *header;
    const struct hkv_block *blocks;
    uint64_t mask;
    uint32_t max_probe;
    struct hkv_index_reader index; /* of what is on disk; hkv_index_attach() is for the caller, where there is one */
};

/* `checked`: a private copy of the header that hkv_header_check() accepted. Without an index at first. */
void hkv_reader_attach(struct hkv_reader *reader, const uint8_t *memory, const struct hkv_header *checked);

/* found[i] = 1 where key i is READY and not doomed in that namespace, or on disk in whatever namespace: a key is of one only. */
void hkv_lookup(const struct hkv_reader *reader, uint32_t namespace_index, const uint8_t *keys, size_t count, uint8_t *found);
size_t hkv_lookup_prefix(const struct hkv_reader *reader, uint32_t namespace_index, const uint8_t *keys, size_t count);
ptrdiff_t hkv_lookup_reverse(const struct hkv_reader *reader, uint32_t namespace_index, const uint8_t *keys, size_t count);

/* Where the blocks are, HKV_OK, or HKV_MISS where hkv_lookup() would find nothing in the pool. Nothing keeps them there. */
void hkv_locate(const struct hkv_reader *reader, uint32_t namespace_index, const uint8_t *keys, size_t count, uint8_t *statuses,
                uint8_t *pages, uint8_t *generations);

/* held[i] = 1 where key i still is READY at pages[i] (uint32) and generations[i] (uint64), doomed or not; 2 where it is and checksums[i]
 * (uint64; NULL: not compared) differs from the entry's, unless the sidecar has turned verify off. */
void hkv_verify(const struct hkv_reader *reader, const uint8_t *keys, const uint8_t *pages, const uint8_t *generations,
                const uint8_t *checksums, size_t count, uint8_t *held);

/* ---- the writer ------------------------------------------------------------------------------------------------------------------ */

/* A block is in the list [reused + wanted], or [reused + half] where shards of one are missing that will be wanted. */
enum { HKV_REUSED = 1, HKV_WANTED = 2, HKV_HALF = 4, HKV_LISTS = 6 };

struct hkv_class { /* everything of one slot size */
    uint64_t slot_bytes;
    struct hkv_list {
        uint32_t oldest, newest; /* linked through hkv_aux, in order of use */
    } idle[HKV_LISTS];           /* its idle blocks, by hkv_list_of() */
    uint32_t blocks[2];          /* all its blocks: [1] of the lists of reused ones, [0] of the others */
    uint32_t open;               /* list of its extents that have a free slot */
    uint32_t extents;
    uint32_t namespaces; /* 0: this record is unused */
};

struct hkv_counts {
    uint64_t used_bytes, blocks, ready, writing, doomed, pinned_blocks, pins, shards_in_flight, members, namespaces, free_extents,
        tombstones, evicted, extents_taken_back, moved, bad_blocks, bad_records, dirty, evicted_dirty;
};

struct hkv_load { /* what one member has in flight; a shard counts as its part of the slot */
    uint64_t bytes, shards;
};

struct hkv_tables {
    uint8_t *memory;
    struct hkv_header fixed; /* private copy of the static part: the only source of capacities */
    struct hkv_header *header;
    struct hkv_reader reader;
    struct hkv_block *blocks;
    struct hkv_aux *aux;
    struct hkv_shard *shards;
    struct hkv_pin *pins;
    struct hkv_member *members;
    struct hkv_namespace *namespaces;
    struct hkv_extent *extents;
    uint32_t *slots; /* the slot map */
    uint64_t mask;
    uint32_t max_probe;
    /* private */
    uint8_t instance_id[16];
    bool verify;
    bool keeps_reused;         /* the lists of reused blocks are of those that were used again; else of all but those of low priority */
    uint32_t min_reuse;        /* the tier wants blocks that were used again so often */
    bool spills;               /* a tier takes wanted blocks: the others are evicted before */
    bool reseal;               /* while they are adopted: the checksums are those of payload, and are wanted no more */
    struct hkv_class *classes; /* namespace_capacity of them */
    uint32_t *class_of_namespace;
    uint32_t *extent_prev, *extent_next; /* links of a class's open list, or of free_extents */
    uint32_t free_extents, free_shard, free_pin;
    uint32_t swept;               /* the next entry that is looked at for a tombstone */
    struct hkv_load *loads;       /* of each member */
    uint64_t *pins_of_session;    /* by session number */
    uint64_t *ghosts, ghost_mask; /* what was evicted of late; see ghost_of() */
    double room;                  /* the part of the blocks of a size that may be ones that were not used again */
    double reused_go;             /* the part of those evicted of late that were used again */
    struct hkv_counts counts;
};

/* Both return NULL when there is no memory for the private part. `memory` has fixed->tables_bytes bytes; create wants them zero, writes
 * `fixed` (ids included, checksum added) into them and makes the pool LIVE; adopt wants a header that hkv_header_check() accepted, and
 * then hkv_tables_repair() before any other call, which is the first that writes. */
struct hkv_tables *hkv_tables_create(uint8_t *memory, const struct hkv_header *fixed, const uint8_t instance_id[16], bool verify);
struct hkv_tables *hkv_tables_adopt(uint8_t *memory, const struct hkv_header *fixed, const uint8_t instance_id[16], bool verify);
void hkv_tables_free(struct hkv_tables *tables);

struct hkv_chain {
    uint32_t session, head;
    uint64_t tag;
};

/* tables_repair.c. False (nothing changed) when memory is short. `chains` is for the caller to free(). */
bool hkv_tables_repair(struct hkv_tables *tables, const uint32_t *dead_members, size_t dead, struct hkv_chain **chains, size_t *count);

/* tables_check.c: reports each invariant that does not hold. False when memory is short. */
typedef void hkv_report(void *context, const char *sentence);
bool hkv_tables_check(struct hkv_tables *tables, hkv_report *report, void *context);

void hkv_set_start(struct hkv_tables *tables); /* what readers are told of this start: instance_id, verify */
void hkv_set_heartbeat(struct hkv_tables *tables, uint64_t now_ns);
void hkv_set_removed(struct hkv_tables *tables);

/* Whether adoption keeps this member's record. */
bool hkv_member_is_sound(const struct hkv_tables *tables, uint32_t member);

/* Indexes given to these are in range and in use, but for HKV_NIL where it says so; shards are below the namespace's. */
uint32_t hkv_member_add(struct hkv_tables *tables, const struct hkv_member *member); /* HKV_NIL: full */
uint64_t hkv_member_remove(struct hkv_tables *tables, uint32_t member);
uint32_t hkv_namespace_add(struct hkv_tables *tables, const struct hkv_namespace *wanted); /* HKV_NIL: full */
uint8_t hkv_reserve(struct hkv_tables *tables, uint32_t namespace_index, uint32_t member, uint64_t tag, const uint8_t key[32],
                    uint32_t shard, bool low_priority, uint32_t *page, uint64_t *generation);
uint8_t hkv_commit(struct hkv_tables *tables, uint32_t member, uint64_t tag, const uint8_t key[32], uint32_t shard, uint64_t generation,
                   uint64_t checksum);
uint64_t hkv_abort(struct hkv_tables *tables, uint32_t member, uint64_t *tags, size_t count); /* puts the tags in order */
uint64_t hkv_clear(struct hkv_tables *tables, uint32_t namespace_index);                      /* HKV_NIL: of all, in one pass */
bool hkv_discard(struct hkv_tables *tables, uint32_t namespace_index, const uint8_t key[32], uint64_t generation);

/* For tiers. Pins the idle block that a tier should have next, which is no use of it, and returns it, HKV_NIL for none; and: a tier has this
 * block now. */
uint32_t hkv_spill(struct hkv_tables *tables, uint32_t session, uint64_t tag, uint32_t *head);
bool hkv_set_clean(struct hkv_tables *tables, const uint8_t key[32], uint64_t generation);

/* A batch of acquires for one chain: mark what the chain already pins, once, then pin key by key. */
bool hkv_chain_is(const struct hkv_tables *tables, uint32_t head, uint32_t session, uint64_t tag);
uint64_t hkv_acquire_begin(struct hkv_tables *tables, uint32_t head); /* returns the mark for hkv_acquire() */
uint8_t hkv_acquire(struct hkv_tables *tables, uint32_t namespace_index, uint32_t session, uint64_t tag, uint64_t mark,
                    const uint8_t key[32], uint32_t *head, uint32_t *page, uint64_t *generation);
uint64_t hkv_release(struct hkv_tables *tables, uint32_t head);

/* Fetches what a later call on this key will touch. */
void hkv_prefetch(const struct hkv_tables *tables, const uint8_t key[32]);

/* What the checksum of an entry is where those of payload are not wanted: of all in it that stays, and of the mask of committed shards. */
uint64_t hkv_seal(const struct hkv_block *block, uint64_t shards_done);

/* ---- shared by tables*.c --------------------------------------------------------------------------------------------------------- */

static inline uint64_t hkv_slot_bytes(uint64_t shard_bytes, uint64_t shards) {
    uint64_t stride = (shard_bytes + HKV_SHARD_ALIGN - 1) / HKV_SHARD_ALIGN * HKV_SHARD_ALIGN;
    return (stride * shards + HKV_PAGE - 1) / HKV_PAGE * HKV_PAGE;
}
static inline bool hkv_is_live(const struct hkv_block *block) {
    return block->state == HKV_WRITING || block->state == HKV_READY;
}
/* Whether this block is worth keeping and nowhere but in the pool. */
static inline bool hkv_is_dirty(const struct hkv_block *block) {
    return block->state == HKV_READY && (block->flags & (HKV_DOOMED | HKV_CLEAN)) == 0;
}
/* Whether it should be on a tier, too. The first use is that of the request which saved it. */
static inline bool hkv_is_wanted(const struct hkv_tables *tables, const struct hkv_block *block) {
    return hkv_is_dirty(block) && block->flags / HKV_USE > tables->min_reuse;
}
static inline int hkv_list_of(const struct hkv_tables *tables, const struct hkv_block *block) {
    uint32_t uses = block->flags / HKV_USE;
    bool goes_first = (block->flags & (HKV_DOOMED | HKV_CLEAN)) != 0 || uses <= tables->min_reuse;
    int kind = goes_first ? 0 : block->state == HKV_READY ? HKV_WANTED : HKV_HALF;
    return kind + (uses > tables->keeps_reused) * HKV_REUSED;
}
static inline uint64_t hkv_all_shards(uint32_t shards) {
    return shards == 64 ? UINT64_MAX : (UINT64_C(1) << shards) - 1;
}
static inline uint64_t hkv_shard_share(const struct hkv_tables *tables, uint32_t namespace_index) {
    return tables->namespaces[namespace_index].slot_bytes / tables->namespaces[namespace_index].shards;
}
static inline uint32_t hkv_extent_pages(const struct hkv_tables *tables) {
    return (uint32_t)(tables->fixed.extent_bytes / HKV_PAGE);
}

void hkv_block_put(struct hkv_block *block, const struct hkv_block *value);
uint32_t hkv_find(const struct hkv_tables *tables, const uint8_t key[32], uint32_t *place);
uint64_t hkv_slots_in(const struct hkv_tables *tables, uint64_t extent, uint64_t slot_bytes);
struct hkv_class *hkv_class_of(const struct hkv_tables *tables, uint32_t block);
bool hkv_class_join(struct hkv_tables *tables, uint32_t namespace_index);
void hkv_count(struct hkv_tables *tables, uint32_t block, int list, int change);
void hkv_lru_add(struct hkv_tables *tables, uint32_t block);
void hkv_extent_link(struct hkv_tables *tables, uint32_t *list, uint32_t extent);
void hkv_free_records(struct hkv_tables *tables);
#endif
