/* Every invariant of the tables, checked from the truth up: each derived field and each counter is computed again and compared. */
#include "tables.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct check {
    struct hkv_tables *t;
    hkv_report *report;
    void *context;
    struct hkv_counts seen;
    uint32_t *pins_of;      /* per entry: pin records on it */
    uint8_t *in_lru;        /* per entry */
    uint8_t *linked_shards; /* per record: times reached through a block */
    uint8_t *linked_pins;   /* per record: times it is another one's next */
    uint8_t *listed;        /* per extent: times it is in an open list or the free list */
    uint64_t *generations;  /* of the blocks, to be sorted */
    struct hkv_load *loads; /* of each member */
    uint64_t *pins_of_session;
    uint64_t *blocks_of; /* each namespace */
    uint64_t *reused_of; /* each namespace */
};

__attribute__((format(printf, 2, 3))) static void say(const struct check *c, const char *format, ...) {
    char sentence[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    c->report(c->context, sentence);
}

#define EXPECT(condition, ...) ((condition) ? (void)0 : say(c, __VA_ARGS__))
#define LLU(value) ((unsigned long long)(value))

static bool is_idle(const struct hkv_aux *aux) {
    return aux->pins == 0 && aux->shards_head == HKV_NIL;
}

static void check_place(struct check *c, uint32_t i) {
    const struct hkv_tables *t = c->t;
    const struct hkv_block *block = &t->blocks[i];
    uint64_t pages = hkv_extent_pages(t), e = block->page / pages;
    if (block->page >= t->fixed.pool_bytes / HKV_PAGE) {
        say(c, "block %u: page %u is outside of the pool", i, block->page);
        return;
    }
    const struct hkv_extent *extent = &t->extents[e];
    uint64_t slot_bytes = t->namespaces[block->namespace_index].slot_bytes;
    EXPECT(extent->slot_bytes == slot_bytes, "block %u: extent %llu has slots of %llu bytes, its namespace of %llu", i, LLU(e),
           LLU(extent->slot_bytes), LLU(slot_bytes));
    uint64_t step = slot_bytes / HKV_PAGE, within = block->page % pages;
    EXPECT(within % step == 0 && within / step < extent->next_fresh, "block %u: page %u is no slot in use of extent %llu", i, block->page,
           LLU(e));
    EXPECT(t->slots[block->page] == i, "block %u: the slot map names entry %u for its page", i, t->slots[block->page]);
    EXPECT(extent->last_used >= t->aux[i].used, "block %u: used after the last use of its extent", i);
}

static void check_shards_of(struct check *c, uint32_t i) {
    const struct hkv_tables *t = c->t;
    const struct hkv_block *block = &t->blocks[i];
    uint64_t held = 0, steps = 0;
    for (uint32_t r = t->aux[i].shards_head; r != HKV_NIL; r = t->shards[r].next) {
        if (r >= t->fixed.shard_capacity || steps++ > HKV_MAX_SHARDS) {
            say(c, "block %u: its chain of shards is broken at %u", i, r);
            return;
        }
        const struct hkv_shard *record = &t->shards[r];
        c->linked_shards[r] = 1;
        EXPECT(record->used == 1, "block %u: shard record %u in its chain is free", i, r);
        EXPECT(record->generation == block->generation && memcmp(record->key, block->key, 32) == 0,
               "block %u: shard record %u in its chain is of another block", i, r);
        if (record->shard >= block->shards) {
            say(c, "shard record %u: shard %u of a block of %u", r, record->shard, block->shards);
            continue;
        }
        EXPECT((held >> record->shard & 1) == 0, "block %u: shard %u is held twice", i, record->shard);
        EXPECT((t->aux[i].shards_done >> record->shard & 1) == 0, "block %u: shard %u is held and committed", i, record->shard);
        held |= UINT64_C(1) << record->shard;
    }
    EXPECT(held == 0 || block->state == HKV_WRITING, "block %u: READY with shards in flight", i);
}

static void check_block(struct check *c, uint32_t i) {
    const struct hkv_tables *t = c->t;
    const struct hkv_block *block = &t->blocks[i];
    const struct hkv_aux *aux = &t->aux[i];
    EXPECT((block->seq & 1) == 0, "entry %u: seq %u is odd", i, block->seq);
    if (block->state == HKV_EMPTY) return;
    if (block->state == HKV_TOMBSTONE) {
        c->seen.tombstones++;
        EXPECT(t->blocks[(i + 1) & t->mask].state != HKV_EMPTY, "entry %u: a tombstone before an EMPTY entry", i);
        return;
    }
    if (!hkv_is_live(block)) {
        say(c, "entry %u: state %u", i, block->state);
        return;
    }
    EXPECT(hkv_find(t, block->key, NULL) == i, "block %u: a search for its key does not find it", i);
    if (block->namespace_index >= t->fixed.namespace_capacity || !t->namespaces[block->namespace_index].used) {
        say(c, "block %u: there is no namespace %u", i, block->namespace_index);
        return;
    }
    EXPECT(!(block->flags & HKV_CLEAN) || block->state == HKV_READY, "block %u: clean while WRITING", i);
    EXPECT(block->shards == t->namespaces[block->namespace_index].shards, "block %u: %u shards, its namespace has %u", i, block->shards,
           t->namespaces[block->namespace_index].shards);
    EXPECT(block->generation >= 1 && block->generation <= t->header->generation, "block %u: generation %llu of %llu", i,
           LLU(block->generation), LLU(t->header->generation));
    EXPECT(aux->used <= t->header->tick, "block %u: used at tick %llu of %llu", i, LLU(aux->used), LLU(t->header->tick));
    EXPECT(aux->pins == c->pins_of[i], "block %u: %u pins, there are records of %u", i, aux->pins, c->pins_of[i]);
    EXPECT(aux->pins == 0 || block->state == HKV_READY, "block %u: pinned while WRITING", i);
    uint64_t all = hkv_all_shards(block->shards);
    EXPECT((aux->shards_done & ~all) == 0 && (aux->shards_done == all) == (block->state == HKV_READY),
           "block %u: state %u with shards %llx of %llx committed", i, block->state, LLU(aux->shards_done), LLU(all));
    EXPECT(!t->verify || block->checksum == 0 || aux->shards_done != 0, "block %u: a checksum of nothing", i);
    EXPECT(t->verify || block->checksum == hkv_seal(block, aux->shards_done), "block %u: its seal is broken", i);
    EXPECT(!is_idle(aux) || (!(block->flags & HKV_DOOMED) && aux->shards_done != 0), "block %u: nobody holds it and nobody can use it", i);
    EXPECT(c->in_lru[i] == is_idle(aux), "block %u: %s the LRU list", i, is_idle(aux) ? "idle but not in" : "in use but in");
    check_shards_of(c, i);
    check_place(c, i);
    if (c->seen.blocks < t->fixed.max_blocks) c->generations[c->seen.blocks] = block->generation;
    c->blocks_of[block->namespace_index]++;
    c->reused_of[block->namespace_index] += (hkv_list_of(t, block) & HKV_REUSED) != 0;
    c->seen.blocks++;
    c->seen.ready += block->state == HKV_READY;
    c->seen.writing += block->state == HKV_WRITING;
    c->seen.doomed += (block->flags & HKV_DOOMED) != 0;
    c->seen.dirty += hkv_is_wanted(t, block);
    c->seen.pinned_blocks += aux->pins > 0;
    c->seen.used_bytes += t->namespaces[block->namespace_index].slot_bytes;
}

static void check_lru(struct check *c, uint64_t which, int list) {
    const struct hkv_tables *t = c->t;
    const struct hkv_class *class = &t->classes[which];
    uint32_t before = HKV_NIL;
    for (uint32_t i = class->idle[list].oldest; i != HKV_NIL; before = i, i = t->aux[i].lru_next) {
        if (i > t->mask || c->in_lru[i] || !hkv_is_live(&t->blocks[i])) {
            say(c, "class %llu: its LRU list is broken at %u", LLU(which), i);
            return;
        }
        c->in_lru[i] = 1;
        EXPECT(t->aux[i].lru_prev == before, "block %u: its LRU neighbour disagrees", i);
        EXPECT(hkv_class_of(t, i) == class, "block %u: in the LRU list of another slot size", i);
        EXPECT(hkv_list_of(t, &t->blocks[i]) == list, "block %u: in LRU list %d, should be in %d", i, list, hkv_list_of(t, &t->blocks[i]));
        EXPECT(before == HKV_NIL || t->aux[before].used <= t->aux[i].used, "block %u: older than the one before it in the LRU list", i);
    }
    EXPECT(class->idle[list].newest == before, "class %llu: newest is %u, the list ends at %u", LLU(which), class->idle[list].newest,
           before);
}

static void check_list(struct check *c, uint32_t head, uint64_t slot_bytes) {
    const struct hkv_tables *t = c->t;
    uint32_t before = HKV_NIL;
    for (uint32_t e = head; e != HKV_NIL; before = e, e = t->extent_next[e]) {
        if (e >= t->fixed.extent_capacity || c->listed[e]) {
            say(c, "the list of extents of %llu bytes is broken at %u", LLU(slot_bytes), e);
            return;
        }
        c->listed[e] = 1;
        EXPECT(t->extent_prev[e] == before, "extent %u: its neighbour disagrees", e);
        EXPECT(t->extents[e].slot_bytes == slot_bytes, "extent %u: slots of %llu bytes, in the list for %llu", e,
               LLU(t->extents[e].slot_bytes), LLU(slot_bytes));
    }
}

static void check_extent(struct check *c, uint32_t e) {
    const struct hkv_tables *t = c->t;
    const struct hkv_extent *extent = &t->extents[e];
    uint32_t first = e * hkv_extent_pages(t), taken = 0, busy = 0, dirty = 0, unused = 0;
    if (extent->slot_bytes == 0) {
        c->seen.free_extents++;
        EXPECT(c->listed[e], "extent %u: free but not listed", e);
        EXPECT(extent->taken == 0, "extent %u: free with %u blocks", e, extent->taken);
        return;
    }
    if (extent->slot_bytes % HKV_PAGE != 0 || extent->slots != hkv_slots_in(t, e, extent->slot_bytes) ||
        extent->next_fresh > extent->slots) {
        say(c, "extent %u: %u slots of %llu bytes, %u begun", e, extent->slots, LLU(extent->slot_bytes), extent->next_fresh);
        return;
    }
    uint32_t step = (uint32_t)(extent->slot_bytes / HKV_PAGE);
    for (uint32_t slot = 0; slot < extent->next_fresh; slot++) {
        uint32_t page = first + slot * step, i = t->slots[page];
        if (i > t->mask || !hkv_is_live(&t->blocks[i]) || t->blocks[i].page != page) continue;
        taken++;
        busy += !is_idle(&t->aux[i]);
        dirty += hkv_is_wanted(t, &t->blocks[i]);
    }
    for (uint32_t page = extent->free_head; page != HKV_NIL; page = t->slots[page]) {
        uint32_t slot = (page - first) / step;
        if (page < first || (page - first) % step != 0 || slot >= extent->next_fresh || unused++ > extent->slots) {
            say(c, "extent %u: its list of free slots is broken at page %u", e, page);
            return;
        }
        uint32_t next = t->slots[page];
        EXPECT(next > t->mask || !hkv_is_live(&t->blocks[next]) || t->blocks[next].page != page,
               "extent %u: the slot at page %u is free and taken", e, page);
    }
    EXPECT(extent->taken > 0, "extent %u: has a slot size and no block", e);
    EXPECT(extent->taken == taken, "extent %u: taken %u, there are %u blocks", e, extent->taken, taken);
    EXPECT(extent->busy == busy, "extent %u: busy %u, there are %u blocks in use", e, extent->busy, busy);
    EXPECT(extent->dirty == dirty, "extent %u: dirty %u, there are %u such blocks", e, extent->dirty, dirty);
    EXPECT(taken + unused == extent->next_fresh, "extent %u: %u taken and %u free slots of %u begun", e, taken, unused, extent->next_fresh);
    EXPECT(c->listed[e] == (extent->taken < extent->slots), "extent %u: %s the list of those with room", e,
           c->listed[e] ? "full but in" : "not in");
}

static void check_pins(struct check *c) {
    const struct hkv_tables *t = c->t;
    for (uint32_t p = 0; p < t->fixed.pin_capacity; p++) {
        const struct hkv_pin *pin = &t->pins[p];
        if (!pin->used) continue;
        c->seen.pins++;
        EXPECT(pin->used == 1, "pin %u: used is %u", p, pin->used);
        if (pin->block > t->mask || !hkv_is_live(&t->blocks[pin->block])) {
            say(c, "pin %u: there is no block %u", p, pin->block);
            continue;
        }
        const struct hkv_block *block = &t->blocks[pin->block];
        c->pins_of[pin->block]++;
        if (pin->session < t->fixed.member_capacity) c->pins_of_session[pin->session]++;
        else say(c, "pin %u: session %u", p, pin->session);
        EXPECT(block->generation == pin->generation && memcmp(block->key, pin->key, 32) == 0, "pin %u: block %u is another one", p,
               pin->block);
        if (pin->next == HKV_NIL) continue;
        if (pin->next >= t->fixed.pin_capacity || !t->pins[pin->next].used || c->linked_pins[pin->next]++ > 0) {
            say(c, "pin %u: its chain is broken at %u", p, pin->next);
            continue;
        }
        const struct hkv_pin *next = &t->pins[pin->next];
        EXPECT(next->session == pin->session && next->tag == pin->tag, "pin %u: the next in its chain is of another tag", p);
    }
}

static void check_records(struct check *c) {
    const struct hkv_tables *t = c->t;
    uint64_t free_shards = 0, free_pins = 0;
    for (uint32_t r = 0; r < t->fixed.shard_capacity; r++) {
        const struct hkv_shard *record = &t->shards[r];
        if (!record->used) continue;
        c->seen.shards_in_flight++;
        EXPECT(c->linked_shards[r], "shard record %u: held but in no block's chain", r);
        if (record->member >= t->fixed.member_capacity || !t->members[record->member].used) {
            say(c, "shard record %u: there is no member %u", r, record->member);
            continue;
        }
        uint32_t i = hkv_find(t, record->key, NULL);
        c->loads[record->member].shards++;
        if (i != HKV_NIL) c->loads[record->member].bytes += hkv_shard_share(t, t->blocks[i].namespace_index);
    }
    for (uint32_t r = t->free_shard; r < t->fixed.shard_capacity && free_shards <= t->fixed.shard_capacity; r = t->shards[r].next) {
        EXPECT(!t->shards[r].used, "shard record %u: held and in the list of free ones", r);
        free_shards++;
    }
    for (uint32_t p = t->free_pin; p < t->fixed.pin_capacity && free_pins <= t->fixed.pin_capacity; p = t->pins[p].next) {
        EXPECT(!t->pins[p].used, "pin %u: held and in the list of free ones", p);
        free_pins++;
    }
    EXPECT(free_shards + c->seen.shards_in_flight == t->fixed.shard_capacity, "shard records: %llu free and %llu held of %llu",
           LLU(free_shards), LLU(c->seen.shards_in_flight), LLU(t->fixed.shard_capacity));
    EXPECT(free_pins + c->seen.pins == t->fixed.pin_capacity, "pins: %llu free and %llu held of %llu", LLU(free_pins), LLU(c->seen.pins),
           LLU(t->fixed.pin_capacity));
    for (uint64_t i = 0; i < t->fixed.member_capacity; i++) {
        const struct hkv_load *kept = &t->loads[i], *seen = &c->loads[i];
        c->seen.members += t->members[i].used;
        EXPECT(kept->shards == seen->shards && kept->bytes == seen->bytes,
               "member %llu: counts %llu shards of %llu bytes, holds %llu of %llu", LLU(i), LLU(kept->shards), LLU(kept->bytes),
               LLU(seen->shards), LLU(seen->bytes));
        EXPECT(t->pins_of_session[i] == c->pins_of_session[i], "session %llu: counts %llu pins, has %llu", LLU(i),
               LLU(t->pins_of_session[i]), LLU(c->pins_of_session[i]));
        EXPECT(!t->members[i].used || t->members[i].session < t->fixed.member_capacity, "member %llu: session %u", LLU(i),
               t->members[i].session);
    }
}

static void check_namespaces(struct check *c) {
    const struct hkv_tables *t = c->t;
    for (uint32_t i = 0; i < t->fixed.namespace_capacity; i++) {
        const struct hkv_namespace *each = &t->namespaces[i];
        if (!each->used) continue;
        c->seen.namespaces++;
        EXPECT(each->slot_bytes == hkv_slot_bytes(each->shard_bytes, each->shards), "namespace %u: slots of %llu bytes", i,
               LLU(each->slot_bytes));
        EXPECT(t->classes[t->class_of_namespace[i]].slot_bytes == each->slot_bytes, "namespace %u: in the class of another slot size", i);
        EXPECT(each->blocks == c->blocks_of[i], "namespace %u: counts %llu blocks, there are %llu", i, LLU(each->blocks),
               LLU(c->blocks_of[i]));
    }
    for (uint64_t k = 0; k < t->fixed.namespace_capacity; k++) {
        uint64_t namespaces = 0, extents = 0, blocks = 0, reused = 0;
        for (uint64_t i = 0; i < t->fixed.namespace_capacity; i++) {
            if (!t->namespaces[i].used || t->class_of_namespace[i] != k) continue;
            namespaces++;
            blocks += c->blocks_of[i];
            reused += c->reused_of[i];
        }
        EXPECT(t->classes[k].namespaces == namespaces, "class %llu: counts %u namespaces, there are %llu", LLU(k), t->classes[k].namespaces,
               LLU(namespaces));
        if (namespaces == 0) continue;
        EXPECT(t->classes[k].blocks[0] + reused == blocks && t->classes[k].blocks[1] == reused,
               "class %llu: counts %u and %u blocks, there are %llu, of them %llu reused", LLU(k), t->classes[k].blocks[0],
               t->classes[k].blocks[1], LLU(blocks), LLU(reused));
        for (uint64_t e = 0; e < t->fixed.extent_capacity; e++) extents += t->extents[e].slot_bytes == t->classes[k].slot_bytes;
        EXPECT(t->classes[k].extents == extents, "class %llu: counts %u extents, there are %llu", LLU(k), t->classes[k].extents,
               LLU(extents));
    }
}

static int compare_u64(const void *left, const void *right) {
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return a < b ? -1 : a > b;
}

static void check_counts(struct check *c) {
    const struct hkv_counts *kept = &c->t->counts, *seen = &c->seen;
#define COUNT(name) EXPECT(kept->name == seen->name, "counter " #name " is %llu, there are %llu", LLU(kept->name), LLU(seen->name))
    COUNT(used_bytes);
    COUNT(blocks);
    COUNT(ready);
    COUNT(writing);
    COUNT(doomed);
    COUNT(dirty);
    COUNT(pinned_blocks);
    COUNT(pins);
    COUNT(shards_in_flight);
    COUNT(members);
    COUNT(namespaces);
    COUNT(free_extents);
    COUNT(tombstones);
    EXPECT(seen->blocks <= c->t->fixed.max_blocks, "%llu blocks, the limit is %llu", LLU(seen->blocks), LLU(c->t->fixed.max_blocks));
    uint64_t n = seen->blocks < c->t->fixed.max_blocks ? seen->blocks : c->t->fixed.max_blocks;
    qsort(c->generations, n, sizeof *c->generations, compare_u64);
    for (uint64_t i = 1; i < n; i++)
        EXPECT(c->generations[i] != c->generations[i - 1], "generation %llu was given twice", LLU(c->generations[i]));
}

static void check_all(struct check *c) {
    struct hkv_tables *t = c->t;
    char message[HKV_MESSAGE_BYTES];
    if (!hkv_header_check(t->header, NULL, t->fixed.host_boot_id, message)) say(c, "%s", message);
    EXPECT(memcmp(t->header, &t->fixed, HKV_STATIC_BYTES) == 0, "the static part of the header has changed");
    check_pins(c);
    for (uint64_t k = 0; k < t->fixed.namespace_capacity; k++) {
        if (t->classes[k].namespaces == 0) continue;
        for (int list = 0; list < HKV_LISTS; list++) check_lru(c, k, list);
        check_list(c, t->classes[k].open, t->classes[k].slot_bytes);
    }
    check_list(c, t->free_extents, 0);
    for (uint64_t i = 0; i <= t->mask; i++) check_block(c, (uint32_t)i);
    for (uint64_t e = 0; e < t->fixed.extent_capacity; e++) check_extent(c, (uint32_t)e);
    check_records(c);
    check_namespaces(c);
    check_counts(c);
}

bool hkv_tables_check(struct hkv_tables *t, hkv_report *report, void *context) {
    struct check c = {.t = t, .report = report, .context = context};
    c.pins_of = calloc(t->mask + 1, sizeof *c.pins_of);
    c.in_lru = calloc(t->mask + 1, 1);
    c.linked_shards = calloc(t->fixed.shard_capacity, 1);
    c.linked_pins = calloc(t->fixed.pin_capacity, 1);
    c.listed = calloc(t->fixed.extent_capacity, 1);
    c.generations = calloc(t->fixed.max_blocks, sizeof *c.generations);
    c.loads = calloc(t->fixed.member_capacity, sizeof *c.loads);
    c.pins_of_session = calloc(t->fixed.member_capacity, sizeof *c.pins_of_session);
    c.blocks_of = calloc(t->fixed.namespace_capacity, sizeof *c.blocks_of);
    c.reused_of = calloc(t->fixed.namespace_capacity, sizeof *c.reused_of);
    bool ready = c.pins_of != NULL && c.in_lru != NULL && c.linked_shards != NULL && c.linked_pins != NULL && c.listed != NULL &&
                 c.generations != NULL && c.loads != NULL && c.pins_of_session != NULL && c.blocks_of != NULL && c.reused_of != NULL;
    if (ready) check_all(&c);
    free(c.pins_of);
    free(c.in_lru);
    free(c.linked_shards);
    free(c.linked_pins);
    free(c.listed);
    free(c.generations);
    free(c.loads);
    free(c.pins_of_session);
    free(c.blocks_of);
    free(c.reused_of);
    return ready;
}
