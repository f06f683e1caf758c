/* What both I/O engines share: devices, their queues and workers, checksums, records, completions.
 *
 * An op goes from submit() into the queue of the device that its file is on. A worker of that device takes it as soon as fewer transfers
 * than the device's depth are under way (io_depth.c), hashes what is to be written, moves the bytes between the file and the mapping,
 * hashes what was read, writes the record of what was written, and puts the op on the list that reap() empties. The caller of submit() and
 * reap() never waits for a device: it takes mutexes that are held for a few list operations.
 *
 * Ops that would have to wait, and whose bytes follow one another in one file, are moved together: one transfer, with a place in memory for
 * each. All else is each op's own: checksum, record, result. Those that such a transfer does not move whole go back to the queue, and each
 * is moved by itself, so whatever failed is met again by exactly the op that it is about.
 *
 * A device has queue, workers and depth of its own, and a bound of its own on what it holds, so one that hangs holds up nobody else. Workers
 * are started as they are needed and live until close(); they block all signals, and depend on nothing of the thread that started them.
 *
 * When the process is killed, the kernel goes on with the transfers that a device has in hand, and keeps what they need: pages of the
 * mapping, and the open file description of the slab. With io_uring the requests hold the description until each is done; a thread in a
 * system call ends only when the call does. An flock on that description is therefore free only once nothing can write into the mapping or
 * the file on behalf of the dead process, which is what the next sidecar waits for. Close-on-exec keeps the description out of children. */
#define _GNU_SOURCE
#include "io.h"
#include "hash.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

enum {
    RETRIES = 100,           /* in a row, of one transfer that the kernel asks to try again; HKV_IO_RETRY_NS apart */
    MOST_BYTES = 1 << 30,    /* of one transfer */
    STACK_BYTES = 256 << 10, /* enough for a system call, and for what libraries of the process keep per thread on the stack */
    SEALED_BYTES = offsetof(struct hkv_record, seal),
};

struct hkv_io_device {
    struct hkv_io *io;
    uint64_t number; /* st_dev */
    pthread_mutex_t mutex;
    struct hkv_io_op *ops, *free; /* all there are; those that hold nothing */
    struct hkv_io_op *first, **last;
    unsigned queued, flying;
    struct hkv_depth depth;
    struct hkv_io_worker *workers;
    unsigned started;
    bool closing;
};

struct hkv_io {
    uint8_t *memory;
    size_t size;
    bool uring;
    unsigned depth, workers;
    struct hkv_io_device *devices[HKV_IO_DEVICES];
    size_t device_count;
    pthread_mutex_t mutex; /* of the list of what is done */
    struct hkv_io_op *first, **last;
    int event;
};

/* ---- completions --------------------------------------------------------------------------------------------------------------- */

static void hand_over(struct hkv_io *io, struct hkv_io_op *op) {
    op->next = NULL;
    pthread_mutex_lock(&io->mutex);
    bool first = io->first == NULL;
    *io->last = op;
    io->last = &op->next;
    if (first) eventfd_write(io->event, 1);
    pthread_mutex_unlock(&io->mutex);
}

size_t hkv_io_reap(struct hkv_io *io, struct hkv_io_done *done, size_t most) {
    pthread_mutex_lock(&io->mutex);
    struct hkv_io_op *ended = io->first, *rest = ended;
    size_t count = 0;
    for (; rest != NULL && count < most; rest = rest->next, count++)
        done[count] = (struct hkv_io_done){.token = rest->token, .checksum = rest->sum, .result = rest->result};
    io->first = rest;
    if (rest == NULL) {
        eventfd_t ignored;
        io->last = &io->first;
        eventfd_read(io->event, &ignored);
    }
    pthread_mutex_unlock(&io->mutex);
    for (struct hkv_io_op *op = ended, *next; op != rest; op = next) {
        struct hkv_io_device *device = op->device;
        next = op->next;
        pthread_mutex_lock(&device->mutex);
        op->next = device->free;
        device->free = op;
        pthread_mutex_unlock(&device->mutex);
    }
    return count;
}

/* ---- workers ------------------------------------------------------------------------------------------------------------------- */

