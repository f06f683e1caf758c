/* Kills the tables' writer after every single instruction, as it were: a child runs verbs on shared tables, its parent steps it one
 * instruction at a time, and whenever a byte of the tables has changed, adopts a copy of them as a new sidecar would, once with all
 * members alive and once with one dead. Every invariant must hold in each copy, nothing in it may be bad, no block may be READY whose checksum is
 * not that of its shards, no pin may be gone, and the two blocks pinned before must be there.
 *
 * usage: step_writer SEED [repair]
 *   repair: the verbs are done, then a writer died in an entry with a shard in flight, and what is killed is the repair
 * Prints: instructions states complaints moved evicted extents_taken_back. Built and run by test_stopped_anywhere.py. */
#define _GNU_SOURCE
#include "tables.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

enum { KEYS = 64, PAGE = 4096, A = 0, B = 1, ONE = 0, TWO = 1, BIG = 2, PINNED_TAG = 7 };

static struct hkv_tables *tables;
static const uint8_t instance[16];
static uint8_t keys[KEYS][32];
static uint64_t generations[KEYS], instructions, random_state;
static int complaints;

static void complain(void *context, const char *sentence) {
    if (complaints++ < 10) fprintf(stderr, "after instruction %llu: %s\n", (unsigned long long)instructions, sentence);
}

static unsigned pick(unsigned below) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(random_state >> 33) % below;
}

/* What each shard's bytes would have: an unfinished set of them never XORs to that of the whole block. */
static uint64_t checksum_of(unsigned k, uint32_t shard) {
    return (k + 1) * UINT64_C(0x9e3779b97f4a7c15) << shard;
}

static uint8_t commit(uint32_t member, uint64_t tag, unsigned k, uint32_t shard) {
    return hkv_commit(tables, member, tag, keys[k], shard, generations[k], checksum_of(k, shard));
}

static uint8_t reserve(uint32_t namespace_index, uint32_t member, uint64_t tag, unsigned k, uint32_t shard) {
    uint32_t page;
    return hkv_reserve(tables, namespace_index, member, tag, keys[k], shard, k % 5 == 0, &page, &generations[k]);
}

static void save(uint32_t namespace_index, unsigned k) {
    for (uint32_t shard = 0; shard < tables->namespaces[namespace_index].shards; shard++)
        if (reserve(namespace_index, A, 9, k, shard) == HKV_OK) commit(A, 9, k, shard);
}

static uint32_t acquire(uint32_t namespace_index, uint32_t session, uint64_t tag, uint32_t head, unsigned from, unsigned to) {
    uint64_t generation, mark = hkv_acquire_begin(tables, head);
    uint32_t page;
    for (unsigned k = from; k < to; k++) hkv_acquire(tables, namespace_index, session, tag, mark, keys[k], &head, &page, &generation);
    return head;
}

/* A block partly written and completed by another member, a chain that grows, blocks doomed in use, every way to make room, tombstones
 * with blocks moved into them, members and namespaces that come and go. */
static void verbs(void) {
    reserve(TWO, A, 1, 20, 0);
    reserve(TWO, B, 1, 20, 1);
    commit(A, 1, 20, 0);
    hkv_abort(tables, B, (uint64_t[]){1}, 1);
    reserve(TWO, B, 2, 20, 1);
    commit(B, 2, 20, 1);
    hkv_discard(tables, TWO, keys[20], generations[20]);
    for (unsigned k = 4; k < 16; k++) save(ONE, k);
    uint32_t head = acquire(ONE, 2, 5, HKV_NIL, 8, 11);
    head = acquire(ONE, 2, 5, head, 9, 12);
    reserve(ONE, B, 3, 30, 0);
    for (unsigned k = 10; k < 13; k++) hkv_discard(tables, ONE, keys[k], generations[k]); /* pinned, pinned, idle */
    hkv_clear(tables, ONE);
    save(BIG, 40);
    save(BIG, 41);
    if (head != HKV_NIL) hkv_release(tables, head);
    hkv_abort(tables, B, (uint64_t[]){3}, 1);
    for (unsigned k = 42; k < 50; k++) save(TWO, k);
    struct hkv_namespace tiny = {.shards = 1, .shard_bytes = 100, .slot_bytes = PAGE, .fingerprint = "tiny"};
    uint32_t fourth = hkv_namespace_add(tables, &tiny);
    for (int round = 0; round < 8; round++) {
        hkv_clear(tables, fourth);
        hkv_clear(tables, ONE);
        hkv_clear(tables, BIG);
        unsigned first = pick(50);
        for (unsigned k = 0; k < 10; k++) save(k % 5 == 4 ? TWO : fourth, 2 + (first + k) % 60);
        save(TWO, 2 + pick(60));
        hkv_clear(tables, fourth);
        save(pick(2) ? TWO : BIG, 2 + pick(60));
        reserve(TWO, B, pick(3), 2 + pick(60), pick(2));
        if (pick(2)) hkv_abort(tables, B, (uint64_t[]){pick(3)}, 1);
    }
    hkv_member_remove(tables, B);
    struct hkv_member late = {.session = 3, .client_id = {3}, .session_id = {3}, .lock_name = {1}};
    hkv_member_add(tables, &late);
}

