/* Python's Tables and View. _cext.pyi documents each call; tables.h does the work.
 *
 * The memory is a region that is unmapped with its last user: the Tables or View that made it, views of a Tables, and each batch that
 * runs without the GIL. So close() never pulls memory from under another thread. Users are counted under the GIL. A region of a file is
 * not inherited by a fork's child, where every method raises. Tables belong to one thread and keep the GIL. */
#define _GNU_SOURCE 1
#include "module.h"
#include "tables.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* A smaller batch takes less time than getting the GIL back can. */
enum { GIL_FREE_KEYS = 2048 };

PyObject *hkv_layout_error;
static PyTypeObject *tables_type, *view_type;

/* ---- regions --------------------------------------------------------------------------------------------------------------------- */

struct hkv_region *hkv_region_map(int fd, size_t size, bool writable) {
    struct hkv_region *region = PyMem_Calloc(1, sizeof *region);
    if (region == NULL) return (struct hkv_region *)PyErr_NoMemory();
    int kind = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *memory = mmap(NULL, size, writable ? PROT_READ | PROT_WRITE : PROT_READ, kind, fd, 0);
    if (memory == MAP_FAILED || (fd >= 0 && madvise(memory, size, MADV_DONTFORK) < 0)) {
        PyErr_SetFromErrno(PyExc_OSError);
        if (memory != MAP_FAILED) munmap(memory, size);
        PyMem_Free(region);
        return NULL;
    }
    madvise(memory, size, MADV_HUGEPAGE); /* halves a lookup in large tables; where the kernel does not offer it, nothing is lost */
    *region = (struct hkv_region){.memory = memory, .size = size, .users = 1, .owner = getpid(), .shared = fd >= 0};
    return region;
}

void hkv_region_leave(struct hkv_region *region) {
    if (region == NULL || --region->users > 0) return;
    if (!region->shared || region->owner == getpid()) munmap(region->memory, region->size);
    PyMem_Free(region);
}

bool hkv_region_usable(const struct hkv_region *region, const char *what) {
    if (region == NULL) {
        PyErr_Format(PyExc_ValueError, "the %s is closed", what);
        return false;
    }
    if (!region->shared || region->owner == getpid()) return true;
    PyErr_Format(PyExc_RuntimeError,
                 "this %s was made by process %ld and is not mapped in process %ld: make a new one after fork, or start processes with "
                 "the spawn method",
                 what, (long)region->owner, (long)getpid());
    return false;
}

/* ---- arguments ------------------------------------------------------------------------------------------------------------------- */

int hkv_to_u64(PyObject *object, void *out) {
    unsigned long long value = PyLong_AsUnsignedLongLong(object);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_ValueError, "%R is not in 0..2**64-1", object);
        }
        return 0;
    }
    *(uint64_t *)out = value;
    return 1;
}

/* A number of a record; those no record can have become HKV_NIL, which is refused later. */
static int to_index(PyObject *object, void *out) {
    int overflow;
    long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (value == -1 && PyErr_Occurred()) return 0;
    *(uint32_t *)out = overflow != 0 || value < 0 || value > HKV_NIL ? HKV_NIL : (uint32_t)value;
    return 1;
}

int hkv_to_u32(PyObject *object, void *out) {
    uint64_t value;
    if (!hkv_to_u64(object, &value)) return 0;
    if (value > UINT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%R is not in 0..2**32-1", object);
        return 0;
    }
    *(uint32_t *)out = (uint32_t)value;
    return 1;
}

struct fixed_bytes {
    const uint8_t *data;
    Py_ssize_t size;
};

static bool has_size(const char *name, struct fixed_bytes bytes, Py_ssize_t size) {
    if (bytes.size == size) return true;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes, must have %zd", name, bytes.size, size);
    return false;
}

Py_ssize_t hkv_key_count(const Py_buffer *keys) {
    if (keys->len % 32 == 0) return keys->len / 32;
    PyErr_Format(PyExc_ValueError, "keys has %zd bytes, must be a multiple of 32", keys->len);
    return -1;
}

static bool has_items(const char *name, const Py_buffer *buffer, Py_ssize_t width, Py_ssize_t count) {
    if (buffer->len == width * count) return true;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes, must have %zd for %zd keys", name, buffer->len, width * count, count);
    return false;
}

static uint8_t *bytes_of(PyObject *object) {
    return (uint8_t *)PyBytes_AsString(object);
}

/* ---- Tables: making them --------------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD struct hkv_region *region; /* NULL once closed */
    struct hkv_tables *tables;
    bool adopted; /* and not repaired yet */
} Tables;

static bool tables_mapped(const Tables *self) {
    return hkv_region_usable(self->region, "Tables");
}

/* Every verb begins with it. */
static bool tables_usable(const Tables *self) {
    if (!tables_mapped(self)) return false;
    if (self->adopted) PyErr_SetString(PyExc_RuntimeError, "these Tables were adopted; call repair() first");
    return !self->adopted;
}

#define GEOMETRY_NAMES "pool_bytes", "extent_bytes", "max_blocks", "max_shards", "max_pins", "max_members", "max_namespaces"
#define GEOMETRY_FORMAT "O&O&O&O&O&O&O&"
#define GEOMETRY_TARGETS(g)                                                                                                           \
    hkv_to_u64, &(g).pool_bytes, hkv_to_u64, &(g).extent_bytes, hkv_to_u64, &(g).max_blocks, hkv_to_u64, &(g).max_shards, hkv_to_u64, \
        &(g).max_pins, hkv_to_u64, &(g).max_members, hkv_to_u64, &(g).max_namespaces

static bool geometry_good(const struct hkv_geometry *geometry) {
    char message[HKV_MESSAGE_BYTES];
    if (hkv_geometry_check(geometry, message)) return true;
    PyErr_SetString(PyExc_ValueError, message);
    return false;
}

static PyObject *tables_bytes_needed(PyObject *none, PyObject *args, PyObject *keywords) {
    static char *names[] = {GEOMETRY_NAMES, NULL};
    struct hkv_geometry geometry;
    struct hkv_header layout;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "$" GEOMETRY_FORMAT ":bytes_needed", names, GEOMETRY_TARGETS(geometry))) return NULL;
    if (!geometry_good(&geometry)) return NULL;
    hkv_layout(&geometry, &layout);
    return PyLong_FromUnsignedLongLong(layout.tables_bytes);
}

bool hkv_file_size(int fd, uint64_t *size) {
    struct stat file;
    if (fstat(fd, &file) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return false;
    }
    *size = (uint64_t)file.st_size;
    return true;
}

/* What is not in the tables themselves: which blocks go first, and which a tier wants. */
struct order {
    int keeps_reused;
    uint32_t min_reuse;
};

