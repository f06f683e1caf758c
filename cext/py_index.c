/* Python's Index. _cext.pyi documents each call; index.h does the work. It belongs to one thread and keeps the GIL. */
#include "module.h"
#include "index.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    PyObject_HEAD struct hkv_region *region;
    struct hkv_index *index;
} Index;

static bool index_usable(const Index *self) {
    return hkv_region_usable(self->region, "Index");
}

/* ---- making it ------------------------------------------------------------------------------------------------------------------- */

static bool blocks_good(uint64_t max_blocks) {
    if (max_blocks >= 1 && max_blocks <= HKV_MOST_BLOCKS) return true;
    PyErr_Format(PyExc_ValueError, "max_blocks is %llu, must be 1..%llu", (unsigned long long)max_blocks,
                 (unsigned long long)HKV_MOST_BLOCKS);
    return false;
}

static PyObject *index_bytes_needed(PyObject *none, PyObject *args) {
    uint64_t max_blocks;
    struct hkv_index_header layout;
    if (!PyArg_ParseTuple(args, "O&:bytes_needed", hkv_to_u64, &max_blocks) || !blocks_good(max_blocks)) return NULL;
    hkv_index_layout(max_blocks, &layout);
    return PyLong_FromUnsignedLongLong(layout.index_bytes);
}

static PyObject *index_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"fd", "max_blocks", "slab_bytes", NULL};
    PyObject *file;
    uint64_t max_blocks, slab_bytes, size;
    struct hkv_index_header layout;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO&O&:Index", names, &file, hkv_to_u64, &max_blocks, hkv_to_u64, &slab_bytes))
        return NULL;
    if (!blocks_good(max_blocks)) return NULL;
    if (slab_bytes % HKV_PAGE != 0 || slab_bytes == 0 || slab_bytes / HKV_PAGE >= HKV_FREE_SLOT - 1)
        return PyErr_Format(PyExc_ValueError, "slab_bytes is %llu, must be a multiple of 4096 and less than 2**31 - 1 times that",
                            (unsigned long long)slab_bytes);
    hkv_index_layout(max_blocks, &layout);
    long fd = file == Py_None ? -1 : PyLong_AsLong(file);
    if (fd == -1 && PyErr_Occurred()) return NULL;
    size = layout.index_bytes;
    if (file != Py_None && !hkv_file_size((int)fd, &size)) return NULL;
    if (size != layout.index_bytes)
        return PyErr_Format(PyExc_ValueError, "the file has %llu bytes, this index needs %llu", (unsigned long long)size,
                            (unsigned long long)layout.index_bytes);
    Index *self = (Index *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    self->region = hkv_region_map((int)fd, layout.index_bytes, true);
    self->index = self->region == NULL ? NULL : hkv_index_create(self->region->memory, max_blocks, slab_bytes);
    if (self->index != NULL) return (PyObject *)self;
    if (!PyErr_Occurred()) PyErr_NoMemory();
    Py_DECREF(self);
    return NULL;
}

