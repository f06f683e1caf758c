/* What the Python-facing files of the extension share. Stable ABI from 3.11 on, plain API on 3.10. */
#ifndef HOSTKV_MODULE_H
#define HOSTKV_MODULE_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

int hkv_add_data(PyObject *module);
int hkv_add_tables(PyObject *module);
int hkv_add_store(PyObject *module);
int hkv_add_io(PyObject *module);
int hkv_add_index(PyObject *module);

/* ---- py_tables.c ----------------------------------------------------------------------------------------------------------------- */

extern PyObject *hkv_layout_error;

/* Mapped memory and who uses it; unmapped with the last one. Not inherited by a fork's child if it is shared. */
struct hkv_region {
    uint8_t *memory;
    size_t size;
    size_t users;
    pid_t owner;
    bool shared;
};
struct hkv_region *hkv_region_map(int fd, size_t size, bool writable); /* fd -1: private memory, zero */
void hkv_region_leave(struct hkv_region *region);                      /* NULL: nothing */
bool hkv_region_usable(const struct hkv_region *region, const char *what);

bool hkv_file_size(int fd, uint64_t *size);
int hkv_to_u64(PyObject *object, void *out); /* for "O&" */
int hkv_to_u32(PyObject *object, void *out);
Py_ssize_t hkv_key_count(const Py_buffer *keys); /* -1 with an exception */
bool hkv_set_number(PyObject *map, const char *name, uint64_t number);
bool hkv_append(PyObject *list, PyObject *item); /* takes over the item; NULL: false */
#endif