/* Takes over the region and the tables; both are given back when there is no memory. */
static PyObject *tables_object(struct hkv_region *region, struct hkv_tables *tables, bool adopted, struct order order) {
    Tables *self = tables == NULL ? NULL : (Tables *)PyType_GenericAlloc(tables_type, 0);
    if (self == NULL) {
        if (tables != NULL) hkv_tables_free(tables);
        hkv_region_leave(region);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    self->region = region;
    self->tables = tables;
    self->adopted = adopted;
    tables->keeps_reused = order.keeps_reused;
    tables->min_reuse = order.min_reuse;
    return (PyObject *)self;
}

/* "$" cannot stand before an optional argument in a format. */
static bool only_fd(PyObject *args) {
    if (PyTuple_Size(args) <= 1) return true;
    PyErr_SetString(PyExc_TypeError, "only fd is a positional argument");
    return false;
}

bool hkv_set_number(PyObject *map, const char *name, uint64_t number) {
    PyObject *value = PyLong_FromUnsignedLongLong(number);
    bool done = value != NULL && PyDict_SetItemString(map, name, value) == 0;
    Py_XDECREF(value);
    return done;
}

static PyObject *tables_create(PyObject *none, PyObject *args, PyObject *keywords) {
    static char *names[] = {"fd", GEOMETRY_NAMES, "boot_id", "pool_epoch", "instance_id", "verify", "keeps_reused", "min_reuse", NULL};
    int fd, verify = 0;
    struct order order = {0, 0};
    struct hkv_geometry geometry;
    struct hkv_header layout;
    struct fixed_bytes boot, epoch, instance;
    if (!only_fd(args) ||
        !PyArg_ParseTupleAndKeywords(args, keywords, "i" GEOMETRY_FORMAT "y#y#y#|ppO&:create", names, &fd, GEOMETRY_TARGETS(geometry),
                                     &boot.data, &boot.size, &epoch.data, &epoch.size, &instance.data, &instance.size, &verify,
                                     &order.keeps_reused, hkv_to_u32, &order.min_reuse))
        return NULL;
    if (!geometry_good(&geometry) || !has_size("boot_id", boot, 16) || !has_size("pool_epoch", epoch, 16) ||
        !has_size("instance_id", instance, 16))
        return NULL;
    hkv_layout(&geometry, &layout);
    memcpy(layout.host_boot_id, boot.data, 16);
    memcpy(layout.pool_epoch, epoch.data, 16);
    uint64_t size = layout.tables_bytes;
    if (fd >= 0 && !hkv_file_size(fd, &size)) return NULL;
    if (size != layout.tables_bytes)
        return PyErr_Format(PyExc_ValueError, "the file has %llu bytes, these tables need %llu", (unsigned long long)size,
                            (unsigned long long)layout.tables_bytes);
    struct hkv_region *region = hkv_region_map(fd, layout.tables_bytes, true);
    if (region == NULL) return NULL;
    return tables_object(region, hkv_tables_create(region->memory, &layout, instance.data, verify), false, order);
}

/* Reads and checks the header of a file before anything of it is mapped. False with LayoutError (or OSError). */
static bool header_of(int fd, struct hkv_header *header, const struct hkv_geometry *geometry, const uint8_t *boot_id) {
    uint64_t size;
    char message[HKV_MESSAGE_BYTES];
    if (!hkv_file_size(fd, &size)) return false;
    if (size < sizeof *header) {
        PyErr_Format(hkv_layout_error, "the file has %llu bytes, tables have at least %zu", (unsigned long long)size, sizeof *header);
        return false;
    }
    ssize_t got = pread(fd, header, sizeof *header, 0);
    if (got < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return false;
    }
    if (got != (ssize_t)sizeof *header) {
        PyErr_SetString(hkv_layout_error, "the file became shorter while it was read");
        return false;
    }
    if (!hkv_header_check(header, geometry, boot_id, message)) {
        PyErr_SetString(hkv_layout_error, message);
        return false;
    }
    if (size == header->tables_bytes) return true;
    PyErr_Format(hkv_layout_error, "the file has %llu bytes, tables_bytes of the tables is %llu", (unsigned long long)size,
                 (unsigned long long)header->tables_bytes);
    return false;
}

static PyObject *tables_adopt(PyObject *none, PyObject *args, PyObject *keywords) {
    static char *names[] = {"fd", GEOMETRY_NAMES, "boot_id", "instance_id", "verify", "keeps_reused", "min_reuse", NULL};
    int fd, verify = 0;
    struct order order = {0, 0};
    struct hkv_geometry geometry;
    struct hkv_header header;
    struct fixed_bytes boot, instance;
    if (!only_fd(args) || !PyArg_ParseTupleAndKeywords(args, keywords, "i" GEOMETRY_FORMAT "y#y#|ppO&:adopt", names, &fd,
                                                       GEOMETRY_TARGETS(geometry), &boot.data, &boot.size, &instance.data, &instance.size,
                                                       &verify, &order.keeps_reused, hkv_to_u32, &order.min_reuse))
        return NULL;
    if (!geometry_good(&geometry) || !has_size("boot_id", boot, 16) || !has_size("instance_id", instance, 16)) return NULL;
    if (!header_of(fd, &header, &geometry, boot.data)) return NULL;
    if (header.pool_state != HKV_POOL_LIVE)
        return PyErr_Format(hkv_layout_error, "pool_state of the tables is %u, must be %d", header.pool_state, HKV_POOL_LIVE);
    if (verify && header.verify != 1) return PyErr_Format(hkv_layout_error, "its blocks have no checksums, verify: load needs them");
    struct hkv_region *region = hkv_region_map(fd, header.tables_bytes, true);
    if (region == NULL) return NULL;
    return tables_object(region, hkv_tables_adopt(region->memory, &header, instance.data, verify), true, order);
}

static PyObject *tables_geometry(PyObject *none, PyObject *args) {
    int fd;
    struct hkv_header header;
    if (!PyArg_ParseTuple(args, "i:geometry", &fd) || !header_of(fd, &header, NULL, NULL)) return NULL;
    const uint64_t values[] = {header.pool_bytes,   header.extent_bytes,    header.max_blocks,         header.shard_capacity,
                               header.pin_capacity, header.member_capacity, header.namespace_capacity, header.verify == 1};
    static const char *names[] = {GEOMETRY_NAMES, "verify"};
    PyObject *map = PyDict_New();
    for (size_t i = 0; map != NULL && i < sizeof values / sizeof *values; i++)
        if (!hkv_set_number(map, names[i], values[i])) Py_CLEAR(map);
    return map;
}

static PyObject *tables_repair(PyObject *object, PyObject *args) {
    Tables *self = (Tables *)object;
    PyObject *list;
    if (!PyArg_ParseTuple(args, "O!:repair", &PyList_Type, &list) || !tables_mapped(self)) return NULL;
    if (!self->adopted) {
        PyErr_SetString(PyExc_RuntimeError, "repair() is called once, after adopt()");
        return NULL;
    }
    Py_ssize_t dead = PyList_Size(list);
    uint32_t *members = PyMem_Malloc((size_t)dead * sizeof *members);
    if (members == NULL) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < dead; i++) {
        if (!to_index(PyList_GetItem(list, i), &members[i])) goto failed;
        if (members[i] >= self->tables->fixed.member_capacity) {
            PyErr_Format(PyExc_IndexError, "there is no member %R", PyList_GetItem(list, i));
            goto failed;
        }
    }
    struct hkv_chain *chains;
    size_t count;
    if (!hkv_tables_repair(self->tables, members, (size_t)dead, &chains, &count)) {
        PyErr_NoMemory();
        goto failed;
    }
    self->adopted = false;
    PyMem_Free(members);
    PyObject *result = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; result != NULL && i < count; i++) {
        PyObject *chain = Py_BuildValue("(IKI)", chains[i].session, (unsigned long long)chains[i].tag, chains[i].head);
        if (chain == NULL || PyList_SetItem(result, (Py_ssize_t)i, chain) < 0) Py_CLEAR(result);
    }
    free(chains);
    return result;

