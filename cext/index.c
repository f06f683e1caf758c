/* The index of what is on disk: layout and the writer's verbs. See index.h.
 *
 * A slab that has a slot size has a map of its slots: 0 where the slot was never used, the number of the entry plus one where it holds a
 * block, HKV_FREE_SLOT where it did. A slab whose last block ends is free again, for any slot size. Maps are untouched memory at first, so
 * what they cost follows what is used of them.
 *
 * Eviction is a clock within a slot size of a directory: its hand passes over what is busy, takes away hit bits, and evicts the first block
 * without one; after STEPS slots the first block that it could have had, so that no call takes long. Where another slot size of the directory
 * has a slab that was not touched for longer than any of this size, all of that slab goes instead. That is looked for once for each slab
 * full of evictions, since it looks at each slab. */
#include "index.h"

#include "hash.h"

#include <stdlib.h>

enum { STEPS = 512, AHEAD = 32, SHIFT = 4 * HKV_MAX_PROBE };

typedef uint64_t __attribute__((may_alias)) word64;

#define STORE(address, value) __atomic_store_n(address, value, __ATOMIC_RELAXED)
#define STORE_RELEASE(address, value) __atomic_store_n(address, value, __ATOMIC_RELEASE)

/* ---- layout ---------------------------------------------------------------------------------------------------------------------- */

static uint64_t whole_pages(uint64_t size) {
    return (size + HKV_PAGE - 1) / HKV_PAGE * HKV_PAGE;
}

void hkv_index_layout(uint64_t max_blocks, struct hkv_index_header *h) {
    memset(h, 0, sizeof *h);
    memcpy(h->magic, HKV_INDEX_MAGIC, sizeof h->magic);
    h->byte_order = HKV_BYTE_ORDER;
    h->entry_bytes = sizeof(struct hkv_index_entry);
    h->max_blocks = max_blocks;
    for (h->table_capacity = 16; 3 * h->table_capacity < 4 * max_blocks;) h->table_capacity *= 2;
    h->table_offset = sizeof *h;
    h->entries_offset = h->table_offset + whole_pages(h->table_capacity * sizeof(uint64_t));
    h->index_bytes = h->entries_offset + whole_pages(max_blocks * sizeof(struct hkv_index_entry));
}

const char *hkv_index_header_differs(const struct hkv_index_header *h) {
    struct hkv_index_header wanted;
    if (memcmp(h->magic, HKV_INDEX_MAGIC, sizeof h->magic) != 0) return "magic";
    if (h->byte_order != HKV_BYTE_ORDER) return "byte_order";
    if (h->entry_bytes != sizeof(struct hkv_index_entry)) return "entry_bytes";
    if (h->max_blocks < 1 || h->max_blocks > HKV_MOST_BLOCKS) return "max_blocks";
    hkv_index_layout(h->max_blocks, &wanted);
    if (h->table_capacity != wanted.table_capacity) return "table_capacity";
    if (h->table_offset != wanted.table_offset) return "table_offset";
    if (h->entries_offset != wanted.entries_offset) return "entries_offset";
    return h->index_bytes != wanted.index_bytes ? "index_bytes" : NULL;
}

uint64_t hkv_record_seal(const struct hkv_record *record, uint32_t slab, uint32_t slot) {
    return hkv_xxh3_64_seeded(record, offsetof(struct hkv_record, seal), (uint64_t)slab << 32 | slot);
}

/* ---- life ------------------------------------------------------------------------------------------------------------------------ */

struct hkv_index *hkv_index_create(uint8_t *memory, uint64_t max_blocks, uint64_t slab_bytes) {
    struct hkv_index *x = calloc(1, sizeof *x);
    if (x == NULL) return NULL;
    hkv_index_layout(max_blocks, &x->fixed);
    x->memory = memory;
    x->table = (uint64_t *)(memory + x->fixed.table_offset);
    x->entries = (struct hkv_index_entry *)(memory + x->fixed.entries_offset);
    x->mask = x->fixed.table_capacity - 1;
    x->max_blocks = max_blocks;
    x->slab_bytes = slab_bytes;
    x->free_entry = HKV_NIL;
    word64 magic;
    memcpy(&magic, HKV_INDEX_MAGIC, sizeof magic);
    memcpy(memory + sizeof magic, (const uint8_t *)&x->fixed + sizeof magic, sizeof x->fixed - sizeof magic);
    STORE_RELEASE((word64 *)memory, magic);
    return x;
}

