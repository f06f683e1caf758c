/* The tables: layout, readers, and the writer's verbs. See tables.h.
 *
 * Truth is the block entries with their aux `used` and `shards_done`, the records, and each extent's slot size; all else is derived and
 * kept beside it. A writer killed between any two stores must leave truth that the next one can repair, so stores that order it use
 * release: an entry leaves the table before its slot is given again, an extent gets its slot size before its first block, a record's
 * `used` is its last store when taken and its first when given back.
 *
 * A block is "idle" when it has no pin and no shard in flight. Idle blocks are in the LRU list of their slot size; all others are counted
 * in `busy` of their extent. An idle block that is doomed, or that no one has committed a shard of, is freed at once. */
#include "tables.h"

#include "hash.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TRIES = 64, AHEAD = 16, SWEEP = 64, MOST_GHOSTS = 1 << 22 };

/* Parts of an entry are accessed as whole words, atomically. */
typedef uint32_t __attribute__((may_alias)) word32;
typedef uint64_t __attribute__((may_alias)) word64;

#define LOAD(address) __atomic_load_n(address, __ATOMIC_RELAXED)
#define LOAD_ACQUIRE(address) __atomic_load_n(address, __ATOMIC_ACQUIRE)
#define STORE(address, value) __atomic_store_n(address, value, __ATOMIC_RELAXED)
#define STORE_RELEASE(address, value) __atomic_store_n(address, value, __ATOMIC_RELEASE)

/* ---- layout ---------------------------------------------------------------------------------------------------------------------- */

static const uint32_t struct_bytes[HKV_SIZES_COUNT] = {sizeof(struct hkv_header),    sizeof(struct hkv_block), sizeof(struct hkv_aux),
                                                       sizeof(struct hkv_shard),     sizeof(struct hkv_pin),   sizeof(struct hkv_member),
                                                       sizeof(struct hkv_namespace), sizeof(struct hkv_extent)};

#define FIELD(name) {#name, offsetof(struct hkv_header, name)}
static const struct {
    const char *name;
    size_t offset;
} layout_fields[] = {FIELD(pool_bytes),     FIELD(extent_bytes),    FIELD(max_blocks),         FIELD(shard_capacity),
                     FIELD(pin_capacity),   FIELD(member_capacity), FIELD(namespace_capacity), FIELD(extent_capacity),
                     FIELD(block_capacity), FIELD(tables_bytes),    FIELD(blocks_offset),      FIELD(aux_offset),
                     FIELD(shards_offset),  FIELD(pins_offset),     FIELD(members_offset),     FIELD(namespaces_offset),
                     FIELD(extents_offset), FIELD(slots_offset)};

static uint64_t field(const struct hkv_header *header, size_t offset) {
    uint64_t value;
    memcpy(&value, (const uint8_t *)header + offset, sizeof value);
    return value;
}

bool hkv_geometry_check(const struct hkv_geometry *g, char message[HKV_MESSAGE_BYTES]) {
    const struct {
        const char *name;
        uint64_t value;
    } counts[] = {{"max_blocks", g->max_blocks},
                  {"max_shards", g->max_shards},
                  {"max_pins", g->max_pins},
                  {"max_members", g->max_members},
                  {"max_namespaces", g->max_namespaces}},
      sizes[] = {{"pool_bytes", g->pool_bytes}, {"extent_bytes", g->extent_bytes}};
    const uint64_t most = (uint64_t)(HKV_NIL - 1) * HKV_PAGE;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i].value % HKV_PAGE != 0 || sizes[i].value == 0 || sizes[i].value > most) {
            snprintf(message, HKV_MESSAGE_BYTES, "%s is %llu, must be a multiple of 4096 in 4096..%llu", sizes[i].name,
                     (unsigned long long)sizes[i].value, (unsigned long long)most);
            return false;
        }
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        if (counts[i].value < 1 || counts[i].value > 1u << 30) {
            snprintf(message, HKV_MESSAGE_BYTES, "%s is %llu, must be 1..%u", counts[i].name, (unsigned long long)counts[i].value,
                     1u << 30);
            return false;
        }
    return true;
}

static uint64_t place(uint64_t *end, uint64_t count, uint64_t size) {
    uint64_t at = *end;
    *end += (count * size + HKV_PAGE - 1) / HKV_PAGE * HKV_PAGE;
    return at;
}

void hkv_layout(const struct hkv_geometry *g, struct hkv_header *h) {
    memset(h, 0, sizeof *h);
    memcpy(h->magic, HKV_MAGIC, sizeof h->magic);
    h->layout_version = HKV_LAYOUT_VERSION;
    h->byte_order = HKV_BYTE_ORDER;
    memcpy(h->struct_bytes, struct_bytes, sizeof struct_bytes);
    h->pool_bytes = g->pool_bytes;
    h->extent_bytes = g->extent_bytes;
    h->max_blocks = g->max_blocks;
    for (h->block_capacity = 16; h->block_capacity < 2 * g->max_blocks;) h->block_capacity *= 2;
    h->shard_capacity = g->max_shards;
    h->pin_capacity = g->max_pins;
    h->member_capacity = g->max_members;
    h->namespace_capacity = g->max_namespaces;
    h->extent_capacity = (g->pool_bytes + g->extent_bytes - 1) / g->extent_bytes;
    uint64_t end = sizeof *h;
    h->blocks_offset = place(&end, h->block_capacity, sizeof(struct hkv_block));
    h->aux_offset = place(&end, h->block_capacity, sizeof(struct hkv_aux));
    h->shards_offset = place(&end, h->shard_capacity, sizeof(struct hkv_shard));
    h->pins_offset = place(&end, h->pin_capacity, sizeof(struct hkv_pin));
    h->members_offset = place(&end, h->member_capacity, sizeof(struct hkv_member));
    h->namespaces_offset = place(&end, h->namespace_capacity, sizeof(struct hkv_namespace));
    h->extents_offset = place(&end, h->extent_capacity, sizeof(struct hkv_extent));
    h->slots_offset = place(&end, h->pool_bytes / HKV_PAGE, sizeof(uint32_t));
    h->tables_bytes = end;
}

static void to_hex(const uint8_t *bytes, size_t size, char *text) {
    for (size_t i = 0; i < size; i++) snprintf(text + 2 * i, 3, "%02x", bytes[i]);
}

static bool bytes_differ(const char *name, const uint8_t *found, const uint8_t *wanted, size_t size, char *message) {
    char a[33], b[33];
    if (memcmp(found, wanted, size) == 0) return false;
    to_hex(found, size, a);
    to_hex(wanted, size, b);
    snprintf(message, HKV_MESSAGE_BYTES, "%s of the tables is %s, must be %s", name, a, b);
    return true;
}

static bool number_differs(const char *name, uint64_t found, uint64_t wanted, char *message) {
    if (found == wanted) return false;
    snprintf(message, HKV_MESSAGE_BYTES, "%s of the tables is %llu, must be %llu", name, (unsigned long long)found,
             (unsigned long long)wanted);
    return true;
}

static uint64_t static_checksum(const struct hkv_header *h) {
    return hkv_xxh3_64(h, offsetof(struct hkv_header, static_checksum));
}

