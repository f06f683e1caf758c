/* Python's view of the data path: hashes, the member lock, mappings of the pool, copies. _cext.pyi documents each call.
 *
 * A Mapping is unmapped by close() or with its last reference. Until then everything that reads or writes its memory without the GIL
 * (a copy, an exported buffer) is counted in `users`, under the GIL, and close() refuses while there are any. The memory is not
 * inherited by a fork's child, so in another process than the one that made it every method raises, and nothing is unmapped. */
#define _GNU_SOURCE 1
#include "copy.h"
#include "hash.h"
#include "lock.h"
#include "module.h"
#include "restart.h"

#include <pthread.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

_Static_assert(sizeof(void *) == 8 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "HostKV needs a 64-bit little-endian machine");

enum {
    /* Below these, giving up the GIL costs more than it frees: taking it back can wait 5 ms for another thread. */
    GIL_FREE_BYTES = 64 << 10,
    GIL_FREE_IDS = 2048,
};

/* ---- hashes -------------------------------------------------------------------------------------------------------------------- */

static PyObject *derive_keys(PyObject *module, PyObject *args, PyObject *keywords) {
    static char *names[] = {"fingerprint", "ids", NULL};
    const uint8_t *fingerprint;
    Py_ssize_t fingerprint_size;
    PyObject *list;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "y#O!:derive_keys", names, &fingerprint, &fingerprint_size, &PyList_Type, &list))
        return NULL;
    if (fingerprint_size != 32) return PyErr_Format(PyExc_ValueError, "fingerprint has %zd bytes, must have 32", fingerprint_size);

    PyObject *pinned = PyList_AsTuple(list); /* another thread may change the list while the GIL is not held */
    if (pinned == NULL) return NULL;
    Py_ssize_t count = PyTuple_Size(pinned);
    struct hkv_id *ids = PyMem_Malloc((size_t)count * sizeof *ids);
    PyObject *keys = PyBytes_FromStringAndSize(NULL, count * HKV_DIGEST);
    if (ids == NULL || keys == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *id = PyTuple_GetItem(pinned, i);
        if (!PyBytes_Check(id)) {
            PyErr_Format(PyExc_TypeError, "ids[%zd] must be bytes, not %R", i, Py_TYPE(id));
            goto failed;
        }
        Py_ssize_t size = PyBytes_Size(id);
        if (size < 1 || size > HKV_MAX_ID) {
            PyErr_Format(PyExc_ValueError, "ids[%zd] has %zd bytes, must have 1..%d", i, size, HKV_MAX_ID);
            goto failed;
        }
        ids[i] = (struct hkv_id){(const uint8_t *)PyBytes_AsString(id), (size_t)size};
    }
    uint32_t prepared[8];
    uint8_t *out = (uint8_t *)PyBytes_AsString(keys);
    hkv_keys_prepare(fingerprint, prepared);
    if (count < GIL_FREE_IDS) {
        hkv_keys_derive(prepared, ids, (size_t)count, out);
    } else {
        Py_BEGIN_ALLOW_THREADS hkv_keys_derive(prepared, ids, (size_t)count, out);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(ids);
    Py_DECREF(pinned);
    return keys;

failed:
    PyMem_Free(ids);
    Py_XDECREF(keys);
    Py_DECREF(pinned);
    return NULL;
}

static void chain(const uint8_t root[HKV_DIGEST], const uint8_t *tokens, size_t block_bytes, const struct hkv_id *extra, size_t blocks,
                  uint8_t *ids) {
    const uint8_t *parent = root;
    for (size_t i = 0; i < blocks; i++, parent = ids, ids += HKV_DIGEST) {
        struct hkv_sha256 sha;
        hkv_sha256_start(&sha);
        hkv_sha256_add(&sha, parent, HKV_DIGEST);
        hkv_sha256_add(&sha, tokens + i * block_bytes, block_bytes);
        if (extra != NULL) hkv_sha256_add(&sha, extra[i].data, extra[i].size);
        hkv_sha256_end(&sha, ids);
    }
}