static void free_directory(struct hkv_directory *d) {
    for (uint32_t s = 0; s < d->slabs; s++) free(d->slab[s].map);
    free(d->slab);
    free(d);
}

void hkv_index_free(struct hkv_index *x) {
    for (uint32_t i = 0; i < x->directories; i++) free_directory(x->directory[i]);
    free(x);
}

uint64_t hkv_index_memory(const struct hkv_index *x) {
    uint64_t sum = x->fixed.index_bytes + sizeof *x;
    for (uint32_t i = 0; i < x->directories; i++) {
        const struct hkv_directory *d = x->directory[i];
        sum += sizeof *d + d->slabs * sizeof *d->slab;
        for (uint32_t s = 0; s < d->slabs; s++)
            if (d->slab[s].map != NULL) sum += d->slab[s].slots * sizeof(uint32_t);
    }
    return sum;
}

/* ---- the table ------------------------------------------------------------------------------------------------------------------- */

/* Where the key's word is, or UINT64_MAX. Where `place` is given: then it holds where one can be inserted, UINT64_MAX for nowhere. */
uint64_t hkv_index_find(const struct hkv_index *x, const uint8_t key[32], uint64_t *place) {
    uint32_t tag = hkv_index_tag(key);
    uint64_t at = tag & x->mask, usable = UINT64_MAX, found = UINT64_MAX;
    for (uint64_t n = 0; n < HKV_MAX_PROBE && n <= x->mask; n++, at = (at + 1) & x->mask) {
        uint64_t word = x->table[at];
        if (word == 0 || word == HKV_TOMBSTONE_WORD) {
            if (usable == UINT64_MAX) usable = at;
            if (word == 0) break;
        } else if (word >> 32 == tag && memcmp(x->entries[(uint32_t)word - 1].key, key, 32) == 0) {
            found = at;
            break;
        }
    }
    if (place != NULL) *place = usable;
    return found;
}

static uint64_t word_of(const struct hkv_index *x, uint32_t number) {
    return (uint64_t)hkv_index_tag(x->entries[number].key) << 32 | (number + 1);
}

/* Where the word of an entry is that has one. */
static uint64_t place_of(const struct hkv_index *x, uint32_t number) {
    uint64_t word = word_of(x, number), at = word >> 32 & x->mask;
    while (x->table[at] != word) at = (at + 1) & x->mask;
    return at;
}

/* Words behind the one that goes move up, each no further than where its search starts. A search passes at most HKV_MAX_PROBE words, so none
 * of those further behind is for this place. Keys chosen to lie in one run could make that long: then a tombstone stays. */
static void remove_word(struct hkv_index *x, uint64_t hole) {
    uint64_t at = hole;
    for (unsigned n = 0; n < SHIFT; n++) {
        at = (at + 1) & x->mask;
        uint64_t word = x->table[at], distance = (at - hole) & x->mask;
        if (word == 0 || distance == 0 || distance >= HKV_MAX_PROBE) {
            STORE(&x->table[hole], 0);
            return;
        }
        if (word == HKV_TOMBSTONE_WORD || ((at - (word >> 32)) & x->mask) < distance) continue;
        STORE_RELEASE(&x->table[hole], word);
        hole = at;
    }
    STORE(&x->table[hole], HKV_TOMBSTONE_WORD);
}

/* ---- slabs ----------------------------------------------------------------------------------------------------------------------- */

#define LINK(d, head, s, links) link_slab(d, head, s, offsetof(struct hkv_slab, links))
#define UNLINK(d, head, s, links) unlink_slab(d, head, s, offsetof(struct hkv_slab, links))