static void *work(void *argument) {
    struct hkv_io_worker *worker = argument;
    pthread_setname_np(pthread_self(), "hostkv-io");
    if (worker->device->io->uring) hkv_io_run_uring(worker);
    else hkv_io_run_threads(worker);
    return NULL;
}

static unsigned most_workers(const struct hkv_io *io) {
    return io->uring ? io->workers : io->depth + io->workers;
}

/* With io_uring each worker has its share of the depth, so that all of them hash. */
static unsigned share(const struct hkv_io_device *device, unsigned depth) {
    return device->io->uring ? (depth + device->io->workers - 1) / device->io->workers : 1;
}

static bool has_share(const struct hkv_io_worker *worker) {
    return worker->flying < share(worker->device, worker->device->depth.now);
}

static void drop_worker(struct hkv_io_worker *worker) {
    pthread_cond_destroy(&worker->wake);
    if (worker->wake_fd >= 0) close(worker->wake_fd);
}

static int start_worker(struct hkv_io_device *device) {
    struct hkv_io_worker *worker = &device->workers[device->started];
    pthread_attr_t attributes;
    sigset_t all, before;
    *worker = (struct hkv_io_worker){.device = device,
                                     .memory = device->io->memory,
                                     .size = device->io->size,
                                     .wake_fd = -1,
                                     .most = share(device, device->depth.most),
                                     .scatters = !device->io->uring};
    if (device->io->uring && (worker->wake_fd = eventfd(0, EFD_CLOEXEC)) < 0) return errno;
    pthread_cond_init(&worker->wake, NULL);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&worker->thread, &attributes, work, worker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (error == 0) device->started++;
    else drop_worker(worker);
    return error;
}

/* As many as there is work for: with threads one for each transfer that may be under way, and those that hash meanwhile. An errno where
 * there is none at all. */
static int start_workers(struct hkv_io_device *device) {
    unsigned most = device->io->uring ? device->io->workers : device->depth.now + device->io->workers, idle = 0;
    for (unsigned i = 0; i < device->started; i++) idle += device->workers[i].idle;
    int error = 0;
    for (; error == 0 && device->started < most && idle < device->queued; idle++) error = start_worker(device);
    return device->started == 0 ? error : 0;
}

static void wake(struct hkv_io_worker *worker) {
    worker->idle = false;
    if (worker->wake_fd >= 0) eventfd_write(worker->wake_fd, 1);
    else pthread_cond_signal(&worker->wake);
}

/* A worker that wanted a ring and got none has an eventfd all the same. */
static void sleep_until_woken(struct hkv_io_worker *worker) {
    eventfd_t ignored;
    if (worker->wake_fd < 0) {
        pthread_cond_wait(&worker->wake, &worker->device->mutex);
        return;
    }
    pthread_mutex_unlock(&worker->device->mutex);
    eventfd_read(worker->wake_fd, &ignored);
    pthread_mutex_lock(&worker->device->mutex);
}

static void wake_workers(struct hkv_io_device *device) {
    unsigned room = device->depth.now > device->flying ? device->depth.now - device->flying : 0;
    unsigned wanted = device->queued < room ? device->queued : room;
    for (unsigned i = 0; wanted > 0 && i < device->started; i++)
        if (device->workers[i].idle) {
            wake(&device->workers[i]);
            wanted--;
        }
}

static struct hkv_io_op *take_first(struct hkv_io_device *device) {
    struct hkv_io_op *op = device->first;
    device->first = op->next;
    if (--device->queued == 0) device->last = &device->first;
    op->next = NULL;
    return op;
}

static bool goes_with(const struct hkv_io_worker *worker, const struct hkv_io_op *op, const struct hkv_io_op *next) {
    if (op->alone || next->alone || next->kind != op->kind || next->fd != op->fd || next->offset != op->offset + op->size) return false;
    const struct hkv_io_op *low = op->at < next->at ? op : next, *high = low == op ? next : op;
    if (low->at / HKV_IO_PIECE != (high->at + high->size - 1) / HKV_IO_PIECE) return false;
    return worker->scatters || next->at == op->at + op->size;
}

