/* Adoption of tables whose writer died at any instant: drops what does not count as PROTOCOL.md ("Shared memory") says, and rebuilds all
 * that layout.h calls derived. It trusts nothing but the checked header, so it also survives bytes that no writer of ours can have left.
 * Killed itself, it is simply run again.
 *
 * What a writer killed at any instant can leave (an odd seq, a record of a block that is gone, ...) is dropped without a word. What it cannot
 * is counted as bad. */
#include "tables.h"

#include <stdlib.h>
#include <string.h>

#define STORE_RELEASE(address, value) __atomic_store_n(address, value, __ATOMIC_RELEASE)

struct item { /* what is sorted: blocks by generation or by use (first), pins by chain (session, tag) */
    uint64_t first, second;
    uint32_t index;
};

static int compare_items(const void *left, const void *right) {
    const struct item *a = left, *b = right;
    if (a->first != b->first) return a->first < b->first ? -1 : 1;
    if (a->second != b->second) return a->second < b->second ? -1 : 1;
    return a->index < b->index ? -1 : a->index > b->index;
}

static void drop_block(struct hkv_tables *t, uint64_t i) {
    struct hkv_block tombstone = {.state = HKV_TOMBSTONE};
    hkv_block_put(&t->blocks[i], &tombstone);
}

/* No counter gets there by counting. From half of it on there are enough numbers left again, and none of them was given. */
#define FAR (UINT64_C(1) << 62)

static void repair_header(struct hkv_tables *t) {
    if (t->header->generation >= FAR) t->header->generation = FAR / 2;
    if (t->header->tick >= FAR) t->header->tick = FAR / 2;
    t->reseal = !t->verify && t->header->verify != 0;
    hkv_set_start(t);
}

bool hkv_member_is_sound(const struct hkv_tables *t, uint32_t m) {
    static const uint8_t no_lock[sizeof t->members->lock_name]; /* names are drawn at random; zero is an unused record's */
    const struct hkv_member *member = &t->members[m];
    if (member->used != 1 || member->session >= t->fixed.member_capacity) return false;
    if (memcmp(member->lock_name, no_lock, sizeof no_lock) == 0) return false;
    for (uint32_t i = 0; i < m; i++) {
        const struct hkv_member *other = &t->members[i];
        if (other->used != 1) continue;
        if (memcmp(other->client_id, member->client_id, sizeof member->client_id) == 0) return false;
        if ((other->session == member->session) != (memcmp(other->session_id, member->session_id, sizeof member->session_id) == 0))
            return false;
    }
    return true;
}

/* From the last one on, so that each is judged beside the earlier ones as they were found. */
static void repair_members(struct hkv_tables *t, const uint32_t *dead_members, size_t dead) {
    for (uint32_t i = (uint32_t)t->fixed.member_capacity; i-- > 0;) {
        struct hkv_member *member = &t->members[i];
        if (member->used == 0) continue;
        bool sound = hkv_member_is_sound(t, i);
        if (!sound || (member->flags & ~(uint32_t)(HKV_DEVICE | HKV_TIER))) t->counts.bad_records++;
        member->flags &= HKV_DEVICE | HKV_TIER;
        if (!sound) STORE_RELEASE(&member->used, 0);
    }
    for (size_t i = 0; i < dead; i++) STORE_RELEASE(&t->members[dead_members[i]].used, 0);
    for (uint64_t i = 0; i < t->fixed.member_capacity; i++) t->counts.members += t->members[i].used;
}

static void repair_namespaces(struct hkv_tables *t) {
    for (uint32_t i = 0; i < t->fixed.namespace_capacity; i++) {
        struct hkv_namespace *each = &t->namespaces[i];
        bool good = each->used == 1 && each->shards >= 1 && each->shards <= HKV_MAX_SHARDS && each->shard_bytes >= 1 &&
                    each->shard_bytes <= t->fixed.pool_bytes && each->slot_bytes == hkv_slot_bytes(each->shard_bytes, each->shards) &&
                    hkv_slots_in(t, 0, each->slot_bytes) > 0;
        for (uint32_t j = 0; good && j < i; j++)
            good = !t->namespaces[j].used || memcmp(t->namespaces[j].fingerprint, each->fingerprint, sizeof each->fingerprint) != 0;
        if (!good && each->used != 0) t->counts.bad_records++;
        each->blocks = 0;
        each->used = good;
        if (!good) continue;
        hkv_class_join(t, i);
        t->counts.namespaces++;
    }
}

