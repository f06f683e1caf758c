/* Stops a reader after every single instruction of a lookup, lets the writer work, and lets the reader go on: whatever it was in the middle
 * of, it must neither find a block that was never READY nor miss one that always was.
 *
 * usage: step_reader reuse|move
 *   reuse: the entry it looks at passes from a READY block to another one that is being written, which it must not find
 *   move: the block it looks for moves to where the search has already been, and its place is emptied
 * Prints: stops wrong. Built and run by test_stopped_anywhere.py. */
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

enum { PAGE = 4096, SOUGHT = 0, OTHER = 1, FILL = 2 };

static struct hkv_tables *tables;

static const uint8_t *key(unsigned n) {
    static uint8_t bytes[32];
    memset(bytes, (int)n, 32);
    memset(bytes, 0, 8); /* every search starts at entry 0 */
    return bytes;
}

static uint64_t reserve(uint32_t namespace_index, unsigned n) {
    uint32_t page;
    uint64_t generation = 0;
    hkv_reserve(tables, namespace_index, 0, 1, key(n), 0, false, &page, &generation);
    return generation;
}

static void save(uint32_t namespace_index, unsigned n) {
    uint64_t generation = reserve(namespace_index, n);
    hkv_commit(tables, 0, 1, key(n), 0, generation, 0);
}

static void before(bool move) {
    if (!move) {
        save(0, OTHER);
        return;
    }
    for (unsigned n = 0; n < 10; n++) save(1, FILL + n);
    save(0, SOUGHT);
    hkv_clear(tables, 1);
}

static void meanwhile(bool move) {
    if (!move) {
        hkv_clear(tables, 0);
        reserve(0, SOUGHT);
        return;
    }
    reserve(2, 40); /* finds many tombstones, and moves the block into the first of them */
    reserve(2, 41);
}

int main(int argc, char **argv) {
    const struct hkv_geometry geometry = {64 * PAGE, 16 * PAGE, 16, 12, 12, 4, 4};
    const uint8_t instance[16] = {0};
    bool move = strcmp(argv[argc - 1], "move") == 0;
    struct hkv_header layout;
    hkv_layout(&geometry, &layout);
    uint8_t *memory = mmap(NULL, layout.tables_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint8_t *found = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    unsigned wrong = 0, stops = 0;
    for (bool ended = false; !ended; stops++) {
        memset(memory, 0, layout.tables_bytes);
        tables = hkv_tables_create(memory, &layout, instance, false);
        struct hkv_member member = {.session = 1};
        hkv_member_add(tables, &member);
        for (unsigned n = 0; n < 3; n++) {
            struct hkv_namespace each = {.shards = 1, .shard_bytes = PAGE, .slot_bytes = PAGE, .fingerprint = {(uint8_t)n}};
            hkv_namespace_add(tables, &each);
        }
        before(move);
        found[1] = false;
        int status;
        pid_t child = fork();
        if (child == 0) {
            if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) < 0) _exit(1);
            raise(SIGSTOP);
            hkv_lookup(&tables->reader, 0, key(SOUGHT), 1, found);
            found[1] = true;
            _exit(0);
        }
        waitpid(child, &status, 0);
        for (unsigned n = 0; n < stops && WIFSTOPPED(status); n++) {
            if (ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) < 0) return 1;
            waitpid(child, &status, 0);
        }
        ended = !WIFSTOPPED(status) || found[1]; /* it has its answer */
        if (WIFSTOPPED(status)) {
            if (!ended) meanwhile(move);
            if (!ended && move && tables->counts.moved != 1) return 2;
            if (ptrace(PTRACE_CONT, child, NULL, NULL) < 0) return 1;
            waitpid(child, &status, 0);
        }
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) return 1;
        if (!ended && *found != move) wrong++;
        hkv_tables_free(tables);
    }
    printf("%u %u\n", stops, wrong);
    return 0;
}
