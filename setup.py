"""The C extension; everything else is in pyproject.toml. It is here because setuptools cannot express a conditional stable ABI there:
the buffer protocol joined the limited API in Python 3.11, so 3.10 gets a build of its own and 3.11 and later share one. Warnings are
errors in CI only (HOSTKV_CFLAGS=-Werror): a newer compiler's new warning is no reason not to install."""

import os
import sys
from glob import glob

from setuptools import Extension, setup

abi3 = sys.version_info >= (3, 11)
setup(
    ext_modules=[
        Extension(
            "hostkv.cext._cext",
            sources=sorted(glob("cext/*.c")),
            depends=sorted([*glob("cext/*.h"), "schemas/layout.h", "cext/vendor/xxhash.h"]),
            include_dirs=["cext", "cext/vendor", "schemas"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if abi3 else [],
            extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fvisibility=hidden", "-pthread"]
            + os.environ.get("HOSTKV_CFLAGS", "").split(),
            extra_link_args=["-pthread", *os.environ.get("HOSTKV_LDFLAGS", "").split()],
            py_limited_api=abi3,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if abi3 else {},
)