/* The parts of a list of bytes objects; `pinned` keeps them alive. NULL with an exception. */
static struct hkv_id *parts_of(PyObject *list, size_t count, PyObject **pinned) {
    if (!PyList_Check(list)) {
        PyErr_Format(PyExc_TypeError, "extra must be a list of bytes or None, not %R", Py_TYPE(list));
        return NULL;
    }
    if ((size_t)PyList_Size(list) != count) {
        PyErr_Format(PyExc_ValueError, "extra has %zd items, there are %zu whole blocks", PyList_Size(list), count);
        return NULL;
    }
    if ((*pinned = PyList_AsTuple(list)) == NULL) return NULL;
    struct hkv_id *parts = PyMem_Malloc(count * sizeof *parts);
    if (parts == NULL) PyErr_NoMemory();
    for (size_t i = 0; parts != NULL && i < count; i++) {
        PyObject *item = PyTuple_GetItem(*pinned, (Py_ssize_t)i);
        if (!PyBytes_Check(item)) {
            PyErr_Format(PyExc_TypeError, "extra[%zu] must be bytes, not %R", i, Py_TYPE(item));
            PyMem_Free(parts);
            return NULL;
        }
        parts[i] = (struct hkv_id){(const uint8_t *)PyBytes_AsString(item), (size_t)PyBytes_Size(item)};
    }
    return parts;
}

static PyObject *chain_ids(PyObject *module, PyObject *args, PyObject *keywords) {
    static char *names[] = {"root", "tokens", "block_tokens", "extra", NULL};
    const uint8_t *root;
    Py_ssize_t root_size, block_tokens;
    PyObject *extra = Py_None, *pinned = NULL, *result = NULL;
    struct hkv_id *parts = NULL;
    uint8_t *ids = NULL;
    Py_buffer tokens;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "y#y*n|O:chain_ids", names, &root, &root_size, &tokens, &block_tokens, &extra))
        return NULL;
    if (root_size != HKV_DIGEST) {
        PyErr_Format(PyExc_ValueError, "root has %zd bytes, must have 32", root_size);
        goto done;
    }
    if (block_tokens < 1 || block_tokens > 1 << 20) {
        PyErr_Format(PyExc_ValueError, "block_tokens is %zd, must be 1..%d", block_tokens, 1 << 20);
        goto done;
    }
    if (tokens.len % 4 != 0) {
        PyErr_Format(PyExc_ValueError, "tokens has %zd bytes, uint32 items have 4", tokens.len);
        goto done;
    }
    size_t block_bytes = (size_t)block_tokens * 4, blocks = (size_t)tokens.len / block_bytes;
    if (extra != Py_None && (parts = parts_of(extra, blocks, &pinned)) == NULL) goto done;
    ids = PyMem_Malloc(blocks * HKV_DIGEST);
    if (ids == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    if (tokens.len < GIL_FREE_BYTES) {
        chain(root, tokens.buf, block_bytes, parts, blocks, ids);
    } else {
        Py_BEGIN_ALLOW_THREADS chain(root, tokens.buf, block_bytes, parts, blocks, ids);
        Py_END_ALLOW_THREADS
    }
    result = PyList_New((Py_ssize_t)blocks);
    for (size_t i = 0; result != NULL && i < blocks; i++) {
        PyObject *id = PyBytes_FromStringAndSize((const char *)ids + i * HKV_DIGEST, HKV_DIGEST);
        if (id == NULL || PyList_SetItem(result, (Py_ssize_t)i, id) < 0) Py_CLEAR(result);
    }
done:
    PyMem_Free(ids);
    PyMem_Free(parts);
    Py_XDECREF(pinned);
    PyBuffer_Release(&tokens);
    return result;
}

static PyObject *sha256(PyObject *module, PyObject *args) {
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "y*:sha256", &data)) return NULL;
    uint8_t digest[HKV_DIGEST];
    struct hkv_sha256 sha;
    PyThreadState *released = data.len < GIL_FREE_BYTES ? NULL : PyEval_SaveThread();
    hkv_sha256_start(&sha);
    hkv_sha256_add(&sha, data.buf, (size_t)data.len);
    hkv_sha256_end(&sha, digest);
    if (released != NULL) PyEval_RestoreThread(released);
    PyBuffer_Release(&data);
    return PyBytes_FromStringAndSize((const char *)digest, sizeof digest);
}