bool hkv_header_check(const struct hkv_header *h, const struct hkv_geometry *geometry, const uint8_t *host_boot_id,
                      char message[HKV_MESSAGE_BYTES]) {
    if (bytes_differ("magic", h->magic, (const uint8_t *)HKV_MAGIC, sizeof h->magic, message) ||
        number_differs("layout_version", h->layout_version, HKV_LAYOUT_VERSION, message) ||
        number_differs("byte_order", h->byte_order, HKV_BYTE_ORDER, message))
        return false;
    for (int i = 0; i < HKV_SIZES_COUNT; i++) {
        char name[32];
        snprintf(name, sizeof name, "struct_bytes[%d]", i);
        if (number_differs(name, h->struct_bytes[i], struct_bytes[i], message)) return false;
    }
    if (number_differs("static_checksum", h->static_checksum, static_checksum(h), message)) return false;
    if (host_boot_id != NULL && bytes_differ("host_boot_id", h->host_boot_id, host_boot_id, 16, message)) return false;

    struct hkv_geometry own = {h->pool_bytes,   h->extent_bytes,    h->max_blocks,        h->shard_capacity,
                               h->pin_capacity, h->member_capacity, h->namespace_capacity};
    if (geometry == NULL) {
        if (!hkv_geometry_check(&own, message)) return false;
        geometry = &own;
    }
    struct hkv_header wanted;
    hkv_layout(geometry, &wanted);
    for (size_t i = 0; i < sizeof layout_fields / sizeof *layout_fields; i++)
        if (number_differs(layout_fields[i].name, field(h, layout_fields[i].offset), field(&wanted, layout_fields[i].offset), message))
            return false;
    return true;
}

/* ---- readers --------------------------------------------------------------------------------------------------------------------- */

static inline uint64_t home_of(const uint8_t key[32]) {
    uint64_t first;
    memcpy(&first, key, sizeof first);
    return first;
}

static inline uint32_t probe_limit(uint64_t capacity) {
    return capacity < HKV_MAX_PROBE ? (uint32_t)capacity : HKV_MAX_PROBE;
}

void hkv_reader_attach(struct hkv_reader *reader, const uint8_t *memory, const struct hkv_header *checked) {
    reader->header = (const struct hkv_header *)memory;
    reader->blocks = (const struct hkv_block *)(memory + checked->blocks_offset);
    reader->mask = checked->block_capacity - 1;
    reader->max_probe = probe_limit(checked->block_capacity);
    reader->index.table = NULL;
}

/* A copy of the entry as it was at one moment. False when the writer was in it 64 times, or died in it. */
static inline bool read_entry(const struct hkv_block *block, struct hkv_block *copy) {
    const word32 *meta = (const word32 *)block + 1;
    const word64 *rest = (const word64 *)block + 1;
    for (int i = 0; i < TRIES; i++) {
        uint32_t seq = LOAD_ACQUIRE(&block->seq);
        ((word32 *)copy)[1] = LOAD(meta);
        for (int j = 0; j < 7; j++) ((word64 *)copy)[1 + j] = LOAD(&rest[j]);
        /* The second load of seq must not be done before the loads of what it guards. */
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if ((seq & 1) == 0 && LOAD(&block->seq) == seq) return true;
    }
    return false;
}

/* Entries move only toward where their search starts, and are in both places before they leave the one further away. So what is found is
 * right, and what is not found may have moved past the search, if any entry moved meanwhile. */
static bool read_key(const struct hkv_reader *reader, const uint8_t key[32], struct hkv_block *copy) {
    for (int i = 0; i < TRIES; i++) {
        uint64_t moves = LOAD_ACQUIRE(&reader->header->moves), at = home_of(key) & reader->mask;
        for (uint32_t n = 0; n < reader->max_probe; n++, at = (at + 1) & reader->mask) {
            if (!read_entry(&reader->blocks[at], copy)) return false;
            if (copy->state == HKV_EMPTY) break;
            if (copy->state != HKV_TOMBSTONE && memcmp(copy->key, key, 32) == 0) return true;
        }
        /* read_entry() ends with the fence that puts this load behind those of the entries. */
        if (LOAD(&reader->header->moves) == moves) return false;
    }
    return false;
}

static inline bool read_hit(const struct hkv_reader *reader, uint32_t namespace_index, const uint8_t key[32], struct hkv_block *copy) {
    return read_key(reader, key, copy) && copy->state == HKV_READY && (copy->flags & HKV_DOOMED) == 0 &&
           copy->namespace_index == namespace_index;
}

static inline bool is_hit(const struct hkv_reader *reader, uint32_t namespace_index, const uint8_t key[32]) {
    struct hkv_block copy;
    return read_hit(reader, namespace_index, key, &copy);
}

static inline void prefetch_key(const struct hkv_reader *reader, const uint8_t key[32]) {
    __builtin_prefetch(&reader->blocks[home_of(key) & reader->mask]);
}

static bool is_live_pool(const struct hkv_reader *reader) {
    return LOAD_ACQUIRE(&reader->header->pool_state) == HKV_POOL_LIVE;
}

/* What of a batch is not in the pool is looked for on disk, after the pool was asked: so what is there costs nothing more. Both the word and
 * the entry are prefetched, one after the other. */
static void lookup_on_disk(const struct hkv_index_reader *index, const uint8_t *keys, size_t count, uint8_t *found) {
    for (size_t n = 0; n < count + 2 * AHEAD; n++) {
        if (n < count && !found[n]) hkv_index_prefetch(index, keys + 32 * n);
        if (n >= AHEAD && n - AHEAD < count && !found[n - AHEAD]) hkv_index_prefetch_entry(index, keys + 32 * (n - AHEAD));
        if (n >= 2 * AHEAD && !found[n - 2 * AHEAD]) found[n - 2 * AHEAD] = hkv_index_has(index, keys + 32 * (n - 2 * AHEAD));
    }
}

/* How many keys from the front are on disk, or, `backward`, how many from the end are not. */
static size_t run_on_disk(const struct hkv_index_reader *index, const uint8_t *keys, size_t count, bool backward) {
    const uint8_t *first = backward && count > 0 ? keys + 32 * (count - 1) : keys;
    ptrdiff_t step = backward ? -32 : 32;
    for (size_t n = 0; n < count + 2 * AHEAD; n++) {
        if (n < count) hkv_index_prefetch(index, first + step * (ptrdiff_t)n);
        if (n >= AHEAD && n - AHEAD < count) hkv_index_prefetch_entry(index, first + step * (ptrdiff_t)(n - AHEAD));
        if (n >= 2 * AHEAD && hkv_index_has(index, first + step * (ptrdiff_t)(n - 2 * AHEAD)) == backward) return n - 2 * AHEAD;
    }
    return count;
}

void hkv_lookup(const struct hkv_reader *reader, uint32_t namespace_index, const uint8_t *keys, size_t count, uint8_t *found) {
    memset(found, 0, count);
    if (!is_live_pool(reader)) return;
    for (size_t n = 0; n < count && n < AHEAD; n++) prefetch_key(reader, keys + 32 * n);
    for (size_t n = 0; n < count; n++) {
        if (n + AHEAD < count) prefetch_key(reader, keys + 32 * (n + AHEAD));
        found[n] = is_hit(reader, namespace_index, keys + 32 * n);
    }
    if (reader->index.table != NULL && memchr(found, 0, count) != NULL) lookup_on_disk(&reader->index, keys, count, found);
}

static size_t run_in_pool(const struct hkv_reader *reader, uint32_t namespace_index, const uint8_t *keys, size_t count) {
    size_t n;
    for (n = 0; n < count && n < AHEAD; n++) prefetch_key(reader, keys + 32 * n);
    for (n = 0; n < count && is_hit(reader, namespace_index, keys + 32 * n); n++)
        if (n + AHEAD < count) prefetch_key(reader, keys + 32 * (n + AHEAD));
    return n;
}

