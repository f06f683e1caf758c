/* CStore: the Python object behind Store.cc_store(). It fills the struct of the public header hostkv.h and keeps what the struct
 * points to in place: the pool, by holding a buffer of its Mapping (whose close() then refuses), and the tables, by a mapping of its
 * own, since a View can be closed under it. */
#define _GNU_SOURCE 1
#include "hash.h"
#include "hostkv.h"
#include "module.h"
#include "tables.h"

#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

_Static_assert(HOSTKV_KEY_BYTES == HKV_DIGEST && HOSTKV_MAX_ID_BYTES == HKV_MAX_ID && HOSTKV_PAGE_BYTES == HKV_PAGE, "hostkv.h");

typedef struct {
    PyObject_HEAD struct hostkv_store store;
    struct hkv_reader reader;
    uint32_t prepared[8];
    Py_buffer pool;
    void *tables;
    size_t tables_bytes;
    pid_t owner;
} CStore;

static int store_lookup(const struct hostkv_store *store, const uint8_t *keys, size_t count, uint8_t *found) {
    if (count == 0) return 0;
    if (keys == NULL || found == NULL) return HOSTKV_EINVAL;
    hkv_lookup(&((const CStore *)store->context)->reader, store->namespace_index, keys, count, found);
    return 0;
}

static int store_derive(const struct hostkv_store *store, const uint8_t *id, size_t id_bytes, uint8_t key[HOSTKV_KEY_BYTES]) {
    if (id == NULL || key == NULL || id_bytes < 1 || id_bytes > HOSTKV_MAX_ID_BYTES) return HOSTKV_EINVAL;
    const struct hkv_id one = {id, id_bytes};
    hkv_keys_derive(((const CStore *)store->context)->prepared, &one, 1, key);
    return 0;
}

/* A size_t attribute of the View. False with an exception (closed, or another process). */
static bool view_number(PyObject *view, const char *name, size_t *value) {
    PyObject *number = PyObject_GetAttrString(view, name);
    if (number == NULL) return false;
    *value = PyLong_AsSize_t(number);
    Py_DECREF(number);
    return !PyErr_Occurred();
}

/* Maps the view's tables once more. Size 0 asks mremap() for a second mapping of the same shared pages; MADV_DONTFORK comes
 * along with it. */
static bool map_tables(CStore *self, PyObject *view) {
    size_t address, size;
    if (!view_number(view, "address", &address) || !view_number(view, "size", &size)) return false;
    void *memory = mremap((void *)address, 0, size, MREMAP_MAYMOVE);
    if (memory == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        return false;
    }
    self->tables = memory;
    self->tables_bytes = size;
    return true;
}

static bool fill(CStore *self, PyObject *view, PyObject *mapping, const char *fingerprint, uint32_t namespace_index, uint64_t shard_bytes,
                 uint32_t shards) {
    struct hkv_header header;
    char message[HKV_MESSAGE_BYTES];
    if (!map_tables(self, view) || PyObject_GetBuffer(mapping, &self->pool, PyBUF_WRITABLE) < 0) return false;
    memcpy(&header, self->tables, sizeof header);
    if (!hkv_header_check(&header, NULL, NULL, message)) {
        PyErr_SetString(PyExc_ValueError, message);
        return false;
    }
    if (header.pool_bytes != (uint64_t)self->pool.len) {
        PyErr_Format(PyExc_ValueError, "the mapping has %zd bytes, the pool of these tables has %llu", self->pool.len,
                     (unsigned long long)header.pool_bytes);
        return false;
    }
    if (namespace_index >= header.namespace_capacity || shards < 1 || shards > HKV_MAX_SHARDS || shard_bytes < 1 ||
        shard_bytes > header.pool_bytes || hkv_slot_bytes(shard_bytes, shards) > header.extent_bytes) {
        PyErr_Format(PyExc_ValueError, "namespace %lu with %lu shards of %llu bytes cannot be in this pool", (unsigned long)namespace_index,
                     (unsigned long)shards, (unsigned long long)shard_bytes);
        return false;
    }
    hkv_reader_attach(&self->reader, self->tables, &header);
    hkv_keys_prepare((const uint8_t *)fingerprint, self->prepared);
    self->store = (struct hostkv_store){
        .abi_version = HOSTKV_ABI_VERSION,
        .struct_bytes = sizeof(struct hostkv_store),
        .namespace_index = namespace_index,
        .shards = shards,
        .shard_bytes = shard_bytes,
        .shard_stride = (shard_bytes + HKV_SHARD_ALIGN - 1) / HKV_SHARD_ALIGN * HKV_SHARD_ALIGN,
        .pool = self->pool.buf,
        .pool_bytes = (uint64_t)self->pool.len,
        .tables = self->tables,
        .tables_bytes = self->tables_bytes,
        .context = self,
        .lookup = store_lookup,
        .derive = store_derive,
    };
    memcpy(self->store.fingerprint, fingerprint, sizeof self->store.fingerprint);
    return true;
}