static PyObject *xxh3_64(PyObject *module, PyObject *args) {
    Py_buffer data;
    unsigned long long seed = 0;
    if (!PyArg_ParseTuple(args, "y*|K:xxh3_64", &data, &seed)) return NULL;
    PyThreadState *released = data.len < GIL_FREE_BYTES ? NULL : PyEval_SaveThread();
    struct hkv_xxh3 sum;
    hkv_xxh3_start(&sum, seed);
    hkv_xxh3_add(&sum, data.buf, (size_t)data.len);
    if (released != NULL) PyEval_RestoreThread(released);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLongLong(hkv_xxh3_end(&sum));
}

static PyObject *cpu_features(PyObject *module, PyObject *none) {
    return Py_BuildValue("[ss]", hkv_sha_path(), hkv_copy_kernel());
}

static PyObject *set_sha(PyObject *module, PyObject *args) {
    const char *name;
    if (!PyArg_ParseTuple(args, "s:_set_sha", &name)) return NULL;
    return PyBool_FromLong(hkv_sha_set_path(name));
}

static PyObject *set_copy(PyObject *module, PyObject *args) {
    const char *name;
    if (!PyArg_ParseTuple(args, "s:_set_copy", &name)) return NULL;
    return PyBool_FromLong(hkv_copy_set_kernel(name));
}

static PyObject *os_error(int error, PyObject *path) {
    errno = error;
    return PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path);
}

/* ---- the sidecar's restart ----------------------------------------------------------------------------------------------------- */

static PyObject *restart_on_abort(PyObject *module, PyObject *args) {
    const char *joined;
    Py_ssize_t size, words = 0;
    if (!PyArg_ParseTuple(args, "y#:restart_on_abort", &joined, &size)) return NULL;
    for (Py_ssize_t i = 0; i < size; i++) words += joined[i] == 0;
    if (words == 0 || joined[size - 1] != 0) {
        PyErr_SetString(PyExc_ValueError, "command must be words that each end with a zero byte");
        return NULL;
    }
    char **command = calloc((size_t)words + 1, sizeof *command), *copy = malloc((size_t)size);
    if (command == NULL || copy == NULL) {
        free(command);
        free(copy);
        return PyErr_NoMemory();
    }
    memcpy(copy, joined, (size_t)size);
    for (Py_ssize_t i = 0; i < words; i++, copy += strlen(copy) + 1) command[i] = copy;
    int error = hkv_restart_on_abort(command);
    if (error != 0) return os_error(error, NULL);
    Py_RETURN_NONE;
}

/* ---- the member lock ----------------------------------------------------------------------------------------------------------- */

static PyObject *lock_take(PyObject *module, PyObject *path) {
    PyObject *raw;
    if (!PyUnicode_FSConverter(path, &raw)) return NULL;
    int error = hkv_lock_take(PyBytes_AsString(raw));
    Py_DECREF(raw);
    if (error != 0) return os_error(error, path);
    Py_RETURN_NONE;
}

static PyObject *lock_look(PyObject *module, PyObject *path) {
    PyObject *raw;
    long holder;
    uint64_t beat;
    if (!PyUnicode_FSConverter(path, &raw)) return NULL;
    int error = hkv_lock_look(PyBytes_AsString(raw), &holder, &beat);
    Py_DECREF(raw);
    return error != 0 ? os_error(error, path) : Py_BuildValue("(lK)", holder, (unsigned long long)beat);
}

/* ---- mappings ------------------------------------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD uint8_t *memory; /* NULL once closed */
    size_t size;
    bool writable;
    pid_t owner;
    Py_ssize_t users;
    pthread_mutex_t turn; /* of the copies that are queued */
} Mapping;

/* Every method begins with it. */
static int usable(Mapping *self) {
    if (self->owner != getpid()) {
        PyErr_Format(PyExc_RuntimeError,
                     "this Mapping was made by process %ld and is not mapped in process %ld: make a new client after fork, "
                     "or start processes with the spawn method",
                     (long)self->owner, (long)getpid());
        return 0;
    }
    if (self->memory == NULL) PyErr_SetString(PyExc_ValueError, "the Mapping is closed");
    return self->memory != NULL;
}