static struct hkv_links *links_of(const struct hkv_directory *d, uint32_t s, size_t links) {
    return (struct hkv_links *)((uint8_t *)&d->slab[s] + links);
}

static void link_slab(struct hkv_directory *d, uint32_t *head, uint32_t s, size_t links) {
    *links_of(d, s, links) = (struct hkv_links){HKV_NIL, *head};
    if (*head != HKV_NIL) links_of(d, *head, links)->prev = s;
    *head = s;
}

static void unlink_slab(struct hkv_directory *d, uint32_t *head, uint32_t s, size_t links) {
    struct hkv_links *own = links_of(d, s, links);
    *(own->prev != HKV_NIL ? &links_of(d, own->prev, links)->next : head) = own->next;
    if (own->next != HKV_NIL) links_of(d, own->next, links)->prev = own->prev;
}

/* Number of a slot size; HKV_NIL: there are too many. */
static uint32_t size_number(struct hkv_index *x, uint64_t slot_bytes) {
    uint32_t unused = HKV_NIL;
    for (uint32_t c = HKV_MAX_SLOT_SIZES; c-- > 0;) {
        if (x->slot_bytes[c] == slot_bytes) return c;
        if (x->slabs_of_size[c] == 0) unused = c;
    }
    if (unused != HKV_NIL) x->slot_bytes[unused] = slot_bytes;
    return unused;
}

static bool is_open(const struct hkv_slab *slab) {
    return slab->free_head != HKV_NIL || slab->fresh < slab->slots;
}

/* False: no memory. */
static bool give_size(struct hkv_index *x, struct hkv_directory *d, uint32_t s, uint32_t c) {
    struct hkv_slab *slab = &d->slab[s];
    slab->slots = (uint32_t)(x->slab_bytes / x->slot_bytes[c]);
    slab->map = calloc(slab->slots, sizeof *slab->map);
    if (slab->map == NULL) return false;
    slab->used = x->sequence;
    slab->size = c;
    UNLINK(d, &d->free_slabs, s, kind);
    LINK(d, &d->sized[c].slabs, s, kind);
    LINK(d, &d->sized[c].open, s, open);
    x->slabs_of_size[c]++;
    return true;
}

static void free_slab(struct hkv_index *x, struct hkv_directory *d, uint32_t s) {
    struct hkv_slab *slab = &d->slab[s];
    struct hkv_sized *sized = &d->sized[slab->size];
    if (sized->hand == s) {
        sized->hand = slab->kind.next;
        sized->hand_slot = 0;
    }
    x->slabs_of_size[slab->size]--;
    UNLINK(d, &sized->slabs, s, kind);
    UNLINK(d, &sized->open, s, open);
    LINK(d, &d->free_slabs, s, kind);
    free(slab->map);
    slab->map = NULL;
    slab->slots = slab->fresh = 0;
    slab->free_head = slab->size = HKV_NIL;
}

static void free_slot(struct hkv_index *x, struct hkv_directory *d, uint32_t s, uint32_t slot) {
    struct hkv_slab *slab = &d->slab[s];
    d->used_bytes -= x->slot_bytes[slab->size];
    slab->taken--;
    if (!is_open(slab)) LINK(d, &d->sized[slab->size].open, s, open);
    slab->map[slot] = HKV_FREE_SLOT | (slab->free_head + 1);
    slab->free_head = slot;
    if (slab->taken == 0 && !d->dropped) free_slab(x, d, s);
}

/* A free slot of an open slab. */
static uint32_t take_slot(struct hkv_index *x, struct hkv_directory *d, uint32_t s, uint32_t entry) {
    struct hkv_slab *slab = &d->slab[s];
    uint32_t slot = slab->free_head;
    if (slot != HKV_NIL) slab->free_head = (slab->map[slot] & ~HKV_FREE_SLOT) - 1;
    else slot = slab->fresh++;
    slab->map[slot] = entry + 1;
    slab->taken++;
    d->used_bytes += x->slot_bytes[slab->size];
    if (!is_open(slab)) UNLINK(d, &d->sized[slab->size].open, s, open);
    return slot;
}