failed:
    PyMem_Free(members);
    return NULL;
}

static void tables_drop(Tables *self) {
    if (self->tables != NULL) hkv_tables_free(self->tables);
    hkv_region_leave(self->region);
    self->tables = NULL;
    self->region = NULL;
}

static PyObject *tables_close(PyObject *self, PyObject *none) {
    tables_drop((Tables *)self);
    Py_RETURN_NONE;
}

static void tables_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    tables_drop((Tables *)object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* ---- Tables: header, members, namespaces ----------------------------------------------------------------------------------------- */

static PyObject *tables_pool_epoch(PyObject *object, void *closure) {
    Tables *self = (Tables *)object;
    return tables_mapped(self) ? PyBytes_FromStringAndSize((const char *)self->tables->fixed.pool_epoch, 16) : NULL;
}

static PyObject *tables_verify(PyObject *object, void *closure) {
    Tables *self = (Tables *)object;
    return tables_mapped(self) ? PyBool_FromLong(self->tables->verify) : NULL;
}

static PyObject *tables_heartbeat(PyObject *object, PyObject *args) {
    Tables *self = (Tables *)object;
    uint64_t now_ns;
    if (!PyArg_ParseTuple(args, "O&:heartbeat", hkv_to_u64, &now_ns) || !tables_mapped(self)) return NULL;
    hkv_set_heartbeat(self->tables, now_ns);
    Py_RETURN_NONE;
}

static PyObject *tables_set_removed(PyObject *object, PyObject *none) {
    Tables *self = (Tables *)object;
    if (!tables_mapped(self)) return NULL;
    hkv_set_removed(self->tables);
    Py_RETURN_NONE;
}

static bool has_member(const Tables *self, uint32_t member) {
    if (member < self->tables->fixed.member_capacity && self->tables->members[member].used) return true;
    PyErr_Format(PyExc_IndexError, "there is no member %u", member);
    return false;
}

static bool has_session(const Tables *self, uint32_t session) {
    if (session < self->tables->fixed.member_capacity) return true;
    PyErr_Format(PyExc_IndexError, "session is %u, must be below %llu", session, (unsigned long long)self->tables->fixed.member_capacity);
    return false;
}

static bool has_namespace(const Tables *self, uint32_t index) {
    if (index < self->tables->fixed.namespace_capacity && self->tables->namespaces[index].used) return true;
    PyErr_Format(PyExc_IndexError, "there is no namespace %u", index);
    return false;
}

static bool are_member_flags(uint32_t flags) {
    if (!(flags & ~(uint32_t)(HKV_DEVICE | HKV_TIER))) return true;
    PyErr_Format(PyExc_ValueError, "flags is %u, the flags are DEVICE (%u) and TIER (%u)", flags, HKV_DEVICE, HKV_TIER);
    return false;
}

static PyObject *tables_member_add(PyObject *object, PyObject *args, PyObject *keywords) {
    static char *names[] = {"client_id", "session_id", "lock_name", "session", "pid", "flags", NULL};
    Tables *self = (Tables *)object;
    struct fixed_bytes client, session, lock;
    struct hkv_member member = {.used = 0};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "y#y#y#O&O&|O&:member_add", names, &client.data, &client.size, &session.data,
                                     &session.size, &lock.data, &lock.size, hkv_to_u32, &member.session, hkv_to_u32, &member.pid,
                                     hkv_to_u32, &member.flags))
        return NULL;
    if (!tables_usable(self) || !has_size("client_id", client, 16) || !has_size("session_id", session, 16) ||
        !has_size("lock_name", lock, 16) || !are_member_flags(member.flags))
        return NULL;
    if (self->tables->counts.members == self->tables->fixed.member_capacity) return PyLong_FromLong(-1);
    if (!has_session(self, member.session)) return NULL;
    memcpy(member.client_id, client.data, 16);
    memcpy(member.session_id, session.data, 16);
    memcpy(member.lock_name, lock.data, 16);
    return PyLong_FromUnsignedLong(hkv_member_add(self->tables, &member));
}

static PyObject *tables_member_set_lock(PyObject *object, PyObject *args) {
    Tables *self = (Tables *)object;
    struct fixed_bytes lock;
    uint32_t member;
    if (!PyArg_ParseTuple(args, "O&y#:member_set_lock", to_index, &member, &lock.data, &lock.size) || !tables_usable(self) ||
        !has_member(self, member) || !has_size("lock_name", lock, 16))
        return NULL;
    memcpy(self->tables->members[member].lock_name, lock.data, 16);
    Py_RETURN_NONE;
}

static PyObject *tables_member_set_flags(PyObject *object, PyObject *args) {
    Tables *self = (Tables *)object;
    uint32_t member, flags;
    if (!PyArg_ParseTuple(args, "O&O&:member_set_flags", to_index, &member, hkv_to_u32, &flags) || !tables_usable(self) ||
        !has_member(self, member) || !are_member_flags(flags))
        return NULL;
    self->tables->members[member].flags = flags;
    Py_RETURN_NONE;
}

static PyObject *tables_member_remove(PyObject *object, PyObject *args) {
    Tables *self = (Tables *)object;
    uint32_t member;
    if (!PyArg_ParseTuple(args, "O&:member_remove", to_index, &member) || !tables_usable(self) || !has_member(self, member)) return NULL;
    return PyLong_FromUnsignedLongLong(hkv_member_remove(self->tables, member));
}

bool hkv_append(PyObject *list, PyObject *item) {
    bool done = item != NULL && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return done;
}