static void index_dealloc(PyObject *object) {
    Index *self = (Index *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->index != NULL) hkv_index_free(self->index);
    hkv_region_leave(self->region);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* ---- directories ----------------------------------------------------------------------------------------------------------------- */

static struct hkv_directory *directory_of(const Index *self, uint32_t number) {
    struct hkv_directory *directory = hkv_index_directory(self->index, number);
    if (directory == NULL) PyErr_Format(PyExc_IndexError, "there is no directory %u", number);
    return directory;
}

static PyObject *index_add_directory(PyObject *object, PyObject *args) {
    Index *self = (Index *)object;
    uint32_t slabs;
    if (!PyArg_ParseTuple(args, "O&:add_directory", hkv_to_u32, &slabs) || !index_usable(self)) return NULL;
    if (slabs == 0) return PyErr_Format(PyExc_ValueError, "a directory has at least one slab");
    uint32_t number = hkv_index_add_directory(self->index, slabs);
    if (number != HKV_NIL) return PyLong_FromUnsignedLong(number);
    return PyErr_Format(PyExc_MemoryError, "no memory for a directory of %u slabs, or there are %d directories already", slabs,
                        HKV_MAX_DIRECTORIES);
}

static PyObject *index_enable(PyObject *object, PyObject *args, PyObject *keywords) {
    static char *names[] = {"directory", "on", NULL};
    Index *self = (Index *)object;
    uint32_t number;
    int on = 1;
    struct hkv_directory *directory;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O&|p:enable", names, hkv_to_u32, &number, &on) || !index_usable(self)) return NULL;
    if ((directory = directory_of(self, number)) == NULL) return NULL;
    hkv_index_enable(directory, on);
    Py_RETURN_NONE;
}

static PyObject *index_drop(PyObject *object, PyObject *args) {
    Index *self = (Index *)object;
    uint32_t number;
    struct hkv_directory *directory;
    if (!PyArg_ParseTuple(args, "O&:drop", hkv_to_u32, &number) || !index_usable(self)) return NULL;
    if ((directory = directory_of(self, number)) == NULL) return NULL;
    return PyLong_FromUnsignedLong(hkv_index_drop(self->index, directory));
}

static int in_order(const void *left, const void *right) {
    uint32_t a = ((const struct hkv_listed *)left)->number, b = ((const struct hkv_listed *)right)->number;
    return (a > b) - (a < b);
}

/* {number: (number of the tier, slot_bytes)} in order of the first; NULL with an exception. */
static struct hkv_listed *listed_of(PyObject *numbers) {
    struct hkv_listed *listed = PyMem_Calloc((size_t)PyDict_Size(numbers) + 1, sizeof *listed), *next = listed;
    PyObject *number, *value;
    if (listed == NULL) return (struct hkv_listed *)PyErr_NoMemory();
    for (Py_ssize_t at = 0; PyDict_Next(numbers, &at, &number, &value); next++) {
        if (PyTuple_Check(value) && hkv_to_u32(number, &next->number) &&
            PyArg_ParseTuple(value, "O&O&", hkv_to_u32, &next->namespace_number, hkv_to_u64, &next->slot_bytes))
            continue;
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "numbers must be {number: (namespace, slot_bytes)}");
        PyMem_Free(listed);
        return NULL;
    }
    qsort(listed, (size_t)(next - listed), sizeof *listed, in_order);
    return listed;
}

static PyObject *index_load(PyObject *object, PyObject *args) {
    Index *self = (Index *)object;
    uint32_t number, slab, loaded = 0;
    Py_buffer records;
    PyObject *numbers;
    struct hkv_directory *directory;
    struct hkv_listed *listed = NULL;
    if (!PyArg_ParseTuple(args, "O&O&y*O!:load", hkv_to_u32, &number, hkv_to_u32, &slab, &records, &PyDict_Type, &numbers)) return NULL;
    if (!index_usable(self) || (directory = directory_of(self, number)) == NULL) goto done;
    if (slab >= directory->slabs) {
        PyErr_Format(PyExc_IndexError, "there is no slab %u in directory %u", slab, number);
    } else if (directory->slab[slab].map != NULL) {
        PyErr_Format(PyExc_ValueError, "slab %u of directory %u is in use", slab, number);
    } else if ((listed = listed_of(numbers)) != NULL) {
        size_t count = (size_t)PyDict_Size(numbers);
        if (!hkv_index_load(self->index, directory, slab, records.buf, (size_t)records.len, listed, count, &loaded)) PyErr_NoMemory();
    }
    PyMem_Free(listed);
done:
    PyBuffer_Release(&records);
    return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLong(loaded);
}

/* ---- blocks ---------------------------------------------------------------------------------------------------------------------- */

struct named { /* what names a block */
    const uint8_t *key;
    Py_ssize_t key_size;
    uint32_t namespace_number;
};

static bool key_good(const Index *self, const struct named *block) {
    if (!index_usable(self)) return false;
    if (block->key_size == 32) return true;
    PyErr_Format(PyExc_ValueError, "key has %zd bytes, must have 32", block->key_size);
    return false;
}

static PyObject *index_place(PyObject *object, PyObject *args) {
    Index *self = (Index *)object;
    struct named block;
    struct hkv_place at;
    uint64_t slot_bytes;
    if (!PyArg_ParseTuple(args, "y#O&O&:place", &block.key, &block.key_size, hkv_to_u32, &block.namespace_number, hkv_to_u64,
                          &slot_bytes) ||
        !key_good(self, &block))
        return NULL;
    if (slot_bytes % HKV_PAGE != 0 || slot_bytes == 0 || slot_bytes > self->index->slab_bytes)
        return PyErr_Format(PyExc_ValueError, "slot_bytes is %llu, must be a multiple of 4096 in 4096..%llu",
                            (unsigned long long)slot_bytes, (unsigned long long)self->index->slab_bytes);
    if (!hkv_index_place(self->index, block.key, block.namespace_number, slot_bytes, &at)) Py_RETURN_NONE;
    return Py_BuildValue("(IIIIK)", at.entry, at.directory, at.slab, at.slot, (unsigned long long)at.sequence);
}

