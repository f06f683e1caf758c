"""What HostKV reaches on this machine, beside what the machine itself reaches in the same run: `hostkv bench`, `make bench`.

It starts sidecars of its own in temporary run directories (or uses the one at --endpoint, then without the figures that need a sidecar
to itself) and measures what a user feels: save and load through the store's own methods, without and with `verify: load`, lookups on
derived keys, acquire and release, many clients at once, what a step costs while the sidecar hangs, and the sidecar's memory. Every
figure is a median; the limit of a copy is measured between the same buffers and a shared memory of its own, alternately with it.
Nothing is asserted here.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

import zmq

from ..cext import Mapping, Tables, cpu_features, derive_keys, memory_copy
from ..schemas.namespace import KEY_BYTES, PAGE_BYTES, Layout
from . import client as client_module
from .client import Client
from .store import Keys, Store
from .tasks import Task

MIB = 1 << 20
BATCH = 64  # blocks per save and load
POOL_BYTES = 1 << 30
LOOKUP_KEYS = 1000
CLIENTS, PROCESSES = 64, 4
FILL_BLOCKS = 100_000
MANY_BLOCKS, QUICK_BLOCKS = 10_000_000, 1_000_000
TIMEOUT_S = 30.0  # a busy machine makes figures bad, and does not end the benchmark


@dataclass
class Row:
    what: str
    value: float
    unit: str
    beside: str = ""
    target: str = ""


class Report:
    """Rows, printed as they come."""

    def __init__(self, quiet: bool) -> None:
        self.rows: list[Row] = []
        self._quiet = quiet

    def section(self, title: str) -> None:
        if not self._quiet:
            print(f"\n{title}", flush=True)

    def add(self, what: str, value: float, unit: str, beside: str = "", target: str = "") -> None:
        self.rows.append(Row(what, round(value, 3), unit, beside, target))
        if not self._quiet:
            wanted = f"target {target}" if target else ""
            print(f"  {what:<52} {value:>9.2f} {unit:<5} {beside:<72} {wanted}".rstrip(), flush=True)


# ---- a sidecar of our own ------------------------------------------------------------------------------------------------------------
class OwnSidecar:
    """In a run directory of its own, of which nothing stays behind."""

    def __init__(self, pool_bytes: int, verify: str = "off", tiers: str = "[]") -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hostkv-bench-")
        directory = self._directory.name
        self.endpoint = f"ipc://{directory}/control.sock"
        config = os.path.join(directory, "hostkv.yaml")
        with open(config, "w") as file:
            wanted = f", tiers: {tiers}" if tiers != "[]" else ""
            file.write(f"{{pool: {{max_blocks: {2 * FILL_BLOCKS}}}, verify: {verify}{wanted}}}\n")
        self._command = [sys.executable, "-m", "hostkv.sidecar.cli", "serve", "--endpoint", self.endpoint, "--config", config]
        self._command += ["--pool-size", f"{pool_bytes // MIB}MiB", "--pool-name", f"hostkv-bench-{os.getpid()}-{secrets.token_hex(3)}"]
        self._log = open(os.path.join(directory, "log"), "w+")  # noqa: SIM115 - closed in __exit__
        with ExitStack() as on_failure:  # also the signal to end
            on_failure.callback(self.__exit__)
            self.start()
            on_failure.pop_all()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=self._log, stdin=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        if not self._process.stdout.readline().startswith("hostkv ready"):
            self._log.seek(0)
            sys.exit(f"the sidecar of the benchmark did not start:\n{self._log.read()}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """Of all its threads, as clock_getcpuclockid(3) names the clock."""
        return time.clock_gettime(~self.pid << 3 | 2)

    def memory_mib(self) -> float:
        """Resident memory beside pool and tables, which are RssShmem."""
        with open(f"/proc/{self.pid}/status") as status:
            fields = dict(line.split(":", 1) for line in status)
        return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1024

    def __enter__(self) -> OwnSidecar:
        return self

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._log.close()
        self._directory.cleanup()


@contextmanager
def hangs_after(silent_s: float) -> Iterator[None]:
    """For the clients of this process a sidecar hangs when it has been silent for so long."""
    before, client_module.STALE_NS = client_module.STALE_NS, int(silent_s * 1e9)
    try:
        yield
    finally:
        client_module.STALE_NS = before


# ---- small tools ---------------------------------------------------------------------------------------------------------------------
@contextmanager
def memory(size: int) -> Iterator[Mapping]:
    """Shared memory like the pool's, that nobody else uses."""
    fd = os.memfd_create("hostkv-bench")
    try:
        os.truncate(fd, size)
        mapping = Mapping(fd, size, writable=True)
    finally:
        os.close(fd)
    mapping.populate(0, size)
    yield mapping
    mapping.close()