static PyObject *tables_members(PyObject *object, PyObject *none) {
    Tables *self = (Tables *)object;
    if (!tables_mapped(self)) return NULL; /* also before repair(), which is told who is dead */
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list != NULL && i < self->tables->fixed.member_capacity; i++) {
        const struct hkv_member *each = &self->tables->members[i];
        if (self->adopted ? !hkv_member_is_sound(self->tables, i) : !each->used) continue;
        if (!hkv_append(list,
                        Py_BuildValue("(Iy#y#y#III)", i, each->client_id, (Py_ssize_t)16, each->session_id, (Py_ssize_t)16, each->lock_name,
                                      (Py_ssize_t)16, each->session, each->pid, each->flags & (HKV_DEVICE | HKV_TIER))))
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *tables_namespace_add(PyObject *object, PyObject *args, PyObject *keywords) {
    static char *names[] = {"fingerprint", "shard_bytes", "shards", "label", NULL};
    Tables *self = (Tables *)object;
    struct fixed_bytes fingerprint, label;
    uint64_t shards;
    struct hkv_namespace wanted = {.used = 0};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "y#O&O&s#:namespace_add", names, &fingerprint.data, &fingerprint.size, hkv_to_u64,
                                     &wanted.shard_bytes, hkv_to_u64, &shards, &label.data, &label.size))
        return NULL;
    if (!tables_usable(self) || !has_size("fingerprint", fingerprint, 32)) return NULL;
    if (shards < 1 || shards > HKV_MAX_SHARDS)
        return PyErr_Format(PyExc_ValueError, "shards is %llu, must be 1..%u", (unsigned long long)shards, HKV_MAX_SHARDS);
    if (label.size > (Py_ssize_t)sizeof wanted.label)
        return PyErr_Format(PyExc_ValueError, "label has %zd bytes, the limit is %zu", label.size, sizeof wanted.label);
    const struct hkv_header *fixed = &self->tables->fixed;
    uint64_t room = fixed->pool_bytes < fixed->extent_bytes ? fixed->pool_bytes : fixed->extent_bytes;
    if (wanted.shard_bytes < 1 || wanted.shard_bytes > room || hkv_slot_bytes(wanted.shard_bytes, shards) > room)
        return PyErr_Format(PyExc_ValueError, "a block of %llu shards of %llu bytes does not fit in an extent of %llu bytes",
                            (unsigned long long)shards, (unsigned long long)wanted.shard_bytes, (unsigned long long)room);
    wanted.shards = (uint32_t)shards;
    wanted.slot_bytes = hkv_slot_bytes(wanted.shard_bytes, shards);
    memcpy(wanted.fingerprint, fingerprint.data, 32);
    memcpy(wanted.label, label.data, (size_t)label.size);
    uint32_t index = hkv_namespace_add(self->tables, &wanted);
    return PyLong_FromLongLong(index == HKV_NIL ? -1 : (long long)index);
}

static PyObject *tables_namespaces(PyObject *object, PyObject *none) {
    Tables *self = (Tables *)object;
    if (!tables_usable(self)) return NULL;
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list != NULL && i < self->tables->fixed.namespace_capacity; i++) {
        const struct hkv_namespace *each = &self->tables->namespaces[i];
        if (!each->used) continue;
        PyObject *label =
            PyUnicode_DecodeUTF8((const char *)each->label, (Py_ssize_t)strnlen((const char *)each->label, sizeof each->label), "replace");
        if (label == NULL ||
            !hkv_append(list, Py_BuildValue("(Iy#KIKKN)", i, each->fingerprint, (Py_ssize_t)32, (unsigned long long)each->shard_bytes,
                                            each->shards, (unsigned long long)each->slot_bytes, (unsigned long long)each->blocks, label)))
            Py_CLEAR(list);
    }
    return list;
}

/* ---- Tables: blocks -------------------------------------------------------------------------------------------------------------- */

enum { AHEAD = 8 };

static inline void prefetch(const struct hkv_tables *tables, const uint8_t *keys, Py_ssize_t i, Py_ssize_t count) {
    if (i + AHEAD < count) hkv_prefetch(tables, keys + 32 * (i + AHEAD));
}

static PyObject *tables_lookup(PyObject *object, PyObject *args) {
    Tables *self = (Tables *)object;
    uint32_t index;
    Py_buffer keys;
    PyObject *statuses = NULL;
    if (!PyArg_ParseTuple(args, "O&y*:lookup", to_index, &index, &keys)) return NULL;
    Py_ssize_t count;
    if (tables_usable(self) && has_namespace(self, index) && (count = hkv_key_count(&keys)) >= 0 &&
        (statuses = PyBytes_FromStringAndSize(NULL, count)) != NULL) {
        uint8_t *out = bytes_of(statuses);
        hkv_lookup(&self->tables->reader, index, keys.buf, (size_t)count, out);
        for (Py_ssize_t i = 0; i < count; i++) out[i] = out[i] ? HKV_OK : HKV_MISS;
    }
    PyBuffer_Release(&keys);
    return statuses;
}

/* The three joined fields that reserve, acquire and locate answer. */
struct handles {
    PyObject *statuses, *pages, *generations;
};

static bool handles_new(struct handles *h, Py_ssize_t count) {
    h->statuses = PyBytes_FromStringAndSize(NULL, count);
    h->pages = PyBytes_FromStringAndSize(NULL, 4 * count);
    h->generations = PyBytes_FromStringAndSize(NULL, 8 * count);
    if (h->statuses != NULL && h->pages != NULL && h->generations != NULL) return true;
    Py_CLEAR(h->statuses);
    Py_CLEAR(h->pages);
    Py_CLEAR(h->generations);
    return false;
}

static void handles_set(const struct handles *h, Py_ssize_t i, uint8_t status, uint32_t page, uint64_t generation) {
    bytes_of(h->statuses)[i] = status;
    memcpy(bytes_of(h->pages) + 4 * i, &page, 4);
    memcpy(bytes_of(h->generations) + 8 * i, &generation, 8);
}

static bool shards_good(const Py_buffer *shards, Py_ssize_t count, uint32_t limit) {
    for (Py_ssize_t i = 0; i < count; i++) {
        uint16_t shard;
        memcpy(&shard, (const uint8_t *)shards->buf + 2 * i, 2);
        if (shard < limit) continue;
        PyErr_Format(PyExc_ValueError, "shards[%zd] is %u, its block has %u", i, shard, limit);
        return false;
    }
    return true;
}