static PyObject *index_settle(PyObject *object, PyObject *args) {
    Index *self = (Index *)object;
    uint32_t entry;
    uint64_t checksum;
    PyObject *given;
    if (!PyArg_ParseTuple(args, "O&O:settle", hkv_to_u32, &entry, &given) || !index_usable(self)) return NULL;
    if (given != Py_None && !hkv_to_u64(given, &checksum)) return NULL;
    if (hkv_index_settle(self->index, entry, given == Py_None ? NULL : &checksum)) Py_RETURN_NONE;
    return PyErr_Format(PyExc_IndexError, "entry %u is not being written", entry);
}

static PyObject *index_has(PyObject *object, PyObject *args) {
    Index *self = (Index *)object;
    uint32_t namespace_number;
    Py_buffer keys;
    Py_ssize_t count;
    PyObject *found = NULL;
    if (!PyArg_ParseTuple(args, "y*O&:has", &keys, hkv_to_u32, &namespace_number)) return NULL;
    if (index_usable(self) && (count = hkv_key_count(&keys)) >= 0 && (found = PyBytes_FromStringAndSize(NULL, count)) != NULL) {
        char *out = PyBytes_AsString(found);
        hkv_index_hold(self->index, keys.buf, (size_t)count, namespace_number, (uint8_t *)out);
    }
    PyBuffer_Release(&keys);
    return found;
}

static PyObject *index_open(PyObject *object, PyObject *args) {
    Index *self = (Index *)object;
    struct named block;
    struct hkv_place at;
    if (!PyArg_ParseTuple(args, "y#O&:open", &block.key, &block.key_size, hkv_to_u32, &block.namespace_number) || !key_good(self, &block))
        return NULL;
    if (!hkv_index_open(self->index, block.key, block.namespace_number, &at)) Py_RETURN_NONE;
    return Py_BuildValue("(IIIIK)", at.entry, at.directory, at.slab, at.slot, (unsigned long long)at.checksum);
}

static PyObject *index_close(PyObject *object, PyObject *args) {
    Index *self = (Index *)object;
    uint32_t entry;
    int keep;
    if (!PyArg_ParseTuple(args, "O&p:close", hkv_to_u32, &entry, &keep) || !index_usable(self)) return NULL;
    if (hkv_index_close(self->index, entry, keep)) Py_RETURN_NONE;
    return PyErr_Format(PyExc_IndexError, "entry %u is not being read", entry);
}

static PyObject *index_remove(PyObject *object, PyObject *args) {
    Index *self = (Index *)object;
    struct named block;
    if (!PyArg_ParseTuple(args, "y#O&:remove", &block.key, &block.key_size, hkv_to_u32, &block.namespace_number) || !key_good(self, &block))
        return NULL;
    return PyBool_FromLong(hkv_index_remove(self->index, block.key, block.namespace_number));
}

static PyObject *index_remove_namespace(PyObject *object, PyObject *args) {
    Index *self = (Index *)object;
    uint32_t namespace_number;
    if (!PyArg_ParseTuple(args, "O&:remove_namespace", hkv_to_u32, &namespace_number) || !index_usable(self)) return NULL;
    return PyLong_FromUnsignedLong(hkv_index_remove_namespace(self->index, namespace_number));
}

/* ---- what there is --------------------------------------------------------------------------------------------------------------- */

struct number {
    const char *name;
    uint64_t value;
};

static PyObject *numbers_of(const struct number *numbers, size_t count) {
    PyObject *map = PyDict_New();
    for (size_t i = 0; map != NULL && i < count; i++)
        if (!hkv_set_number(map, numbers[i].name, numbers[i].value)) Py_CLEAR(map);
    return map;
}