static PyObject *mapping_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"fd", "size", "writable", NULL};
    int fd, writable = 0;
    Py_ssize_t size;
    struct stat file;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "in|p:Mapping", names, &fd, &size, &writable)) return NULL;
    if (size < 1) return PyErr_Format(PyExc_ValueError, "size is %zd, must be at least 1", size);
    if (fstat(fd, &file) < 0) return PyErr_SetFromErrno(PyExc_OSError);
    if (file.st_size < size)
        return PyErr_Format(PyExc_ValueError, "the file has %lld bytes, %zd were to be mapped", (long long)file.st_size, size);

    Mapping *self = (Mapping *)PyType_GenericNew(type, NULL, NULL);
    if (self == NULL) return NULL;
    self->owner = getpid();
    pthread_mutex_init(&self->turn, NULL);
    void *memory = mmap(NULL, (size_t)size, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED || madvise(memory, (size_t)size, MADV_DONTFORK) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        if (memory != MAP_FAILED) munmap(memory, (size_t)size);
        Py_DECREF(self);
        return NULL;
    }
    self->memory = memory;
    self->size = (size_t)size;
    self->writable = writable;
    return (PyObject *)self;
}

static void mapping_dealloc(PyObject *object) {
    Mapping *self = (Mapping *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->memory != NULL && self->owner == getpid()) munmap(self->memory, self->size);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *mapping_close(PyObject *object, PyObject *none) {
    Mapping *self = (Mapping *)object;
    if (!usable(self)) return NULL;
    if (self->users > 0)
        return PyErr_Format(PyExc_BufferError, "the Mapping is in use by %zd buffers or copies; release them first", self->users);
    munmap(self->memory, self->size);
    self->memory = NULL;
    Py_RETURN_NONE;
}

static int mapping_getbuffer(PyObject *object, Py_buffer *view, int flags) {
    Mapping *self = (Mapping *)object;
    view->obj = NULL;
    if (!usable(self)) return -1;
    if (PyBuffer_FillInfo(view, object, self->memory, (Py_ssize_t)self->size, !self->writable, flags) < 0) return -1;
    self->users++;
    return 0;
}

static void mapping_releasebuffer(PyObject *object, Py_buffer *view) {
    ((Mapping *)object)->users--;
}

static PyObject *mapping_address(PyObject *object, void *closure) {
    Mapping *self = (Mapping *)object;
    return usable(self) ? PyLong_FromVoidPtr(self->memory) : NULL;
}

static PyObject *mapping_size(PyObject *object, void *closure) {
    Mapping *self = (Mapping *)object;
    return usable(self) ? PyLong_FromSize_t(self->size) : NULL;
}

/* What MADV_POPULATE does, on kernels before 5.14. A write must not undo what another process writes meanwhile: it adds zero. */
static void touch_pages(uint8_t *from, uint8_t *to, size_t page, bool write) {
    for (; from < to; from += page)
        if (write) __atomic_fetch_or(from, 0, __ATOMIC_RELAXED);
        else *(volatile uint8_t *)from;
}

static PyObject *mapping_populate(PyObject *object, PyObject *args, PyObject *keywords) {
    static char *names[] = {"offset", "length", NULL};
    Mapping *self = (Mapping *)object;
    Py_ssize_t offset, length;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "nn:populate", names, &offset, &length) || !usable(self)) return NULL;
    if (offset < 0 || length < 0 || (size_t)offset > self->size || (size_t)length > self->size - (size_t)offset)
        return PyErr_Format(PyExc_ValueError, "%zd bytes at %zd are outside of a mapping of %zu bytes", length, offset, self->size);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *from = self->memory + ((size_t)offset & ~(page - 1)), *to = self->memory + offset + length;
    int advice = self->writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ, error;
    self->users++;
    do {
        Py_BEGIN_ALLOW_THREADS error = from < to && madvise(from, (size_t)(to - from), advice) < 0 ? errno : 0;
        if (error == EINVAL) {
            touch_pages(from, to, page, self->writable);
            error = 0;
        }
        Py_END_ALLOW_THREADS
    } while (error == EINTR && PyErr_CheckSignals() == 0);
    self->users--;
    if (PyErr_Occurred()) return NULL;
    if (error != 0) return os_error(error, NULL);
    Py_RETURN_NONE;
}

/* ---- copies -------------------------------------------------------------------------------------------------------------------- */

