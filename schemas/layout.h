/* Byte layouts of the shared memory of one HostKV pool. layout.py mirrors this file; PROTOCOL.md tells when a byte is valid.
 *
 * Two files: the pool (payload, nothing else) and the tables (this file). The sidecar is the only writer of the tables; everybody
 * else maps them read-only. All integers are little-endian. The block entries, shards, pins, members, namespaces and the slot size
 * of each extent are the truth; every field marked "derived" is rebuilt from them when a sidecar adopts the pool.
 */
#ifndef HOSTKV_LAYOUT_H
#define HOSTKV_LAYOUT_H
#include <stdint.h>

#define HKV_MAGIC "HOSTKV\0\1"
#define HKV_LAYOUT_VERSION 4u
#define HKV_BYTE_ORDER 0x01020304u
#define HKV_PAGE 4096u        /* unit of pool offsets, slot sizes and the header */
#define HKV_NIL 0xffffffffu   /* no index */
#define HKV_MAX_SHARDS 64u    /* a block's committed shards are one 64-bit mask */
#define HKV_SHARD_ALIGN 64u   /* shard k of a block starts at k * round_up(shard_bytes, 64) in its slot */
#define HKV_MAX_PROBE 1024u   /* no entry lies further from where its key's search starts, whatever keys a client chooses */
#define HKV_STATIC_BYTES 512u /* the part of the header that never changes after creation */

enum { HKV_POOL_CREATING = 0, HKV_POOL_LIVE = 1, HKV_POOL_REMOVED = 2 };
enum { HKV_EMPTY = 0, HKV_WRITING = 1, HKV_READY = 2, HKV_TOMBSTONE = 3 };
enum { HKV_DOOMED = 1 }; /* block flag: cleared or discarded while it was in use; a miss for everybody, freed at the last release */
enum { HKV_CLEAN = 2 };  /* block flag: READY, and a tier has it, too; it goes before those that no tier has */
enum { HKV_USE = 4, HKV_MAX_USES = 63 }; /* the other bits of a block's flags: how many requests had it, this often at most */
enum { HKV_UNSEALED = 2 };
enum { HKV_DEVICE = 1 }; /* member flag: a device driver may touch the pool a moment longer than the process holds its lock */
enum { HKV_TIER = 2 };   /* member flag: a sidecar's own, for transfers between the pool and its tiers; the kernel may go on with them */
enum { HKV_SIZES_COUNT = 8 };

struct hkv_header { /* 4096 bytes at offset 0 */
    uint8_t magic[8];
    uint32_t layout_version;
    uint32_t byte_order;
    uint32_t struct_bytes[HKV_SIZES_COUNT]; /* header, block, aux, shard, pin, member, namespace, extent */
    uint8_t host_boot_id[16];               /* the kernel's; another one means the memory is not ours */
    uint8_t pool_epoch[16];                 /* random, new at each creation */
    uint64_t pool_bytes, extent_bytes, tables_bytes, max_blocks;
    uint64_t block_capacity; /* entries of the block table; a power of two >= 2 * max_blocks */
    uint64_t shard_capacity, pin_capacity, member_capacity, namespace_capacity, extent_capacity;
    uint64_t blocks_offset, aux_offset;
    uint64_t shards_offset, pins_offset, members_offset, namespaces_offset, extents_offset, slots_offset;
    uint8_t unused_static[280];
    uint64_t static_checksum; /* xxh3-64 of bytes 0..503 */
    /* ---- from here on the sidecar writes while it runs (offset 512) ---- */
    uint8_t instance_id[16]; /* random, new at each start of a sidecar */
    uint64_t heartbeat_ns;   /* CLOCK_MONOTONIC of the sidecar, written at least every 200 ms */
    uint64_t moves;          /* one more for each entry that moved */
    uint64_t generation;     /* the last one given to a slot */
    uint64_t tick;           /* the last use counted; orders blocks by use */
    uint32_t pool_state;     /* HKV_POOL_* */
    uint32_t verify;         /* 1: entries hold checksums of payload; 0: seals; HKV_UNSEALED: the one, on the way to the other */
    uint8_t unused[3528];
};