/* ---- entries --------------------------------------------------------------------------------------------------------------------- */

struct hkv_directory *hkv_index_directory_of(const struct hkv_index *x, uint32_t slab) {
    uint32_t i = 0;
    while (slab - x->directory[i]->first_slab >= x->directory[i]->slabs) i++;
    return x->directory[i];
}

static bool has_free_entry(const struct hkv_index *x) {
    return x->free_entry != HKV_NIL || x->fresh_entry < x->max_blocks;
}

static void change(struct hkv_index *x, struct hkv_directory *d, struct hkv_index_entry *entry, uint8_t state, uint16_t readers) {
    struct hkv_slab *slab = &d->slab[entry->slab - d->first_slab];
    bool busy = hkv_index_busy(entry);
    x->counts.states[entry->state]--;
    x->counts.states[state]++;
    d->blocks += (state == HKV_ON_DISK) - (entry->state == HKV_ON_DISK);
    entry->readers = readers;
    STORE_RELEASE(&entry->state, state);
    slab->busy += hkv_index_busy(entry) - busy;
    d->busy += hkv_index_busy(entry) - busy;
}

/* A new entry of that key, which can be found from now on: its word goes where hkv_index_find() said. */
static uint32_t take_entry(struct hkv_index *x, struct hkv_directory *d, uint64_t place, const uint8_t key[32]) {
    uint32_t number = x->free_entry;
    if (number != HKV_NIL) x->free_entry = x->entries[number].slot;
    else x->counts.states[HKV_ON_DISK_FREE]++, number = x->fresh_entry++;
    struct hkv_index_entry *entry = &x->entries[number];
    uint64_t words[4];
    memcpy(words, key, sizeof words);
    /* No reader that came by an old word takes the new key for a block that is whole: it was FREE before. */
    __atomic_thread_fence(__ATOMIC_RELEASE);
    for (int i = 0; i < 4; i++) STORE(&((word64 *)entry->key)[i], words[i]);
    entry->hit = 0;
    STORE_RELEASE(&x->table[place], word_of(x, number));
    return number;
}

static void free_entry(struct hkv_index *x, struct hkv_directory *d, uint32_t number) {
    struct hkv_index_entry *entry = &x->entries[number];
    change(x, d, entry, HKV_ON_DISK_FREE, 0);
    free_slot(x, d, entry->slab - d->first_slab, entry->slot);
    entry->slot = x->free_entry;
    x->free_entry = number;
}

static void forget_directory(struct hkv_index *x, struct hkv_directory *d) {
    for (uint32_t s = 0; s < d->slabs; s++)
        if (d->slab[s].size != HKV_NIL) x->slabs_of_size[d->slab[s].size]--;
    for (uint32_t i = 0; i < x->directories; i++)
        if (x->directory[i] == d) x->directory[i] = x->directory[--x->directories];
    free_directory(d);
}

/* What nobody writes or reads any more, and nobody can find. */
static void end(struct hkv_index *x, struct hkv_directory *d, uint32_t number) {
    free_entry(x, d, number);
    if (d->dropped && d->busy == 0) forget_directory(x, d);
}

/* A block that can be found becomes a miss. It stays where it is for as long as it is written or read. */
static void take_out(struct hkv_index *x, struct hkv_directory *d, uint32_t number) {
    struct hkv_index_entry *entry = &x->entries[number];
    remove_word(x, place_of(x, number));
    if (!hkv_index_busy(entry)) free_entry(x, d, number);
    else change(x, d, entry, entry->state == HKV_ON_DISK ? HKV_ON_DISK_GONE : HKV_ON_DISK_DOOMED, entry->readers);
}

static bool is_found(const struct hkv_index_entry *entry) {
    return entry->state == HKV_ON_DISK || entry->state == HKV_ON_DISK_WRITING;
}