static int check_threads(int threads) {
    if (threads >= 1 && threads <= HKV_COPY_MAX_THREADS) return 1;
    PyErr_Format(PyExc_ValueError, "threads is %d, must be 1..%d", threads, HKV_COPY_MAX_THREADS);
    return 0;
}

/* The uint64 items of a buffer, copied: another thread may change the buffer once the GIL is given up, after the checks. */
static uint64_t *items_of(const Py_buffer *buffer, const char *name, size_t *count) {
    if (buffer->len % 8 != 0) {
        PyErr_Format(PyExc_ValueError, "%s has %zd bytes, uint64 items have 8", name, buffer->len);
        return NULL;
    }
    uint64_t *items = PyMem_Malloc((size_t)buffer->len);
    if (items == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    if (buffer->len > 0) memcpy(items, buffer->buf, (size_t)buffer->len);
    *count = (size_t)buffer->len / 8;
    return items;
}

/* Turns sizes into running sums and checks that every block lies in the mapping. */
static int check_batch(const Mapping *self, struct hkv_batch *batch, uint64_t *piece_bytes, Py_ssize_t addresses_bytes) {
    size_t items, block_bytes = 0, total;
    if (__builtin_mul_overflow(batch->blocks, batch->pieces, &items) || items != (size_t)addresses_bytes / 8 || addresses_bytes % 8 != 0) {
        PyErr_Format(PyExc_ValueError, "addresses has %zd bytes, must be 8 for each of %zu blocks times %zu pieces", addresses_bytes,
                     batch->blocks, batch->pieces);
        return 0;
    }
    for (size_t j = 0; j < batch->pieces; j++) {
        if (piece_bytes[j] == 0) {
            PyErr_Format(PyExc_ValueError, "piece_bytes[%zu] is 0", j);
            return 0;
        }
        if (piece_bytes[j] > self->size - block_bytes) {
            PyErr_Format(PyExc_ValueError, "the pieces 0..%zu are larger than the mapping of %zu bytes", j, self->size);
            return 0;
        }
        piece_bytes[j] = block_bytes += piece_bytes[j];
    }
    for (size_t i = 0; i < batch->blocks; i++)
        if (batch->offsets[i] > self->size - block_bytes) {
            PyErr_Format(PyExc_ValueError, "block %zu: %zu bytes at offset %llu leave the mapping of %zu bytes", i, block_bytes,
                         (unsigned long long)batch->offsets[i], self->size);
            return 0;
        }
    if (!__builtin_mul_overflow(batch->blocks, block_bytes, &total) && total <= PY_SSIZE_T_MAX) return 1;
    PyErr_SetString(PyExc_ValueError, "the batch has more bytes than there are addresses");
    return 0;
}

/* Checks that there is one seed for each block, and something to hash with it. */
static int check_seeds(const struct hkv_batch *batch, size_t seeds) {
    if (seeds != batch->blocks) PyErr_Format(PyExc_ValueError, "seeds has %zu items for %zu blocks", seeds, batch->blocks);
    else if (batch->blocks > 0 && batch->pieces == 0) PyErr_SetString(PyExc_ValueError, "piece_bytes is empty, a checksum needs bytes");
    return !PyErr_Occurred();
}

static PyObject *copy(Mapping *self, PyObject *args, PyObject *keywords, bool into_pool) {
    static char *names[] = {"offsets", "addresses", "piece_bytes", "threads", "queued", "seeds", NULL};
    Py_buffer offsets_buffer, addresses, sizes_buffer, seeds_buffer = {0};
    PyObject *checksums = NULL;
    int threads = 1, queued = 0, done = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, into_pool ? "y*y*y*|ipz*:copy_in" : "y*y*y*|ipz*:copy_out", names, &offsets_buffer,
                                     &addresses, &sizes_buffer, &threads, &queued, &seeds_buffer))
        return NULL;
    struct hkv_batch batch = {.addresses = addresses.buf};
    uint64_t *offsets = NULL, *sizes = NULL, *seeds = NULL;
    size_t seed_count;
    if (usable(self) && check_threads(threads) && (offsets = items_of(&offsets_buffer, "offsets", &batch.blocks)) != NULL &&
        (sizes = items_of(&sizes_buffer, "piece_bytes", &batch.pieces)) != NULL) {
        batch.pool = self->memory;
        batch.offsets = offsets;
        batch.piece_ends = sizes;
        if (into_pool && !self->writable) {
            PyErr_SetString(PyExc_ValueError, "the Mapping is read-only; make it with writable=True to copy into it");
        } else if (check_batch(self, &batch, sizes, addresses.len) &&
                   (seeds_buffer.obj == NULL ||
                    ((seeds = items_of(&seeds_buffer, "seeds", &seed_count)) != NULL && check_seeds(&batch, seed_count) &&
                     (checksums = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)seed_count * 8)) != NULL))) {
            batch.seeds = seeds;
            if (checksums != NULL) batch.checksums = (void *)PyBytes_AsString(checksums);
            self->users++;
            /* The turn is passed on here, before the GIL is asked for, so that the next copy does not wait for Python. */
            Py_BEGIN_ALLOW_THREADS;
            if (queued) pthread_mutex_lock(&self->turn);
            hkv_copy_batch(&batch, into_pool, threads);
            if (queued) pthread_mutex_unlock(&self->turn);
            Py_END_ALLOW_THREADS;
            self->users--;
            done = 1;
        }
    }
    PyMem_Free(offsets);
    PyMem_Free(sizes);
    PyMem_Free(seeds);
    PyBuffer_Release(&offsets_buffer);
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&sizes_buffer);
    PyBuffer_Release(&seeds_buffer);
    if (!done) Py_CLEAR(checksums);
    if (!done || checksums != NULL) return checksums;
    Py_RETURN_NONE;
}

