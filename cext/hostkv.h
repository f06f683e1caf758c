/* hostkv.h: a HostKV store for C and C++.
 *
 * Engines and kernels that are not written in Python get at a store through one struct. Python makes it:
 *
 *     address = store.cc_store()                      # an int: where the struct lies in this process
 *
 * and C uses it:
 *
 *     const struct hostkv_store *store = (const struct hostkv_store *)address;
 *     if (store->abi_version != HOSTKV_ABI_VERSION) return -1;
 *     uint8_t key[HOSTKV_KEY_BYTES], found;
 *     store->derive(store, id, id_bytes, key);
 *     store->lookup(store, key, 1, &found);
 *
 * There is nothing to link with: the functions come with the struct. This header needs only the C standard library.
 *
 * WHAT IT IS FOR
 *   Two things that an engine does in its innermost loops, without Python, its lock, a system call or a message: turning block ids
 *   into keys, and asking which blocks the host holds. And the place of the pool, for a copy engine or a device that is to read and
 *   write it directly.
 *
 * WHAT IT IS NOT FOR
 *   It gives places, not rights. A block may be read only while it is pinned (acquire ... release), and a shard may be written only
 *   while it is reserved (reserve ... commit); both are messages to the sidecar, and the Python store sends them. The page and the
 *   generation in their answers say where a block lies:
 *
 *       store->pool + (uint64_t)page * HOSTKV_PAGE_BYTES + shard * store->shard_stride        shard_bytes of payload
 *
 *   Symptom: bytes of another block.      Cause: read without a pin; the sidecar gave the slot to somebody else meanwhile.
 *   Fix: acquire first. A hit in lookup() is a statement about a moment that has passed.
 *   Symptom: other engines compute garbage from your blocks.       Cause: written without, or past, a reservation.
 *   Fix: write only what reserve granted, only until commit. A committed block never changes.
 *
 * OWNERSHIP
 *   The struct and all it points to belong to the Python object behind store.cc_store() and live as long as that object's store: until
 *   the store or its client is closed. Keep the store; do not free, copy or change the struct. A copy works until the original is
 *   gone, and then fails in ways that depend on the day.
 *   The store makes a new struct when the sidecar made a new pool, and the old one then describes memory that nobody serves: every
 *   lookup in it is a miss. So ask the store for the address again after it has reconnected, rather than keep it for good.
 *
 * THREADS
 *   The functions may be called from any thread, any number at a time, with or without Python's lock. They take no lock and never
 *   block, allocate or fail for want of a resource; the sidecar may be busy, stopped or dead meanwhile.
 *
 * FORK
 *   Pool and tables are not mapped in a fork's child. Symptom: SIGSEGV in a child. Fix: make a new client in the child.
 *
 * ERRORS
 *   A function returns 0, or HOSTKV_EINVAL when an argument is out of its range; then nothing was written. A block that is not there is
 *   no error. Nothing here sets errno.
 *
 * VERSIONS
 *   abi_version changes when a field or a function changes its meaning, and a reader must refuse another one. New fields are added at
 *   the end and counted in struct_bytes: before using a field that your oldest HostKV lacks, compare struct_bytes with its offset.
 */
#ifndef HOSTKV_H
#define HOSTKV_H
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HOSTKV_ABI_VERSION 1u
#define HOSTKV_KEY_BYTES 32u
#define HOSTKV_MAX_ID_BYTES 64u
#define HOSTKV_PAGE_BYTES 4096u /* unit of the pages that reserve and acquire answer */

#define HOSTKV_EINVAL (-1)

struct hostkv_store {
    /* HOSTKV_ABI_VERSION of the HostKV that made this struct, and how many bytes of it there are. */
    uint32_t abi_version;
    uint32_t struct_bytes;

    /* The namespace: its SHA-256, which every key is derived from, and its number in this pool, which every message names. The number
     * is good for this pool only; another pool may give it to another namespace. */
    uint8_t fingerprint[32];
    uint32_t namespace_index;

    /* The geometry of a block: how many shards make it whole, the payload bytes of one, and from the start of one to the next. */
    uint32_t shards;
    uint64_t shard_bytes;
    uint64_t shard_stride;

    /* The pool, as this process has it mapped: what a device driver registers. Writable, and shared with every engine on the host: see
     * above for when a byte of it may be read or written. */
    uint8_t *pool;
    uint64_t pool_bytes;

    /* The tables, read-only. Their format is private to HostKV and changes without a new ABI version; here for debuggers. */
    const uint8_t *tables;
    uint64_t tables_bytes;

    /* Private to the functions below. */
    const void *context;

    /* found[i] becomes 1 where the block of the i-th of `count` joined keys is whole and can be acquired, else 0. About 100 ns a key
     * with cold caches. HOSTKV_EINVAL: keys or found is NULL and count is not 0. */
    int (*lookup)(const struct hostkv_store *store, const uint8_t *keys, size_t count, uint8_t *found);

    /* key becomes SHA-256(fingerprint, 32 zero bytes, id). HOSTKV_EINVAL: a pointer is NULL, or id_bytes is not 1..64. */
    int (*derive)(const struct hostkv_store *store, const uint8_t *id, size_t id_bytes, uint8_t key[HOSTKV_KEY_BYTES]);
};

#ifdef __cplusplus
}
#endif
#endif