struct hkv_block { /* 64 bytes; one key of the open-addressing table */
    uint32_t seq;  /* odd while the writer changes the entry */
    uint8_t state; /* HKV_EMPTY .. HKV_TOMBSTONE */
    uint8_t flags;
    uint16_t shards; /* how many shards make the block whole, 1..64 */
    uint8_t key[32];
    uint64_t generation; /* unique over the life of the pool: moved on every reuse of the slot */
    uint32_t page;       /* where the slot starts in the pool, in pages of 4096 bytes */
    uint32_t namespace_index;
    uint64_t checksum; /* where header.verify is 1: XOR over its committed shards k of xxh3-64(payload of shard k, seed k). Else its seal:
                          xxh3-64 of this entry with seq, state and flags zero and the mask of committed shards in the place of the seal */
};

struct hkv_aux {                 /* 32 bytes; the writer's part of the block entry of the same index */
    uint32_t lru_prev, lru_next; /* derived; toward older, toward newer */
    uint64_t used;               /* tick of the last use */
    uint64_t shards_done;        /* mask of committed shards while WRITING; changes with the entry's checksum, while its seq is odd */
    uint32_t shards_head;        /* derived; chain of the block's shards in flight */
    uint32_t pins;               /* derived; number of pin records on the block */
};

struct hkv_shard { /* 64 bytes; the right of one member to write one shard */
    uint32_t used; /* 0 free, 1 held; written last when taken and first when given back */
    uint32_t member;
    uint32_t shard;
    uint32_t next; /* derived; next of the same block */
    uint64_t tag;
    uint64_t generation;
    uint8_t key[32];
};

struct hkv_pin { /* 64 bytes; what keeps one READY block in place */
    uint32_t used;
    uint32_t session; /* session number, as in the member records */
    uint64_t tag;
    uint64_t generation;
    uint8_t key[32];
    uint32_t next;  /* derived; next of the same (session, tag) */
    uint32_t block; /* derived; index of the block's entry */
};

struct hkv_member { /* 64 bytes; one client of a session */
    uint32_t used;
    uint32_t session;      /* number of the session, equal for all its members and for no others; below member_capacity */
    uint32_t pid;          /* as the client sees it; for people only */
    uint32_t flags;        /* HKV_DEVICE, HKV_TIER */
    uint8_t client_id[16]; /* no two members have the same */
    uint8_t session_id[16];
    uint8_t lock_name[16]; /* its lock file is <run directory>/members/<32 hex digits> */
};

struct hkv_namespace { /* 128 bytes */
    uint32_t used;
    uint32_t shards;
    uint64_t shard_bytes;
    uint64_t slot_bytes; /* round_up(shards * round_up(shard_bytes, 64), 4096) */
    uint64_t blocks;     /* derived; entries of it in the block table */
    uint8_t fingerprint[32];
    uint8_t label[64]; /* UTF-8, zero-padded, for people */
};

struct hkv_extent {        /* 64 bytes; an equal-sized piece of the pool */
    uint64_t slot_bytes;   /* 0 free, else the slot size all its slots have */
    uint64_t last_used;    /* derived; no block in it was used after this tick */
    uint32_t slots, taken; /* derived; how many slots it has and how many hold a block */
    uint32_t busy;         /* derived; blocks in it that are pinned or being written */
    uint32_t free_head;    /* derived; first free slot, as a page number */
    uint32_t next_fresh;   /* derived; slots never used since the extent got its size */
    uint32_t dirty;        /* derived; READY blocks in it that no tier has */
    uint8_t unused[24];
};