static PyObject *mapping_copy_in(PyObject *self, PyObject *args, PyObject *keywords) {
    return copy((Mapping *)self, args, keywords, true);
}

static PyObject *mapping_copy_out(PyObject *self, PyObject *args, PyObject *keywords) {
    return copy((Mapping *)self, args, keywords, false);
}

static PyObject *mapping_checksums(PyObject *object, PyObject *args, PyObject *keywords) {
    static char *names[] = {"offsets", "size", "seeds", NULL};
    Mapping *self = (Mapping *)object;
    Py_buffer offsets_buffer, seeds_buffer;
    Py_ssize_t size;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "y*ny*:checksums", names, &offsets_buffer, &size, &seeds_buffer)) return NULL;
    uint64_t *offsets = NULL, *seeds = NULL;
    size_t count, seed_count;
    PyObject *result = NULL;
    if (usable(self) && (offsets = items_of(&offsets_buffer, "offsets", &count)) != NULL &&
        (seeds = items_of(&seeds_buffer, "seeds", &seed_count)) != NULL) {
        size_t outside = 0;
        if (size >= 0 && (size_t)size <= self->size)
            while (outside < count && offsets[outside] <= self->size - (size_t)size) outside++;
        if (outside < count || size < 0)
            PyErr_Format(PyExc_ValueError, "%zd bytes at offsets[%zu] leave the mapping of %zu bytes", size, outside, self->size);
        else if (seed_count != count) PyErr_Format(PyExc_ValueError, "seeds has %zu items for %zu offsets", seed_count, count);
        else result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)count * 8);
    }
    if (result != NULL) {
        uint64_t *sums = (void *)PyBytes_AsString(result);
        self->users++;
        Py_BEGIN_ALLOW_THREADS;
        for (size_t i = 0; i < count; i++) {
            struct hkv_xxh3 sum;
            hkv_xxh3_start(&sum, seeds[i]);
            hkv_xxh3_add(&sum, self->memory + offsets[i], (size_t)size);
            sums[i] = hkv_xxh3_end(&sum);
        }
        Py_END_ALLOW_THREADS;
        self->users--;
    }
    PyMem_Free(offsets);
    PyMem_Free(seeds);
    PyBuffer_Release(&offsets_buffer);
    PyBuffer_Release(&seeds_buffer);
    return result;
}