/* What is queued is shared out among the transfers that may begin now: it is moved together only where it would have to wait. */
static void take_run(const struct hkv_io_worker *worker, struct hkv_io_op *op, unsigned room) {
    struct hkv_io_device *device = worker->device;
    unsigned most = (device->queued + room) / room;
    uint64_t bytes = op->size;
    if (most > HKV_IO_RUN) most = HKV_IO_RUN;
    for (unsigned count = 1; count < most && device->queued > 0 && goes_with(worker, op, device->first); count++) {
        bytes += device->first->size;
        if (bytes > HKV_IO_RUN_BYTES) return;
        op = op->with = take_first(device);
    }
}

struct hkv_io_op *hkv_io_take(struct hkv_io_worker *worker, bool wait) {
    struct hkv_io_device *device = worker->device;
    struct hkv_io_op *op = NULL;
    pthread_mutex_lock(&device->mutex);
    while (device->queued == 0 || device->flying >= device->depth.now || !has_share(worker)) {
        worker->idle = has_share(worker);
        if (!wait || device->closing) goto done;
        sleep_until_woken(worker);
    }
    worker->idle = false;
    op = take_first(device);
    take_run(worker, op, device->depth.now - device->flying);
    device->flying++;
    worker->flying++;
done:
    pthread_mutex_unlock(&device->mutex);
    return op;
}

bool hkv_io_closing(struct hkv_io_worker *worker) {
    pthread_mutex_lock(&worker->device->mutex);
    bool closing = worker->device->closing;
    pthread_mutex_unlock(&worker->device->mutex);
    return closing;
}

/* ---- the steps of an op -------------------------------------------------------------------------------------------------------- */

unsigned hkv_io_parts(struct hkv_io_op *first) {
    struct iovec *part = first->parts;
    unsigned count = 0;
    for (struct hkv_io_op *op = first; op != NULL; op = op->with) {
        uint8_t *memory = op->device->io->memory + op->at + op->moved;
        size_t bytes = op->size - op->moved < MOST_BYTES ? op->size - op->moved : MOST_BYTES;
        if (count > 0 && (uint8_t *)part[count - 1].iov_base + part[count - 1].iov_len == memory) part[count - 1].iov_len += bytes;
        else part[count++] = (struct iovec){.iov_base = memory, .iov_len = bytes};
    }
    return count;
}

static uint64_t payload_checksum(const struct hkv_io_op *op) {
    const uint8_t *block = op->device->io->memory + op->at;
    uint64_t stride = (op->shard_bytes + HKV_SHARD_ALIGN - 1) / HKV_SHARD_ALIGN * HKV_SHARD_ALIGN, all = 0;
    for (uint32_t shard = 0; shard < op->shards; shard++) {
        struct hkv_xxh3 sum;
        hkv_xxh3_start(&sum, shard);
        hkv_xxh3_add(&sum, block + shard * stride, op->shard_bytes);
        all ^= hkv_xxh3_end(&sum);
    }
    return all;
}

static bool sum_payload(struct hkv_io_op *op) {
    op->sum = payload_checksum(op);
    if (op->expects && op->sum != op->checksum) op->result = HKV_IO_CORRUPT;
    return op->result == 0;
}

bool hkv_io_check(struct hkv_io_op *op) {
    for (; op != NULL && op->kind == HKV_IO_WRITE; op = op->with)
        if (!sum_payload(op)) return false;
    return true;
}

bool hkv_io_moved(struct hkv_io_op *op, int64_t moved) {
    if (op->with != NULL) { /* what was not moved whole meets its own error by itself */
        for (; op != NULL && moved > 0; op = op->with) {
            op->moved = (uint64_t)moved < op->size ? (uint64_t)moved : op->size;
            moved -= (int64_t)op->moved;
        }
        return false;
    }
    if (moved > 0) {
        op->moved += (uint64_t)moved;
        op->retries = 0;
        return op->moved < op->size;
    }
    int error = moved == 0 ? EIO : (int)-moved; /* 0: the file ends before */
    if ((error == EINTR || error == EAGAIN) && op->retries++ < RETRIES) {
        if (error == EAGAIN) nanosleep(&(struct timespec){.tv_nsec = HKV_IO_RETRY_NS}, NULL);
        return true;
    }
    if (error == EINVAL && op->moved % HKV_PAGE != 0) error = EIO; /* O_DIRECT says so where the file ended inside of a page */
    op->result = error;
    return false;
}