static PyObject *tables_reserve(PyObject *object, PyObject *args) {
    Tables *self = (Tables *)object;
    uint32_t index, member;
    uint64_t tag;
    Py_buffer keys, shards;
    struct handles handles = {NULL, NULL, NULL};
    int low_priority = 0;
    if (!PyArg_ParseTuple(args, "O&O&O&y*y*|p:reserve", to_index, &index, to_index, &member, hkv_to_u64, &tag, &keys, &shards,
                          &low_priority))
        return NULL;
    Py_ssize_t count;
    if (tables_usable(self) && has_namespace(self, index) && has_member(self, member) && (count = hkv_key_count(&keys)) >= 0 &&
        has_items("shards", &shards, 2, count) && shards_good(&shards, count, self->tables->namespaces[index].shards) &&
        handles_new(&handles, count)) {
        for (Py_ssize_t i = 0; i < count; i++) {
            uint32_t page = 0;
            uint64_t generation = 0;
            uint16_t shard;
            memcpy(&shard, (const uint8_t *)shards.buf + 2 * i, 2);
            prefetch(self->tables, keys.buf, i, count);
            const uint8_t *key = (const uint8_t *)keys.buf + 32 * i;
            uint8_t status = hkv_reserve(self->tables, index, member, tag, key, shard, low_priority, &page, &generation);
            handles_set(&handles, i, status, page, generation);
        }
    }
    PyBuffer_Release(&keys);
    PyBuffer_Release(&shards);
    return handles.statuses == NULL ? NULL : Py_BuildValue("(NNN)", handles.statuses, handles.pages, handles.generations);
}

static PyObject *tables_commit(PyObject *object, PyObject *args) {
    Tables *self = (Tables *)object;
    uint32_t member;
    uint64_t tag;
    Py_buffer keys, shards, generations, checksums;
    PyObject *statuses = NULL;
    if (!PyArg_ParseTuple(args, "O&O&y*y*y*y*:commit", to_index, &member, hkv_to_u64, &tag, &keys, &shards, &generations, &checksums))
        return NULL;
    Py_ssize_t count;
    if (tables_usable(self) && has_member(self, member) && (count = hkv_key_count(&keys)) >= 0 && has_items("shards", &shards, 2, count) &&
        has_items("generations", &generations, 8, count) && has_items("checksums", &checksums, 8, count) &&
        (statuses = PyBytes_FromStringAndSize(NULL, count)) != NULL) {
        for (Py_ssize_t i = 0; i < count; i++) {
            uint64_t generation, checksum;
            uint16_t shard;
            memcpy(&shard, (const uint8_t *)shards.buf + 2 * i, 2);
            memcpy(&generation, (const uint8_t *)generations.buf + 8 * i, 8);
            memcpy(&checksum, (const uint8_t *)checksums.buf + 8 * i, 8);
            prefetch(self->tables, keys.buf, i, count);
            bytes_of(statuses)[i] = hkv_commit(self->tables, member, tag, (const uint8_t *)keys.buf + 32 * i, shard, generation, checksum);
        }
    }
    PyBuffer_Release(&keys);
    PyBuffer_Release(&shards);
    PyBuffer_Release(&generations);
    PyBuffer_Release(&checksums);
    return statuses;
}

static PyObject *tables_abort(PyObject *object, PyObject *args) {
    Tables *self = (Tables *)object;
    uint32_t member;
    uint64_t *tags = NULL;
    Py_buffer given;
    PyObject *aborted = NULL;
    if (!PyArg_ParseTuple(args, "O&y*:abort", to_index, &member, &given)) return NULL;
    if (!tables_usable(self) || !has_member(self, member) || !has_items("tags", &given, 8, given.len / 8)) {
        PyBuffer_Release(&given);
        return NULL;
    }
    if ((tags = malloc((size_t)given.len + 1)) == NULL) {
        PyErr_NoMemory();
    } else {
        memcpy(tags, given.buf, (size_t)given.len);
        aborted = PyLong_FromUnsignedLongLong(hkv_abort(self->tables, member, tags, (size_t)given.len / 8));
    }
    free(tags);
    PyBuffer_Release(&given);
    return aborted;
}

static PyObject *tables_acquire(PyObject *object, PyObject *args) {
    Tables *self = (Tables *)object;
    uint32_t index, session, head;
    uint64_t tag;
    Py_buffer keys;
    struct handles handles = {NULL, NULL, NULL};
    if (!PyArg_ParseTuple(args, "O&O&O&O&y*:acquire", to_index, &index, hkv_to_u32, &session, hkv_to_u64, &tag, hkv_to_u32, &head, &keys))
        return NULL;
    Py_ssize_t count;
    if (!tables_usable(self) || !has_namespace(self, index) || !has_session(self, session) || (count = hkv_key_count(&keys)) < 0) {
        /* the exception is set */
    } else if (head != HKV_NIL && !hkv_chain_is(self->tables, head, session, tag)) {
        PyErr_Format(PyExc_IndexError, "pin %u is not the head of a chain of session %u and tag %llu", head, session,
                     (unsigned long long)tag);
    } else if (handles_new(&handles, count)) {
        uint64_t mark = hkv_acquire_begin(self->tables, head);
        for (Py_ssize_t i = 0; i < count; i++) {
            uint32_t page = 0;
            uint64_t generation = 0;
            prefetch(self->tables, keys.buf, i, count);
            uint8_t status =
                hkv_acquire(self->tables, index, session, tag, mark, (const uint8_t *)keys.buf + 32 * i, &head, &page, &generation);
            handles_set(&handles, i, status, page, generation);
        }
    }
    PyBuffer_Release(&keys);
    return handles.statuses == NULL ? NULL : Py_BuildValue("(NNNI)", handles.statuses, handles.pages, handles.generations, head);
}

static PyObject *tables_release(PyObject *object, PyObject *args) {
    Tables *self = (Tables *)object;
    uint32_t head;
    if (!PyArg_ParseTuple(args, "O&:release", to_index, &head) || !tables_usable(self)) return NULL;
    if (head >= self->tables->fixed.pin_capacity || !self->tables->pins[head].used)
        return PyErr_Format(PyExc_IndexError, "there is no pin %u", head);
    return PyLong_FromUnsignedLongLong(hkv_release(self->tables, head));
}

static PyObject *tables_clear(PyObject *object, PyObject *args) {
    Tables *self = (Tables *)object;
    uint32_t index;
    if (!PyArg_ParseTuple(args, "O&:clear", hkv_to_u32, &index) || !tables_usable(self)) return NULL;
    if (index != HKV_NIL && !has_namespace(self, index)) return NULL;
    return PyLong_FromUnsignedLongLong(hkv_clear(self->tables, index));
}