static void complain_about_checksums(const struct hkv_tables *next) {
    for (uint64_t i = 0; i <= next->mask; i++) {
        const struct hkv_block *block = &next->blocks[i];
        uint64_t sum = 0;
        if (!hkv_is_live(block) || (block->flags & HKV_DOOMED)) continue; /* nobody will find what is doomed */
        for (uint32_t shard = 0; shard < block->shards; shard++)
            if (next->aux[i].shards_done >> shard & 1) sum ^= checksum_of(block->key[31], shard);
        if (sum != block->checksum) complain(NULL, "a checksum is not that of the committed shards");
    }
}

static bool verify_after; /* whether adoption wants checksums of payload */

static void adopt(uint8_t *copy, const struct hkv_header *fixed, size_t dead) {
    const uint32_t dead_member = B;
    struct hkv_chain *chains;
    size_t count;
    uint8_t found[2];
    struct hkv_tables *next = hkv_tables_adopt(copy, fixed, instance, verify_after);
    uint64_t pins = 0;
    for (uint64_t p = 0; p < fixed->pin_capacity; p++) pins += next->pins[p].used;
    hkv_tables_repair(next, &dead_member, dead, &chains, &count);
    if (dead == 0 && next->counts.pins != pins) complain(NULL, "a pin is gone whose session lives");
    hkv_tables_check(next, complain, NULL);
    if (verify_after) complain_about_checksums(next); /* else the check above looks at the seals */
    if (next->counts.bad_blocks + next->counts.bad_records > 0) complain(NULL, "what a crash left was taken for bad");
    hkv_lookup(&next->reader, TWO, keys[0], 2, found);
    if (!found[0] || !found[1]) complain(NULL, "a pinned block is gone");
    if (count < 1 || chains[0].tag != PINNED_TAG || hkv_release(next, chains[0].head) != 2) complain(NULL, "pins are gone");
    hkv_tables_check(next, complain, NULL);
    free(chains);
    hkv_tables_free(next);
}

static void add_namespace(const char *name, uint32_t shards, uint64_t shard_bytes) {
    struct hkv_namespace each = {.shards = shards, .shard_bytes = shard_bytes, .slot_bytes = hkv_slot_bytes(shard_bytes, shards)};
    snprintf((char *)each.fingerprint, sizeof each.fingerprint, "%s", name);
    hkv_namespace_add(tables, &each);
}

/* SEED writer|repair VERIFY VERIFY_AFTER: which of the two is run, and whether entries hold checksums of payload before and after (0, 1). */
int main(int argc, char **argv) {
    const struct hkv_geometry geometry = {54 * PAGE, 16 * PAGE, 16, 12, 12, 4, 4};
    struct hkv_header layout;
    hkv_layout(&geometry, &layout);
    size_t size = layout.tables_bytes;
    uint8_t *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint8_t *last = malloc(size), *copy = aligned_alloc(PAGE, size);
    struct hkv_counts *counts = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (argc != 5) return 2;
    random_state = strtoull(argv[1], NULL, 10);
    const bool repair = strcmp(argv[2], "repair") == 0;
    verify_after = argv[4][0] == '1';
    for (unsigned k = 0; k < KEYS; k++) {
        memset(keys[k], (int)k, 32);
        memset(keys[k], 0, 8);
        keys[k][0] = k % 3 ? 30 : 31; /* searches run into each other and over the end of the table */
    }
    tables = hkv_tables_create(memory, &layout, instance, argv[3][0] == '1');
    tables->keeps_reused = true;
    for (uint32_t session = 1; session <= 2; session++) {
        struct hkv_member member = {
            .session = session, .client_id = {(uint8_t)session}, .session_id = {(uint8_t)session}, .lock_name = {1}};
        hkv_member_add(tables, &member);
    }
    add_namespace("one", 1, 2 * PAGE);
    add_namespace("two", 2, 2 * PAGE);
    add_namespace("big", 1, 8 * PAGE);
    save(TWO, 0);
    save(TWO, 1);
    acquire(TWO, 1, PINNED_TAG, HKV_NIL, 0, 2);

    struct hkv_header fixed = tables->fixed;
    if (repair) {
        verbs();
        reserve(TWO, B, 1, 60, 0);
        reserve(TWO, A, 1, 60, 1);
        reserve(ONE, B, 1, 61, 0);
        tables->blocks[hkv_find(tables, keys[60], NULL)].seq++;
    }
    int status;
    pid_t child = fork();
    if (child == 0) {
        struct hkv_chain *chains;
        size_t count;
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) < 0) _exit(1);
        raise(SIGSTOP);
        if (repair) hkv_tables_repair(hkv_tables_adopt(memory, &fixed, instance, verify_after), NULL, 0, &chains, &count);
        else verbs();
        *counts = tables->counts;
        _exit(0);
    }
    uint64_t states = 0;
    memset(last, 0, size);
    for (waitpid(child, &status, 0); WIFSTOPPED(status); waitpid(child, &status, 0), instructions++) {
        if (memcmp(last, memory, size) != 0) {
            memcpy(last, memory, size);
            states++;
            for (size_t dead = 0; dead < 2; dead++) {
                memcpy(copy, last, size);
                adopt(copy, &fixed, dead);
            }
        }
        if (ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) < 0) return 1;
    }
    printf("%llu %llu %d %llu %llu %llu\n", (unsigned long long)instructions, (unsigned long long)states, complaints,
           (unsigned long long)counts->moved, (unsigned long long)counts->evicted, (unsigned long long)counts->extents_taken_back);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