def seconds(call: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def saver(store: Store, addresses: array[int]) -> Callable[[list[bytes]], Task]:
    return lambda ids: store.dump_data(ids, 0, addresses)


def loader(store: Store, addresses: array[int]) -> Callable[[list[bytes]], Task]:
    return lambda ids: store.load_data(ids, 0, addresses)


def percentile(samples: list[float], percent: float) -> float:
    return sorted(samples)[min(len(samples) - 1, int(len(samples) * percent / 100))]


def layout(shard_bytes: int) -> Layout:
    return Layout(
        model="bench", revision=secrets.token_hex(8), kv_dtype="uint8", layout_id="opaque", block_tokens=128, shard_bytes=shard_bytes
    )


def new_ids(count: int) -> list[bytes]:
    return [secrets.token_bytes(32) for _ in range(count)]


# ---- copies --------------------------------------------------------------------------------------------------------------------------
def stream(store: Store, start: Callable[[list[bytes]], Task], batches: list[list[bytes]]) -> None:
    """All batches, one waiting while another moves, as an engine that saves layer after layer does."""
    tasks: list[Task] = []
    for ids in batches:
        tasks.append(start(ids))
        if len(tasks) > 1:
            store.wait(tasks.pop(0))
    for task in tasks:
        store.wait(task)


def runs(client: Client, store: Store, batches: list[list[bytes]]) -> tuple[int, list[tuple[int, int, int]]]:
    """Where the blocks of these batches lie in the pool, as (pool offset, offset in the batch, bytes), neighbours joined; and the tag that
    pins them there."""
    size = store.layout.shard_bytes
    found: list[tuple[int, int, int]] = []
    tag = client.new_tag()
    pages = memoryview(store.acquire([block_id for ids in batches for block_id in ids], tag).pages).cast("I")
    for i, page in enumerate(pages):
        there, here = page * PAGE_BYTES, i % BATCH * size
        if found and here and found[-1][0] + found[-1][2] == there:
            found[-1] = (*found[-1][:2], found[-1][2] + size)
        else:
            found.append((there, here, size))
    return tag, found


def flat(pool: Mapping, local: Mapping, places: list[tuple[int, int, int]], out: bool, threads: int, streaming: bool) -> None:
    """One plain copy for each run of slots, between the buffers that were just saved and loaded; the bytes there are the same."""

    def copy_some(first: int) -> None:
        for there, here, size in places[first::threads]:
            source, destination = (pool.address + there, local.address + here) if out else (local.address + here, pool.address + there)
            memory_copy(destination, source, size, 1, streaming)

    others = [threading.Thread(target=copy_some, args=(i,)) for i in range(1, threads)]
    for other in others:
        other.start()
    copy_some(0)
    for other in others:
        other.join()


def copies(report: Report, endpoint: str, size: int, threads: int, rounds: int) -> None:
    """Save and load of batches of BATCH whole blocks, against plain copies of the same bytes between the same buffers."""
    total = size * BATCH
    count = POOL_BYTES // 2 // total
    with Client(endpoint, copy_threads=threads, timeout_s=TIMEOUT_S, name="bench") as client, memory(total) as local:
        store = client.open(layout(size))
        client.warm()
        link = client.mapped()
        assert link is not None
        addresses = array("Q", range(local.address, local.address + total, size))
        save, load = saver(store, addresses), loader(store, addresses)
        spent: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            batches = [new_ids(BATCH) for _ in range(count)]
            one = new_ids(BATCH)
            measured: dict[str, float] = {
                "one save": seconds(stream, store, save, [one]),
                "one load": seconds(stream, store, load, [one]),
                "save": seconds(stream, store, save, batches) / count,
                "load": seconds(stream, store, load, batches) / count,
            }
            tag, places = runs(client, store, batches)
            for name, nontemporal in (("stream", True), ("libc", False)):
                measured[f"{name} in"] = seconds(flat, link.pool, local, places, False, threads, nontemporal) / count
                measured[f"{name} out"] = seconds(flat, link.pool, local, places, True, threads, nontemporal) / count
            store.release([tag])
            if number:  # the first touches everything
                for name, value in measured.items():
                    spent.setdefault(name, []).append(value)
    target = f"{95 if threads == 1 else 90} % of streaming"
    for verb, way in (("save", "in"), ("load", "out")):
        ours, streaming, libc, alone = (
            total / statistics.median(spent[name]) / 1e9 for name in (verb, f"stream {way}", f"libc {way}", f"one {verb}")
        )
        beside = (
            f"{100 * ours / streaming:.0f} % of streaming memcpy {streaming:.1f}; libc {libc:.1f}; "
            f"one batch alone {alone:.1f} ({100 * alone / streaming:.0f} %)"
        )
        report.add(f"{verb} {BATCH} x {size // MIB} MiB, {threads} thread{'s' * (threads > 1)}", ours, "GB/s", beside, target)


def pieces(report: Report, endpoint: str, piece: int, rounds: int) -> None:
    """The same with blocks of 1 MiB cut into pieces that lie apart, against a memcpy per piece, less what the calls cost."""
    total = MIB * BATCH
    count = total // piece
    with Client(endpoint, timeout_s=TIMEOUT_S, name="bench") as client, memory(2 * total) as local, memory(total) as shared:
        store = client.open(layout(MIB))
        client.warm()
        addresses = array("Q", [local.address + i * 2 * piece for i in range(count)])  # every other piece: a gap after each

        def one_by_one(out: bool, size: int) -> None:
            base = shared.address
            for i, address in enumerate(addresses):
                there = base + i * piece
                memory_copy(*((address, there) if out else (there, address)), size, 1, False)

        save, load = saver(store, addresses), loader(store, addresses)
        spent: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            batches = [new_ids(BATCH) for _ in range(2)]
            measured = {
                "save": seconds(stream, store, save, batches) / 2,
                "memcpy in": seconds(one_by_one, False, piece) - seconds(one_by_one, False, 1),
                "load": seconds(stream, store, load, batches) / 2,
                "memcpy out": seconds(one_by_one, True, piece) - seconds(one_by_one, True, 1),
            }
            if number:
                for name, value in measured.items():
                    spent.setdefault(name, []).append(value)
    for verb, way in (("save", "in"), ("load", "out")):
        ours, memcpy = (total / statistics.median(spent[name]) / 1e9 for name in (verb, f"memcpy {way}"))
        beside = f"{100 * ours / memcpy:.0f} % of memcpy of such pieces {memcpy:.1f}"
        report.add(f"{verb} {BATCH} x 1 MiB in pieces of {piece // 1024} KiB", ours, "GB/s", beside)


def verified(report: Report, endpoint: str, verifying: str, rounds: int) -> None:
    """What `verify: load` costs: the same saves and loads with a sidecar that does not want it and with one that does, alternately."""
    total = 2 * MIB * BATCH
    spent: dict[tuple[str, str], list[tuple[float, float]]] = {}  # seconds, and CPU seconds of this process
    with (
        memory(MIB * BATCH) as local,
        Client(endpoint, timeout_s=TIMEOUT_S, name="bench") as off,
        Client(verifying, timeout_s=TIMEOUT_S, name="bench") as on,
    ):
        addresses = array("Q", range(local.address, local.address + MIB * BATCH, MIB))
        stores = {"off": off.open(layout(MIB)), "on": on.open(layout(MIB))}
        off.warm()
        on.warm()
        for number in range(rounds + 1):
            batches = [new_ids(BATCH) for _ in range(2)]
            for way, store in stores.items():
                for verb, start in (("save", saver(store, addresses)), ("load", loader(store, addresses))):
                    before = time.process_time()
                    one = seconds(stream, store, start, batches), time.process_time() - before
                    if number:
                        spent.setdefault((verb, way), []).append(one)
    for verb in ("save", "load"):
        took, cpu = ({way: statistics.median(one[which] for one in spent[verb, way]) / (total / 1e9) for way in stores} for which in (0, 1))
        beside = (
            f"{100 * took['off'] / took['on']:.0f} % of {1 / took['off']:.1f} without; CPU {cpu['on']:.3f} s/GB, without {cpu['off']:.3f}"
        )
        report.add(f"{verb} {BATCH} x 1 MiB, verify: load", 1 / took["on"], "GB/s", beside)


# ---- lookups -------------------------------------------------------------------------------------------------------------------------
def derivation(report: Report, store: Store) -> None:
    spent = []
    for _ in range(200):
        ids = new_ids(LOOKUP_KEYS)
        spent.append(seconds(store.keys, ids))
    report.add(f"derive {LOOKUP_KEYS} keys", statistics.median(spent) * 1e6, "µs", target="100 µs")


def small_table(report: Report, client: Client) -> None:
    """FILL_BLOCKS blocks saved through the store, then lookups through the store."""
    store = client.open(layout(4096))
    source = bytearray(4096)
    groups: list[Keys] = []
    for _ in range(FILL_BLOCKS // LOOKUP_KEYS):
        ids = new_ids(LOOKUP_KEYS)
        store.wait(store.dump(ids, 0, [[source]] * LOOKUP_KEYS))
        groups.append(store.keys(ids))
    derivation(report, store)
    spent = [seconds(store.lookup_on_prefix, keys) for keys in groups for _ in range(2)]
    assert store.lookup_on_prefix(groups[-1]) == LOOKUP_KEYS - 1
    beside = f"p99 {percentile(spent, 99) * 1e6:.0f} µs; all of them found"
    report.add(f"look up {LOOKUP_KEYS} keys among {FILL_BLOCKS:,}", statistics.median(spent) * 1e6, "µs", beside, "100 µs")


def large_table(report: Report, blocks: int) -> None:
    """Tables in private memory, since a pool of so many blocks does not fit here; the reader is the one the store uses. Each group of
    keys is looked up once, so its entries come from memory and not from a cache."""
    tables = Tables.create(
        -1,
        pool_bytes=-(-blocks * 4096 // MIB) * MIB + 64 * MIB,
        extent_bytes=64 * MIB,
        max_blocks=blocks,
        max_shards=16384,
        max_pins=16384,
        max_members=16,
        max_namespaces=16,
        boot_id=bytes(16),
        pool_epoch=secrets.token_bytes(16),
        instance_id=secrets.token_bytes(16),
    )
    try:
        ours = layout(4096)
        index = tables.namespace_add(ours.fingerprint(), ours.shard_bytes, ours.shards, "bench")
        member = tables.member_add(secrets.token_bytes(16), secrets.token_bytes(16), secrets.token_bytes(16), 0, os.getpid())
        groups: list[bytes] = []
        step = 8 * LOOKUP_KEYS
        for number in range(blocks // step):
            keys = derive_keys(ours.fingerprint(), new_ids(LOOKUP_KEYS)) if number % 6 == 0 else b""
            groups += [keys] if keys else []
            keys += os.urandom(step * KEY_BYTES - len(keys))
            _, _, generations = tables.reserve(index, member, 1, keys, bytes(2 * step))
            tables.commit(member, 1, keys, bytes(2 * step), generations, bytes(8 * step))
        view = tables.view()
        spent = [seconds(view.lookup_prefix, index, keys) for keys in groups]
        found = sum(view.lookup_prefix(index, keys) for keys in groups)
        view.close()
        beside = (
            f"p99 {percentile(spent, 99) * 1e6:.0f} µs; {100 * found / len(groups) / LOOKUP_KEYS:.0f} % found; tables apart from any pool"
        )
        report.add(f"look up {LOOKUP_KEYS} keys among {blocks:,}", statistics.median(spent) * 1e6, "µs", beside, "150 µs")
    finally:
        tables.close()


# ---- requests ------------------------------------------------------------------------------------------------------------------------
ECHO = "import sys, zmq; s = zmq.Context().socket(zmq.ROUTER); s.bind(sys.argv[1])\nwhile True: s.send_multipart(s.recv_multipart())"


def bare_round_trip(report: Report) -> None:
    """What ZeroMQ alone takes between two processes for a message as large as an acquire of BATCH keys: the floor of every request."""
    with tempfile.TemporaryDirectory(prefix="hostkv-bench-") as directory:
        endpoint = f"ipc://{directory}/echo.sock"
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        with subprocess.Popen([sys.executable, "-c", ECHO, endpoint]) as echo:
            socket.connect(endpoint)
            spent = []
            for _ in range(2000):
                start = time.perf_counter()
                socket.send(bytes(BATCH * KEY_BYTES))
                socket.recv()
                spent.append(time.perf_counter() - start)
            echo.kill()
        context.destroy(0)
    report.add("a bare ZeroMQ round trip", statistics.median(spent) * 1e6, "µs", f"p99 {percentile(spent, 99) * 1e6:.0f} µs")


def pin(report: Report, client: Client) -> None:
    store = client.open(layout(4096))
    ids = new_ids(BATCH)
    store.wait(store.dump(ids, 0, [[bytearray(4096)]] * BATCH))
    keys = store.keys(ids)
    spent = []
    for _ in range(2000):
        start = time.perf_counter()
        tag = client.new_tag()
        store.acquire(keys, tag)
        store.release([tag])
        spent.append(time.perf_counter() - start)
    report.add(
        f"acquire and release {BATCH} blocks", statistics.median(spent) * 1e6, "µs", f"p99 {percentile(spent, 99) * 1e6:.0f} µs", "350 µs"
    )


@hangs_after(TIMEOUT_S)
def clients_of_one_process(endpoint: str, clients: int, revision: str, requests: int, blocks: int) -> None:
    """Runs in a process of its own: waits for a line, then every client pins and gives back as fast as it can. Prints the times."""
    ours = Layout(model="bench", revision=revision, kv_dtype="uint8", layout_id="opaque", block_tokens=128, shard_bytes=4096)
    opened = [Client(endpoint, timeout_s=TIMEOUT_S) for _ in range(clients)]
    stores = [client.open(ours) for client in opened]
    keys = stores[0].keys([b"%d" % i for i in range(blocks)])
    spent: list[float] = []
    lost = [0]
    print("ready", flush=True)
    sys.stdin.readline()

    def work(client: Client, store: Store) -> None:
        for _ in range(requests):
            start = time.perf_counter()
            tag = client.new_tag()
            found = store.acquire(keys, tag).run
            store.release([tag])
            spent.append(time.perf_counter() - start)
            lost[0] += found != blocks or bool(client.down_reason)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(opened, stores, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in opened:
        client.close()
    print(json.dumps({"lost": lost[0], "spent": spent}), flush=True)


def many_clients(report: Report, client: Client, endpoint: str, requests: int) -> None:
    ours = layout(4096)
    store = client.open(ours)
    store.wait(store.dump([b"%d" % i for i in range(BATCH)], 0, [[bytearray(4096)]] * BATCH))
    call = f"clients_of_one_process({endpoint!r}, {CLIENTS // PROCESSES}, {ours.revision!r}, {requests}, {BATCH})"
    command = [sys.executable, "-c", f"from hostkv.connector.bench import *; {call}"]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "a process of clients did not start"
    start = time.perf_counter()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [json.loads(process.communicate()[0]) for process in processes]
    rate = 2 * CLIENTS * requests / (time.perf_counter() - start)
    spent = [value for result in results for value in result["spent"]]
    lost = sum(result["lost"] for result in results)
    beside = f"p99 {percentile(spent, 99) * 1e3:.1f} ms; {len(spent)} pairs, {lost} lost, {rate:,.0f} requests/s"
    report.add(f"{CLIENTS} clients at once: acquire and release {BATCH}", statistics.median(spent) * 1e3, "ms", beside, "none lost")


@hangs_after(client_module.STALE_NS / 1e9)
def hung_sidecar(report: Report, client: Client, sidecar: OwnSidecar) -> None:
    """What a step of an engine (look up, pin, give back, save) costs while the sidecar is stopped."""
    store = client.open(layout(4096))
    ids, source = new_ids(BATCH), [[bytearray(4096)]] * BATCH

    def step() -> None:
        store.lookup_on_prefix(ids)
        store.acquire(ids, tag := client.new_tag())
        store.release([tag])
        task = store.dump(ids, 0, source)
        while not store.check(task):
            time.sleep(0.0005)

    os.kill(sidecar.pid, signal.SIGSTOP)
    try:
        first = seconds(step)
        spent = []
        for _ in range(100):
            spent.append(seconds(step))
            time.sleep(0.02)
    finally:
        os.kill(sidecar.pid, signal.SIGCONT)
    back = time.perf_counter()
    while not client.serving():
        time.sleep(0.001)
    back = time.perf_counter() - back
    beside = f"median {statistics.median(spent) * 1e3:.2f} ms; the first, which detects it, {first * 1e3:.0f} ms"
    report.add("a step while the sidecar hangs, slowest of 100", max(spent) * 1e3, "ms", beside, "50 ms")
    report.add("work resumes after the sidecar does", back * 1e3, "ms", target="2000 ms")


# ---- all of it -----------------------------------------------------------------------------------------------------------------------
def machine() -> str:
    name = platform.machine()
    with open("/proc/cpuinfo") as info:
        name = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores, {', '.join(cpu_features())}; Python {platform.python_version()}, Linux {platform.release()}"


@hangs_after(TIMEOUT_S)
def measure(report: Report, endpoint: str, sidecar: OwnSidecar | None, quick: bool, directory: str = ".") -> None:
    """`directory`: on the disk that is measured."""
    rounds = 7 if quick else 25
    report.section("Copies, blocks between host memory and the pool (medians)")
    empty_mib = sidecar.memory_mib() if sidecar else 0.0
    for size in (MIB, 4 * MIB):
        for threads in (1, 2):
            copies(report, endpoint, size, threads, rounds if size == MIB else max(5, rounds // 2))
    for piece in (4096, 16384, 65536):
        pieces(report, endpoint, piece, max(5, rounds // 2))
    if sidecar:
        with OwnSidecar(POOL_BYTES // 2, verify="load") as other:
            verified(report, endpoint, other.endpoint, rounds)
    report.section("Lookups (medians)")
    with Client(endpoint, timeout_s=TIMEOUT_S, name="bench") as client:
        small_table(report, client)
    if sidecar:
        filled_mib = sidecar.memory_mib()
    large_table(report, QUICK_BLOCKS if quick else MANY_BLOCKS)
    report.section("Requests (medians)")
    with Client(endpoint, timeout_s=TIMEOUT_S, name="bench") as client:
        bare_round_trip(report)
        pin(report, client)
        many_clients(report, client, endpoint, 40 if quick else 150)
        if sidecar:
            with Client(endpoint, name="bench") as usual:
                hung_sidecar(report, usual, sidecar)
            report.section("The sidecar's memory beside pool and tables")
            report.add("empty", empty_mib, "MiB", target="60 MiB")
            report.add(f"with {FILL_BLOCKS:,} blocks", filled_mib, "MiB", target="60 MiB")
    if sidecar:
        from .bench_disk import disk

        disk(report, directory, quick)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hostkv bench", description="Speed of HostKV on this machine, beside the machine's own limits.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and a smaller table, about half a minute")
    parser.add_argument("--endpoint", help="a running sidecar to measure; blocks it holds may be evicted. Default: one of its own")
    parser.add_argument("--disk", default=".", help="a directory on the disk to measure (2 GiB with --quick, else 7). Default: this one")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended on the way out
    logging.getLogger("hostkv").addHandler(logging.NullHandler())  # that the sidecar hangs is our own doing
    report = Report(options.json)
    if not options.json:
        print(machine())
    if options.endpoint:
        measure(report, options.endpoint, None, options.quick)
    else:
        with OwnSidecar(POOL_BYTES) as sidecar:
            measure(report, sidecar.endpoint, sidecar, options.quick, options.disk)
    if options.json:
        print(json.dumps({"machine": machine(), "rows": [asdict(row) for row in report.rows]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
