#!/usr/bin/env bash
# A peer in an environment of its own: install.sh lmcache | mooncake. The first time minutes and up to 2 GB (lmcache) or 200 MB (mooncake).
set -euo pipefail
cd "$(dirname "$0")/../../.."
peer=$1
venv=.venvs/$peer
python=${PYTHON:-python3}
has() { "$python" -c "import ctypes; ctypes.CDLL('$1')" 2>/dev/null; }
if [ "$peer" = mooncake ] && ! has libibverbs.so.1; then # which it links with whatever it speaks
    [ "$(id -u)" != 0 ] || { apt-get update -qq && apt-get install -y -qq libibverbs1; } >/dev/null 2>&1 || true
    has libibverbs.so.1 || { echo "libibverbs1 is missing: sudo apt-get install libibverbs1" >&2; exit 1; }
fi
wanted="$(sha256sum <"$0" | cut -d' ' -f1) $("$python" -c 'import sys; print(sys.version)')"
[ "$(cat "$venv/.installed" 2>/dev/null)" = "$wanted" ] && exit
install() { "$venv/bin/pip" --disable-pip-version-check install --progress-bar off "$@" | sed -unE 's/^Collecting ([^ ;]+).*/   \1/p'; }

printf '== %s goes into %s\n' "$peer" "$venv"
mkdir -p .venvs
"$python" -m venv "$venv"
case $peer in
lmcache)
    # Its own list has CUDA's libraries as well; these are what its server, its client and its file adapters import.
    install "torch==2.13.0+cpu" 2>/dev/null || install "torch==2.13.0"
    install aiofile aiofiles aiohttp blake3 cachetools cryptography fastapi httptools httpx 'huggingface_hub>=1.5.0' msgspec numba 'numpy<=2.2.6' nvtx \
        'opentelemetry-api<=1.40.0' opentelemetry-sdk opentelemetry-exporter-otlp 'opentelemetry-exporter-prometheus<=0.61b0' \
        'prometheus_client<=0.24.1' 'protobuf>=6.31.1,<7' psutil py-cpuinfo pyyaml 'pyzmq>=25' redis requests safetensors sortedcontainers \
        'transformers>=5.4' uvicorn
    install --no-deps lmcache==0.5.6
    ;;
mooncake)
    # The build without CUDA still links with CUDA's runtime library.
    install mooncake-transfer-engine-non-cuda==0.3.13 nvidia-cuda-runtime-cu12==12.9.79
    ;;
*) echo "install.sh lmcache | mooncake" && exit 2 ;;
esac
echo "$wanted" >"$venv/.installed"
