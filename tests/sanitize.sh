#!/usr/bin/env bash
# The C extension under AddressSanitizer and UndefinedBehaviorSanitizer (bytes flipped under it, and the tests that exercise it, in a copy of
# the tree), and under ThreadSanitizer the copy threads, and readers of the tables beside their writer. A few minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT

tables="cext/tables.c cext/tables_repair.c cext/tables_check.c cext/hash.c"
index="cext/index.c cext/index_check.c cext/hash.c"
build() { # PROGRAM OPTION... SOURCE...
  "${CC:-cc}" -std=c11 -g -O1 -Wall -Wextra -Wno-unused-parameter -Werror -fno-sanitize-recover=all -Icext -Icext/vendor -Ischemas \
    "tests/unit/$1.c" "${@:2}" -o "$tree/$1" -pthread
}

echo "-- thread sanitizer: the copy threads"
build copy_race -fsanitize=thread cext/copy.c cext/hash.c
"$tree/copy_race"

echo "-- thread sanitizer: readers of the tables beside their writer"
build tables_race -fsanitize=thread -Wno-tsan $tables
"$tree/tables_race" 10

echo "-- thread sanitizer: readers of the index of what is on disk beside its writer"
build index_race -fsanitize=thread -Wno-tsan $index
"$tree/index_race" 10

# liburing where it is installed; without it io_faults says that it skips io_uring (77).
uring=$(echo '#include <liburing.h>' | "${CC:-cc}" -E - >/dev/null 2>&1 && echo "-DHKV_HAVE_LIBURING -luring" || true)
for sanitizer in thread address,undefined; do
  echo "-- $sanitizer sanitizer: both I/O engines under faults"
  build io_faults "-fsanitize=$sanitizer" -Wno-tsan cext/io_depth.c cext/hash.c $uring
  for engine in threads io_uring; do
    "$tree/io_faults" $engine "$tree/slab" 1 2000 || test $? = 77
  done
done

echo "-- address and undefined behaviour sanitizers: bytes flipped under readers of the index, and under recovery"
build index_fuzz -fsanitize=address,undefined $index
"$tree/index_fuzz" 25

echo "-- address and undefined behaviour sanitizers: bytes flipped under readers and adoption"
build reader_fuzz -fsanitize=address,undefined $tables
"$tree/reader_fuzz" 25

echo "-- address and undefined behaviour sanitizers: the extension"
cp -r pyproject.toml setup.py README.md LICENSE schemas cext sidecar connector tests "$tree"
rm -f "$tree"/cext/*.so
cd "$tree"
"${PYTHON:-python3}" -m venv env
env/bin/pip install -q "setuptools>=77" wheel
HOSTKV_CFLAGS="-Werror -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all" \
  HOSTKV_LDFLAGS="-fsanitize=address,undefined" env/bin/pip install -q --no-build-isolation -e '.[test]'
# One test takes the address space away, which the sanitizer needs itself; two count the memory of the process.
# Python does not free all it has at exit, so leak detection is off; PYTHONMALLOC lets the sanitizer see every object.
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc
LD_PRELOAD="$(${CC:-cc} -print-file-name=libasan.so) $(${CC:-cc} -print-file-name=libubsan.so)" env/bin/python -m pytest -x \
  --deselect tests/unit/test_lock.py::test_a_heartbeat_whose_thread_cannot_start_is_an_error_and_leaves_no_file \
  --deselect tests/unit/test_index.py::test_a_block_costs_at_most_100_bytes_in_all \
  --deselect tests/unit/test_index.py::test_thousands_of_small_ones_leave_nothing_behind \
  tests/unit/test_copy.py tests/unit/test_hash.py tests/unit/test_index.py tests/unit/test_lock.py tests/unit/test_public_header.py \
  tests/unit/test_io.py tests/unit/test_tables.py \
  tests/property/test_copy_model.py tests/property/test_index_model.py tests/property/test_tables_model.py tests/property/test_message_fuzz.py \
  "tests/sim/test_simulation.py::test_nothing_is_lost_leaked_or_wrong_whatever_happens[0]"