static void reset_extents(struct hkv_tables *t) {
    for (uint64_t e = 0; e < t->fixed.extent_capacity; e++) {
        struct hkv_extent *extent = &t->extents[e];
        extent->slots = extent->slot_bytes == 0 ? 0 : (uint32_t)hkv_slots_in(t, e, extent->slot_bytes);
        extent->taken = extent->busy = extent->next_fresh = extent->dirty = 0;
        extent->last_used = 0;
        extent->free_head = HKV_NIL;
    }
    memset(t->slots, 0xff, t->fixed.pool_bytes / HKV_PAGE * sizeof *t->slots);
}

/* Whether the entry's place is that of a slot of its namespace that no earlier entry has. */
static bool has_its_place(const struct hkv_tables *t, const struct hkv_block *block) {
    if (block->page >= t->fixed.pool_bytes / HKV_PAGE || t->slots[block->page] != HKV_NIL) return false;
    uint32_t e = block->page / hkv_extent_pages(t), within = block->page % hkv_extent_pages(t);
    const struct hkv_extent *extent = &t->extents[e];
    if (extent->slot_bytes != t->namespaces[block->namespace_index].slot_bytes) return false;
    uint32_t step = (uint32_t)(extent->slot_bytes / HKV_PAGE);
    return within % step == 0 && within / step < extent->slots;
}

static bool is_sound(const struct hkv_tables *t, const struct hkv_block *block, const struct hkv_aux *aux) {
    if (!hkv_is_live(block) || ((block->flags & HKV_CLEAN) && block->state != HKV_READY)) return false;
    if (block->namespace_index >= t->fixed.namespace_capacity || !t->namespaces[block->namespace_index].used) return false;
    if (block->shards != t->namespaces[block->namespace_index].shards || block->generation < 1 || block->generation > t->header->generation)
        return false;
    uint64_t all = hkv_all_shards(block->shards);
    if (block->state == HKV_WRITING && ((aux->shards_done & ~all) || aux->shards_done == all)) return false;
    if (t->verify) {
        if (block->state == HKV_WRITING && aux->shards_done == 0 && block->checksum != 0) return false;
    } else if (!t->reseal && block->checksum != hkv_seal(block, block->state == HKV_READY ? all : aux->shards_done)) {
        return false;
    }
    return has_its_place(t, block);
}

/* Whether it is the very block that an earlier entry is: a writer died between the two halves of its move. */
static bool is_twin(const struct hkv_tables *t, const struct hkv_block *block) {
    uint32_t i = hkv_is_live(block) && block->page < t->fixed.pool_bytes / HKV_PAGE ? t->slots[block->page] : HKV_NIL;
    return i != HKV_NIL && memcmp((const uint8_t *)&t->blocks[i] + 4, (const uint8_t *)block + 4, sizeof *block - 4) == 0;
}

/* Every table of ours has EMPTY entries, where searches end. One without was never valid, and nothing in it is believed. */
static void repair_ends(struct hkv_tables *t) {
    const struct hkv_block empty = {.state = HKV_EMPTY};
    for (uint64_t i = 0; i <= t->mask; i++)
        if ((t->blocks[i].seq & 1) == 0 && t->blocks[i].state == HKV_EMPTY) return;
    for (uint64_t i = 0; i <= t->mask; i++) {
        t->counts.bad_blocks += (t->blocks[i].seq & 1) == 0 && t->blocks[i].state != HKV_TOMBSTONE;
        hkv_block_put(&t->blocks[i], &empty);
    }
}

enum { MOST_IN_CHANGE = 16 }; /* each crash leaves one at most; that many are looked for in all records */

static bool session_lives(const struct hkv_tables *t, uint32_t session) {
    for (uint64_t i = 0; i < t->fixed.member_capacity; i++)
        if (t->members[i].used && t->members[i].session == session) return true;
    return false;
}