/* All of a slab's blocks. Returns how many were ON_DISK. Where nothing is busy, the slab is free afterwards. */
static uint32_t take_out_all(struct hkv_index *x, struct hkv_directory *d, uint32_t s) {
    const struct hkv_slab *slab = &d->slab[s];
    uint32_t blocks = d->blocks;
    for (uint32_t slot = 0, fresh = slab->fresh; slot < fresh && slab->taken > 0; slot++) {
        uint32_t ahead = slot + AHEAD < fresh ? slab->map[slot + AHEAD] : 0, word = slab->map[slot];
        if (ahead != 0 && (ahead & HKV_FREE_SLOT) == 0) hkv_index_expect(x, x->entries[ahead - 1].key);
        if (word == 0 || (word & HKV_FREE_SLOT) != 0 || !is_found(&x->entries[word - 1])) continue;
        take_out(x, d, word - 1);
    }
    return blocks - d->blocks;
}

/* ---- directories ----------------------------------------------------------------------------------------------------------------- */

uint32_t hkv_index_add_directory(struct hkv_index *x, uint32_t slabs) {
    if (x->directories == HKV_MAX_DIRECTORIES || x->next_slab + slabs < slabs) return HKV_NIL;
    struct hkv_directory *d = calloc(1, sizeof *d);
    if (d == NULL) return HKV_NIL;
    d->slab = calloc(slabs, sizeof *d->slab);
    if (d->slab == NULL) {
        free(d);
        return HKV_NIL;
    }
    d->number = x->next_number++;
    d->first_slab = x->next_slab;
    d->slabs = slabs;
    d->free_slabs = HKV_NIL;
    for (uint32_t c = 0; c < HKV_MAX_SLOT_SIZES; c++) d->sized[c].slabs = d->sized[c].open = d->sized[c].hand = HKV_NIL;
    for (uint32_t s = slabs; s-- > 0;) {
        d->slab[s].free_head = d->slab[s].size = HKV_NIL;
        LINK(d, &d->free_slabs, s, kind);
    }
    x->next_slab += slabs;
    x->directory[x->directories++] = d;
    return d->number;
}

struct hkv_directory *hkv_index_directory(const struct hkv_index *x, uint32_t number) {
    for (uint32_t i = 0; i < x->directories; i++)
        if (x->directory[i]->number == number && !x->directory[i]->dropped) return x->directory[i];
    return NULL;
}

void hkv_index_enable(struct hkv_directory *d, bool on) {
    d->enabled = on;
}

uint32_t hkv_index_drop(struct hkv_index *x, struct hkv_directory *d) {
    uint32_t blocks = d->blocks;
    d->enabled = false;
    d->dropped = true;
    for (uint32_t s = 0; s < d->slabs; s++) take_out_all(x, d, s);
    if (d->busy == 0) forget_directory(x, d);
    return blocks;
}

/* ---- recovery -------------------------------------------------------------------------------------------------------------------- */

static const struct hkv_listed *look_up(const struct hkv_listed *listed, size_t count, uint32_t number) {
    size_t from = 0;
    while (count > 1) {
        size_t half = count / 2;
        if (listed[from + half].number <= number) from += half;
        count -= half;
    }
    return count == 1 && listed[from].number == number ? &listed[from] : NULL;
}

