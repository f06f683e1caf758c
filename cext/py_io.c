/* Python's view of the I/O engine; _cext.pyi documents each call. The engine's threads never touch Python. Its mapping and its threads are
 * not inherited by a fork's child, so in another process than the one that made it every method raises, and nothing is closed. */
#define _GNU_SOURCE 1
#include "io.h"
#include "module.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct {
    PyObject_HEAD struct hkv_io *io;
    size_t size;
    bool closed;
    pid_t owner;
    char why[HKV_IO_WHY];
} Io;

static int usable(Io *self) {
    if (self->owner == getpid()) return 1;
    PyErr_Format(PyExc_RuntimeError, "this Io was made by process %ld and does not work in process %ld", (long)self->owner, (long)getpid());
    return 0;
}

static PyObject *io_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"fd", "size", "engine", "depth", "workers", NULL};
    int fd, depth = 64, workers = 2;
    Py_ssize_t size;
    const char *engine = "auto";
    struct stat file;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "in|$sii:Io", names, &fd, &size, &engine, &depth, &workers)) return NULL;
    if (strcmp(engine, "auto") != 0 && strcmp(engine, "io_uring") != 0 && strcmp(engine, "threads") != 0)
        return PyErr_Format(PyExc_ValueError, "engine is '%s', must be 'auto', 'io_uring' or 'threads'", engine);
    if (depth < 1 || depth > HKV_IO_MAX_DEPTH) return PyErr_Format(PyExc_ValueError, "depth is %d, must be 1..%d", depth, HKV_IO_MAX_DEPTH);
    if (workers < 1 || workers > HKV_IO_MAX_WORKERS)
        return PyErr_Format(PyExc_ValueError, "workers is %d, must be 1..%d", workers, HKV_IO_MAX_WORKERS);
    if (size < 1) return PyErr_Format(PyExc_ValueError, "size is %zd, must be at least 1", size);
    if (fstat(fd, &file) < 0) return PyErr_SetFromErrno(PyExc_OSError);
    if (file.st_size < size)
        return PyErr_Format(PyExc_ValueError, "the file has %lld bytes, %zd were to be mapped", (long long)file.st_size, size);

    Io *self = (Io *)PyType_GenericNew(type, NULL, NULL);
    if (self == NULL) return NULL;
    self->owner = getpid();
    self->size = (size_t)size;
    int error = hkv_io_open(fd, (size_t)size, engine, (unsigned)depth, (unsigned)workers, &self->io, self->why);
    if (error == 0) return (PyObject *)self;
    PyObject *arguments = Py_BuildValue("(is)", error, self->why[0] != 0 ? self->why : strerror(error));
    if (arguments != NULL) PyErr_SetObject(PyExc_OSError, arguments);
    Py_XDECREF(arguments);
    Py_DECREF(self);
    return NULL;
}

/* Other threads may run meanwhile, and find it closed. */
static void close_engine(Io *self) {
    if (self->closed) return;
    self->closed = true;
    Py_BEGIN_ALLOW_THREADS hkv_io_close(self->io);
    Py_END_ALLOW_THREADS
}

