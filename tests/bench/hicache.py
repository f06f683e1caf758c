"""SGLang's bundled `file` storage and HostKV on the same work: `python -m tests.bench.hicache [--turns N] [--model NAME]`.

A real SGLang server (`make test-engines` installs it) gets a document of 3,000 tokens: new to it; out of its own memory; out of the
storage, `turns` times; and once more after it was started again. Printed are the time to the first token, and the CPU time of all the
server's processes until a request and what it saves are done; medians. Out of its own memory is the floor: SGLang's attention in plain
torch computes the whole prompt's anew for every prompt, whatever is cached. The file storage has its directory under /tmp, and what it
wrote is in the page cache.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines"))

from sglang_servers import PAGE, Answer, SglangServer, SglangServers, hostkv, sglang_imported, whole_pages
from test_vllm import DOCUMENT

from tests.support import Sidecar

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PROMPT = DOCUMENT.read_text() + "\n\nQuestion about this document: What are the rings of Saturn made of?\nAnswer:"


def cpu_s(pid: int) -> float:
    """Of a process, its children that live, and their children."""
    seconds = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        seconds += sum(cpu_s(int(child)) for child in (task / "children").read_text().split())
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return seconds + (int(fields[11]) + int(fields[12])) * TICK_S


def measure(
    start: Callable[[], SglangServer], stop: Callable[[SglangServer], None], stored: Callable[[], int], turns: int
) -> dict[str, float]:
    """`stored`: the bytes that the storage has by now."""
    server = start()

    def ask(name: str, want: int) -> Answer:
        before = cpu_s(server.pid)
        answer = server.ask(PROMPT, 8)
        while stored() < want:
            time.sleep(0.01)
        time.sleep(0.5)  # what goes on beside
        assert not asked or answer.tokens == asked[0].tokens
        asked.append(answer)
        times.setdefault(f"{name}: first token, s", []).append(answer.first_s)
        times.setdefault(f"{name}: CPU, s", []).append(cpu_s(server.pid) - before)
        return answer

    asked: list[Answer] = []
    times: dict[str, list[float]] = {}
    server.ask("Hello", 1)
    base = stored()
    pages = whole_pages(ask("new", 0).prompt)
    until = time.monotonic() + 60
    while (have := stored()) == base or (time.sleep(1), stored())[1] != have:  # the last page is written after the answer
        assert time.monotonic() < until
    for _ in range(turns):
        assert ask("own memory", 0).stored == 0
        server.flush()
        assert ask("storage", 0).stored == pages
    stop(server)
    server = start()
    assert ask("new server", 0).stored == pages
    stop(server)
    figures = {name: statistics.median(values) for name, values in times.items()}
    return {**figures, "pages": pages / PAGE, "bytes": have}


def compare(model: str, turns: int) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="hostkv-") as short:
        folder = Path(short)
        with sglang_imported(folder) as path:
            servers = SglangServers(path, folder)
            files = folder / "files"
            files.mkdir()
            found = {}

            def file_server() -> SglangServer:
                environment = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(files)}
                flags = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}
                return servers.start(model=model, environment=environment, **flags)

            found["file"] = measure(file_server, servers.stop, lambda: sum(file.stat().st_size for file in files.iterdir()), turns)
            with Sidecar(folder, pool_size="512MiB") as sidecar:
                try:
                    used = lambda: int(sidecar.status()["pool"]["used_bytes"])  # noqa: E731
                    found["HostKV"] = measure(lambda: servers.start(hostkv(sidecar), model=model), servers.stop, used, turns)
                finally:
                    servers.stop_all()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended on the way out
    found = compare(options.model, options.turns)
    print(f"\n{'':32}" + "".join(f"{name:>12}" for name in found))
    for figure in next(iter(found.values())):
        print(f"{figure:32}" + "".join(f"{figures[figure]:12.4g}" for figures in found.values()))


if __name__ == "__main__":
    main()