bool hkv_index_load(struct hkv_index *x, struct hkv_directory *d, uint32_t s, const uint8_t *records, size_t bytes,
                    const struct hkv_listed *listed, size_t count, uint32_t *loaded) {
    struct hkv_slab *slab = &d->slab[s];
    uint64_t most = x->slab_bytes / HKV_PAGE, newest = 0;
    uint32_t end = (uint32_t)(bytes / sizeof(struct hkv_record) < most ? bytes / sizeof(struct hkv_record) : most), pages = 0;
    uint8_t *sealed = calloc(end + 1, 1);
    *loaded = 0;
    if (sealed == NULL) return false;
    for (uint32_t n = 0; n < end; n++) {
        struct hkv_record record;
        memcpy(&record, records + n * sizeof record, sizeof record);
        if (record.slot_pages == 0 || hkv_record_seal(&record, s, n) != record.seal) continue;
        sealed[n] = 1;
        if (pages != 0 && record.sequence < newest) continue;
        newest = record.sequence;
        pages = record.slot_pages;
    }
    if (newest > x->sequence) x->sequence = newest;
    uint64_t slot_bytes = (uint64_t)pages * HKV_PAGE;
    uint32_t c = pages == 0 || slot_bytes > x->slab_bytes ? HKV_NIL : size_number(x, slot_bytes), fresh = 0;
    for (uint32_t n = 0; c != HKV_NIL && n < end && n < x->slab_bytes / slot_bytes && has_free_entry(x); n++) {
        struct hkv_record record;
        uint64_t place;
        if (n + AHEAD < end) hkv_index_expect(x, records + (n + AHEAD) * sizeof record);
        memcpy(&record, records + n * sizeof record, sizeof record);
        const struct hkv_listed *space = sealed[n] && record.slot_pages == pages ? look_up(listed, count, record.namespace_number) : NULL;
        if (space == NULL || space->slot_bytes != slot_bytes) continue;
        if (hkv_index_find(x, record.key, &place) != UINT64_MAX || place == UINT64_MAX) continue;
        if (slab->map == NULL && !give_size(x, d, s, c)) {
            free(sealed);
            return false;
        }
        uint32_t number = take_entry(x, d, place, record.key);
        struct hkv_index_entry *entry = &x->entries[number];
        entry->checksum = record.checksum;
        entry->slab = d->first_slab + s;
        entry->slot = n;
        entry->namespace_number = space->namespace_number;
        change(x, d, entry, HKV_ON_DISK, 0);
        slab->map[n] = number + 1;
        slab->taken++;
        fresh = n + 1;
        d->used_bytes += slot_bytes;
        ++*loaded;
    }
    free(sealed);
    if (slab->map == NULL) return true;
    slab->used = newest;
    slab->fresh = fresh;
    for (uint32_t n = fresh; n-- > 0;) {
        if (slab->map[n] != 0) continue;
        slab->map[n] = HKV_FREE_SLOT | (slab->free_head + 1);
        slab->free_head = n;
    }
    if (!is_open(slab)) UNLINK(d, &d->sized[c].open, s, open);
    return true;
}

/* ---- room ------------------------------------------------------------------------------------------------------------------------ */

static void evict_entry(struct hkv_index *x, struct hkv_directory *d, uint32_t number) {
    take_out(x, d, number);
    x->counts.evicted++;
    d->evicted++;
}

static bool turn_hand(struct hkv_index *x, struct hkv_directory *d, struct hkv_sized *sized) {
    uint32_t spare = HKV_NIL;
    for (int n = 0; n < STEPS && sized->slabs != HKV_NIL; n++) {
        if (sized->hand == HKV_NIL) sized->hand = sized->slabs;
        struct hkv_slab *slab = &d->slab[sized->hand];
        if (sized->hand_slot >= slab->fresh) {
            sized->hand = slab->kind.next;
            sized->hand_slot = 0;
            continue;
        }
        uint32_t word = slab->map[sized->hand_slot++];
        if (word == 0 || (word & HKV_FREE_SLOT) != 0) continue;
        struct hkv_index_entry *entry = &x->entries[word - 1];
        if (hkv_index_busy(entry)) continue;
        if (entry->hit == 0) {
            evict_entry(x, d, word - 1);
            return true;
        }
        entry->hit = 0;
        if (spare == HKV_NIL) spare = word - 1;
    }
    if (spare != HKV_NIL) evict_entry(x, d, spare);
    return spare != HKV_NIL;
}

/* Takes the slab of another slot size that was not touched for longest and has nothing busy, if there is one, and if `colder`, it must be
 * colder than all of this size. */