static bool is_being_written(const struct hkv_tables *t, const struct hkv_block *block, const struct hkv_aux *aux) {
    for (uint32_t r = 0; r < t->fixed.shard_capacity; r++) {
        const struct hkv_shard *record = &t->shards[r];
        if (record->used != 1 || record->generation != block->generation || memcmp(record->key, block->key, 32) != 0) continue;
        if (record->member >= t->fixed.member_capacity || !t->members[record->member].used) continue;
        if (record->shard < block->shards && !(aux->shards_done >> record->shard & 1)) return true;
    }
    return false;
}

static bool is_pinned(const struct hkv_tables *t, const struct hkv_block *block) {
    for (uint32_t p = 0; p < t->fixed.pin_capacity; p++) {
        const struct hkv_pin *pin = &t->pins[p];
        if (pin->used != 1 || pin->generation != block->generation || memcmp(pin->key, block->key, 32) != 0) continue;
        if (session_lives(t, pin->session)) return true;
    }
    return false;
}

/* An entry whose writer died while it changed it tells nothing any more. But it was changed in place, and its key and place are whole, where
 * a shard of it is in flight or a pin on it: one who lives may be writing or reading there. Then its slot stays taken, by a block that
 * nobody finds, until the last of those is given back. False: there are none. */
static bool keep_in_use(const struct hkv_tables *t, struct hkv_block *block, const struct hkv_aux *aux) {
    struct hkv_block value = *block;
    value.flags = HKV_DOOMED;
    if (is_being_written(t, block, aux)) {
        value.state = HKV_WRITING;
        value.checksum = t->verify ? 0 : hkv_seal(&value, aux->shards_done);
    } else if (is_pinned(t, block)) {
        value.state = HKV_READY;
        if (!t->verify) value.checksum = hkv_seal(&value, hkv_all_shards(value.shards));
    } else {
        return false;
    }
    hkv_block_put(block, &value);
    return true;
}

static void repair_blocks(struct hkv_tables *t) {
    uint64_t kept = 0, changing = 0;
    for (uint64_t i = 0; i <= t->mask; i++) {
        struct hkv_block *block = &t->blocks[i];
        if ((block->seq & 1) == 0 && (block->state == HKV_EMPTY || block->state == HKV_TOMBSTONE)) continue;
        bool in_change = block->seq & 1;
        bool unfinished = in_change ? ++changing > MOST_IN_CHANGE || !keep_in_use(t, block, &t->aux[i]) : is_twin(t, block);
        if (!unfinished && kept < t->fixed.max_blocks && is_sound(t, block, &t->aux[i])) {
            t->slots[block->page] = (uint32_t)i;
            kept++;
            continue;
        }
        t->counts.bad_blocks += !unfinished && !in_change;
        drop_block(t, i);
    }
    for (uint64_t i = 0; i <= t->mask; i++) {
        struct hkv_block *block = &t->blocks[i];
        struct hkv_aux *aux = &t->aux[i];
        if (!hkv_is_live(block)) continue;
        if (i + 8 <= t->mask) hkv_prefetch(t, t->blocks[i + 8].key);
        if (hkv_find(t, block->key, NULL) != i) { /* a second one of its key, or behind an EMPTY one */
            t->slots[block->page] = HKV_NIL;
            t->counts.bad_blocks++;
            drop_block(t, i);
            continue;
        }
        if (block->state == HKV_READY) aux->shards_done = hkv_all_shards(block->shards);
        aux->lru_prev = aux->lru_next = aux->shards_head = HKV_NIL;
        aux->pins = 0;
        if (aux->used > t->header->tick) aux->used = t->header->tick;
        if (t->reseal) STORE_RELEASE(&block->checksum, hkv_seal(block, aux->shards_done)); /* nobody reads it while it is unsealed */
    }
    if (t->reseal) STORE_RELEASE(&t->header->verify, 0);
}

/* A generation is given once. */
static void repair_generations(struct hkv_tables *t, struct item *items) {
    size_t n = 0;
    for (uint64_t i = 0; i <= t->mask; i++)
        if (hkv_is_live(&t->blocks[i])) items[n++] = (struct item){.first = t->blocks[i].generation, .index = (uint32_t)i};
    qsort(items, n, sizeof *items, compare_items);
    for (size_t k = 1; k < n; k++) {
        if (items[k].first != items[k - 1].first) continue;
        t->slots[t->blocks[items[k].index].page] = HKV_NIL;
        t->counts.bad_blocks++;
        drop_block(t, items[k].index);
    }
}

