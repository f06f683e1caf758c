/* Both I/O engines on a file whose system calls, and whose io_uring completions, are short, interrupted, refused or fail, by a seed: an op
 * ends with exactly the error that was meant for it, the others with exact bytes, whichever are moved together. Compiles the engines with what they call replaced.
 *
 *     io_faults ENGINE FILE SEED OPS [direct] */
#define _GNU_SOURCE
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>
#ifdef HKV_HAVE_LIBURING
#include <liburing.h>
#endif

enum { BLOCK = 4 * 4096, BLOCKS = 64, PAGES = 32, GROUP = 8, STRIDE = 32 << 20, POOL = PAGES / GROUP * STRIDE, RECORD = 64, HALF_A_RECORD = 1000 };

static int fails_with[BLOCKS]; /* an errno, for all transfers of that block; HALF_A_RECORD */
static int slab, records, step; /* transfers are multiples of it */

static uint64_t mixed(uint64_t x) {
    x ^= x >> 33, x *= 0xff51afd7ed558ccdu, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53u;
    return x ^ x >> 33;
}

static _Thread_local uint64_t draws;
static uint64_t seed;
static _Atomic uint64_t threads, together; /* transfers of several blocks */
static uint64_t draw(uint64_t below) {
    if (draws == 0) draws = ++threads << 32;
    return mixed(seed ^ mixed(++draws)) % below;
}

/* 0, with fewer bytes now and then, or the negative errno that this transfer ends with. */
static int fault(uint64_t offset, size_t *bytes, bool ring) {
    static const int passing[] = {-EINTR, -EAGAIN, -EINVAL, -EOPNOTSUPP};
    together += *bytes > BLOCK;
    for (uint64_t block = offset / BLOCK; block * BLOCK < offset + *bytes; block++) {
        int meant = fails_with[block];
        if (meant == 0 || meant == HALF_A_RECORD) continue;
        if (block == offset / BLOCK || draw(2) == 0) return -meant;
        *bytes = block * BLOCK - offset;
    }
    uint64_t what = draw(16);
    if (what < 4 && *bytes > (size_t)step) *bytes = (1 + draw(*bytes / (size_t)step - 1)) * (size_t)step;
    return what >= 12 ? passing[draw(ring ? 4 : 2)] : 0;
}

/* Fewer bytes of the same places. */
static int shorten(struct iovec *parts, int count, size_t bytes) {
    for (int i = 0; i < count; bytes -= parts[i++].iov_len)
        if (bytes <= parts[i].iov_len) {
            parts[i].iov_len = bytes;
            return i + 1;
        }
    return count;
}

static size_t bytes_of(const struct iovec *parts, int count) {
    size_t bytes = 0;
    for (int i = 0; i < count; i++) bytes += parts[i].iov_len;
    return bytes;
}

static ssize_t faulty_preadv2(int fd, struct iovec *parts, int count, off_t offset, int flags) {
    size_t less = bytes_of(parts, count);
    int error = fault((uint64_t)offset, &less, false);
    if (error == 0) return preadv2(fd, parts, shorten(parts, count, less), offset, flags);
    errno = -error;
    return -1;
}

static ssize_t faulty_pwritev2(int fd, struct iovec *parts, int count, off_t offset, int flags) {
    size_t less = bytes_of(parts, count);
    int error = fault((uint64_t)offset, &less, false);
    if (error == 0) return pwritev2(fd, parts, shorten(parts, count, less), offset, flags);
    errno = -error;
    return -1;
}

static ssize_t faulty_pwrite(int fd, const void *data, size_t bytes, off_t offset) {
    assert(fd == records && bytes == RECORD);
    if (fails_with[offset / RECORD] == HALF_A_RECORD) return pwrite(fd, data, bytes / 2, offset);
    if (draw(4) > 0) return pwrite(fd, data, bytes, offset);
    errno = EINTR;
    return -1;
}

#define preadv2 faulty_preadv2
#define pwritev2 faulty_pwritev2
#define pwrite faulty_pwrite
#include "../../cext/io.c"
#include "../../cext/io_threads.c"

