/* What the Python-facing files of the extension share. Stable ABI from 3.11 on, plain API on 3.10. */
#ifndef HOSTKV_MODULE_H
#define HOSTKV_MODULE_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>

int hkv_add_data(PyObject *module);
int hkv_add_tables(PyObject *module);
int hkv_add_store(PyObject *module);
int hkv_add_io(PyObject *module);
#endif