size_t hkv_lookup_prefix(const struct hkv_reader *reader, uint32_t namespace_index, const uint8_t *keys, size_t count) {
    size_t n = 0, more;
    if (!is_live_pool(reader)) return 0;
    do {
        n += run_in_pool(reader, namespace_index, keys + 32 * n, count - n);
        more = reader->index.table == NULL ? 0 : run_on_disk(&reader->index, keys + 32 * n, count - n, false);
        n += more;
    } while (more > 0 && n < count);
    return n;
}

ptrdiff_t hkv_lookup_reverse(const struct hkv_reader *reader, uint32_t namespace_index, const uint8_t *keys, size_t count) {
    size_t n;
    if (!is_live_pool(reader)) return -1;
    for (n = count; n > 0 && n + AHEAD > count; n--) prefetch_key(reader, keys + 32 * (n - 1));
    for (n = count; n > 0 && !is_hit(reader, namespace_index, keys + 32 * (n - 1)); n--)
        if (n > AHEAD) prefetch_key(reader, keys + 32 * (n - 1 - AHEAD));
    /* Nothing behind the nth is in the pool. */
    size_t missed = reader->index.table == NULL ? count - n : run_on_disk(&reader->index, keys + 32 * n, count - n, true);
    return (ptrdiff_t)(count - missed) - 1;
}

void hkv_locate(const struct hkv_reader *reader, uint32_t namespace_index, const uint8_t *keys, size_t count, uint8_t *statuses,
                uint8_t *pages, uint8_t *generations) {
    bool live = is_live_pool(reader);
    for (size_t n = 0; n < count && n < AHEAD; n++) prefetch_key(reader, keys + 32 * n);
    for (size_t n = 0; n < count; n++) {
        struct hkv_block copy;
        if (n + AHEAD < count) prefetch_key(reader, keys + 32 * (n + AHEAD));
        bool hit = live && read_hit(reader, namespace_index, keys + 32 * n, &copy);
        if (!hit) copy.page = 0, copy.generation = 0;
        statuses[n] = hit ? HKV_OK : HKV_MISS;
        memcpy(pages + 4 * n, &copy.page, 4);
        memcpy(generations + 8 * n, &copy.generation, 8);
    }
}

void hkv_verify(const struct hkv_reader *reader, const uint8_t *keys, const uint8_t *pages, const uint8_t *generations,
                const uint8_t *checksums, size_t count, uint8_t *held) {
    /* What the caller read of the pool was read before the entries are. */
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    memset(held, 0, count);
    if (!is_live_pool(reader)) return;
    for (size_t n = 0; n < count && n < AHEAD; n++) prefetch_key(reader, keys + 32 * n);
    for (size_t n = 0; n < count; n++) {
        struct hkv_block copy;
        if (n + AHEAD < count) prefetch_key(reader, keys + 32 * (n + AHEAD));
        held[n] = read_key(reader, keys + 32 * n, &copy) && copy.state == HKV_READY && memcmp(&copy.page, pages + 4 * n, 4) == 0 &&
                  memcmp(&copy.generation, generations + 8 * n, 8) == 0;
        if (!held[n] || checksums == NULL || memcmp(&copy.checksum, checksums + 8 * n, 8) == 0) continue;
        /* Loaded after the entry: a sidecar that wants no checksums says so before it takes a commit without one. */
        if (LOAD(&reader->header->verify) == 1) held[n] = 2;
    }
}

/* ---- the writer: life ------------------------------------------------------------------------------------------------------------ */

struct hkv_tables *hkv_tables_adopt(uint8_t *memory, const struct hkv_header *fixed, const uint8_t instance_id[16], bool verify) {
    struct hkv_tables *t = calloc(1, sizeof *t);
    if (t == NULL) return NULL;
    t->memory = memory;
    t->fixed = *fixed;
    t->header = (struct hkv_header *)memory;
    memcpy(t->instance_id, instance_id, 16);
    t->verify = verify;
    t->room = t->reused_go = 0.5;
    hkv_reader_attach(&t->reader, memory, fixed);
    t->blocks = (struct hkv_block *)(memory + fixed->blocks_offset);
    t->aux = (struct hkv_aux *)(memory + fixed->aux_offset);
    t->shards = (struct hkv_shard *)(memory + fixed->shards_offset);
    t->pins = (struct hkv_pin *)(memory + fixed->pins_offset);
    t->members = (struct hkv_member *)(memory + fixed->members_offset);
    t->namespaces = (struct hkv_namespace *)(memory + fixed->namespaces_offset);
    t->extents = (struct hkv_extent *)(memory + fixed->extents_offset);
    t->slots = (uint32_t *)(memory + fixed->slots_offset);
    t->mask = fixed->block_capacity - 1;
    t->max_probe = probe_limit(fixed->block_capacity);
    t->classes = calloc(fixed->namespace_capacity, sizeof *t->classes);
    t->class_of_namespace = calloc(fixed->namespace_capacity, sizeof *t->class_of_namespace);
    t->extent_prev = calloc(fixed->extent_capacity, sizeof *t->extent_prev);
    t->extent_next = calloc(fixed->extent_capacity, sizeof *t->extent_next);
    t->loads = calloc(fixed->member_capacity, sizeof *t->loads);
    t->pins_of_session = calloc(fixed->member_capacity, sizeof *t->pins_of_session);
    t->ghost_mask = (fixed->block_capacity < MOST_GHOSTS ? fixed->block_capacity : MOST_GHOSTS) - 1;
    t->ghosts = calloc(t->ghost_mask + 1, sizeof *t->ghosts);
    t->free_extents = t->free_shard = t->free_pin = HKV_NIL;
    if (t->classes != NULL && t->class_of_namespace != NULL && t->extent_prev != NULL && t->extent_next != NULL && t->loads != NULL &&
        t->pins_of_session != NULL && t->ghosts != NULL)
        return t;
    hkv_tables_free(t);
    return NULL;
}

void hkv_tables_free(struct hkv_tables *t) {
    free(t->classes);
    free(t->class_of_namespace);
    free(t->extent_prev);
    free(t->extent_next);
    free(t->loads);
    free(t->pins_of_session);
    free(t->ghosts);
    free(t);
}

struct hkv_tables *hkv_tables_create(uint8_t *memory, const struct hkv_header *fixed, const uint8_t instance_id[16], bool verify) {
    struct hkv_tables *t = hkv_tables_adopt(memory, fixed, instance_id, verify);
    if (t == NULL) return NULL;
    t->fixed.static_checksum = static_checksum(fixed);
    memcpy(memory, &t->fixed, HKV_STATIC_BYTES);
    hkv_set_start(t);
    hkv_free_records(t);
    for (uint32_t e = (uint32_t)fixed->extent_capacity; e-- > 0;) {
        t->extents[e].free_head = HKV_NIL;
        hkv_extent_link(t, &t->free_extents, e);
    }
    t->counts.free_extents = fixed->extent_capacity;
    STORE_RELEASE(&t->header->pool_state, HKV_POOL_LIVE);
    return t;
}

/* Puts every record that is not used on its free list, lowest index first, so that few pages of the tables are touched. */
void hkv_free_records(struct hkv_tables *t) {
    t->free_shard = t->free_pin = HKV_NIL;
    for (uint32_t i = (uint32_t)t->fixed.shard_capacity; i-- > 0;)
        if (t->shards[i].used == 0) {
            t->shards[i].next = t->free_shard;
            t->free_shard = i;
        }
    for (uint32_t i = (uint32_t)t->fixed.pin_capacity; i-- > 0;)
        if (t->pins[i].used == 0) {
            t->pins[i].next = t->free_pin;
            t->free_pin = i;
        }
}

