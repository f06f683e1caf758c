"""`make bench-peers`: HostKV beside LMCache's server, Mooncake's sidecar client and vLLM's own offloading, in one run, by turns, on the
same work, as one table. Each peer is installed into an environment of its own under .venvs/; one that cannot be, or fails, is a line that
says why. Their reports of use are switched off. Needs 16 GiB of memory, of which 6 in /dev/shm, and 8 GiB of disk; half an hour once all
is installed.

A cell is the median over turns; in brackets what it is of HostKV's: above 1 HostKV is ahead, so many times.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from hostkv.connector.bench import machine

from tests.bench.peers import disk, first_token, memory
from tests.bench.peers.common import HERE, ROOT, Table, Unavailable

PEERS = {"LMCache": "LMCache 0.5.6", "Mooncake": "Mooncake 0.3.13", "vLLM native": "vLLM 0.32.0 native", "no cache": "no cache"}
LEFT_BEHIND = (f"hostkv-bench-{os.getpid()}-", "hostkv-peers-", "lmcache_kv_", "mooncake_", "vllm_offload_", "__KMP_REGISTERED_LIB_")


def install(table: Table) -> set[str]:
    """What of "lmcache", "mooncake" and "vllm" is there."""
    commands = {name: ["bash", str(HERE / "install.sh"), name] for name in ("lmcache", "mooncake")}
    commands["vllm"] = ["make", "--no-print-directory", "engine"]
    there = set()
    for name, command in commands.items():
        done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0:
            there.add(name)
        else:
            why = [line for line in done.stderr.splitlines() if line.strip()]
            table.note(f"{name} could not be installed: {' / '.join(why[-2:])}")
    return there


def in_use() -> set[str]:
    """Files of /dev/shm that a process has mapped or open."""
    found = set()
    for at in (*Path("/proc").glob("[0-9]*/map_files/*"), *Path("/proc").glob("[0-9]*/fd/*")):
        try:
            found.add(os.readlink(at).removeprefix("/dev/shm/"))
        except OSError:  # closed meanwhile, or another user's
            continue
    return found


def tidy(table: Table, before: set[str]) -> None:
    """Removes what peers left in /dev/shm, and says so."""
    new = {name for name in os.listdir("/dev/shm") if name.startswith(LEFT_BEHIND)} - before
    for name in sorted(new - in_use()):
        if name.startswith("__KMP_"):  # OpenMP's, named for its process
            if not Path("/proc", name.split("_")[5]).exists():
                Path("/dev/shm", name).unlink(missing_ok=True)
        else:
            Path("/dev/shm", name).unlink(missing_ok=True)
            table.note(f"left in /dev/shm, and removed: {name}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-peers", description="HostKV beside its peers.")
    parser.add_argument("--dir", default=".", type=Path, help="on the disk to measure. Default: this one")
    parser.add_argument("--only", choices=("memory", "disk", "vllm"), action="append", help="a part of the table")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended on the way out
    logging.getLogger("hostkv").addHandler(logging.NullHandler())  # that its sidecars end is our own doing
    table = Table(list(PEERS))
    before = set(os.listdir("/dev/shm"))
    there = install(table)
    stores = [Table.OURS, *(name for name in ("LMCache", "Mooncake") if name.lower() in there)]
    engines = [first_token.HostKV, first_token.Native, *([first_token.LMCache] if "lmcache" in there else []), first_token.Plain]
    parts: dict[str, Callable[[Path], None]] = {
        "memory": lambda place: memory.measure(table, place, stores),
        "disk": lambda place: disk.measure(table, place, stores),
        "vllm": lambda place: first_token.measure(table, place, engines if "vllm" in there else []),
    }
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="hostkv-peers-", dir=options.dir.resolve()) as place:
        try:
            for name, part in parts.items():
                if not options.only or name in options.only:
                    try:
                        part(Path(place))
                    except Unavailable as error:
                        table.note(f"{name}: {error}")
                    load.append(os.getloadavg()[0])
        finally:
            tidy(table, before)
    print(f"\n{machine()}\nload average {', '.join(f'{one:.1f}' for one in load)} before and after each part\n")
    print(table.text(PEERS))
    print("".join(f"\n{note}" for note in table.notes))


if __name__ == "__main__":
    sys.exit(main())