static bool take_back(struct hkv_index *x, struct hkv_directory *d, uint32_t c, bool colder) {
    uint32_t coldest = HKV_NIL;
    uint64_t limit = UINT64_MAX, used = UINT64_MAX;
    for (uint32_t s = 0; s < d->slabs; s++) {
        const struct hkv_slab *slab = &d->slab[s];
        if (slab->size == c) {
            if (slab->used < limit) limit = slab->used;
        } else if (slab->size != HKV_NIL && slab->busy == 0 && slab->used < used) {
            used = slab->used;
            coldest = s;
        }
    }
    if (coldest == HKV_NIL || (colder && used >= limit)) return false;
    uint32_t evicted = take_out_all(x, d, coldest);
    x->counts.evicted += evicted;
    d->evicted += evicted;
    x->counts.slabs_taken_back++;
    return true;
}

static bool make_room(struct hkv_index *x, struct hkv_directory *d, uint32_t c) {
    struct hkv_sized *sized = &d->sized[c];
    if (sized->until_look == 0) {
        sized->until_look = (uint32_t)(x->slab_bytes / x->slot_bytes[c]);
        if (take_back(x, d, c, true)) return true;
    }
    sized->until_look--;
    return turn_hand(x, d, sized) || take_back(x, d, c, false);
}

/* The directory with room for this slot size of which the smallest share is used. */
static struct hkv_directory *emptiest(const struct hkv_index *x, uint32_t c) {
    struct hkv_directory *best = NULL;
    for (uint32_t i = 0; i < x->directories; i++) {
        struct hkv_directory *d = x->directory[i];
        if (!d->enabled || (d->sized[c].open == HKV_NIL && d->free_slabs == HKV_NIL)) continue;
        if (best == NULL || (double)d->used_bytes / d->slabs < (double)best->used_bytes / best->slabs) best = d;
    }
    return best;
}

/* The next directory in turn where room can be made; the turns of each are as many as its slabs. */
static struct hkv_directory *next_in_turn(struct hkv_index *x, uint32_t c) {
    uint64_t tried = 0;
    for (;;) {
        struct hkv_directory *best = NULL;
        uint32_t chosen = 0;
        int64_t total = 0;
        for (uint32_t i = 0; i < x->directories; i++) {
            struct hkv_directory *d = x->directory[i];
            if (!d->enabled) continue;
            total += d->slabs;
            if ((tried >> i & 1) != 0 || (best != NULL && d->credit + d->slabs <= best->credit + best->slabs)) continue;
            best = d;
            chosen = i;
        }
        if (best == NULL) return NULL;
        tried |= UINT64_C(1) << chosen;
        if (!make_room(x, best, c)) continue;
        for (uint32_t i = 0; i < x->directories; i++)
            if (x->directory[i]->enabled) x->directory[i]->credit += x->directory[i]->slabs;
        best->credit -= total;
        return best;
    }
}

/* ---- blocks ---------------------------------------------------------------------------------------------------------------------- */

bool hkv_index_place(struct hkv_index *x, const uint8_t key[32], uint32_t namespace_number, uint64_t slot_bytes, struct hkv_place *out) {
    uint64_t place;
    if (hkv_index_find(x, key, &place) != UINT64_MAX || place == UINT64_MAX) return false;
    uint32_t c = size_number(x, slot_bytes);
    if (c == HKV_NIL) return false;
    struct hkv_directory *d = has_free_entry(x) ? emptiest(x, c) : NULL;
    if (d == NULL) d = next_in_turn(x, c);
    if (d == NULL || (d->sized[c].open == HKV_NIL && !give_size(x, d, d->free_slabs, c))) return false;
    uint32_t s = d->sized[c].open;
    hkv_index_find(x, key, &place); /* evictions move words */
    uint32_t number = take_entry(x, d, place, key);
    struct hkv_index_entry *entry = &x->entries[number];
    entry->slab = d->first_slab + s;
    entry->slot = take_slot(x, d, s, number);
    entry->namespace_number = namespace_number;
    change(x, d, entry, HKV_ON_DISK_WRITING, 0);
    d->slab[s].used = ++x->sequence;
    x->counts.placed++;
    d->placed++;
    *out = (struct hkv_place){.entry = number, .directory = d->number, .slab = s, .slot = entry->slot, .sequence = x->sequence};
    return true;
}

