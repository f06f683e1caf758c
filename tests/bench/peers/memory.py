"""Saves to and loads from shared memory, lookups and round trips of HostKV, LMCache and Mooncake, each by its own client (side.py) beside
its own server, 2 GiB each. They take turns, another one first each time; nobody's server has work while another is measured.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from hostkv.connector.bench import MIB, OwnSidecar

from tests.bench.peers.common import VENVS, Process, Side, Table, Unavailable, free_port, say, tail
from tests.bench.peers.first_token import lmcache_server

POOL_BYTES, BATCH_BYTES, ROUNDS = 2048 * MIB, 256 * MIB, 7
SIZES, LOOKUPS = (MIB, 4 * MIB, 32 * MIB), (4, 128, 512, 1000)
TRIP = "a round trip, the smallest request"


def hostkv(place: Path, closing: ExitStack) -> Side:
    sidecar = closing.enter_context(OwnSidecar(POOL_BYTES))
    return Side("HostKV", Path(sys.executable), place / "hostkv-side.log", sidecar.endpoint)


def lmcache(place: Path, closing: ExitStack) -> Side:
    port = free_port()
    closing.callback(lmcache_server(place / "lmcache-memory.log", port, POOL_BYTES >> 30, []).stop)
    # One thread copies, as HostKV's: two of OpenMP wait for each other by spinning, which takes many times as long while a core is busy.
    url, threads = f"tcp://127.0.0.1:{port}", {"OMP_NUM_THREADS": "1"}
    return Side("LMCache", VENVS / "lmcache" / "bin" / "python", place / "lmcache-side.log", url, environment=threads)


def mooncake(place: Path, closing: ExitStack) -> Side:
    packages = next((VENVS / "mooncake" / "lib").glob("python*/site-packages"), None)
    if packages is None:
        raise Unavailable("it is not installed")
    environment = {"LD_LIBRARY_PATH": str(packages / "nvidia" / "cuda_runtime" / "lib"), "GLOG_minloglevel": "1"}
    master, client, metrics = free_port(), free_port(), free_port()
    programs, log = packages / "mooncake", place / "mooncake.log"
    flags = ["--rpc_address=127.0.0.1", f"--rpc_port={master}", f"--metrics_port={metrics}", "--metrics_host=127.0.0.1"]
    server = Process("mooncake_master", [programs / "mooncake_master", *flags], log, environment)
    closing.callback(server.stop)
    server.until(master)
    flags = ["--protocol=tcp", "--host=127.0.0.1", f"--port={client}", f"--master_server_address=127.0.0.1:{master}"]
    flags += [f"--global_segment_size={POOL_BYTES >> 30} GB", "--metadata_server=P2PHANDSHAKE"]
    server = Process("mooncake_client", [programs / "mooncake_client", *flags], log, environment)
    closing.callback(server.stop)
    server.until(client)
    python = VENVS / "mooncake" / "bin" / "python"
    return Side("Mooncake", python, place / "mooncake-side.log", f"127.0.0.1:{client}", environment=environment)


MAKERS = {Table.OURS: hostkv, "LMCache": lmcache, "Mooncake": mooncake}


def copies(size: int) -> tuple[str, str]:
    what = f"{BATCH_BYTES // size} x {size // MIB} MiB"
    return f"save {what} to shared memory", f"load {what} from shared memory"


def look(count: int) -> tuple[str, str]:
    return f"look up a prefix of {count}", f"look up a prefix of {count} and keep it for a load"


class Turns:
    def __init__(self, table: Table, sides: dict[str, Side]) -> None:
        self._table, self._sides, self._number = table, sides, 0

    def each(self, *asked: tuple[str, str, dict[str, object]], into: dict[str, float] | None = None) -> None:
        """The same requests to everyone: (line of the table or "", request, arguments). `into`: what a figure is of, over its seconds."""
        self._number += 1
        names = list(self._sides)
        first = self._number % max(1, len(names))
        for name in names[first:] + names[:first]:
            try:
                for line, do, arguments in asked:
                    done = self._sides[name].ask(do, **arguments)
                    if line:
                        for one in line.split("|"):
                            self._table.add(one, name, (into or {}).get(one, 0) / done if into else done * 1000)
            except Unavailable as error:
                self._table.note(f"{name}: {error} ({tail(self._sides[name].log_path, 1)})")
                self._sides.pop(name).stop()


def measure(table: Table, place: Path, wanted: list[str]) -> None:
    for size in SIZES:
        for line in copies(size):
            table.line(line, "GB/s")
    for count in LOOKUPS:
        for line in look(count):
            table.line(line, "ms")
    table.line(TRIP, "ms")
    with ExitStack() as closing:
        sides: dict[str, Side] = {}
        for name in wanted:
            say(f"starting {name}")
            try:
                sides[name] = MAKERS[name](place, closing)
                closing.callback(sides[name].stop)
            except (Unavailable, OSError) as error:
                table.note(f"{name}: {error}")
        turns = Turns(table, sides)
        for size in SIZES:
            save, load = copies(size)
            say(f"saves and loads of {size // MIB} MiB")
            turns.each(("", "open", {"size": size, "count": BATCH_BYTES // size}))
            for number in range(ROUNDS + 1):  # the first touches the memory
                batch = {"batch": f"{size}-{number}"}
                names = (save, load) if number else ("", "")
                turns.each(
                    (names[0], "save", batch), (names[1], "load", batch), ("", "clear", {}), into=dict.fromkeys(names, BATCH_BYTES / 1e9)
                )
        say("lookups and round trips")
        turns.each(("", "open", {"size": MIB, "count": BATCH_BYTES // MIB}), ("", "keep", {"count": max(LOOKUPS)}))
        for _ in range(ROUNDS):
            for count in LOOKUPS:
                turns.each((look(count)[0], "lookup", {"count": count}))
                turns.each((look(count)[1], "lookup_kept", {"count": count}))
            turns.each((TRIP, "round_trip", {}))
