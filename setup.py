"""The C extension; everything else is in pyproject.toml. It is here because setuptools cannot express a conditional stable ABI there:
the buffer protocol joined the limited API in Python 3.11, so 3.10 gets a build of its own and 3.11 and later share one. Warnings are
errors in CI only (HOSTKV_CFLAGS=-Werror): a newer compiler's new warning is no reason not to install. liburing is used where it is
there, and linked statically if it can be: what is built runs on a host without it, too."""

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from glob import glob
from pathlib import Path

from setuptools import Extension, setup

PROBE = """
#include <liburing.h>
int probe(struct io_uring *ring) {
    io_uring_prep_read(io_uring_get_sqe(ring), 0, ring, 1, 0);
    return io_uring_queue_init(1, ring, 0) + io_uring_ring_dontfork(ring) + io_uring_register_buffers_sparse(ring, 1);
}
"""


def liburing() -> list[str]:
    """The linker's arguments for liburing; none where it is missing or too old."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text(PROBE)
        for arguments in (["-Wl,-Bstatic", "-luring", "-Wl,-Bdynamic"], ["-luring"]):
            command = [*compiler, "-shared", "-fPIC", "-Wl,--no-undefined", str(source), "-o", str(Path(folder, "probe.so")), *arguments]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return arguments
    return []


uring = liburing()
abi3 = sys.version_info >= (3, 11)
setup(
    ext_modules=[
        Extension(
            "hostkv.cext._cext",
            sources=sorted(glob("cext/*.c")),
            depends=sorted([*glob("cext/*.h"), "schemas/layout.h", "cext/vendor/xxhash.h"]),
            include_dirs=["cext", "cext/vendor", "schemas"],
            define_macros=[*([("Py_LIMITED_API", "0x030B0000")] if abi3 else []), *([("HKV_HAVE_LIBURING", None)] if uring else [])],
            extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fvisibility=hidden", "-pthread"]
            + os.environ.get("HOSTKV_CFLAGS", "").split(),
            extra_link_args=["-pthread", *uring, *os.environ.get("HOSTKV_LDFLAGS", "").split()],
            py_limited_api=abi3,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if abi3 else {},
)