void hkv_set_start(struct hkv_tables *t) {
    word64 *to = (word64 *)t->header->instance_id, halves[2];
    memcpy(halves, t->instance_id, sizeof halves);
    STORE(&t->header->verify, t->reseal ? HKV_UNSEALED : t->verify);
    STORE(&to[0], halves[0]);
    STORE_RELEASE(&to[1], halves[1]);
}

void hkv_set_heartbeat(struct hkv_tables *t, uint64_t now_ns) {
    STORE_RELEASE(&t->header->heartbeat_ns, now_ns);
}

void hkv_set_removed(struct hkv_tables *t) {
    STORE_RELEASE(&t->header->pool_state, HKV_POOL_REMOVED);
}

/* ---- the writer: entries --------------------------------------------------------------------------------------------------------- */

/* An entry changes between these two only: what a writer killed in there leaves is dropped. Returns the odd seq. */
static inline uint32_t entry_open(struct hkv_block *block) {
    uint32_t odd = block->seq | 1; /* it is odd already where a writer died in it */
    STORE(&block->seq, odd);
    /* No store below may be seen before the odd seq. */
    __atomic_thread_fence(__ATOMIC_RELEASE);
    return odd;
}

static inline void entry_close(struct hkv_block *block, uint32_t odd, const struct hkv_block *value) {
    const word64 *from = (const word64 *)value;
    word64 *to = (word64 *)block;
    STORE((word32 *)block + 1, ((const word32 *)value)[1]);
    for (int i = 1; i < 8; i++) STORE(&to[i], from[i]);
    STORE_RELEASE(&block->seq, odd + 1);
}

void hkv_block_put(struct hkv_block *block, const struct hkv_block *value) {
    uint32_t odd = entry_open(block);
    entry_close(block, odd, value);
}

static void put_free(struct hkv_block *block, uint8_t state) {
    struct hkv_block value = {.state = state};
    hkv_block_put(block, &value);
}

/* Index of the entry of a key, or HKV_NIL. Where `place` is given: then it holds where the key can be inserted, HKV_NIL for nowhere. */
uint32_t hkv_find(const struct hkv_tables *t, const uint8_t key[32], uint32_t *place) {
    uint32_t at = (uint32_t)(home_of(key) & t->mask), usable = HKV_NIL, found = HKV_NIL;
    for (uint32_t n = 0; n < t->max_probe; n++, at = (uint32_t)((at + 1) & t->mask)) {
        const struct hkv_block *block = &t->blocks[at];
        if (hkv_is_live(block)) {
            if (memcmp(block->key, key, 32) != 0) continue;
            found = at;
            break;
        }
        if (usable == HKV_NIL) usable = at;
        if (block->state == HKV_EMPTY) break;
    }
    if (place != NULL) *place = usable;
    return found;
}

void hkv_prefetch(const struct hkv_tables *t, const uint8_t key[32]) {
    uint64_t at = home_of(key) & t->mask;
    __builtin_prefetch(&t->blocks[at], 1);
    __builtin_prefetch(&t->aux[at], 1);
}

/* Also of the tombstones before it: no search passes them any more. */
static void make_empty(struct hkv_tables *t, uint32_t i) {
    put_free(&t->blocks[i], HKV_EMPTY);
    for (uint64_t at = (i - 1) & t->mask; t->blocks[at].state == HKV_TOMBSTONE; at = (at - 1) & t->mask) {
        put_free(&t->blocks[at], HKV_EMPTY);
        t->counts.tombstones--;
    }
}

static void remove_entry(struct hkv_tables *t, uint32_t i) {
    if (t->blocks[(i + 1) & t->mask].state == HKV_EMPTY) {
        make_empty(t, i);
    } else {
        put_free(&t->blocks[i], HKV_TOMBSTONE);
        t->counts.tombstones++;
    }
}

static inline bool is_idle(const struct hkv_aux *aux) {
    return aux->pins == 0 && aux->shards_head == HKV_NIL;
}

/* Whether a search for the key in entry `from` passes entry `through`, which lies before it in the same run. */
static inline bool passes(const struct hkv_tables *t, uint64_t from, uint64_t through) {
    uint64_t home = home_of(t->blocks[from].key);
    return ((through - home) & t->mask) < ((from - home) & t->mask);
}

/* Moves an idle block to the tombstone `to`, which a search for it passes. One in use stays: a pin names its entry, and of one that a
 * writer died in, adoption must find out who was writing the block. */
static void move(struct hkv_tables *t, uint32_t from, uint32_t to) {
    struct hkv_block value = t->blocks[from];
    struct hkv_class *class = hkv_class_of(t, from);
    struct hkv_aux *aux = &t->aux[to];
    *aux = t->aux[from];
    hkv_block_put(&t->blocks[to], &value);
    t->counts.tombstones--;
    t->counts.moved++;
    /* Before the entry behind is gone: see read_key(). */
    STORE_RELEASE(&t->header->moves, t->header->moves + 1);
    t->slots[value.page] = to;
    struct hkv_list *list = &class->idle[hkv_list_of(t, &value)];
    *(aux->lru_prev != HKV_NIL ? &t->aux[aux->lru_prev].lru_next : &list->oldest) = to;
    *(aux->lru_next != HKV_NIL ? &t->aux[aux->lru_next].lru_prev : &list->newest) = to;
    remove_entry(t, from);
}

/* What becomes of the tombstone i: a block that lies behind it for its sake moves into it; one that no search needs to pass becomes EMPTY.
 * Returns how many entries were looked at. */
static unsigned fill(struct hkv_tables *t, uint32_t i) {
    bool needed = false;
    unsigned steps = 0;
    for (uint32_t at = (uint32_t)((i + 1) & t->mask); ++steps < t->max_probe && t->blocks[at].state != HKV_EMPTY;
         at = (uint32_t)((at + 1) & t->mask)) {
        if (!hkv_is_live(&t->blocks[at]) || !passes(t, at, i)) continue;
        if (is_idle(&t->aux[at])) {
            move(t, at, i);
            return steps;
        }
        needed = true;
    }
    if (!needed) {
        t->counts.tombstones--;
        make_empty(t, i);
    }
    return steps;
}

/* Looks at some more entries for tombstones. Reserves do, while there are many: so they stay few, and no reserve waits long. */
static void sweep(struct hkv_tables *t) {
    for (unsigned steps = 0; steps < SWEEP; t->swept = (uint32_t)((t->swept + 1) & t->mask)) {
        steps++;
        if (t->blocks[t->swept].state == HKV_TOMBSTONE) steps += fill(t, t->swept);
    }
}

/* Searches end at EMPTY entries. Where blocks in use keep tombstones in place everywhere, the last EMPTY ones are not given. */
static bool is_crowded(const struct hkv_tables *t, uint32_t at) {
    return t->blocks[at].state == HKV_EMPTY &&
           t->counts.blocks + t->counts.tombstones >= t->fixed.block_capacity - t->fixed.block_capacity / 16;
}

/* ---- the writer: order of use ---------------------------------------------------------------------------------------------------- */

struct hkv_class *hkv_class_of(const struct hkv_tables *t, uint32_t i) {
    return &t->classes[t->class_of_namespace[t->blocks[i].namespace_index]];
}

static inline struct hkv_extent *extent_of(const struct hkv_tables *t, uint32_t i) {
    return &t->extents[t->blocks[i].page / hkv_extent_pages(t)];
}

void hkv_lru_add(struct hkv_tables *t, uint32_t i) {
    struct hkv_list *list = &hkv_class_of(t, i)->idle[hkv_list_of(t, &t->blocks[i])];
    t->aux[i].lru_prev = list->newest;
    t->aux[i].lru_next = HKV_NIL;
    *(list->newest != HKV_NIL ? &t->aux[list->newest].lru_next : &list->oldest) = i;
    list->newest = i;
}