static PyObject *tables_discard(PyObject *object, PyObject *args) {
    Tables *self = (Tables *)object;
    uint32_t index;
    Py_buffer keys, generations;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "O&y*y*:discard", to_index, &index, &keys, &generations)) return NULL;
    Py_ssize_t count;
    if (tables_usable(self) && has_namespace(self, index) && (count = hkv_key_count(&keys)) >= 0 &&
        has_items("generations", &generations, 8, count)) {
        unsigned long discarded = 0;
        for (Py_ssize_t i = 0; i < count; i++) {
            uint64_t generation;
            memcpy(&generation, (const uint8_t *)generations.buf + 8 * i, 8);
            prefetch(self->tables, keys.buf, i, count);
            discarded += hkv_discard(self->tables, index, (const uint8_t *)keys.buf + 32 * i, generation);
        }
        result = PyLong_FromUnsignedLong(discarded);
    }
    PyBuffer_Release(&keys);
    PyBuffer_Release(&generations);
    return result;
}

static PyObject *tables_set_spills(PyObject *object, PyObject *args) {
    Tables *self = (Tables *)object;
    int on;
    if (!PyArg_ParseTuple(args, "p:set_spills", &on) || !tables_usable(self)) return NULL;
    self->tables->spills = on;
    Py_RETURN_NONE;
}

static PyObject *tables_spill(PyObject *object, PyObject *args) {
    Tables *self = (Tables *)object;
    uint32_t session, head = HKV_NIL;
    uint64_t tag;
    if (!PyArg_ParseTuple(args, "O&O&:spill", hkv_to_u32, &session, hkv_to_u64, &tag) || !tables_usable(self) ||
        !has_session(self, session))
        return NULL;
    uint32_t i = hkv_spill(self->tables, session, tag, &head);
    if (i == HKV_NIL) Py_RETURN_NONE;
    const struct hkv_block *block = &self->tables->blocks[i];
    return Py_BuildValue("(y#IIKKI)", block->key, (Py_ssize_t)32, block->namespace_index, block->page,
                         (unsigned long long)block->generation, (unsigned long long)block->checksum, head);
}

static PyObject *tables_set_clean(PyObject *object, PyObject *args) {
    Tables *self = (Tables *)object;
    struct fixed_bytes key;
    uint64_t generation;
    if (!PyArg_ParseTuple(args, "y#O&:set_clean", &key.data, &key.size, hkv_to_u64, &generation) || !tables_usable(self) ||
        !has_size("key", key, 32))
        return NULL;
    return PyBool_FromLong(hkv_set_clean(self->tables, (const uint8_t *)key.data, generation));
}

static PyObject *tables_stats(PyObject *object, PyObject *none) {
    Tables *self = (Tables *)object;
    if (!tables_usable(self)) return NULL;
    const struct hkv_counts *n = &self->tables->counts;
    const struct hkv_header *fixed = &self->tables->fixed;
    const struct {
        const char *name;
        uint64_t value;
    } values[] = {{"pool_bytes", fixed->pool_bytes},
                  {"used_bytes", n->used_bytes},
                  {"max_blocks", fixed->max_blocks},
                  {"blocks", n->blocks},
                  {"ready", n->ready},
                  {"writing", n->writing},
                  {"doomed", n->doomed},
                  {"dirty", n->dirty},
                  {"pinned_blocks", n->pinned_blocks},
                  {"pins", n->pins},
                  {"shards_in_flight", n->shards_in_flight},
                  {"members", n->members},
                  {"namespaces", n->namespaces},
                  {"extents", fixed->extent_capacity},
                  {"free_extents", n->free_extents},
                  {"tombstones", n->tombstones},
                  {"evicted", n->evicted},
                  {"evicted_dirty", n->evicted_dirty},
                  {"extents_taken_back", n->extents_taken_back},
                  {"moved", n->moved},
                  {"bad_blocks", n->bad_blocks},
                  {"bad_records", n->bad_records}};
    PyObject *map = PyDict_New();
    for (size_t i = 0; map != NULL && i < sizeof values / sizeof *values; i++)
        if (!hkv_set_number(map, values[i].name, values[i].value)) Py_CLEAR(map);
    return map;
}

static PyObject *tables_extents(PyObject *object, PyObject *none) {
    Tables *self = (Tables *)object;
    if (!tables_usable(self)) return NULL;
    PyObject *list = PyList_New(0);
    for (uint64_t e = 0; list != NULL && e < self->tables->fixed.extent_capacity; e++) {
        const struct hkv_extent *each = &self->tables->extents[e];
        if (each->slot_bytes == 0) continue;
        if (!hkv_append(list,
                        Py_BuildValue("(KKII)", (unsigned long long)e, (unsigned long long)each->slot_bytes, each->slots, each->taken)))
            Py_CLEAR(list);
    }
    return list;
}

static void append_sentence(void *context, const char *sentence) {
    if (!PyErr_Occurred()) hkv_append(context, PyUnicode_FromString(sentence));
}

static PyObject *tables_check(PyObject *object, PyObject *none) {
    Tables *self = (Tables *)object;
    if (!tables_usable(self)) return NULL;
    PyObject *list = PyList_New(0);
    if (list != NULL && !hkv_tables_check(self->tables, append_sentence, list)) PyErr_NoMemory();
    if (PyErr_Occurred()) Py_CLEAR(list);
    return list;
}

/* ---- View ------------------------------------------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD struct hkv_region *region; /* NULL once closed */
    struct hkv_region *index_region;         /* NULL: no index was attached, or closed */
    struct hkv_reader reader;
    uint8_t pool_epoch[16];
    uint64_t pool_bytes;
} View;

static bool view_usable(const View *self) {
    return hkv_region_usable(self->region, "View");
}

/* Takes over one use of the region. */
static PyObject *view_object(PyTypeObject *type, struct hkv_region *region, const struct hkv_header *checked) {
    View *self = (View *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        hkv_region_leave(region);
        return NULL;
    }
    self->region = region;
    hkv_reader_attach(&self->reader, region->memory, checked);
    memcpy(self->pool_epoch, checked->pool_epoch, 16);
    self->pool_bytes = checked->pool_bytes;
    return (PyObject *)self;
}

static PyObject *view_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"fd", "size", NULL};
    int fd;
    uint64_t size;
    struct hkv_header header;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iO&:View", names, &fd, hkv_to_u64, &size)) return NULL;
    if (!header_of(fd, &header, NULL, NULL)) return NULL;
    if (size != header.tables_bytes)
        return PyErr_Format(hkv_layout_error, "tables_bytes of the tables is %llu, must be %llu", (unsigned long long)header.tables_bytes,
                            (unsigned long long)size);
    struct hkv_region *region = hkv_region_map(fd, size, false);
    return region == NULL ? NULL : view_object(type, region, &header);
}

static PyObject *tables_view(PyObject *object, PyObject *none) {
    Tables *self = (Tables *)object;
    if (!tables_usable(self)) return NULL;
    self->region->users++;
    return view_object(view_type, self->region, &self->tables->fixed);
}