enum verdict { KEPT, UNFINISHED, BAD };

/* A writer can have died after it freed the block, or committed the shard, and before it freed the record. */
static enum verdict judge_shard(const struct hkv_tables *t, const struct hkv_shard *record, uint32_t *block) {
    if (record->used != 1 || record->member >= t->fixed.member_capacity) return BAD;
    uint32_t i = *block = hkv_find(t, record->key, NULL);
    if (i == HKV_NIL) return UNFINISHED;
    if (t->blocks[i].generation != record->generation || record->shard >= t->blocks[i].shards) return BAD;
    if (!t->members[record->member].used || (t->aux[i].shards_done >> record->shard & 1)) return UNFINISHED;
    for (uint32_t r = t->aux[i].shards_head; r != HKV_NIL; r = t->shards[r].next)
        if (t->shards[r].shard == record->shard) return BAD;
    return KEPT;
}

static void repair_shards(struct hkv_tables *t) {
    for (uint32_t r = 0; r < t->fixed.shard_capacity; r++) {
        struct hkv_shard *record = &t->shards[r];
        if (record->used == 0) continue;
        uint32_t i;
        enum verdict verdict = judge_shard(t, record, &i);
        t->counts.bad_records += verdict == BAD;
        if (verdict != KEPT) {
            STORE_RELEASE(&record->used, 0);
            continue;
        }
        record->next = t->aux[i].shards_head;
        t->aux[i].shards_head = r;
        t->loads[record->member].shards++;
        t->loads[record->member].bytes += hkv_shard_share(t, t->blocks[i].namespace_index);
        t->counts.shards_in_flight++;
    }
}

/* Keeps the pins that count, collects them in `items` and links those of a chain, which sorting has made neighbours. */
static void repair_pins(struct hkv_tables *t, struct item *items, struct hkv_chain *chains, size_t *count) {
    size_t n = 0;
    uint32_t last = HKV_NIL;
    bool lives = false;
    for (uint32_t p = 0; p < t->fixed.pin_capacity; p++) {
        struct hkv_pin *pin = &t->pins[p];
        if (pin->used == 0) continue;
        uint32_t i = hkv_find(t, pin->key, NULL);
        bool good = pin->used == 1 && pin->session < t->fixed.member_capacity &&
                    (i == HKV_NIL || (t->blocks[i].generation == pin->generation && t->blocks[i].state == HKV_READY));
        t->counts.bad_records += !good;
        if (!good || i == HKV_NIL) {
            STORE_RELEASE(&pin->used, 0);
            continue;
        }
        pin->block = i;
        items[n++] = (struct item){pin->session, pin->tag, p};
    }
    qsort(items, n, sizeof *items, compare_items);
    *count = 0;
    for (size_t k = 0; k < n; k++) {
        struct hkv_pin *pin = &t->pins[items[k].index];
        bool same_session = k > 0 && items[k].first == items[k - 1].first;
        bool same_chain = same_session && items[k].second == items[k - 1].second;
        if (!same_session) lives = session_lives(t, pin->session);
        if (!same_chain) last = HKV_NIL;
        if (!lives) {
            STORE_RELEASE(&pin->used, 0);
            continue;
        }
        pin->next = last;
        last = items[k].index;
        if (!same_chain) chains[(*count)++] = (struct hkv_chain){.session = pin->session, .tag = pin->tag};
        chains[*count - 1].head = last;
        if (t->aux[pin->block].pins++ == 0) t->counts.pinned_blocks++;
        t->pins_of_session[pin->session]++;
        t->counts.pins++;
    }
}