static PyObject *store_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"view", "mapping", "fingerprint", "namespace_index", "shard_bytes", "shards", NULL};
    PyObject *module = PyType_GetModule(type), *view, *mapping;
    const char *fingerprint;
    Py_ssize_t fingerprint_size;
    unsigned long long namespace_index, shard_bytes, shards;
    if (module == NULL) return NULL;
    PyObject *view_type = PyObject_GetAttrString(module, "View"), *mapping_type = PyObject_GetAttrString(module, "Mapping");
    int parsed = view_type != NULL && mapping_type != NULL &&
                 PyArg_ParseTupleAndKeywords(args, keywords, "O!O!y#KKK:CStore", names, view_type, &view, mapping_type, &mapping,
                                             &fingerprint, &fingerprint_size, &namespace_index, &shard_bytes, &shards);
    Py_XDECREF(view_type);
    Py_XDECREF(mapping_type);
    if (!parsed) return NULL;
    if (fingerprint_size != 32) return PyErr_Format(PyExc_ValueError, "fingerprint has %zd bytes, must have 32", fingerprint_size);
    if (namespace_index > UINT32_MAX || shards > HKV_MAX_SHARDS)
        return PyErr_Format(PyExc_ValueError, "namespace_index %llu or shards %llu is out of range", namespace_index, shards);

    CStore *self = (CStore *)PyType_GenericNew(type, NULL, NULL);
    if (self == NULL) return NULL;
    self->owner = getpid();
    if (fill(self, view, mapping, fingerprint, (uint32_t)namespace_index, shard_bytes, (uint32_t)shards)) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static void store_dealloc(PyObject *object) {
    CStore *self = (CStore *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->tables != NULL && self->owner == getpid()) munmap(self->tables, self->tables_bytes);
    PyBuffer_Release(&self->pool);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *store_address(PyObject *object, void *closure) {
    CStore *self = (CStore *)object;
    if (self->owner != getpid())
        return PyErr_Format(PyExc_RuntimeError,
                            "this store was made by process %ld: make a new client after fork, or start processes with the "
                            "spawn method",
                            (long)self->owner);
    return PyLong_FromVoidPtr(&self->store);
}

static PyGetSetDef store_attributes[] = {{"address", store_address, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot store_slots[] = {{Py_tp_new, store_new}, {Py_tp_dealloc, store_dealloc}, {Py_tp_getset, store_attributes}, {0, NULL}};

static PyType_Spec store_spec = {
    .name = "hostkv.cext._cext.CStore", .basicsize = sizeof(CStore), .flags = Py_TPFLAGS_DEFAULT, .slots = store_slots};

int hkv_add_store(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &store_spec, NULL);
    if (type == NULL) return -1;
    if (PyModule_AddObject(module, "CStore", type) == 0) return 0;
    Py_DECREF(type);
    return -1;
}