static void lru_remove(struct hkv_tables *t, uint32_t i) {
    struct hkv_list *list = &hkv_class_of(t, i)->idle[hkv_list_of(t, &t->blocks[i])];
    struct hkv_aux *aux = &t->aux[i];
    *(aux->lru_prev != HKV_NIL ? &t->aux[aux->lru_prev].lru_next : &list->oldest) = aux->lru_next;
    *(aux->lru_next != HKV_NIL ? &t->aux[aux->lru_next].lru_prev : &list->newest) = aux->lru_prev;
}

/* A block of such a list has come, or goes. */
void hkv_count(struct hkv_tables *t, uint32_t i, int list, int change) {
    hkv_class_of(t, i)->blocks[list & HKV_REUSED] += (uint32_t)change;
    if ((list & HKV_WANTED) == 0) return;
    extent_of(t, i)->dirty += (uint32_t)change;
    t->counts.dirty += (uint64_t)change;
}

/* After the state or the flags of a block changed, which was one of list `before`. */
static void recount(struct hkv_tables *t, uint32_t i, int before) {
    int list = hkv_list_of(t, &t->blocks[i]);
    if (list == before) return;
    hkv_count(t, i, before, -1);
    hkv_count(t, i, list, 1);
}

/* One more request has the block, which is in no list. */
static void count_use(struct hkv_tables *t, uint32_t i) {
    struct hkv_block *block = &t->blocks[i];
    int before = hkv_list_of(t, block);
    if (block->flags / HKV_USE == HKV_MAX_USES) return;
    STORE(&block->flags, block->flags + HKV_USE); /* no reader looks at these bits */
    recount(t, i, before);
}

static void touch(struct hkv_tables *t, uint32_t i) {
    uint64_t tick = t->header->tick + 1;
    STORE_RELEASE(&t->header->tick, tick);
    STORE_RELEASE(&t->aux[i].used, tick);
    extent_of(t, i)->last_used = tick;
}

/* ---- the writer: slots ----------------------------------------------------------------------------------------------------------- */

void hkv_extent_link(struct hkv_tables *t, uint32_t *list, uint32_t e) {
    t->extent_prev[e] = HKV_NIL;
    t->extent_next[e] = *list;
    if (*list != HKV_NIL) t->extent_prev[*list] = e;
    *list = e;
}

static void extent_unlink(struct hkv_tables *t, uint32_t *list, uint32_t e) {
    *(t->extent_prev[e] != HKV_NIL ? &t->extent_next[t->extent_prev[e]] : list) = t->extent_next[e];
    if (t->extent_next[e] != HKV_NIL) t->extent_prev[t->extent_next[e]] = t->extent_prev[e];
}

uint64_t hkv_slots_in(const struct hkv_tables *t, uint64_t e, uint64_t slot_bytes) {
    uint64_t left = t->fixed.pool_bytes - e * t->fixed.extent_bytes;
    return (left < t->fixed.extent_bytes ? left : t->fixed.extent_bytes) / slot_bytes;
}

/* An extent without blocks that has room for a slot of the class. Only the last extent can be too short, so this looks at two at most. */
static uint32_t free_extent_for(const struct hkv_tables *t, const struct hkv_class *class) {
    uint32_t e = t->free_extents;
    while (e != HKV_NIL && hkv_slots_in(t, e, class->slot_bytes) == 0) e = t->extent_next[e];
    return e;
}

static void extent_give(struct hkv_tables *t, uint32_t e, struct hkv_class *class) {
    struct hkv_extent *extent = &t->extents[e];
    extent_unlink(t, &t->free_extents, e);
    t->counts.free_extents--;
    extent->slots = (uint32_t)hkv_slots_in(t, e, class->slot_bytes);
    extent->taken = extent->busy = extent->next_fresh = extent->dirty = 0;
    extent->last_used = 0;
    extent->free_head = HKV_NIL;
    STORE_RELEASE(&extent->slot_bytes, class->slot_bytes);
    hkv_extent_link(t, &class->open, e);
    class->extents++;
}

/* Gives back the slot of an entry that has left the table; an extent that has no block any more serves any slot size. */
static void slot_free(struct hkv_tables *t, struct hkv_class *class, uint32_t page) {
    uint32_t e = page / hkv_extent_pages(t);
    struct hkv_extent *extent = &t->extents[e];
    if (extent->taken == extent->slots) hkv_extent_link(t, &class->open, e);
    t->slots[page] = extent->free_head;
    extent->free_head = page;
    extent->taken--;
    t->counts.used_bytes -= class->slot_bytes;
    if (extent->taken > 0) return;
    STORE_RELEASE(&extent->slot_bytes, 0);
    extent_unlink(t, &class->open, e);
    class->extents--;
    hkv_extent_link(t, &t->free_extents, e);
    t->counts.free_extents++;
}

/* Frees a block that is neither in an LRU list nor counted busy any more. */
static void erase(struct hkv_tables *t, uint32_t i) {
    struct hkv_class *class = hkv_class_of(t, i);
    struct hkv_block *block = &t->blocks[i];
    uint32_t page = block->page;
    t->namespaces[block->namespace_index].blocks--;
    t->counts.blocks--;
    if (block->state == HKV_READY) t->counts.ready--;
    else t->counts.writing--;
    if (block->flags & HKV_DOOMED) t->counts.doomed--;
    hkv_count(t, i, hkv_list_of(t, block), -1);
    remove_entry(t, i);
    slot_free(t, class, page);
}

#define GHOST_REUSED (UINT64_C(1) << 32)
#define ROOM_STEP 4.0
#define ROOM_LEAST 0.25
#define LOW_ROOM 0.125 /* where the lists are not by reuse: the part of the blocks of a size that may be of low priority */

/* The word of the table of ghosts for a key: which eviction it was, whether the block had been used again, and in 31 bits more of the key. One
 * that is written over is forgotten. */
static uint64_t *ghost_of(const struct hkv_tables *t, const uint8_t key[32], uint64_t *mark) {
    uint64_t part;
    memcpy(&part, key + 8, sizeof part);
    *mark = part >> 33 << 33;
    return &t->ghosts[part & t->ghost_mask];
}

/* Whether the key was evicted, and since then fewer blocks than there are. Then its list should have been longer: sidecar/policies.py, Reuse. */
static bool comes_back(struct hkv_tables *t, const uint8_t key[32]) {
    uint64_t mark, ghost = *ghost_of(t, key, &mark);
    if (ghost == 0 || ghost >> 33 << 33 != mark || (uint32_t)t->counts.evicted - (uint32_t)ghost >= t->counts.blocks) return false;
    double step = ROOM_STEP / (double)t->counts.blocks;
    t->room += step * (t->reused_go - (ghost & GHOST_REUSED ? 1 : 0));
    t->room = t->room < ROOM_LEAST ? ROOM_LEAST : t->room > 1 ? 1 : t->room;
    return true;
}

/* The block goes. */
static void remember(struct hkv_tables *t, const struct hkv_block *block) {
    bool reused = (hkv_list_of(t, block) & HKV_REUSED) != 0;
    uint64_t mark, *ghost = ghost_of(t, block->key, &mark);
    *ghost = mark | (reused ? GHOST_REUSED : 0) | (uint32_t)t->counts.evicted;
    t->reused_go += (reused - t->reused_go) / (double)t->counts.blocks;
}