/* Reads the header of a file and checks it. False with LayoutError (or OSError). */
static bool index_header_of(int fd, uint64_t size, struct hkv_index_header *header) {
    uint64_t found;
    if (!hkv_file_size(fd, &found)) return false;
    ssize_t got = pread(fd, header, sizeof *header, 0);
    if (got < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return false;
    }
    const char *wrong = got != (ssize_t)sizeof *header ? "size" : hkv_index_header_differs(header);
    if (wrong == NULL && (found != header->index_bytes || size != found)) wrong = "index_bytes";
    if (wrong == NULL) return true;
    PyErr_Format(hkv_layout_error, "the %s of this index is wrong: the file has %llu bytes, %llu are wanted", wrong,
                 (unsigned long long)found, (unsigned long long)size);
    return false;
}

static PyObject *view_attach_index(PyObject *object, PyObject *args) {
    View *self = (View *)object;
    int fd;
    uint64_t size;
    struct hkv_index_header header;
    if (!PyArg_ParseTuple(args, "iO&:attach_index", &fd, hkv_to_u64, &size) || !view_usable(self)) return NULL;
    if (!index_header_of(fd, size, &header)) return NULL;
    struct hkv_region *region = hkv_region_map(fd, size, false);
    if (region == NULL) return NULL;
    hkv_region_leave(self->index_region);
    self->index_region = region;
    hkv_index_attach(&self->reader.index, region->memory, &header);
    Py_RETURN_NONE;
}

static void view_end(View *self) {
    hkv_region_leave(self->region);
    hkv_region_leave(self->index_region);
    self->region = self->index_region = NULL;
}

static PyObject *view_close(PyObject *object, PyObject *none) {
    view_end((View *)object);
    Py_RETURN_NONE;
}

static void view_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    view_end((View *)object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *view_pool_epoch(PyObject *object, void *closure) {
    return PyBytes_FromStringAndSize((const char *)((View *)object)->pool_epoch, 16);
}

static PyObject *view_pool_bytes(PyObject *object, void *closure) {
    return PyLong_FromUnsignedLongLong(((View *)object)->pool_bytes);
}

static PyObject *view_address(PyObject *object, void *closure) {
    View *self = (View *)object;
    return view_usable(self) ? PyLong_FromVoidPtr(self->region->memory) : NULL;
}

static PyObject *view_size(PyObject *object, void *closure) {
    View *self = (View *)object;
    return view_usable(self) ? PyLong_FromSize_t(self->region->size) : NULL;
}

static PyObject *view_alive(PyObject *object, PyObject *none) {
    View *self = (View *)object;
    if (!view_usable(self)) return NULL;
    return PyBool_FromLong(__atomic_load_n(&self->reader.header->pool_state, __ATOMIC_ACQUIRE) == HKV_POOL_LIVE);
}

static PyObject *view_instance_id(PyObject *object, PyObject *none) {
    View *self = (View *)object;
    return view_usable(self) ? PyBytes_FromStringAndSize((const char *)self->reader.header->instance_id, 16) : NULL;
}

static PyObject *view_heartbeat_ns(PyObject *object, PyObject *none) {
    View *self = (View *)object;
    return view_usable(self) ? PyLong_FromUnsignedLongLong(__atomic_load_n(&self->reader.header->heartbeat_ns, __ATOMIC_ACQUIRE)) : NULL;
}

/* The work of a batch uses what the view has mapped now, and gives up the GIL where that pays. */
struct batch {
    struct hkv_reader reader;
    struct hkv_region *region, *index_region;
    PyThreadState *released;
};

static struct batch batch_begin(const View *self, Py_ssize_t count) {
    struct batch batch = {.reader = self->reader, .region = self->region, .index_region = self->index_region};
    batch.region->users++;
    if (batch.index_region != NULL) batch.index_region->users++;
    if (count >= GIL_FREE_KEYS) batch.released = PyEval_SaveThread();
    return batch;
}

static void batch_end(struct batch *batch) {
    if (batch->released != NULL) PyEval_RestoreThread(batch->released);
    hkv_region_leave(batch->region);
    hkv_region_leave(batch->index_region);
}

static PyObject *view_lookup(PyObject *object, PyObject *args) {
    View *self = (View *)object;
    uint32_t index;
    Py_buffer keys;
    PyObject *found = NULL;
    if (!PyArg_ParseTuple(args, "O&y*:lookup", to_index, &index, &keys)) return NULL;
    Py_ssize_t count;
    if (view_usable(self) && (count = hkv_key_count(&keys)) >= 0 && (found = PyBytes_FromStringAndSize(NULL, count)) != NULL) {
        uint8_t *out = bytes_of(found);
        struct batch batch = batch_begin(self, count);
        hkv_lookup(&batch.reader, index, keys.buf, (size_t)count, out);
        batch_end(&batch);
    }
    PyBuffer_Release(&keys);
    return found;
}

/* The batches that answer one number. */
static PyObject *view_run(PyObject *object, PyObject *args, bool reverse) {
    View *self = (View *)object;
    uint32_t index;
    Py_buffer keys;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, reverse ? "O&y*:lookup_reverse" : "O&y*:lookup_prefix", to_index, &index, &keys)) return NULL;
    Py_ssize_t count;
    if (view_usable(self) && (count = hkv_key_count(&keys)) >= 0) {
        struct batch batch = batch_begin(self, count);
        Py_ssize_t found = reverse ? hkv_lookup_reverse(&batch.reader, index, keys.buf, (size_t)count)
                                   : (Py_ssize_t)hkv_lookup_prefix(&batch.reader, index, keys.buf, (size_t)count);
        batch_end(&batch);
        result = PyLong_FromSsize_t(found);
    }
    PyBuffer_Release(&keys);
    return result;
}

static PyObject *view_lookup_prefix(PyObject *self, PyObject *args) {
    return view_run(self, args, false);
}
static PyObject *view_lookup_reverse(PyObject *self, PyObject *args) {
    return view_run(self, args, true);
}

static PyObject *view_locate(PyObject *object, PyObject *args) {
    View *self = (View *)object;
    uint32_t index;
    Py_buffer keys;
    struct handles found = {NULL, NULL, NULL};
    if (!PyArg_ParseTuple(args, "O&y*:locate", to_index, &index, &keys)) return NULL;
    Py_ssize_t count;
    if (view_usable(self) && (count = hkv_key_count(&keys)) >= 0 && handles_new(&found, count)) {
        uint8_t *pages = bytes_of(found.pages), *generations = bytes_of(found.generations), *statuses = bytes_of(found.statuses);
        struct batch batch = batch_begin(self, count);
        hkv_locate(&batch.reader, index, keys.buf, (size_t)count, statuses, pages, generations);
        batch_end(&batch);
    }
    PyBuffer_Release(&keys);
    return found.statuses == NULL ? NULL : Py_BuildValue("(NNN)", found.statuses, found.pages, found.generations);
}