/* The slot map: one uint32_t for each page of the pool. At the first page of a slot that holds a block: the index of its entry.
 * At the first page of a free slot: the page of the next free slot of the extent, or HKV_NIL. Derived.
 *
 * Extent e starts at page e * extent_bytes / 4096. The last one is shorter where pool_bytes is no multiple of extent_bytes; what is left
 * at the end of an extent when its slots are laid out is unused. */

/* ---- the disk tier -----------------------------------------------------------------------------------------------------------------
 *
 * A directory has slab files of payload, and beside each a file of records. Record n tells what is in slot n, which starts at
 * n * slot_pages * 4096 of the slab. It is valid if and only if its seal is right, the directory's list has its namespace with that slot
 * size, slot n ends inside of the slab, and no record of the slab that has a right seal has another slot size and a higher sequence. Of one
 * key any valid record will do. A valid record proves nothing of the payload, its checksum does, at each read: so writes may reach the disk
 * in any order. */
struct hkv_record { /* 64 bytes */
    uint8_t key[32];
    uint64_t checksum;         /* XOR over its shards k of xxh3-64(payload of shard k, seed k) */
    uint64_t sequence;         /* of this write: higher than those of all before it */
    uint32_t namespace_number; /* in the list of this directory; never given again once it is off the list */
    uint32_t slot_pages;
    uint64_t seal; /* xxh3-64 of the 56 bytes before, seed slab << 32 | n */
};

/* What is on disk, in a file of shared memory of its own, made anew at each start of a sidecar. A hint to readers: acquire decides.
 *
 * The table is a power of two of uint64_t, at least 4/3 of max_blocks; open addressing, the search for a key starts at its first four bytes
 * modulo the capacity. A word is those four bytes << 32 | number of the entry plus one; 0 ends a search, HKV_TOMBSTONE_WORD does not. */
#define HKV_INDEX_MAGIC "HKVINDX\1"
#define HKV_TOMBSTONE_WORD 0xffffffffu
enum { HKV_ON_DISK_FREE = 0, HKV_ON_DISK_WRITING = 1, HKV_ON_DISK = 2, HKV_ON_DISK_GONE = 3, HKV_ON_DISK_DOOMED = 4 };
/* Only ON_DISK is a hit. GONE (still read) and DOOMED (still written) are misses whose key is out of the table already. */

struct hkv_index_header { /* 4096 bytes at offset 0 */
    uint8_t magic[8];     /* written last */
    uint32_t byte_order;
    uint32_t entry_bytes;
    uint64_t max_blocks; /* entries */
    uint64_t table_capacity;
    uint64_t table_offset, entries_offset, index_bytes;
    uint8_t unused[4040];
};

struct hkv_index_entry { /* 56 bytes; one block on disk */
    uint8_t key[32];
    uint64_t checksum;
    uint32_t slab;             /* number of the slab among those of all directories that ever were */
    uint32_t slot;             /* of a FREE entry: the next one, HKV_NIL for none */
    uint32_t namespace_number; /* of the tier */
    uint16_t readers;
    uint8_t state; /* HKV_ON_DISK_* */
    uint8_t hit;   /* read since the clock's hand passed */
};

#define HKV_CHECK_SIZE(type, n) _Static_assert(sizeof(struct type) == (n), #type " must be " #n " bytes")
HKV_CHECK_SIZE(hkv_header, 4096);
HKV_CHECK_SIZE(hkv_block, 64);
HKV_CHECK_SIZE(hkv_aux, 32);
HKV_CHECK_SIZE(hkv_shard, 64);
HKV_CHECK_SIZE(hkv_pin, 64);
HKV_CHECK_SIZE(hkv_member, 64);
HKV_CHECK_SIZE(hkv_namespace, 128);
HKV_CHECK_SIZE(hkv_extent, 64);
HKV_CHECK_SIZE(hkv_record, 64);
HKV_CHECK_SIZE(hkv_index_header, 4096);
HKV_CHECK_SIZE(hkv_index_entry, 56);
#endif