static void evict(struct hkv_tables *t, uint32_t i) {
    t->counts.evicted++;
    t->counts.evicted_dirty += t->spills && hkv_is_wanted(t, &t->blocks[i]);
    if (t->keeps_reused) remember(t, &t->blocks[i]);
    lru_remove(t, i);
    erase(t, i);
}

/* Frees every block of an extent without busy ones. */
static void take_back(struct hkv_tables *t, uint32_t e) {
    struct hkv_extent *extent = &t->extents[e];
    uint32_t page = e * hkv_extent_pages(t), step = (uint32_t)(extent->slot_bytes / HKV_PAGE);
    for (uint32_t left = extent->taken; left > 0; page += step) {
        uint32_t i = t->slots[page];
        /* A free slot holds a page number; no entry of that index can claim this page. */
        if (i > t->mask || !hkv_is_live(&t->blocks[i]) || t->blocks[i].page != page) continue;
        evict(t, i);
        left--;
    }
    t->counts.extents_taken_back++;
}

/* The coldest extent of another slot size that nobody uses and that has room for a slot of the class; one with dirty blocks if need be. */
static uint32_t coldest_extent(const struct hkv_tables *t, const struct hkv_class *class, bool dirty_too) {
    uint32_t best = HKV_NIL;
    if (t->fixed.extent_capacity - t->counts.free_extents == class->extents) return HKV_NIL;
    for (uint32_t e = 0; e < t->fixed.extent_capacity; e++) {
        const struct hkv_extent *extent = &t->extents[e];
        if (extent->slot_bytes == 0 || extent->slot_bytes == class->slot_bytes || extent->busy > 0) continue;
        if (extent->dirty > 0 && !dirty_too) continue;
        if (best != HKV_NIL && extent->last_used >= t->extents[best].last_used) continue;
        if (hkv_slots_in(t, e, class->slot_bytes) > 0) best = e;
    }
    return best;
}

static uint32_t older_of(const struct hkv_tables *t, uint32_t one, uint32_t other) {
    if (one == HKV_NIL || other == HKV_NIL) return one == HKV_NIL ? other : one;
    return t->aux[other].used < t->aux[one].used ? other : one;
}

/* The block of this slot size that goes next. One of which shards are missing is like a dirty one: gone before its last rank comes, it would
 * never be whole. */
static uint32_t oldest_of(const struct hkv_tables *t, const struct hkv_class *class, bool dirty_too) {
    uint32_t one = class->idle[0].oldest, other = class->idle[HKV_REUSED].oldest;
    for (int list = HKV_WANTED; dirty_too && list < HKV_LISTS; list += HKV_WANTED) {
        one = older_of(t, one, class->idle[list].oldest);
        other = older_of(t, other, class->idle[list + HKV_REUSED].oldest);
    }
    double room = t->keeps_reused ? t->room : LOW_ROOM;
    bool fits = class->blocks[0] < room * ((double)class->blocks[0] + class->blocks[1]);
    if (one == HKV_NIL || (fits && other != HKV_NIL)) return other;
    return one;
}

/* Frees the block of this slot size, or the whole extent of another one, that nobody used for longest. */
static bool make_room(struct hkv_tables *t, struct hkv_class *class) {
    for (int dirty_too = !t->spills; dirty_too <= 1; dirty_too++) {
        uint32_t e = coldest_extent(t, class, dirty_too), oldest = oldest_of(t, class, dirty_too);
        if (e != HKV_NIL && (oldest == HKV_NIL || t->extents[e].last_used < t->aux[oldest].used)) {
            take_back(t, e);
            return true;
        }
        if (oldest == HKV_NIL) continue;
        evict(t, oldest);
        return true;
    }
    return false;
}

/* Frees an entry where all max_blocks are in use: the oldest of any slot size. */
static bool evict_oldest(struct hkv_tables *t) {
    uint32_t oldest = HKV_NIL;
    for (int dirty_too = !t->spills; dirty_too <= 1 && oldest == HKV_NIL; dirty_too++)
        for (uint64_t c = 0; c < t->fixed.namespace_capacity; c++)
            if (t->classes[c].namespaces > 0) oldest = older_of(t, oldest, oldest_of(t, &t->classes[c], dirty_too));
    if (oldest == HKV_NIL) return false;
    evict(t, oldest);
    return true;
}

/* The page of a slot for one more block of the class, HKV_NIL when everything is in use. */
static uint32_t slot_take(struct hkv_tables *t, struct hkv_class *class) {
    while (class->open == HKV_NIL && free_extent_for(t, class) == HKV_NIL)
        if (!make_room(t, class)) return HKV_NIL;
    if (t->counts.blocks == t->fixed.max_blocks && !evict_oldest(t)) return HKV_NIL;
    if (class->open == HKV_NIL) extent_give(t, free_extent_for(t, class), class);

    uint32_t e = class->open, page;
    struct hkv_extent *extent = &t->extents[e];
    if (extent->free_head != HKV_NIL) {
        page = extent->free_head;
        extent->free_head = t->slots[page];
    } else {
        page = e * hkv_extent_pages(t) + extent->next_fresh++ * (uint32_t)(class->slot_bytes / HKV_PAGE);
    }
    if (++extent->taken == extent->slots) extent_unlink(t, &class->open, e);
    t->counts.used_bytes += class->slot_bytes;
    return page;
}

/* ---- the writer: members and namespaces ------------------------------------------------------------------------------------------ */

uint32_t hkv_member_add(struct hkv_tables *t, const struct hkv_member *member) {
    for (uint32_t i = 0; i < t->fixed.member_capacity; i++) {
        if (t->members[i].used) continue;
        t->members[i] = *member;
        STORE_RELEASE(&t->members[i].used, 1);
        t->counts.members++;
        return i;
    }
    return HKV_NIL;
}

/* Joins the namespace to the class of its slot size. */
bool hkv_class_join(struct hkv_tables *t, uint32_t namespace_index) {
    uint64_t slot_bytes = t->namespaces[namespace_index].slot_bytes;
    uint32_t unused = HKV_NIL, c = 0;
    for (; c < t->fixed.namespace_capacity; c++) {
        if (t->classes[c].namespaces == 0) {
            if (unused == HKV_NIL) unused = c;
        } else if (t->classes[c].slot_bytes == slot_bytes) {
            break;
        }
    }
    if (c == t->fixed.namespace_capacity) {
        if (unused == HKV_NIL) return false;
        c = unused;
        t->classes[c] = (struct hkv_class){.slot_bytes = slot_bytes, .open = HKV_NIL};
        for (int list = 0; list < HKV_LISTS; list++) t->classes[c].idle[list].oldest = t->classes[c].idle[list].newest = HKV_NIL;
    }
    t->classes[c].namespaces++;
    t->class_of_namespace[namespace_index] = c;
    return true;
}

uint32_t hkv_namespace_add(struct hkv_tables *t, const struct hkv_namespace *wanted) {
    uint32_t unused = HKV_NIL, replaced = HKV_NIL, i;
    for (i = 0; i < t->fixed.namespace_capacity; i++) {
        const struct hkv_namespace *each = &t->namespaces[i];
        if (!each->used) {
            if (unused == HKV_NIL) unused = i;
        } else if (memcmp(each->fingerprint, wanted->fingerprint, sizeof each->fingerprint) == 0) {
            return i;
        } else if (each->blocks == 0 && replaced == HKV_NIL) {
            replaced = i;
        }
    }
    if (unused == HKV_NIL && replaced == HKV_NIL) return HKV_NIL;
    i = unused;
    if (unused == HKV_NIL) {
        i = replaced;
        t->classes[t->class_of_namespace[i]].namespaces--;
        t->counts.namespaces--;
        STORE(&t->namespaces[i].used, 0);
        __atomic_thread_fence(__ATOMIC_RELEASE);
    }
    t->namespaces[i] = *wanted;
    STORE_RELEASE(&t->namespaces[i].used, 1);
    hkv_class_join(t, i); /* there are as many classes as namespaces */
    t->counts.namespaces++;
    return i;
}

