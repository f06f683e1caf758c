#!/usr/bin/env bash
# The unit and contract tests on every Python from 3.10 to 3.13 that this machine has, each against a wheel built for it, but for those that
# WITHOUT names.
set -euo pipefail
cd "$(dirname "$0")/.."
find_python() {
  if "python$1" -c '' 2>/dev/null; then command -v "python$1"; return; fi
  if command -v pyenv >/dev/null; then ls -d "$(pyenv root)/versions/$1".*/bin/python 2>/dev/null | tail -n 1; fi
}
work=
trap 'rm -rf "$work"' EXIT
ran=0
for version in 3.10 3.11 3.12 3.13; do
  [[ " ${WITHOUT:-} " != *" $version "* ]] || { echo "-- Python $version is left out"; ran=$((ran + 1)); continue; }
  python=$(find_python "$version" || true)
  [ -n "$python" ] || { echo "-- Python $version is not here"; continue; }
  echo "-- Python $version ($python)"
  work=$(mktemp -d)
  "$python" -m venv "$work/env"
  "$work/env/bin/pip" install -q "setuptools>=77" wheel
  mkdir "$work/tree" && cp -r pyproject.toml setup.py README.md LICENSE schemas cext sidecar connector "$work/tree"
  rm -f "$work"/tree/cext/*.so
  "$work/env/bin/pip" wheel -q --no-deps --no-build-isolation -w "$work" "$work/tree"
  "$work/env/bin/pip" install -q "$(ls "$work"/hostkv-*.whl)[test]"
  mkdir "$work/run" && cp -r tests pyproject.toml "$work/run" && ln -s "$PWD/schemas" "$PWD/cext" "$PWD/examples" "$work/run"
  (cd "$work/run" && "$work/env/bin/python" -m pytest tests/unit tests/contract -n 2 --dist loadfile --deselect tests/unit/test_wheel.py --deselect tests/unit/test_tidy.py)
  rm -rf "$work"
  ran=$((ran + 1))
done
[ "$ran" -gt 0 ] || { echo "no Python from 3.10 to 3.13 found"; exit 1; }
