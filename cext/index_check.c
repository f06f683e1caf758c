/* Every invariant of an index, looked at one by one: for tests and the simulation. O(index). */
#include "index.h"

#include <stdarg.h>
#include <stdio.h>

struct check {
    const struct hkv_index *x;
    void (*report)(void *context, const char *sentence);
    void *context;
};

static void __attribute__((format(printf, 2, 3))) broken(const struct check *c, const char *format, ...) {
    char sentence[256];
    va_list values;
    va_start(values, format);
    vsnprintf(sentence, sizeof sentence, format, values);
    va_end(values);
    c->report(c->context, sentence);
}

#define EXPECT(condition, ...) ((condition) ? (void)0 : broken(c, __VA_ARGS__))

static bool is_found(const struct hkv_index_entry *entry) {
    return entry->state == HKV_ON_DISK || entry->state == HKV_ON_DISK_WRITING;
}

static const struct hkv_directory *owner_of(const struct check *c, uint32_t slab) {
    for (uint32_t i = 0; i < c->x->directories; i++)
        if (slab - c->x->directory[i]->first_slab < c->x->directory[i]->slabs) return c->x->directory[i];
    return NULL;
}

static void check_entry(const struct check *c, uint32_t i) {
    const struct hkv_index_entry *entry = &c->x->entries[i];
    const struct hkv_directory *d = owner_of(c, entry->slab);
    EXPECT(d != NULL, "entry %u: its slab %u is of no directory", i, entry->slab);
    if (d == NULL) return;
    const struct hkv_slab *slab = &d->slab[entry->slab - d->first_slab];
    EXPECT(slab->map != NULL && entry->slot < slab->fresh && slab->map[entry->slot] == i + 1, "entry %u: its slot %u is not its own", i,
           entry->slot);
    EXPECT((entry->state == HKV_ON_DISK || entry->state == HKV_ON_DISK_GONE) || entry->readers == 0, "entry %u: read while in state %u", i,
           entry->state);
    EXPECT(entry->state != HKV_ON_DISK_GONE || entry->readers > 0, "entry %u: gone, and nobody reads it", i);
    EXPECT(!d->dropped || !is_found(entry), "entry %u: to be found in a directory that was dropped", i);
    uint64_t at = hkv_index_find(c->x, entry->key, NULL);
    bool found = at != UINT64_MAX && (uint32_t)c->x->table[at] == i + 1;
    EXPECT(found == is_found(entry), "entry %u in state %u: a search finds %s", i, entry->state, found ? "it" : "another or none");
}

static void check_entries(const struct check *c) {
    uint64_t states[5] = {0}, words = 0;
    uint32_t i, length = 0;
    for (i = 0; i < c->x->fresh_entry; i++) {
        uint8_t state = c->x->entries[i].state;
        EXPECT(state <= HKV_ON_DISK_DOOMED, "entry %u: state %u", i, state);
        if (state > HKV_ON_DISK_DOOMED) continue;
        states[state]++;
        if (state != HKV_ON_DISK_FREE) check_entry(c, i);
    }
    for (i = 0; i < 5; i++)
        EXPECT(states[i] == c->x->counts.states[i], "%llu entries are in state %u, %llu are counted", (unsigned long long)states[i], i,
               (unsigned long long)c->x->counts.states[i]);
    for (i = c->x->free_entry; i != HKV_NIL && length <= states[HKV_ON_DISK_FREE]; i = c->x->entries[i].slot, length++) {
        EXPECT(i < c->x->fresh_entry && c->x->entries[i].state == HKV_ON_DISK_FREE, "entry %u: in the list of free ones", i);
        if (i >= c->x->fresh_entry) break;
    }
    EXPECT(length == states[HKV_ON_DISK_FREE], "the list of free entries has not all that are free");
    for (uint64_t at = 0; at <= c->x->mask; at++) words += c->x->table[at] != 0 && c->x->table[at] != HKV_TOMBSTONE_WORD;
    EXPECT(words == states[HKV_ON_DISK] + states[HKV_ON_DISK_WRITING], "the table has %llu words", (unsigned long long)words);
}

/* Of the list whose links are at that offset of a slab. */
static uint32_t length_of(const struct hkv_directory *d, uint32_t head, size_t links) {
    uint32_t length = 0, prev = HKV_NIL;
    for (uint32_t s = head; s < d->slabs && length <= d->slabs; length++) {
        const struct hkv_links *own = (const struct hkv_links *)((const uint8_t *)&d->slab[s] + links);
        if (own->prev != prev) return HKV_NIL;
        prev = s;
        s = own->next;
    }
    return length;
}