/* ---- the writer: shards ---------------------------------------------------------------------------------------------------------- */

static void become_busy(struct hkv_tables *t, uint32_t i) {
    lru_remove(t, i);
    extent_of(t, i)->busy++;
}

/* After a pin or a shard of the block was given back: what an idle block becomes. */
static void settle(struct hkv_tables *t, uint32_t i) {
    const struct hkv_aux *aux = &t->aux[i];
    const struct hkv_block *block = &t->blocks[i];
    if (!is_idle(aux)) return;
    extent_of(t, i)->busy--;
    if ((block->flags & HKV_DOOMED) || (block->state == HKV_WRITING && aux->shards_done == 0)) {
        erase(t, i);
    } else {
        touch(t, i);
        hkv_lru_add(t, i);
    }
}

static void shard_take(struct hkv_tables *t, uint32_t i, uint32_t member, uint64_t tag, uint32_t shard) {
    uint32_t r = t->free_shard;
    struct hkv_shard *record = &t->shards[r];
    t->free_shard = record->next;
    record->member = member;
    record->shard = shard;
    record->tag = tag;
    record->generation = t->blocks[i].generation;
    memcpy(record->key, t->blocks[i].key, 32);
    record->next = t->aux[i].shards_head;
    STORE_RELEASE(&record->used, 1);
    t->aux[i].shards_head = r;
    t->loads[member].shards++;
    t->loads[member].bytes += hkv_shard_share(t, t->blocks[i].namespace_index);
    t->counts.shards_in_flight++;
}

static void shard_give_back(struct hkv_tables *t, uint32_t i, uint32_t r) {
    struct hkv_shard *record = &t->shards[r];
    uint32_t *link = &t->aux[i].shards_head;
    STORE_RELEASE(&record->used, 0);
    while (*link != r) link = &t->shards[*link].next;
    *link = record->next;
    record->next = t->free_shard;
    t->free_shard = r;
    t->loads[record->member].shards--;
    t->loads[record->member].bytes -= hkv_shard_share(t, t->blocks[i].namespace_index);
    t->counts.shards_in_flight--;
}

/* Whether the member may hold one more shard: its first one always, then up to half of all there is. */
static uint8_t may_take(const struct hkv_tables *t, uint32_t member, uint64_t share) {
    const struct hkv_load *load = &t->loads[member];
    if (load->shards > 0 && (load->shards + 1 > t->fixed.shard_capacity / 2 || load->bytes + share > t->fixed.pool_bytes / 2))
        return HKV_THROTTLED;
    return t->free_shard == HKV_NIL ? HKV_FULL : HKV_OK;
}

uint64_t hkv_seal(const struct hkv_block *block, uint64_t shards_done) {
    struct hkv_block value = *block;
    value.seq = 0;
    value.state = value.flags = 0;
    value.checksum = shards_done;
    return hkv_xxh3_64(&value, sizeof value);
}

uint8_t hkv_reserve(struct hkv_tables *t, uint32_t namespace_index, uint32_t member, uint64_t tag, const uint8_t key[32], uint32_t shard,
                    bool low_priority, uint32_t *page, uint64_t *generation) {
    struct hkv_namespace *namespace = &t->namespaces[namespace_index];
    uint32_t at;
    uint8_t allowed = may_take(t, member, hkv_shard_share(t, namespace_index));
    if (t->counts.tombstones > t->fixed.block_capacity / 8) sweep(t);
    uint32_t i = hkv_find(t, key, &at);
    if (i != HKV_NIL) {
        const struct hkv_block *block = &t->blocks[i];
        if (block->namespace_index != namespace_index || (block->flags & HKV_DOOMED)) return HKV_BUSY;
        if (block->state == HKV_READY || (t->aux[i].shards_done >> shard & 1)) return HKV_EXISTS;
        for (uint32_t r = t->aux[i].shards_head; r != HKV_NIL; r = t->shards[r].next)
            if (t->shards[r].shard == shard) return HKV_BUSY;
        if (allowed != HKV_OK) return allowed;
        if (is_idle(&t->aux[i])) become_busy(t, i);
    } else {
        struct hkv_class *class = &t->classes[t->class_of_namespace[namespace_index]];
        if (allowed != HKV_OK) return allowed;
        if (at == HKV_NIL || is_crowded(t, at)) return HKV_FULL;
        uint32_t slot = slot_take(t, class);
        if (slot == HKV_NIL) return HKV_FULL;
        hkv_find(t, key, &at); /* evictions may have freed an earlier place, or made this one EMPTY */
        i = at;
        struct hkv_block value = {.state = HKV_WRITING,
                                  .flags = (uint8_t)((!low_priority + comes_back(t, key)) * HKV_USE),
                                  .shards = (uint16_t)namespace->shards,
                                  .generation = t->header->generation + 1,
                                  .page = slot,
                                  .namespace_index = namespace_index};
        memcpy(value.key, key, 32);
        if (!t->verify) value.checksum = hkv_seal(&value, 0);
        STORE_RELEASE(&t->header->generation, value.generation);
        t->aux[i] = (struct hkv_aux){.lru_prev = HKV_NIL, .lru_next = HKV_NIL, .shards_head = HKV_NIL};
        t->slots[slot] = i;
        if (t->blocks[i].state == HKV_TOMBSTONE) t->counts.tombstones--;
        hkv_block_put(&t->blocks[i], &value);
        t->counts.blocks++;
        t->counts.writing++;
        namespace->blocks++;
        hkv_count(t, i, hkv_list_of(t, &value), 1);
        extent_of(t, i)->busy++;
    }
    touch(t, i);
    shard_take(t, i, member, tag, shard);
    *page = t->blocks[i].page;
    *generation = t->blocks[i].generation;
    return HKV_OK;
}

uint8_t hkv_commit(struct hkv_tables *t, uint32_t member, uint64_t tag, const uint8_t key[32], uint32_t shard, uint64_t generation,
                   uint64_t checksum) {
    uint32_t i = hkv_find(t, key, NULL);
    if (i == HKV_NIL || t->blocks[i].generation != generation) return HKV_NOT_HELD;
    struct hkv_block *block = &t->blocks[i];
    struct hkv_aux *aux = &t->aux[i];
    uint32_t r = aux->shards_head;
    while (r != HKV_NIL && (t->shards[r].shard != shard || t->shards[r].member != member || t->shards[r].tag != tag)) r = t->shards[r].next;
    if (r == HKV_NIL) return HKV_NOT_HELD;
    struct hkv_block value = *block;
    uint64_t done = aux->shards_done | UINT64_C(1) << shard;
    value.checksum = t->verify ? value.checksum ^ checksum : hkv_seal(&value, done);
    if (done == hkv_all_shards(block->shards)) {
        value.state = HKV_READY;
        t->counts.writing--;
        t->counts.ready++;
    }
    /* The mask with the checksum: adopted apart, the shard would be written again and its checksum be in twice, or the seal be broken. */
    int before = hkv_list_of(t, block);
    uint32_t odd = entry_open(block);
    STORE(&aux->shards_done, done);
    entry_close(block, odd, &value);
    recount(t, i, before);
    shard_give_back(t, i, r);
    settle(t, i);
    return HKV_OK;
}

