#!/usr/bin/env bash
# A real SGLang for a machine without an accelerator in .venvs/sglang, with this source tree's HostKV in it: what `make test-engines` runs.
#
# The wheel asks for the CUDA builds of torch and for a dozen kernel packages. Without an accelerator SGLang runs on what vLLM runs on, so this
# environment stands on that of install_vllm.sh, pip included. sglang_cpu stands in for the CUDA copies, and for what text models import and
# do not use. It takes half a minute and 140 MB.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -e .venvs/vllm/.installed ] || bash tests/engines/install_vllm.sh
venv=.venvs/sglang
stamp=$venv/.installed
wanted="$(cat "$0" tests/engines/sglang_cpu/*.{py,toml} pyproject.toml setup.py .venvs/vllm/.installed | sha256sum) $PWD"
say() { printf '== SGLang %s\n' "$*"; }

# SGLang compiles its hash of a page when it first needs it.
echo '#include <openssl/sha.h>' | c++ -E -x c++ - >/dev/null 2>&1 || {
    [ "$(id -u)" = 0 ] || { say "needs a C++ compiler and OpenSSL's headers: sudo apt-get install g++ libssl-dev" && exit 1; }
    say "needs g++ and libssl-dev, which are installed now"
    apt-get update -qq && apt-get install -y -qq g++ libssl-dev >/dev/null
}
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    say "goes into $venv (the first time: half a minute and 140 MB)"
    rm -rf "$venv"
    .venvs/vllm/bin/python -m venv --without-pip "$venv"
    echo 'import os, site, sys; site.addsitedir(os.path.join(sys.prefix, "..", "vllm", "lib", "python%d.%d" % sys.version_info[:2], "site-packages"))' \
        >"$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/vllm.pth"
    pip="$venv/bin/python -m pip --disable-pip-version-check install -q --no-deps"
    $pip --no-compile sglang==0.5.23 orjson==3.13.0 soundfile==0.13.1
    # Both by reference to the source tree: HostKV is current as long as the C extension in there is, which `make` sees to.
    $pip --no-build-isolation -e tests/engines/sglang_cpu -e .
    echo "$wanted" >"$stamp"
fi
"$venv/bin/python" -c 'import hostkv.connector.store, importlib.metadata as m; assert m.version("sglang") == "0.5.23" and m.version("sglang-cpu") == "1"'
say "is ready in $venv"
