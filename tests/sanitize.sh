#!/usr/bin/env bash
# Builds the C extension with AddressSanitizer and UndefinedBehaviorSanitizer in a copy of the tree and runs the tests that exercise it.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
cp -r pyproject.toml setup.py README.md LICENSE schemas cext sidecar connector tests "$tree"
rm -f "$tree"/cext/*.so
cd "$tree"
"${PYTHON:-python3}" -m venv env
env/bin/pip install -q "setuptools>=77" wheel
HOSTKV_CFLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined" HOSTKV_LDFLAGS="-fsanitize=address,undefined" \
  env/bin/pip install -q --no-build-isolation -e '.[test]'
# Python itself leaks by design at exit, so leak detection stays off.
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
LD_PRELOAD="$(${CC:-cc} -print-file-name=libasan.so) $(${CC:-cc} -print-file-name=libubsan.so)" \
  env/bin/python -m pytest tests/unit/test_copy.py tests/unit/test_hash.py tests/unit/test_lock.py tests/unit/test_tables.py tests/property -x