static int compare_tags(const void *left, const void *right) {
    const uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return a < b ? -1 : a > b;
}

/* Gives back what a member holds, under some tags (in order) or, where `tags` is NULL, under all. One pass, however many tags. */
static uint64_t abort_shards(struct hkv_tables *t, uint32_t member, const uint64_t *tags, size_t count_tags) {
    uint64_t left = t->counts.shards_in_flight, count = 0;
    for (uint32_t r = 0; left > 0; r++) {
        const struct hkv_shard *record = &t->shards[r];
        if (!record->used) continue;
        left--;
        if (record->member != member) continue;
        if (tags != NULL && bsearch(&record->tag, tags, count_tags, sizeof *tags, compare_tags) == NULL) continue;
        uint32_t i = hkv_find(t, record->key, NULL);
        shard_give_back(t, i, r);
        settle(t, i);
        count++;
    }
    return count;
}

uint64_t hkv_abort(struct hkv_tables *t, uint32_t member, uint64_t *tags, size_t count) {
    qsort(tags, count, sizeof *tags, compare_tags);
    return abort_shards(t, member, tags, count);
}

uint64_t hkv_member_remove(struct hkv_tables *t, uint32_t member) {
    uint64_t count = abort_shards(t, member, NULL, 0);
    STORE_RELEASE(&t->members[member].used, 0);
    memset(&t->members[member], 0, sizeof t->members[member]); /* so that no flipped bit brings it back */
    t->counts.members--;
    return count;
}

/* ---- the writer: pins ------------------------------------------------------------------------------------------------------------ */

bool hkv_chain_is(const struct hkv_tables *t, uint32_t head, uint32_t session, uint64_t tag) {
    return head < t->fixed.pin_capacity && t->pins[head].used && t->pins[head].session == session && t->pins[head].tag == tag;
}

/* A block whose tick is above the mark is pinned in the chain: the tick moves for nothing else during the batch. */
uint64_t hkv_acquire_begin(struct hkv_tables *t, uint32_t head) {
    uint64_t mark = t->header->tick;
    for (uint32_t p = head; p != HKV_NIL; p = t->pins[p].next) touch(t, t->pins[p].block);
    return mark;
}

/* False: there is no record for it, or too many are the session's. */
static bool pin_block(struct hkv_tables *t, uint32_t i, uint32_t session, uint64_t tag, uint32_t *head) {
    struct hkv_aux *aux = &t->aux[i];
    uint32_t p = t->free_pin;
    uint64_t *pins = &t->pins_of_session[session];
    if (p == HKV_NIL || (*pins > 0 && *pins >= t->fixed.pin_capacity / 2)) return false;
    struct hkv_pin *pin = &t->pins[p];
    t->free_pin = pin->next;
    pin->session = session;
    pin->tag = tag;
    pin->generation = t->blocks[i].generation;
    memcpy(pin->key, t->blocks[i].key, 32);
    pin->next = *head;
    pin->block = i;
    STORE_RELEASE(&pin->used, 1);
    *head = p;
    ++*pins;
    t->counts.pins++;
    if (aux->pins == 0) {
        become_busy(t, i);
        t->counts.pinned_blocks++;
    }
    aux->pins++;
    touch(t, i);
    return true;
}

uint8_t hkv_acquire(struct hkv_tables *t, uint32_t namespace_index, uint32_t session, uint64_t tag, uint64_t mark, const uint8_t key[32],
                    uint32_t *head, uint32_t *page, uint64_t *generation) {
    uint32_t i = hkv_find(t, key, NULL);
    if (i == HKV_NIL) return HKV_MISS;
    const struct hkv_block *block = &t->blocks[i];
    if (block->state != HKV_READY || (block->flags & HKV_DOOMED) || block->namespace_index != namespace_index) return HKV_MISS;
    if (t->aux[i].used <= mark) {
        if (!pin_block(t, i, session, tag, head)) return HKV_FULL;
        count_use(t, i);
    }
    *page = block->page;
    *generation = block->generation;
    return HKV_OK;
}

uint64_t hkv_release(struct hkv_tables *t, uint32_t head) {
    uint64_t count = 0;
    for (uint32_t p = head, next; p != HKV_NIL; p = next, count++) {
        struct hkv_pin *pin = &t->pins[p];
        struct hkv_aux *aux = &t->aux[pin->block];
        next = pin->next;
        STORE_RELEASE(&pin->used, 0);
        pin->next = t->free_pin;
        t->free_pin = p;
        t->pins_of_session[pin->session]--;
        t->counts.pins--;
        if (--aux->pins > 0) continue;
        t->counts.pinned_blocks--;
        settle(t, pin->block);
    }
    return count;
}

/* Frees a block, or makes it a miss until its last user frees it. */
static void doom(struct hkv_tables *t, uint32_t i) {
    if (is_idle(&t->aux[i])) {
        lru_remove(t, i);
        erase(t, i);
        return;
    }
    struct hkv_block value = t->blocks[i];
    int before = hkv_list_of(t, &value);
    value.flags = HKV_DOOMED;
    hkv_block_put(&t->blocks[i], &value);
    recount(t, i, before);
    t->counts.doomed++;
}

uint64_t hkv_clear(struct hkv_tables *t, uint32_t namespace_index) {
    const bool all = namespace_index == HKV_NIL;
    uint64_t left = all ? t->counts.blocks : t->namespaces[namespace_index].blocks, count = 0;
    for (uint32_t i = 0; left > 0; i++) {
        const struct hkv_block *block = &t->blocks[i];
        if (!hkv_is_live(block) || (!all && block->namespace_index != namespace_index)) continue;
        left--;
        if (block->flags & HKV_DOOMED) continue;
        count++;
        doom(t, i);
    }
    return count;
}

bool hkv_discard(struct hkv_tables *t, uint32_t namespace_index, const uint8_t key[32], uint64_t generation) {
    uint32_t i = hkv_find(t, key, NULL);
    if (i == HKV_NIL) return false;
    const struct hkv_block *block = &t->blocks[i];
    if (block->state != HKV_READY || (block->flags & HKV_DOOMED) || block->namespace_index != namespace_index ||
        block->generation != generation)
        return false;
    doom(t, i);
    return true;
}

/* ---- the writer: tiers ----------------------------------------------------------------------------------------------------------- */

uint32_t hkv_spill(struct hkv_tables *t, uint32_t session, uint64_t tag, uint32_t *head) {
    uint32_t oldest = HKV_NIL;
    for (uint64_t c = 0; c < t->fixed.namespace_capacity; c++)
        for (int list = HKV_WANTED; list < HKV_HALF && t->classes[c].namespaces > 0; list++)
            oldest = older_of(t, oldest, t->classes[c].idle[list].oldest);
    if (oldest == HKV_NIL || !pin_block(t, oldest, session, tag, head)) return HKV_NIL;
    return oldest;
}

bool hkv_set_clean(struct hkv_tables *t, const uint8_t key[32], uint64_t generation) {
    uint32_t i = hkv_find(t, key, NULL);
    if (i == HKV_NIL || t->blocks[i].generation != generation || !hkv_is_dirty(&t->blocks[i])) return false;
    bool idle = is_idle(&t->aux[i]);
    if (idle) lru_remove(t, i);
    struct hkv_block value = t->blocks[i];
    int before = hkv_list_of(t, &value);
    value.flags |= HKV_CLEAN;
    hkv_block_put(&t->blocks[i], &value);
    recount(t, i, before);
    if (!idle) return true;
    touch(t, i); /* the list is in order of use */
    hkv_lru_add(t, i);
    return true;
}