#ifdef HKV_HAVE_LIBURING
/* A transfer that is to fail is none: its completion is rewritten. */
enum { MARKED = 256 };
static _Thread_local struct {
    uint64_t data;
    int error;
} marked[MARKED];
static _Thread_local int next_error;

static void faulty_prep(int opcode, struct io_uring_sqe *sqe, int fd, void *memory, unsigned count, uint64_t offset) {
    bool several = opcode == IORING_OP_READV || opcode == IORING_OP_WRITEV || opcode >= 60;
    size_t less = several ? bytes_of(memory, (int)count) : count;
    next_error = fault(offset, &less, true);
    if (next_error != 0) io_uring_prep_nop(sqe);
    else io_uring_prep_rw(opcode, sqe, fd, memory, several ? (unsigned)shorten(memory, (int)count, less) : (unsigned)less, offset);
}

static void faulty_set_data(struct io_uring_sqe *sqe, void *data) {
    io_uring_sqe_set_data(sqe, data);
    for (int i = 0; next_error != 0; i++)
        if (marked[i].data == 0) {
            marked[i].data = (uintptr_t)data, marked[i].error = next_error;
            next_error = 0;
        }
}

static int faulty_peek(struct io_uring *ring, struct io_uring_cqe **done) {
    int error = io_uring_peek_cqe(ring, done);
    for (int i = 0; error == 0 && i < MARKED; i++)
        if (marked[i].data != 0 && marked[i].data == (*done)->user_data) {
            (*done)->res = marked[i].error;
            marked[i].data = 0;
        }
    return error;
}

static int faulty_submit(struct io_uring *ring) {
    return draw(8) == 0 ? -EAGAIN : io_uring_submit(ring);
}

static int faulty_wait(struct io_uring *ring, unsigned count) {
    return draw(8) == 0 ? -EINTR : io_uring_submit_and_wait(ring, count);
}

static int faulty_register(struct io_uring *ring, unsigned piece, const struct iovec *memory, const __u64 *tag, unsigned count) {
    return draw(2) == 0 ? -ENOMEM : io_uring_register_buffers_update_tag(ring, piece, memory, tag, count);
}

static int faulty_init(unsigned entries, struct io_uring *ring, unsigned flags) {
    return draw(4) == 0 ? -EMFILE : io_uring_queue_init(entries, ring, flags);
}

#define io_uring_prep_rw faulty_prep
#define io_uring_sqe_set_data faulty_set_data
#define io_uring_peek_cqe faulty_peek
#define io_uring_submit faulty_submit
#define io_uring_submit_and_wait faulty_wait
#define io_uring_register_buffers_update_tag faulty_register
#define io_uring_queue_init faulty_init
#endif
#include "../../cext/io_uring.c"

static uint8_t content[BLOCKS][BLOCK]; /* what is on disk; where an op failed, what was there before it */
static uint8_t *memory;