static void io_dealloc(PyObject *object) {
    Io *self = (Io *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->io != NULL && self->owner == getpid()) {
        close_engine(self);
        hkv_io_free(self->io);
    }
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *io_close(PyObject *object, PyObject *none) {
    if (!usable((Io *)object)) return NULL;
    close_engine((Io *)object);
    Py_RETURN_NONE;
}

static PyObject *io_fileno(PyObject *object, PyObject *none) {
    return usable((Io *)object) ? PyLong_FromLong(hkv_io_event(((Io *)object)->io)) : NULL;
}

/* ---- ops ----------------------------------------------------------------------------------------------------------------------- */

static int bad_op(Py_ssize_t index, const char *what, unsigned long long value, const char *rule) {
    PyErr_Format(PyExc_ValueError, "ops[%zd]: %s is %llu, %s", index, what, value, rule);
    return -1;
}

/* What the engine relies on. */
static int check_op(const Io *self, Py_ssize_t index, const struct hkv_io_op *op) {
    if (op->kind != HKV_IO_READ && op->kind != HKV_IO_WRITE) return bad_op(index, "kind", (unsigned)op->kind, "must be READ or WRITE");
    if (op->offset % HKV_PAGE != 0 || op->offset > INT64_MAX / 2) return bad_op(index, "offset", op->offset, "must be a multiple of 4096");
    if (op->at % HKV_PAGE != 0) return bad_op(index, "at", op->at, "must be a multiple of 4096");
    if (op->size == 0 || op->size % HKV_PAGE != 0) return bad_op(index, "size", op->size, "must be a multiple of 4096, and not 0");
    if (op->size > self->size || op->at > self->size - op->size)
        return bad_op(index, "at + size", op->at + op->size, "outside of the mapping");
    if (op->shards < 1 || op->shards > HKV_MAX_SHARDS) return bad_op(index, "shards", op->shards, "must be 1..64");
    uint64_t stride =
        op->shard_bytes < op->size ? (op->shard_bytes + HKV_SHARD_ALIGN - 1) / HKV_SHARD_ALIGN * HKV_SHARD_ALIGN : op->shard_bytes;
    if (op->shard_bytes < 1 || stride > op->size / op->shards)
        return bad_op(index, "shard_bytes", op->shard_bytes, "must fit into size, shards times");
    if (op->record_fd >= 0 && op->record_offset > INT64_MAX / 2) return bad_op(index, "record_offset", op->record_offset, "too large");
    return 0;
}

static int parse_op(const Io *self, Py_ssize_t index, PyObject *tuple, struct hkv_io_op *op) {
    unsigned long long token, offset, at, size, shard_bytes, record_offset;
    PyObject *checksum;
    const char *record;
    Py_ssize_t record_size;
    if (!PyTuple_Check(tuple)) {
        PyErr_Format(PyExc_TypeError, "ops[%zd] must be a tuple, not %R", index, Py_TYPE(tuple));
        return -1;
    }
    *op = (struct hkv_io_op){.record_fd = -1};
    if (!PyArg_ParseTuple(tuple, "KiiKKKIKOiKy#:op", &token, &op->kind, &op->fd, &offset, &at, &size, &op->shards, &shard_bytes, &checksum,
                          &op->record_fd, &record_offset, &record, &record_size))
        return -1;
    op->token = token, op->offset = offset, op->at = at, op->size = size, op->shard_bytes = shard_bytes, op->record_offset = record_offset;
    op->expects = checksum != Py_None;
    if (op->expects) {
        op->checksum = PyLong_AsUnsignedLongLong(checksum);
        if (PyErr_Occurred()) return -1;
    }
    if (op->record_fd >= 0) {
        if (record_size != (Py_ssize_t)sizeof op->record)
            return bad_op(index, "size of the record", (unsigned long long)record_size, "must be 64");
        memcpy(&op->record, record, sizeof op->record);
    }
    return check_op(self, index, op);
}

static PyObject *io_submit(PyObject *object, PyObject *batch) {
    Io *self = (Io *)object;
    if (!usable(self)) return NULL;
    PyObject *tuples = PySequence_Tuple(batch);
    if (tuples == NULL) return NULL;
    Py_ssize_t count = PyTuple_Size(tuples);
    struct hkv_io_op *ops = PyMem_Malloc((size_t)count * sizeof *ops);
    PyObject *result = ops == NULL ? PyErr_NoMemory() : NULL;
    for (Py_ssize_t i = 0; ops != NULL && i < count; i++)
        if (parse_op(self, i, PyTuple_GetItem(tuples, i), &ops[i]) < 0) goto done;
    if (self->closed) PyErr_SetString(PyExc_ValueError, "the Io is closed"); /* parsing may have run other threads */
    else if (ops != NULL) result = PyLong_FromSize_t(hkv_io_submit(self->io, ops, (size_t)count));
done:
    PyMem_Free(ops);
    Py_DECREF(tuples);
    return result;
}

static PyObject *io_reap(PyObject *object, PyObject *none) {
    Io *self = (Io *)object;
    if (!usable(self)) return NULL;
    struct hkv_io_done done[64];
    size_t count, most = sizeof done / sizeof done[0];
    PyObject *list = PyList_New(0);
    do {
        count = list == NULL ? 0 : hkv_io_reap(self->io, done, most);
        for (size_t i = 0; i < count && list != NULL; i++) {
            PyObject *item =
                Py_BuildValue("(KiK)", (unsigned long long)done[i].token, done[i].result, (unsigned long long)done[i].checksum);
            if (item == NULL || PyList_Append(list, item) < 0) Py_CLEAR(list);
            Py_XDECREF(item);
        }
    } while (count == most);
    return list;
}

static PyObject *io_depths(PyObject *object, PyObject *none) {
    Io *self = (Io *)object;
    if (!usable(self)) return NULL;
    struct hkv_io_depth depths[HKV_IO_DEVICES];
    size_t count = hkv_io_depths(self->io, depths);
    PyObject *result = PyDict_New();
    for (size_t i = 0; i < count && result != NULL; i++) {
        PyObject *device = PyLong_FromUnsignedLongLong(depths[i].device), *depth = PyLong_FromUnsignedLong(depths[i].depth);
        if (device == NULL || depth == NULL || PyDict_SetItem(result, device, depth) < 0) Py_CLEAR(result);
        Py_XDECREF(device);
        Py_XDECREF(depth);
    }
    return result;
}

static PyObject *io_engine(PyObject *object, void *closure) {
    return usable((Io *)object) ? PyUnicode_FromString(hkv_io_engine(((Io *)object)->io)) : NULL;
}

static PyObject *io_why(PyObject *object, void *closure) {
    return PyUnicode_FromString(((Io *)object)->why);
}

static PyMethodDef io_methods[] = {
    {"fileno", io_fileno, METH_NOARGS, NULL}, {"submit", io_submit, METH_O, NULL},    {"reap", io_reap, METH_NOARGS, NULL},
    {"depths", io_depths, METH_NOARGS, NULL}, {"close", io_close, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL},
};

static PyGetSetDef io_attributes[] = {
    {"engine", io_engine, NULL, NULL, NULL}, {"why", io_why, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot io_slots[] = {
    {Py_tp_new, io_new}, {Py_tp_dealloc, io_dealloc}, {Py_tp_methods, io_methods}, {Py_tp_getset, io_attributes}, {0, NULL}};

static PyType_Spec io_spec = {.name = "hostkv.cext._cext.Io", .basicsize = sizeof(Io), .flags = Py_TPFLAGS_DEFAULT, .slots = io_slots};

static int set_constant(PyObject *type, const char *name, int value) {
    PyObject *number = PyLong_FromLong(value);
    int failed = number == NULL ? -1 : PyObject_SetAttrString(type, name, number);
    Py_XDECREF(number);
    return failed;
}

int hkv_add_io(PyObject *module) {
    PyObject *type = PyType_FromSpec(&io_spec);
    if (type == NULL) return -1;
    if (set_constant(type, "READ", HKV_IO_READ) == 0 && set_constant(type, "WRITE", HKV_IO_WRITE) == 0 &&
        set_constant(type, "CORRUPT", HKV_IO_CORRUPT) == 0 && PyModule_AddObject(module, "Io", type) == 0)
        return 0;
    Py_DECREF(type);
    return -1;
}