static void check_slab(const struct check *c, const struct hkv_directory *d, uint32_t s) {
    const struct hkv_slab *slab = &d->slab[s];
    uint32_t taken = 0, busy = 0, length = 0, slot;
    for (slot = 0; slot < slab->slots; slot++) {
        uint32_t word = slab->map[slot];
        EXPECT(slot < slab->fresh || word == 0, "slab %u: slot %u was never used, but is in the map", s, slot);
        if (word == 0 || (word & HKV_FREE_SLOT) != 0) continue;
        const struct hkv_index_entry *entry = &c->x->entries[word - 1];
        EXPECT(word <= c->x->fresh_entry && entry->state != HKV_ON_DISK_FREE && entry->slab == d->first_slab + s && entry->slot == slot,
               "slab %u: the entry of slot %u is elsewhere", s, slot);
        taken++;
        busy += hkv_index_busy(entry);
    }
    for (slot = slab->free_head; slot < slab->fresh && length <= slab->slots; slot = (slab->map[slot] & ~HKV_FREE_SLOT) - 1) {
        EXPECT((slab->map[slot] & HKV_FREE_SLOT) != 0, "slab %u: slot %u is in the list of free ones", s, slot);
        length++;
    }
    EXPECT(slab->fresh <= slab->slots && taken + length == slab->fresh, "slab %u: %u slots taken and %u free of %u", s, taken, length,
           slab->fresh);
    EXPECT(taken == slab->taken && busy == slab->busy, "slab %u: %u blocks, %u busy; %u and %u are counted", s, taken, busy, slab->taken,
           slab->busy);
    EXPECT(taken > 0 || d->dropped, "slab %u: has a slot size and no block", s);
    EXPECT(slab->slots == c->x->slab_bytes / c->x->slot_bytes[slab->size], "slab %u: %u slots", s, slab->slots);
}

static void check_directory(const struct check *c, const struct hkv_directory *d, uint32_t slabs_of_size[]) {
    uint32_t free_slabs = 0, busy = 0, kind[HKV_MAX_SLOT_SIZES] = {0}, open[HKV_MAX_SLOT_SIZES] = {0};
    uint64_t used = 0;
    for (uint32_t s = 0; s < d->slabs; s++) {
        const struct hkv_slab *slab = &d->slab[s];
        if (slab->size == HKV_NIL) {
            EXPECT(slab->map == NULL && slab->slots == 0 && slab->taken == 0 && slab->busy == 0, "slab %u: free and in use", s);
            free_slabs++;
            continue;
        }
        check_slab(c, d, s);
        kind[slab->size]++;
        slabs_of_size[slab->size]++;
        open[slab->size] += slab->free_head != HKV_NIL || slab->fresh < slab->slots;
        busy += slab->busy;
        used += slab->taken * c->x->slot_bytes[slab->size];
    }
    EXPECT(length_of(d, d->free_slabs, offsetof(struct hkv_slab, kind)) == free_slabs, "directory %u: its list of free slabs", d->number);
    for (uint32_t n = 0; n < HKV_MAX_SLOT_SIZES; n++) {
        const struct hkv_sized *sized = &d->sized[n];
        EXPECT(length_of(d, sized->slabs, offsetof(struct hkv_slab, kind)) == kind[n], "directory %u: its list of size %u", d->number, n);
        EXPECT(length_of(d, sized->open, offsetof(struct hkv_slab, open)) == open[n], "directory %u: its open list of size %u", d->number,
               n);
        EXPECT(sized->hand == HKV_NIL || d->slab[sized->hand].size == n, "directory %u: the hand of size %u is elsewhere", d->number, n);
    }
    uint32_t blocks = 0;
    for (uint32_t i = 0; i < c->x->fresh_entry; i++) {
        const struct hkv_index_entry *entry = &c->x->entries[i];
        blocks += entry->state == HKV_ON_DISK && entry->slab - d->first_slab < d->slabs;
    }
    EXPECT(busy == d->busy && blocks == d->blocks && used == d->used_bytes, "directory %u: %u busy, %u blocks, %llu bytes are not counted",
           d->number, busy, blocks, (unsigned long long)used);
    EXPECT(!d->dropped || busy > 0, "directory %u: dropped, and nothing of it is busy", d->number);
    EXPECT(!d->dropped || !d->enabled, "directory %u: dropped and enabled", d->number);
}

void hkv_index_check(const struct hkv_index *x, void (*report)(void *context, const char *sentence), void *context) {
    const struct check each = {x, report, context}, *c = &each;
    uint32_t slabs_of_size[HKV_MAX_SLOT_SIZES] = {0};
    check_entries(c);
    for (uint32_t i = 0; i < x->directories; i++) check_directory(c, x->directory[i], slabs_of_size);
    EXPECT(memcmp(slabs_of_size, x->slabs_of_size, sizeof slabs_of_size) == 0, "the slabs of some slot size are not counted");
}