static PyObject *view_check(PyObject *object, PyObject *args) {
    View *self = (View *)object;
    Py_buffer keys, pages, generations, checksums = {.buf = NULL};
    PyObject *held = NULL, *given = Py_None;
    if (!PyArg_ParseTuple(args, "y*y*y*|O:check", &keys, &pages, &generations, &given)) return NULL;
    Py_ssize_t count;
    if (view_usable(self) && (count = hkv_key_count(&keys)) >= 0 && has_items("pages", &pages, 4, count) &&
        has_items("generations", &generations, 8, count) &&
        (given == Py_None || (PyObject_GetBuffer(given, &checksums, PyBUF_SIMPLE) == 0 && has_items("checksums", &checksums, 8, count))) &&
        (held = PyBytes_FromStringAndSize(NULL, count)) != NULL) {
        uint8_t *out = bytes_of(held);
        struct batch batch = batch_begin(self, count);
        hkv_verify(&batch.reader, keys.buf, pages.buf, generations.buf, given == Py_None ? NULL : checksums.buf, (size_t)count, out);
        batch_end(&batch);
    }
    if (checksums.obj != NULL) PyBuffer_Release(&checksums);
    PyBuffer_Release(&keys);
    PyBuffer_Release(&pages);
    PyBuffer_Release(&generations);
    return held;
}

/* ---- the module ------------------------------------------------------------------------------------------------------------------ */

#define WITH_KEYWORDS(function) (PyCFunction)(void (*)(void)) function

static PyMethodDef tables_methods[] = {
    {"bytes_needed", WITH_KEYWORDS(tables_bytes_needed), METH_STATIC | METH_VARARGS | METH_KEYWORDS, NULL},
    {"create", WITH_KEYWORDS(tables_create), METH_STATIC | METH_VARARGS | METH_KEYWORDS, NULL},
    {"adopt", WITH_KEYWORDS(tables_adopt), METH_STATIC | METH_VARARGS | METH_KEYWORDS, NULL},
    {"repair", tables_repair, METH_VARARGS, NULL},
    {"geometry", tables_geometry, METH_STATIC | METH_VARARGS, NULL},
    {"heartbeat", tables_heartbeat, METH_VARARGS, NULL},
    {"set_removed", tables_set_removed, METH_NOARGS, NULL},
    {"member_add", WITH_KEYWORDS(tables_member_add), METH_VARARGS | METH_KEYWORDS, NULL},
    {"member_set_lock", tables_member_set_lock, METH_VARARGS, NULL},
    {"member_set_flags", tables_member_set_flags, METH_VARARGS, NULL},
    {"member_remove", tables_member_remove, METH_VARARGS, NULL},
    {"members", tables_members, METH_NOARGS, NULL},
    {"namespace_add", WITH_KEYWORDS(tables_namespace_add), METH_VARARGS | METH_KEYWORDS, NULL},
    {"namespaces", tables_namespaces, METH_NOARGS, NULL},
    {"lookup", tables_lookup, METH_VARARGS, NULL},
    {"reserve", tables_reserve, METH_VARARGS, NULL},
    {"commit", tables_commit, METH_VARARGS, NULL},
    {"abort", tables_abort, METH_VARARGS, NULL},
    {"acquire", tables_acquire, METH_VARARGS, NULL},
    {"release", tables_release, METH_VARARGS, NULL},
    {"discard", tables_discard, METH_VARARGS, NULL},
    {"set_spills", tables_set_spills, METH_VARARGS, NULL},
    {"spill", tables_spill, METH_VARARGS, NULL},
    {"set_clean", tables_set_clean, METH_VARARGS, NULL},
    {"clear", tables_clear, METH_VARARGS, NULL},
    {"stats", tables_stats, METH_NOARGS, NULL},
    {"extents", tables_extents, METH_NOARGS, NULL},
    {"check", tables_check, METH_NOARGS, NULL},
    {"view", tables_view, METH_NOARGS, NULL},
    {"close", tables_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef tables_attributes[] = {
    {"pool_epoch", tables_pool_epoch, NULL, NULL, NULL}, {"verify", tables_verify, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot tables_slots[] = {
    {Py_tp_dealloc, tables_dealloc}, {Py_tp_methods, tables_methods}, {Py_tp_getset, tables_attributes}, {0, NULL}};

static PyType_Spec tables_spec = {.name = "hostkv.cext._cext.Tables",
                                  .basicsize = sizeof(Tables),
                                  .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                  .slots = tables_slots};

static PyMethodDef view_methods[] = {
    {"alive", view_alive, METH_NOARGS, NULL},
    {"instance_id", view_instance_id, METH_NOARGS, NULL},
    {"heartbeat_ns", view_heartbeat_ns, METH_NOARGS, NULL},
    {"attach_index", view_attach_index, METH_VARARGS, NULL},
    {"lookup", view_lookup, METH_VARARGS, NULL},
    {"lookup_prefix", view_lookup_prefix, METH_VARARGS, NULL},
    {"lookup_reverse", view_lookup_reverse, METH_VARARGS, NULL},
    {"locate", view_locate, METH_VARARGS, NULL},
    {"check", view_check, METH_VARARGS, NULL},
    {"close", view_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef view_attributes[] = {
    {"pool_epoch", view_pool_epoch, NULL, NULL, NULL},
    {"pool_bytes", view_pool_bytes, NULL, NULL, NULL},
    {"address", view_address, NULL, NULL, NULL},
    {"size", view_size, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot view_slots[] = {
    {Py_tp_new, view_new}, {Py_tp_dealloc, view_dealloc}, {Py_tp_methods, view_methods}, {Py_tp_getset, view_attributes}, {0, NULL}};

static PyType_Spec view_spec = {
    .name = "hostkv.cext._cext.View", .basicsize = sizeof(View), .flags = Py_TPFLAGS_DEFAULT, .slots = view_slots};

/* The module keeps the one reference that this file uses too: it is never unloaded. */
static int add(PyObject *module, const char *name, PyObject *object) {
    if (object == NULL) return -1;
    Py_INCREF(object);
    return PyModule_AddObject(module, name, object);
}

int hkv_add_tables(PyObject *module) {
    hkv_layout_error = PyErr_NewException("hostkv.cext._cext.LayoutError", PyExc_ValueError, NULL);
    tables_type = (PyTypeObject *)PyType_FromSpec(&tables_spec);
    view_type = (PyTypeObject *)PyType_FromSpec(&view_spec);
    return add(module, "LayoutError", hkv_layout_error) < 0 || add(module, "Tables", (PyObject *)tables_type) < 0 ||
                   add(module, "View", (PyObject *)view_type) < 0
               ? -1
               : 0;
}