struct hkv_io_op *hkv_io_landed(struct hkv_io_worker *worker, struct hkv_io_op *op) {
    struct hkv_io_device *device = worker->device;
    struct hkv_io_op *ended = NULL, **last = &ended, **place = &device->first;
    uint64_t bytes = 0;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    pthread_mutex_lock(&device->mutex);
    device->flying--;
    worker->flying--;
    for (struct hkv_io_op *with; op != NULL; op = with) {
        with = op->with;
        op->with = NULL;
        bytes += op->moved;
        if (op->result != 0 || op->moved == op->size) {
            op->next = NULL;
            *last = op;
            last = &op->next;
            continue;
        }
        op->alone = true; /* back to the front of the queue */
        op->next = *place;
        *place = op;
        place = &op->next;
        if (op->next == NULL) device->last = place;
        device->queued++;
    }
    hkv_depth_ended(&device->depth, bytes, (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec, device->queued > 0);
    start_workers(device); /* those that a greater depth asks for */
    wake_workers(device);
    pthread_mutex_unlock(&device->mutex);
    return ended;
}

static void write_record(struct hkv_io_op *op) {
    struct hkv_xxh3 sum;
    op->record.checksum = op->sum;
    hkv_xxh3_start(&sum, op->record.seal);
    hkv_xxh3_add(&sum, &op->record, SEALED_BYTES);
    op->record.seal = hkv_xxh3_end(&sum);
    ssize_t written;
    do written = pwrite(op->record_fd, &op->record, sizeof op->record, (off_t)op->record_offset);
    while (written < 0 && errno == EINTR);
    /* Half a record has no right seal: it is none. */
    if (written != (ssize_t)sizeof op->record) op->result = written < 0 ? errno : ENOSPC;
}

void hkv_io_finish(struct hkv_io_op *op) {
    if (op->result == 0 && op->kind == HKV_IO_READ) sum_payload(op);
    else if (op->result == 0 && op->record_fd >= 0) write_record(op);
    hand_over(op->device->io, op);
}

/* ---- devices ------------------------------------------------------------------------------------------------------------------- */

static void free_device(struct hkv_io_device *device) {
    for (unsigned i = 0; i < device->started; i++) drop_worker(&device->workers[i]);
    pthread_mutex_destroy(&device->mutex);
    free(device->ops);
    free(device->workers);
    free(device);
}

static struct hkv_io_device *new_device(struct hkv_io *io, uint64_t number) {
    size_t held = (size_t)io->depth * HKV_IO_QUEUE;
    struct hkv_io_device *device = calloc(1, sizeof *device);
    if (device == NULL) return NULL;
    *device = (struct hkv_io_device){.io = io, .number = number, .last = &device->first};
    pthread_mutex_init(&device->mutex, NULL);
    hkv_depth_start(&device->depth, io->depth);
    device->ops = calloc(held, sizeof *device->ops);
    device->workers = calloc(most_workers(io), sizeof *device->workers);
    if (device->ops == NULL || device->workers == NULL) {
        free_device(device);
        return NULL;
    }
    for (size_t i = held; i > 0; i--) {
        device->ops[i - 1].next = device->free;
        device->free = &device->ops[i - 1];
    }
    return device;
}

/* What the file system has in memory is enough to name the device; asking it for more could wait for a server that hangs. */
static struct hkv_io_device *device_of(struct hkv_io *io, int fd, int *error) {
    struct statx file;
    uint64_t number = 0;
    *error = statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, 0, &file) < 0 ? errno : 0;
    if (*error == 0) number = makedev(file.stx_dev_major, file.stx_dev_minor);
    for (size_t i = 0; i < io->device_count; i++)
        if (io->devices[i]->number == number || i + 1 == HKV_IO_DEVICES) return io->devices[i];
    struct hkv_io_device *device = new_device(io, number);
    if (device != NULL) io->devices[io->device_count++] = device;
    return device;
}