int main(int argc, char **argv) {
    assert(argc >= 5);
    const char *engine = argv[1];
    bool direct = argc > 5;
    seed = strtoull(argv[3], NULL, 10);
    step = direct ? 4096 : 1;
    int left = atoi(argv[4]);
    slab = open(argv[2], O_RDWR | O_CREAT | O_TRUNC | (direct ? O_DIRECT : 0), 0600);
    records = memfd_create("records", 0);
    int pool = memfd_create("pool", 0);
    assert(slab >= 0 && pool >= 0 && records >= 0 && ftruncate(pool, POOL) == 0 && ftruncate(slab, sizeof content) == 0);
    memory = mmap(NULL, POOL, PROT_READ | PROT_WRITE, MAP_SHARED, pool, 0);

    struct hkv_io *io;
    char why[HKV_IO_WHY];
    int error;
    do error = hkv_io_open(pool, POOL, engine, 16, 2, &io, why);
    while (error == EMFILE || error == EAGAIN || error == EINTR);
    if (error != 0) {
        printf("%s: %s\n", engine, why);
        return 77;
    }

    static const int errors[] = {EIO, ENOSPC, EDQUOT, EFBIG, EROFS, HALF_A_RECORD};
    struct hkv_io_op flying[PAGES]; /* by page; token: the block plus one, 0: none */
    memset(flying, 0, sizeof flying);
    bool busy[BLOCKS] = {false};
    unsigned failed = 0, good = 0;
    fails_with[7] = EAGAIN; /* without end */
    uint64_t block = 0;
    int kind = HKV_IO_READ;
    for (int under_way = 0; left > 0 || under_way > 0;) {
        for (uint32_t page = 0; page < PAGES; page++) {
            if (draw(4) == 0) block = draw(BLOCKS), kind = (int)draw(2);
            else block = (block + 1) % BLOCKS;
            if (flying[page].token != 0 || busy[block] || left == 0) continue;
            if (block != 7) fails_with[block] = draw(8) == 0 ? errors[draw(6)] : 0;
            struct hkv_io_op op = {.token = block + 1,
                                   .kind = kind,
                                   .fd = slab,
                                   .record_fd = records,
                                   .offset = block * BLOCK,
                                   .at = page / GROUP * (uint64_t)STRIDE + page % GROUP * BLOCK,
                                   .size = BLOCK,
                                   .shard_bytes = BLOCK / 2 - 100,
                                   .shards = 2,
                                   .expects = draw(16) == 0, /* what is not so */
                                   .record_offset = block * RECORD,
                                   .record = {.sequence = draws, .seal = block}};
            if (page >= GROUP) op.at -= BLOCK / 2; /* one lies across 64 MiB */
            if (op.kind == HKV_IO_WRITE)
                for (size_t i = 0; i < BLOCK; i += 8) memcpy(memory + op.at + i, &(uint64_t){draw(UINT64_MAX)}, 8);
            flying[page] = op;
            if (hkv_io_submit(io, &op, 1) == 0) {
                flying[page].token = 0;
                break;
            }
            busy[block] = true;
            under_way++, left--;
        }
        struct hkv_io_done done[8];
        poll(&(struct pollfd){.fd = hkv_io_event(io), .events = POLLIN}, 1, -1);
        size_t count = hkv_io_reap(io, done, 8);
        for (size_t i = 0; i < count; i++) {
            uint32_t page = 0;
            block = done[i].token - 1;
            while (flying[page].token != done[i].token) page++;
            const struct hkv_io_op *op = &flying[page];
            int meant = fails_with[block];
            if (meant == HALF_A_RECORD) meant = op->kind == HKV_IO_WRITE ? ENOSPC : 0;
            if (op->expects && (op->kind == HKV_IO_WRITE || meant == 0)) meant = HKV_IO_CORRUPT;
            if (done[i].result != meant) {
                printf("block %d: %s ended with %d, %d was meant\n", (int)block, op->kind ? "write" : "read", done[i].result, meant);
                return 1;
            }
            uint8_t *bytes = memory + op->at;
            if (op->kind == HKV_IO_WRITE && (meant == 0 || (fails_with[block] == HALF_A_RECORD && !op->expects))) memcpy(content[block], bytes, BLOCK);
            if (meant == 0) assert(memcmp(content[block], bytes, BLOCK) == 0);
            if (meant == 0 && op->kind == HKV_IO_WRITE) {
                struct hkv_record record = op->record, found;
                record.checksum = done[i].checksum;
                struct hkv_xxh3 sum;
                hkv_xxh3_start(&sum, record.seal);
                hkv_xxh3_add(&sum, &record, offsetof(struct hkv_record, seal));
                record.seal = hkv_xxh3_end(&sum);
                assert(pread(records, &found, sizeof found, (off_t)(block * RECORD)) == RECORD && memcmp(&found, &record, RECORD) == 0);
            }
            meant == 0 ? good++ : failed++;
            flying[page].token = 0;
            busy[block] = false;
            under_way--;
        }
    }
    hkv_io_close(io);
    hkv_io_free(io);
    static _Alignas(4096) uint8_t found[BLOCK];
    for (off_t each = 0; each < BLOCKS; each++)
        assert(pread(slab, found, BLOCK, each * BLOCK) == BLOCK && memcmp(found, content[each], BLOCK) == 0);
    printf("%s: %u ops as they should be, %u failed as they should, %d transfers of several\n", engine, good, failed, (int)together);
    return good == 0 || failed == 0 || together == 0 || together > good + failed;
}
