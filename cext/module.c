/* The module `hostkv.cext._cext`: puts together what py_data.c (hashes, lock, pool mappings), py_tables.c
 * (Tables, View), py_index.c (Index), py_store.c (CStore) and py_io.c (Io) define. */
#include "module.h"

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "hostkv.cext._cext",
                                        .m_doc = "HostKV's C extension; see _cext.pyi.", .m_size = -1};

PyMODINIT_FUNC PyInit__cext(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (hkv_add_data(module) < 0 || hkv_add_tables(module) < 0 || hkv_add_store(module) < 0 || hkv_add_index(module) < 0 ||
        hkv_add_io(module) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