/* Frees blocks that nobody holds and that are doomed or empty of committed shards; counts the others, and collects the idle ones. */
static size_t count_blocks(struct hkv_tables *t, struct item *items) {
    size_t idle = 0;
    for (uint64_t i = 0; i <= t->mask; i++) {
        struct hkv_block *block = &t->blocks[i];
        const struct hkv_aux *aux = &t->aux[i];
        if (!hkv_is_live(block)) continue;
        bool is_idle = aux->pins == 0 && aux->shards_head == HKV_NIL;
        if (is_idle && ((block->flags & HKV_DOOMED) || aux->shards_done == 0)) {
            t->slots[block->page] = HKV_NIL;
            drop_block(t, i);
            continue;
        }
        struct hkv_extent *extent = &t->extents[block->page / hkv_extent_pages(t)];
        uint32_t slot = block->page % hkv_extent_pages(t) / (uint32_t)(extent->slot_bytes / HKV_PAGE);
        extent->taken++;
        if (slot >= extent->next_fresh) extent->next_fresh = slot + 1;
        if (aux->used > extent->last_used) extent->last_used = aux->used;
        if (is_idle) items[idle++] = (struct item){.first = aux->used, .index = (uint32_t)i};
        else extent->busy++;
        t->namespaces[block->namespace_index].blocks++;
        t->counts.blocks++;
        t->counts.used_bytes += extent->slot_bytes;
        if (block->flags & HKV_DOOMED) t->counts.doomed++;
        hkv_count(t, (uint32_t)i, hkv_list_of(t, block), 1);
        if (block->state == HKV_READY) t->counts.ready++;
        else t->counts.writing++;
    }
    return idle;
}

/* Makes EMPTY of every tombstone that no search has to pass, and counts the others. */
static void repair_tombstones(struct hkv_tables *t) {
    const struct hkv_block empty = {.state = HKV_EMPTY};
    uint64_t start = 0;
    while (t->blocks[start].state != HKV_EMPTY) start++;
    for (uint64_t n = 1; n <= t->mask; n++) {
        struct hkv_block *block = &t->blocks[(start - n) & t->mask];
        if (block->state != HKV_TOMBSTONE) continue;
        if (t->blocks[(start - n + 1) & t->mask].state == HKV_EMPTY) hkv_block_put(block, &empty);
        else t->counts.tombstones++;
    }
}

static void repair_extents(struct hkv_tables *t) {
    uint32_t pages = hkv_extent_pages(t);
    for (uint32_t e = (uint32_t)t->fixed.extent_capacity; e-- > 0;) {
        struct hkv_extent *extent = &t->extents[e];
        if (extent->taken == 0) {
            STORE_RELEASE(&extent->slot_bytes, 0);
            hkv_extent_link(t, &t->free_extents, e);
            t->counts.free_extents++;
            continue;
        }
        struct hkv_class *class = t->classes;
        while (class->namespaces == 0 || class->slot_bytes != extent->slot_bytes) class++; /* its blocks have a namespace */
        class->extents++;
        if (extent->taken < extent->slots) hkv_extent_link(t, &class->open, e);
        for (uint32_t slot = extent->next_fresh; slot-- > 0;) {
            uint32_t page = e * pages + slot * (uint32_t)(extent->slot_bytes / HKV_PAGE);
            if (t->slots[page] != HKV_NIL) continue;
            t->slots[page] = extent->free_head;
            extent->free_head = page;
        }
    }
}

bool hkv_tables_repair(struct hkv_tables *t, const uint32_t *dead_members, size_t dead, struct hkv_chain **chains, size_t *count) {
    uint64_t most = t->fixed.max_blocks > t->fixed.pin_capacity ? t->fixed.max_blocks : t->fixed.pin_capacity;
    struct item *items = malloc(most * sizeof *items);
    *chains = malloc(t->fixed.pin_capacity * sizeof **chains);
    if (items == NULL || *chains == NULL) {
        free(items);
        free(*chains);
        *chains = NULL;
        return false;
    }
    repair_header(t);
    repair_members(t, dead_members, dead);
    repair_namespaces(t);
    reset_extents(t);
    repair_ends(t);
    repair_blocks(t);
    repair_generations(t, items);
    repair_shards(t);
    repair_pins(t, items, *chains, count);
    size_t idle = count_blocks(t, items);
    repair_tombstones(t);
    repair_extents(t);
    qsort(items, idle, sizeof *items, compare_items);
    for (size_t i = 0; i < idle; i++) hkv_lru_add(t, items[i].index);
    hkv_free_records(t);
    free(items);
    return true;
}