bool hkv_index_settle(struct hkv_index *x, uint32_t number, const uint64_t *checksum) {
    struct hkv_index_entry *entry = &x->entries[number];
    if (number >= x->fresh_entry || (entry->state != HKV_ON_DISK_WRITING && entry->state != HKV_ON_DISK_DOOMED)) return false;
    struct hkv_directory *d = hkv_index_directory_of(x, entry->slab);
    if (checksum == NULL) x->counts.failed++;
    if (entry->state == HKV_ON_DISK_WRITING && checksum != NULL) {
        entry->checksum = *checksum;
        change(x, d, entry, HKV_ON_DISK, 0);
        return true;
    }
    if (entry->state == HKV_ON_DISK_WRITING) remove_word(x, place_of(x, number));
    end(x, d, number);
    return true;
}

/* The block of that key if it is of that namespace, else NULL. */
static struct hkv_index_entry *block_of(const struct hkv_index *x, const uint8_t key[32], uint32_t namespace_number) {
    uint64_t place = hkv_index_find(x, key, NULL);
    if (place == UINT64_MAX) return NULL;
    struct hkv_index_entry *entry = &x->entries[(uint32_t)x->table[place] - 1];
    return entry->namespace_number == namespace_number ? entry : NULL;
}

void hkv_index_hold(const struct hkv_index *x, const uint8_t *keys, size_t count, uint32_t namespace_number, uint8_t *held) {
    for (size_t n = 0; n < count; n++) {
        if (n + AHEAD < count) hkv_index_expect(x, keys + 32 * (n + AHEAD));
        const struct hkv_index_entry *entry = block_of(x, keys + 32 * n, namespace_number);
        held[n] = entry != NULL && entry->state == HKV_ON_DISK;
    }
}

bool hkv_index_open(struct hkv_index *x, const uint8_t key[32], uint32_t namespace_number, struct hkv_place *out) {
    struct hkv_index_entry *entry = block_of(x, key, namespace_number);
    if (entry == NULL || entry->state != HKV_ON_DISK || entry->readers == UINT16_MAX) return false;
    struct hkv_directory *d = hkv_index_directory_of(x, entry->slab);
    change(x, d, entry, HKV_ON_DISK, entry->readers + 1);
    entry->hit = 1;
    d->slab[entry->slab - d->first_slab].used = x->sequence;
    *out = (struct hkv_place){.entry = (uint32_t)(entry - x->entries),
                              .directory = d->number,
                              .slab = entry->slab - d->first_slab,
                              .slot = entry->slot,
                              .checksum = entry->checksum};
    return true;
}

bool hkv_index_close(struct hkv_index *x, uint32_t number, bool keep) {
    struct hkv_index_entry *entry = &x->entries[number];
    if (number >= x->fresh_entry || entry->readers == 0) return false;
    struct hkv_directory *d = hkv_index_directory_of(x, entry->slab);
    if (!keep && entry->state == HKV_ON_DISK) take_out(x, d, number);
    change(x, d, entry, entry->state, entry->readers - 1);
    if (entry->state == HKV_ON_DISK_GONE && entry->readers == 0) end(x, d, number);
    return true;
}

bool hkv_index_remove(struct hkv_index *x, const uint8_t key[32], uint32_t namespace_number) {
    const struct hkv_index_entry *entry = block_of(x, key, namespace_number);
    if (entry == NULL) return false;
    take_out(x, hkv_index_directory_of(x, entry->slab), (uint32_t)(entry - x->entries));
    return true;
}

uint32_t hkv_index_remove_namespace(struct hkv_index *x, uint32_t namespace_number) {
    uint32_t removed = 0;
    for (uint32_t i = 0; i < x->fresh_entry; i++) {
        const struct hkv_index_entry *entry = &x->entries[i];
        if (i + AHEAD < x->fresh_entry && entry[AHEAD].namespace_number == namespace_number) hkv_index_expect(x, entry[AHEAD].key);
        if (entry->namespace_number != namespace_number || !is_found(entry)) continue;
        take_out(x, hkv_index_directory_of(x, entry->slab), i);
        removed++;
    }
    return removed;
}