static PyObject *index_stats(PyObject *object, PyObject *none) {
    Index *self = (Index *)object;
    if (!index_usable(self)) return NULL;
    const struct hkv_index *x = self->index;
    uint64_t used = 0, total = 0, reading = 0;
    for (uint32_t i = 0; i < x->directories; i++) {
        const struct hkv_directory *d = x->directory[i];
        reading += d->busy;
        if (d->dropped) continue;
        used += d->used_bytes;
        total += d->slabs * x->slab_bytes;
    }
    const uint64_t writing = x->counts.states[HKV_ON_DISK_WRITING] + x->counts.states[HKV_ON_DISK_DOOMED];
    const struct number numbers[] = {{"max_blocks", x->max_blocks},
                                     {"blocks", x->counts.states[HKV_ON_DISK]},
                                     {"writing", writing},
                                     {"reading", reading - writing},
                                     {"gone", x->counts.states[HKV_ON_DISK_GONE] + x->counts.states[HKV_ON_DISK_DOOMED]},
                                     {"used_bytes", used},
                                     {"total_bytes", total},
                                     {"memory_bytes", hkv_index_memory(x)},
                                     {"sequence", x->sequence},
                                     {"placed", x->counts.placed},
                                     {"failed", x->counts.failed},
                                     {"evicted", x->counts.evicted},
                                     {"slabs_taken_back", x->counts.slabs_taken_back}};
    return numbers_of(numbers, sizeof numbers / sizeof *numbers);
}

static PyObject *index_directory(PyObject *object, PyObject *args) {
    Index *self = (Index *)object;
    uint32_t number;
    struct hkv_directory *d;
    if (!PyArg_ParseTuple(args, "O&:directory", hkv_to_u32, &number) || !index_usable(self)) return NULL;
    if ((d = directory_of(self, number)) == NULL) return NULL;
    uint64_t free_slabs = 0;
    for (uint32_t s = 0; s < d->slabs; s++) free_slabs += d->slab[s].map == NULL;
    const struct number numbers[] = {{"enabled", d->enabled},
                                     {"blocks", d->blocks},
                                     {"busy", d->busy},
                                     {"used_bytes", d->used_bytes},
                                     {"total_bytes", d->slabs * self->index->slab_bytes},
                                     {"slabs", d->slabs},
                                     {"free_slabs", free_slabs},
                                     {"placed", d->placed},
                                     {"evicted", d->evicted}};
    return numbers_of(numbers, sizeof numbers / sizeof *numbers);
}

static void append_sentence(void *context, const char *sentence) {
    if (!PyErr_Occurred()) hkv_append(context, PyUnicode_FromString(sentence));
}

static PyObject *index_check(PyObject *object, PyObject *none) {
    Index *self = (Index *)object;
    if (!index_usable(self)) return NULL;
    PyObject *list = PyList_New(0);
    if (list != NULL) hkv_index_check(self->index, append_sentence, list);
    if (PyErr_Occurred()) Py_CLEAR(list);
    return list;
}

/* ---- the module ------------------------------------------------------------------------------------------------------------------ */

static PyMethodDef index_methods[] = {
    {"bytes_needed", index_bytes_needed, METH_STATIC | METH_VARARGS, NULL},
    {"add_directory", index_add_directory, METH_VARARGS, NULL},
    {"enable", (PyCFunction)(void (*)(void))index_enable, METH_VARARGS | METH_KEYWORDS, NULL},
    {"drop", index_drop, METH_VARARGS, NULL},
    {"load", index_load, METH_VARARGS, NULL},
    {"place", index_place, METH_VARARGS, NULL},
    {"settle", index_settle, METH_VARARGS, NULL},
    {"has", index_has, METH_VARARGS, NULL},
    {"open", index_open, METH_VARARGS, NULL},
    {"close", index_close, METH_VARARGS, NULL},
    {"remove", index_remove, METH_VARARGS, NULL},
    {"remove_namespace", index_remove_namespace, METH_VARARGS, NULL},
    {"stats", index_stats, METH_NOARGS, NULL},
    {"directory", index_directory, METH_VARARGS, NULL},
    {"check", index_check, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot index_slots[] = {{Py_tp_new, index_new}, {Py_tp_dealloc, index_dealloc}, {Py_tp_methods, index_methods}, {0, NULL}};

static PyType_Spec index_spec = {
    .name = "hostkv.cext._cext.Index", .basicsize = sizeof(Index), .flags = Py_TPFLAGS_DEFAULT, .slots = index_slots};

int hkv_add_index(PyObject *module) {
    PyObject *type = PyType_FromSpec(&index_spec);
    return type == NULL ? -1 : PyModule_AddObject(module, "Index", type);
}
