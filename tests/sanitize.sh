#!/usr/bin/env bash
# The C extension under AddressSanitizer and UndefinedBehaviorSanitizer (the tests that exercise it, in a copy of the tree), and the
# copy threads under ThreadSanitizer.
set -euo pipefail
cd "$(dirname "$0")/.."
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT

echo "-- thread sanitizer: the copy threads"
"${CC:-cc}" -std=c11 -g -O1 -Wall -Wextra -Wno-unused-parameter -Werror -fsanitize=thread -fno-sanitize-recover=all -Icext -Icext/vendor \
  tests/unit/copy_race.c cext/copy.c cext/hash.c -o "$tree/copy_race" -pthread
"$tree/copy_race"

echo "-- address and undefined behaviour sanitizers: the extension"
cp -r pyproject.toml setup.py README.md LICENSE schemas cext sidecar connector tests "$tree"
rm -f "$tree"/cext/*.so
cd "$tree"
"${PYTHON:-python3}" -m venv env
env/bin/pip install -q "setuptools>=77" wheel
HOSTKV_CFLAGS="-Werror -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all" \
  HOSTKV_LDFLAGS="-fsanitize=address,undefined" env/bin/pip install -q --no-build-isolation -e '.[test]'
# Python does not free all it has at exit, so leak detection is off; PYTHONMALLOC lets the sanitizer see every object.
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc
LD_PRELOAD="$(${CC:-cc} -print-file-name=libasan.so) $(${CC:-cc} -print-file-name=libubsan.so)" env/bin/python -m pytest -x \
  tests/unit/test_copy.py tests/unit/test_hash.py tests/unit/test_lock.py tests/unit/test_public_header.py tests/unit/test_tables.py \
  tests/property/test_copy_model.py tests/property/test_tables_model.py