static PyObject *memory_copy(PyObject *module, PyObject *args, PyObject *keywords) {
    static char *names[] = {"destination", "source", "size", "threads", "streaming", NULL};
    unsigned long long destination, source;
    Py_ssize_t size;
    int threads = 1, streaming = 1;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "KKn|ip:memory_copy", names, &destination, &source, &size, &threads, &streaming))
        return NULL;
    if (!check_threads(threads)) return NULL;
    if (size < 0) return PyErr_Format(PyExc_ValueError, "size is %zd", size);
    Py_BEGIN_ALLOW_THREADS if (streaming)
        hkv_copy_flat((void *)(uintptr_t)destination, (const void *)(uintptr_t)source, (size_t)size, threads);
    else if (size > 0) memcpy((void *)(uintptr_t)destination, (const void *)(uintptr_t)source, (size_t)size);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *buffer_address(PyObject *module, PyObject *args, PyObject *keywords) {
    static char *names[] = {"buffer", "writable", NULL};
    PyObject *object;
    int writable;
    Py_buffer view;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "Op:buffer_address", names, &object, &writable)) return NULL;
    if (PyObject_GetBuffer(object, &view, PyBUF_FULL_RO) < 0) return NULL;
    PyObject *result = NULL;
    if (!PyBuffer_IsContiguous(&view, 'C')) PyErr_SetString(PyExc_BufferError, "the buffer is not C-contiguous");
    else if (writable && view.readonly) PyErr_SetString(PyExc_BufferError, "the buffer is read-only");
    else result = Py_BuildValue("(Kn)", (unsigned long long)(uintptr_t)view.buf, view.len);
    PyBuffer_Release(&view);
    return result;
}

/* ---- the module ---------------------------------------------------------------------------------------------------------------- */

static PyMethodDef mapping_methods[] = {
    {"populate", (PyCFunction)(void (*)(void))mapping_populate, METH_VARARGS | METH_KEYWORDS, NULL},
    {"copy_in", (PyCFunction)(void (*)(void))mapping_copy_in, METH_VARARGS | METH_KEYWORDS, NULL},
    {"copy_out", (PyCFunction)(void (*)(void))mapping_copy_out, METH_VARARGS | METH_KEYWORDS, NULL},
    {"checksums", (PyCFunction)(void (*)(void))mapping_checksums, METH_VARARGS | METH_KEYWORDS, NULL},
    {"close", mapping_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef mapping_attributes[] = {
    {"address", mapping_address, NULL, NULL, NULL},
    {"size", mapping_size, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot mapping_slots[] = {
    {Py_tp_new, mapping_new},
    {Py_tp_dealloc, mapping_dealloc},
    {Py_tp_methods, mapping_methods},
    {Py_tp_getset, mapping_attributes},
    {Py_bf_getbuffer, mapping_getbuffer},
    {Py_bf_releasebuffer, mapping_releasebuffer},
    {0, NULL},
};

static PyType_Spec mapping_spec = {
    .name = "hostkv.cext._cext.Mapping", .basicsize = sizeof(Mapping), .flags = Py_TPFLAGS_DEFAULT, .slots = mapping_slots};

static PyMethodDef functions[] = {
    {"derive_keys", (PyCFunction)(void (*)(void))derive_keys, METH_VARARGS | METH_KEYWORDS, NULL},
    {"chain_ids", (PyCFunction)(void (*)(void))chain_ids, METH_VARARGS | METH_KEYWORDS, NULL},
    {"sha256", sha256, METH_VARARGS, NULL},
    {"xxh3_64", xxh3_64, METH_VARARGS, NULL},
    {"cpu_features", cpu_features, METH_NOARGS, NULL},
    {"restart_on_abort", restart_on_abort, METH_VARARGS, NULL},
    {"lock_take", lock_take, METH_O, NULL},
    {"lock_look", lock_look, METH_O, NULL},
    {"memory_copy", (PyCFunction)(void (*)(void))memory_copy, METH_VARARGS | METH_KEYWORDS, NULL},
    {"buffer_address", (PyCFunction)(void (*)(void))buffer_address, METH_VARARGS | METH_KEYWORDS, NULL},
    {"_set_sha", set_sha, METH_VARARGS, NULL},
    {"_set_copy", set_copy, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int hkv_add_data(PyObject *module) {
    if (PyModule_AddFunctions(module, functions) < 0) return -1;
    PyObject *mapping = PyType_FromSpec(&mapping_spec);
    if (mapping == NULL) return -1;
    if (PyModule_AddObject(module, "Mapping", mapping) == 0) return 0;
    Py_DECREF(mapping);
    return -1;
}