/* An errno where the device has no worker and gets none: the queue is empty then. */
static int enqueue(struct hkv_io_device *device, struct hkv_io_op *op) {
    op->next = NULL;
    *device->last = op;
    device->last = &op->next;
    device->queued++;
    int error = start_workers(device);
    if (error == 0) {
        wake_workers(device);
        return 0;
    }
    device->first = NULL;
    device->last = &device->first;
    device->queued = 0;
    return error;
}

size_t hkv_io_submit(struct hkv_io *io, const struct hkv_io_op *ops, size_t count) {
    for (size_t taken = 0; taken < count; taken++) {
        int error;
        struct hkv_io_device *device = device_of(io, ops[taken].fd, &error);
        if (device == NULL) return taken;
        pthread_mutex_lock(&device->mutex);
        struct hkv_io_op *op = device->free;
        if (op != NULL) {
            device->free = op->next;
            *op = ops[taken];
            op->device = device;
            if (error == 0) error = enqueue(device, op);
            op->result = error;
        }
        pthread_mutex_unlock(&device->mutex);
        if (op == NULL) return taken;
        if (error != 0) hand_over(io, op);
    }
    return count;
}

size_t hkv_io_depths(struct hkv_io *io, struct hkv_io_depth depths[HKV_IO_DEVICES]) {
    for (size_t i = 0; i < io->device_count; i++) {
        struct hkv_io_device *device = io->devices[i];
        pthread_mutex_lock(&device->mutex);
        depths[i] = (struct hkv_io_depth){.device = device->number, .depth = device->depth.now};
        pthread_mutex_unlock(&device->mutex);
    }
    return io->device_count;
}

/* ---- open and close ------------------------------------------------------------------------------------------------------------ */

int hkv_io_open(int fd, size_t size, const char *engine, unsigned depth, unsigned workers, struct hkv_io **opened, char *why) {
    bool wanted = strcmp(engine, "threads") != 0;
    int error = 0;
    if (wanted) error = hkv_io_uring_works(why);
    else snprintf(why, HKV_IO_WHY, "threads were asked for");
    if (error != 0 && strcmp(engine, "auto") != 0) return error;
    struct hkv_io *io = calloc(1, sizeof *io);
    if (io == NULL) return ENOMEM;
    *io = (struct hkv_io){.size = size, .uring = wanted && error == 0, .depth = depth, .workers = workers, .last = &io->first};
    pthread_mutex_init(&io->mutex, NULL);
    io->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    void *memory = io->event < 0 ? MAP_FAILED : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED || madvise(memory, size, MADV_DONTFORK) < 0) {
        error = errno;
        if (memory != MAP_FAILED) munmap(memory, size);
        hkv_io_free(io);
        return error;
    }
    io->memory = memory;
    *opened = io;
    return 0;
}

const char *hkv_io_engine(const struct hkv_io *io) {
    return io->uring ? "io_uring" : "threads";
}

int hkv_io_event(const struct hkv_io *io) {
    return io->event;
}

void hkv_io_close(struct hkv_io *io) {
    for (size_t i = 0; i < io->device_count; i++) {
        struct hkv_io_device *device = io->devices[i];
        pthread_mutex_lock(&device->mutex);
        device->closing = true;
        struct hkv_io_op *op = device->first;
        device->first = NULL;
        device->last = &device->first;
        device->queued = 0;
        for (unsigned k = 0; k < device->started; k++) wake(&device->workers[k]);
        pthread_mutex_unlock(&device->mutex);
        for (struct hkv_io_op *next; op != NULL; op = next) {
            next = op->next;
            op->result = ECANCELED;
            hand_over(io, op);
        }
    }
    for (size_t i = 0; i < io->device_count; i++)
        for (unsigned k = 0; k < io->devices[i]->started; k++) pthread_join(io->devices[i]->workers[k].thread, NULL);
    munmap(io->memory, io->size);
}

void hkv_io_free(struct hkv_io *io) {
    for (size_t i = 0; i < io->device_count; i++) free_device(io->devices[i]);
    if (io->event >= 0) close(io->event);
    pthread_mutex_destroy(&io->mutex);
    free(io);
}
