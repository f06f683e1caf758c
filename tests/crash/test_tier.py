"""The disk tier of a real sidecar under real clients: what they may rely on, and what they meet when the sidecar is killed over its
transfers, or when its disk is full, read-only, fails, crawls, hangs, or is gone. What then lies in the files is in test_disk_files.py."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostkv.cext import Io
from hostkv.connector import Client, DumpError, Layout, LoadError, Store
from hostkv.schemas import messages as m
from hostkv.schemas.errors import Status
from hostkv.sidecar import rundir

from tests.crash.puppet import Puppet
from tests.crash.slow_disk import SlowDisk
from tests.support import HASTY_CLIENTS, LIFE_S, MEMORY, PATIENCE_S, Sidecar, Wire, disk_tier, hostkv, until, waiting_as

LAYOUT = Layout(model="m", revision="1", kv_dtype="uint8", layout_id="opaque", block_tokens=16, shard_bytes=1 << 20)
ODD = Layout(model="odd", revision="1", kv_dtype="uint8", layout_id="opaque", block_tokens=16, shard_bytes=123_457, shards=3)
POOL_SIZE, POOL_BLOCKS = "8MiB", 8  # of LAYOUT
HASTY = {"HUNG_S": 2.0, "RETRY_S": 0.3, "CLOSE_S": 1.0, "START_S": 1.0}
PATIENT = {"HUNG_S": 3600.0}  # where a disk that is held must not be given up
pytestmark = pytest.mark.usefixtures("patient_clients")
_RUN = np.frombuffer(np.random.default_rng(1).bytes(LAYOUT.shard_bytes + 997 * 4096), np.uint8)


def content(number: int, shard: int, layout: Layout) -> np.ndarray:
    at = (number * 4 + shard) * 997
    return _RUN[at : at + layout.shard_bytes]


def id_of(number: int) -> bytes:
    return b"block %d" % number


def save(store: Store, numbers: Iterable[int]) -> list[str]:
    pairs = [(number, shard) for number in numbers for shard in range(store.layout.shards)]
    sources = [[content(number, shard, store.layout)] for number, shard in pairs]
    return store.wait(store.dump([id_of(number) for number, _ in pairs], [shard for _, shard in pairs], sources), PATIENCE_S)


def saved(store: Store, number: int) -> bool:
    """Not yet, where the pool is full of what is not on disk."""
    try:
        return set(save(store, [number])) <= {"committed", "present"}
    except DumpError:
        return False


def save_to_disk(sidecar: Sidecar, store: Store, numbers: Iterable[int]) -> None:
    """As many at a time as leave the pool room."""
    for number in numbers:
        assert set(save(store, [number])) == {"committed"}
        sidecar.until_clean()


def load(store: Store, numbers: Iterable[int]) -> set[int]:
    """Which could be loaded; each of these is exact."""
    if not (numbers := list(numbers)):
        return set()
    pairs = [(number, shard) for number in numbers for shard in range(store.layout.shards)]
    targets = [np.zeros(store.layout.shard_bytes, np.uint8) for _ in pairs]
    failed: set[bytes] = set()
    try:
        store.wait(store.load([id_of(n) for n, _ in pairs], [shard for _, shard in pairs], [[each] for each in targets]), PATIENCE_S)
    except LoadError as error:
        failed = set(error.failed)
    for (number, shard), target in zip(pairs, targets, strict=True):
        assert id_of(number) in failed or np.array_equal(target, content(number, shard, store.layout)), f"block {number} is wrong"
    return {number for number, _ in pairs if id_of(number) not in failed}


def found(store: Store, numbers: Iterable[int]) -> set[int]:
    return {number for number in numbers if store.lookup([id_of(number)]) == [True]}


def pooled(store: Store, client: Client, numbers: Iterable[int]) -> set[int]:
    """What is in the pool: an acquire does not wait for a tier."""
    tag = client.new_tag()
    held = {number for number in numbers if store.acquire([id_of(number)], tag).statuses == b"\0"}
    store.release([tag])
    return held


def directory(sidecar: Sidecar) -> dict[str, Any]:
    (only,) = sidecar.tier()["directories"]
    assert isinstance(only, dict)
    return only


def nothing_held(sidecar: Sidecar) -> bool:
    status = sidecar.status()
    tier = status["tiers"][0]
    counts = (status["pins"], status["shards_in_flight"], status["waiting"], tier["reading"], tier["wanted"], tier["spilling"])
    return not any(counts) and bool(tier["quiet"])


def runs(engine: str) -> None:
    """Skips the test where this engine does not run."""
    fd = os.memfd_create("pool")
    try:
        os.truncate(fd, 4096)
        Io(fd, 4096, engine=engine).close()
    except OSError as error:
        pytest.skip(f"{engine} does not run here: {error}")
    finally:
        os.close(fd)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SlowDisk]:
    with SlowDisk(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
def memory() -> Iterator[Path]:
    """For directories that must answer while another one hangs."""
    with tempfile.TemporaryDirectory(prefix="hostkv-test-", dir=MEMORY) as name:
        yield Path(name)


@contextmanager
def serving(tmp_path: Path, *paths: Path, engine: str = "auto", config: str = "", **more: Any) -> Iterator[Sidecar]:
    """A sidecar whose tier of these directories serves."""
    config += disk_tier(*paths, size="160MiB", engine=engine)
    with Sidecar(tmp_path / "sidecar", **{"pool_size": POOL_SIZE, "config": config, "disk": PATIENT, **more}) as sidecar:
        sidecar.until_tier_serves()
        yield sidecar


def answers(disk: SlowDisk, client: Client) -> None:
    """From now on, and a load waits for that however long it takes."""
    disk.obey()
    client.tier_wait_s = PATIENCE_S


def restart(sidecar: Sidecar) -> None:
    """Until it has been done; it is put off where transfers take long."""

    def outcomes() -> tuple[int, int]:
        return sidecar.log().count(" ready "), sidecar.log().count("restart put off")

    ready, _ = before = outcomes()
    while before[0] == ready:
        os.kill(sidecar.pid, signal.SIGHUP)
        sidecar.until(lambda before=before: outcomes() != before)  # type: ignore[misc]
        before = outcomes()


# ---- what clients may rely on --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("verify", ["off", "load"])
@pytest.mark.parametrize("layout", [LAYOUT, ODD], ids=["1 MiB", "odd"])
def test_what_is_only_on_disk_is_found_and_loaded_as_if_it_were_in_the_pool(tmp_path: Path, verify: str, layout: Layout) -> None:
    numbers = range(40)
    with serving(tmp_path, tmp_path / "a", tmp_path / "b", config=f"verify: {verify}\n") as sidecar, Client(sidecar.endpoint) as client:
        store = client.open(layout)
        save_to_disk(sidecar, store, numbers)
        assert len(pooled(store, client, numbers)) < len(numbers)
        assert found(store, range(50)) == set(numbers)
        ids = [id_of(number) for number in range(50)]
        assert (store.lookup_on_prefix(ids), store.lookup_on_reverse(ids)) == (39, 39)
        assert load(store, numbers) == set(numbers)
        assert load(store, [3, 45, 39]) == {3, 39}
        store.wait(store.prefetch([id_of(number) for number in range(4)]), PATIENCE_S)
        assert pooled(store, client, range(4)) == {0, 1, 2, 3}
        assert all(each["reads"] > 0 for each in sidecar.tier()["directories"]), "both directories were asked"
        until(lambda: nothing_held(sidecar), sidecar.status)


def test_an_acquire_waits_for_the_disk_as_long_as_it_is_told_to(tmp_path: Path, disk: SlowDisk) -> None:
    with serving(tmp_path, disk.path) as sidecar, Client(sidecar.endpoint, tier_wait_s=0.3) as client:
        store = client.open(LAYOUT)
        save_to_disk(sidecar, store, range(12))
        away = min(set(range(12)) - pooled(store, client, range(12)))
        tag = client.new_tag()
        disk.hold("read")
        assert store.acquire([id_of(away)], tag).statuses == bytes([Status.MISS])
        assert store.acquire([id_of(away)], tag, wait_s=0.1).statuses == bytes([Status.MISS])
        there = pooled(store, client, range(12))
        assert len(there) == POOL_BLOCKS - 1, "one slot is read into"
        assert load(store, [away, *there]) == there, "a slow disk is a miss, and costs what is in the pool nothing"
        store.wait(store.prefetch([id_of(away)]), PATIENCE_S)  # a prefetch that brings nothing is none that fails
        answers(disk, client)
        assert store.acquire([id_of(away)], tag, wait_s=PATIENCE_S).statuses == b"\0"
        store.release([tag])
        until(lambda: nothing_held(sidecar), sidecar.status)


def test_pins_are_given_back_when_the_sidecar_goes_while_an_acquire_waits_for_the_disk(tmp_path: Path, disk: SlowDisk) -> None:
    with serving(tmp_path, disk.path) as sidecar, Client(sidecar.endpoint) as client:
        store = client.open(LAYOUT)
        save_to_disk(sidecar, store, range(12))
        there = pooled(store, client, range(12))
        away = min(set(range(12)) - there)
        tag = client.new_tag()
        disk.hold("read")
        with ThreadPoolExecutor(1) as thread:
            waits = thread.submit(store.acquire, [id_of(min(there)), id_of(away)], tag, PATIENCE_S)
            sidecar.until(lambda: (status := sidecar.status())["waiting"] == status["pins"] == 1)
            sidecar.kill()
            handles = waits.result(PATIENCE_S)
        disk.obey()
        assert set(handles.statuses) == {Status.MISS}, "so nobody gives back anything under the tag"
        sidecar.start()
        sidecar.until_tier_serves()
        until(lambda: client.serving() and nothing_held(sidecar), sidecar.status)


def test_a_load_of_many_batches_waits_for_a_disk_in_vain_once(tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostkv.connector.store.STREAM_BYTES", LAYOUT.slot_bytes)
    with serving(tmp_path, disk.path) as sidecar, Client(sidecar.endpoint, tier_wait_s=0.3) as client:
        store = client.open(LAYOUT)
        save_to_disk(sidecar, store, range(12))
        there = pooled(store, client, range(12))
        disk.hold("read")
        waits, bring = [], store.bring
        monkeypatch.setattr(store, "bring", lambda keys, wait_s: (waits.append(wait_s), bring(keys, wait_s)))
        assert load(store, sorted(set(range(12)) - there)) == set()
        assert [wait_s for wait_s in waits if wait_s] == [0.3]
        answers(disk, client)
        assert load(store, range(12)) == set(range(12))


def test_all_who_want_a_block_share_one_read(tmp_path: Path, disk: SlowDisk) -> None:
    with serving(tmp_path, disk.path) as sidecar, Client(sidecar.endpoint) as first, Client(sidecar.endpoint) as second:
        stores = [first.open(LAYOUT), second.open(LAYOUT)]
        save_to_disk(sidecar, stores[0], range(12))
        away = min(set(range(12)) - pooled(stores[0], first, range(12)))
        disk.hold("read")
        tasks = [store.prefetch([id_of(away)]) for store in stores]
        sidecar.until(lambda: sidecar.status()["waiting"] == 2)
        disk.until_held(1)
        disk.obey()
        for store, task in zip(stores, tasks, strict=True):
            store.wait(task, PATIENCE_S)
            assert load(store, [away]) == {away}
        assert directory(sidecar)["reads"] == 1


def test_a_new_engine_finds_on_disk_what_another_one_left(tmp_path: Path) -> None:
    with serving(tmp_path, tmp_path / "a") as sidecar:
        ids = [b"%d" % i for i in range(12)]
        with Puppet(sidecar.endpoint) as engine:
            for block_id in ids:
                assert engine.do(f"answer = save(store, {[block_id]!r})") == ["committed"]
                sidecar.until_clean()
        with Puppet(sidecar.endpoint) as engine:
            assert engine.do(f"answer = load(store, {ids!r})") == [True] * len(ids)
        assert sidecar.tier()["promoted"] > 0


def test_a_client_of_before_there_were_tiers_is_served_from_the_pool(tmp_path: Path) -> None:
    with serving(tmp_path, tmp_path / "a") as sidecar, Client(sidecar.endpoint) as client, Puppet(sidecar.endpoint) as puppet:
        store = client.open(LAYOUT)
        save_to_disk(sidecar, store, range(12))
        there = pooled(store, client, range(12))
        lock = puppet.do("client.status(); answer = client._lock")
        with Wire(sidecar.endpoint) as wire:
            assert isinstance(wire.ask(m.Hello([2, 0], b"o" * 16, b"o" * 16, lock, puppet.pid, "old")), m.HelloReply)
            registered = wire.ask(m.Register(LAYOUT.encode()))
            assert isinstance(registered, m.RegisterReply)
            keys = store.keys([id_of(number) for number in range(12)]).joined
            held = wire.ask(m.Acquire(registered.index, 1, keys))
            assert isinstance(held, m.HandlesReply)
            assert {number for number in range(12) if held.statuses[number] == Status.OK} == there
            assert wire.ask(m.Bye()) == m.Empty()


def test_with_min_reuse_only_what_was_reused_is_written_and_with_reuse_it_stays_in_the_pool(tmp_path: Path) -> None:
    config = "eviction: reuse\n" + disk_tier(tmp_path / "a", size="160MiB", min_reuse=1)
    with Sidecar(tmp_path / "sidecar", pool_size=POOL_SIZE, config=config) as sidecar, Client(sidecar.endpoint) as client:
        sidecar.until_tier_serves()
        store = client.open(LAYOUT)
        save(store, range(6))
        assert load(store, [0, 1]) == {0, 1}
        sidecar.until(lambda: sidecar.tier()["spilled"] == 2)
        sidecar.kill()
        sidecar.start()
        until(client.serving)
        sidecar.until_tier_serves()
        save(store, range(10, 30))
        assert sidecar.status()["blocks"]["dirty"] == sidecar.tier()["spilled"] == 0
        assert pooled(store, client, [0, 1, *range(10, 30)]) == {0, 1, *range(24, 30)}
        sidecar.until(lambda: sidecar.tier()["spilled"] == 6)


# ---- killed over its transfers -------------------------------------------------------------------------------------------------------
def test_slots_under_reads_of_a_killed_sidecar_are_not_given_away_until_the_reads_have_ended(
    tmp_path: Path, memory: Path, disk: SlowDisk
) -> None:
    """The kernel writes into them after their process is gone. All else is served meanwhile, from the other directory too."""
    runs("io_uring")
    with (
        serving(tmp_path, disk.path, memory / "other", engine="io_uring") as sidecar,
        Client(sidecar.endpoint, tier_wait_s=0.5) as client,
    ):
        store = client.open(LAYOUT)
        save_to_disk(sidecar, store, range(24))
        there = pooled(store, client, range(24))
        disk.hold("read")
        store.wait(store.prefetch([id_of(number) for number in range(24) if number not in there][:8]), PATIENCE_S)
        tier: dict[str, Any] = {}

        def only_its_reads_are_left() -> bool:
            tier.update(sidecar.tier())
            hangs, other = tier["directories"]
            return tier["wanted"] == other["in_flight"] == 0 < tier["reading"] == hangs["in_flight"]

        until(only_its_reads_are_left, lambda: f"{disk.held()} are held: {tier}")
        reading = tier["reading"]
        disk.until_held(reading)
        assert reading < POOL_BLOCKS
        disk.hold()  # what comes now is answered, and those reads are not
        client.tier_wait_s = PATIENCE_S
        sidecar.kill()
        sidecar.start()
        until(client.serving)
        sidecar.until(lambda: sidecar.tier()["directories"][0]["state"] == "quarantine")
        sidecar.until(lambda: sidecar.tier()["directories"][1]["state"] == "serving")
        status = sidecar.status()
        assert (status["shards_in_flight"], status["tiers"][0]["quiet"]) == (reading, False)
        assert str(disk.path) in status["tiers"][0]["directories"][0]["reason"]

        kept = load(store, range(24))
        assert len(kept) >= 12 - reading, "the pool's, and those of the other directory"
        save_to_disk(sidecar, store, range(100, 140))  # the pool changes hands, again and again, but for these slots
        last = pooled(store, client, range(100, 140))
        assert len(last) == POOL_BLOCKS - reading
        assert sidecar.status()["shards_in_flight"] == reading

        disk.obey()
        sidecar.until(lambda: nothing_held(sidecar))
        assert load(store, last) == last, "and none of them got the bytes that came late"
        sidecar.until_tier_serves()
        assert load(store, range(100, 140)) == set(range(100, 140))
        save_to_disk(sidecar, store, range(200, 200 + 2 * POOL_BLOCKS))
        assert len(pooled(store, client, range(200, 220))) == POOL_BLOCKS, "all slots are in use again"
        assert load(store, range(200, 200 + 2 * POOL_BLOCKS)) == set(range(200, 200 + 2 * POOL_BLOCKS))


def test_a_sidecar_killed_in_a_system_call_is_gone_when_its_disk_has_answered(tmp_path: Path, disk: SlowDisk) -> None:
    """Threads in the kernel keep the process, and all its locks, until then: engines run uncached, and the next start waits."""
    with serving(tmp_path, disk.path, engine="threads") as sidecar, Client(sidecar.endpoint, tier_wait_s=0.2) as client:
        store = client.open(LAYOUT)
        save_to_disk(sidecar, store, range(12))
        away = set(range(12)) - pooled(store, client, range(12))
        disk.hold("read")
        store.wait(store.prefetch([id_of(min(away))]), PATIENCE_S)
        disk.until_held(1)
        there = pooled(store, client, range(12))
        killed, sidecar.process = sidecar.process, None
        assert killed is not None
        killed.kill()
        with waiting_as(HASTY_CLIENTS):
            until(lambda: not client.serving())
            assert load(store, there) == set()
        successor = sidecar.launch()
        lock = str(sidecar.run_directory / "lock")
        until(lambda: any(os.path.realpath(fd) == lock for fd in Path(f"/proc/{successor.pid}/fd").iterdir()))
        assert killed.poll() is None
        answers(disk, client)
        assert int(sidecar.until_ready()["adopted"]) == len(there)
        assert killed.wait(PATIENCE_S) == -signal.SIGKILL
        until(client.serving)
        assert load(store, there) == there
        sidecar.until(lambda: nothing_held(sidecar))
        sidecar.until_tier_serves()
        assert load(store, range(12)) == set(range(12))


class Throttled:
    """A group of processes that reads slowly from the disk of `folder`."""

    def __init__(self, folder: Path) -> None:
        self.group = Path("/sys/fs/cgroup/blkio") / f"hostkv-test-{os.getpid()}"
        device = folder.stat().st_dev
        self._device = f"{os.major(device)}:{os.minor(device)}"
        try:
            self.group.mkdir()
            self.limit(64 << 10)
        except OSError as error:
            self.close()
            pytest.skip(f"the disk of {folder} cannot be throttled here: {error}")

    def limit(self, bytes_per_s: int) -> None:
        """0: none, also for what is waiting."""
        (self.group / "blkio.throttle.read_bps_device").write_text(f"{self._device} {bytes_per_s}")

    def take(self, pid: int) -> None:
        (self.group / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        if self.group.exists():
            self.group.rmdir()


@pytest.fixture
def throttled(tmp_path: Path) -> Iterator[Throttled]:
    throttled = Throttled(tmp_path)
    yield throttled
    throttled.close()


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_nothing_that_a_killed_sidecar_read_from_a_throttled_disk_comes_late(tmp_path: Path, throttled: Throttled, engine: str) -> None:
    runs(engine)
    with serving(tmp_path, tmp_path / "a", engine=engine) as sidecar, Client(sidecar.endpoint) as client:
        store = client.open(LAYOUT)
        save_to_disk(sidecar, store, range(24))
        under_way = 0
        for kill in range(3):
            throttled.limit(64 << 10)
            throttled.take(sidecar.pid)
            there = pooled(store, client, range(24))
            task = store.prefetch([id_of(number) for number in range(24) if number not in there][:6])
            sidecar.until(lambda: sidecar.tier()["reading"] > 2)
            assert sidecar.process is not None
            sidecar.process.kill()
            if engine == "threads":  # of those the process itself waits for them
                throttled.limit(0)
            sidecar.wait()
            sidecar.start()
            under_way += not sidecar.tier()["quiet"]
            throttled.limit(0)
            store.wait(task, PATIENCE_S)
            until(client.serving)
            numbers = range(100 * kill + 100, 100 * kill + 100 + 2 * POOL_BLOCKS)
            for number in numbers:
                sidecar.until(lambda number=number: saved(store, number))
            last = pooled(store, client, numbers)
            assert last
            sidecar.until(lambda: nothing_held(sidecar))
            assert load(store, last) == last
            assert load(store, numbers) >= last, "others may have had to go while nothing could be written"
        assert under_way > 0 or engine == "threads"
        assert load(store, range(24)) == set(range(24))


# ---- a disk that fails ---------------------------------------------------------------------------------------------------------------
def goes_on(sidecar: Sidecar, client: Client, store: Store, there: set[int], numbers: range) -> None:
    """Health, lookups, hits in the pool and saves are as ever: each request is answered."""
    assert sidecar.status()["pid"] == sidecar.pid
    assert found(store, there) == there
    assert load(store, there) == there
    for number in numbers:
        assert save(store, [number]) == ["committed"]
        assert load(store, [number]) == {number}
    counters = client.counters.as_dict()
    assert (counters["reconnects"], counters["dropped_saves"], client.down_reason) == (0, 0, "")


def status_page(sidecar: Sidecar) -> str:
    """As people see it."""
    pages = [""]

    def told() -> bool:
        pages.append(hostkv("status", "--endpoint", sidecar.endpoint).stdout)
        return bool(pages[-1])

    sidecar.until(told)
    return pages[-1]


ALL_KINDS = ["read", "write", "sync", "make", "open", "look"]


def test_while_its_disk_hangs_all_else_goes_on_and_it_comes_back(tmp_path: Path, disk: SlowDisk) -> None:
    """Hits in the pool, saves and answers, while it is not known yet, and when it is."""
    with serving(tmp_path, disk.path, disk=HASTY) as sidecar, Client(sidecar.endpoint, tier_wait_s=0.3) as client:
        store = client.open(LAYOUT)
        save_to_disk(sidecar, store, range(12))
        disk.hold(*ALL_KINDS)
        away = set(range(12)) - pooled(store, client, range(12))
        store.wait(store.prefetch([id_of(min(away))]), PATIENCE_S)
        disk.until_held(1)
        rounds = 0
        while directory(sidecar)["state"] == "serving":
            assert rounds < 40, sidecar.status()
            goes_on(sidecar, client, store, pooled(store, client, [10, 11]), range(100 + rounds, 101 + rounds))
            assert load(store, away) == set()
            rounds += 1
        assert directory(sidecar)["state"] == "failed"
        assert "no answer" in directory(sidecar)["reason"]
        assert "disk directory failed" in sidecar.log()
        page = status_page(sidecar)
        assert f"{disk.path}  FAILED: no answer for 2 s; looked at again when " in page, page
        assert f"-> {disk.path} does not answer: see whether the disk, or the server behind it, still works" in page
        assert found(store, away) == set(), "from then on nobody is promised what it has"
        for more in range(20):
            goes_on(sidecar, client, store, set(), range(1000 + more, 1001 + more))
        answers(disk, client)
        sidecar.until_tier_serves()
        assert load(store, away) == away
        sidecar.until(lambda: nothing_held(sidecar))
        sidecar.until_clean()
        assert sidecar.tier()["spilled"] > 12, "and what was saved meanwhile went there"


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_disk_whose_every_answer_is_an_error_is_given_up_and_tried_again(tmp_path: Path, disk: SlowDisk, kind: str) -> None:
    with serving(tmp_path, disk.path, disk={**HASTY, **PATIENT}) as sidecar, Client(sidecar.endpoint, tier_wait_s=0.3) as client:
        store = client.open(LAYOUT)
        save_to_disk(sidecar, store, range(20))
        away = set(range(20)) - pooled(store, client, range(20))
        disk.fail(errno.EIO, kind)
        goes_on(sidecar, client, store, pooled(store, client, [18, 19]), range(100, 104))
        if kind == "read":
            sidecar.until_clean()  # a write that ends well between two reads would begin the count of errors anew
            assert load(store, away) == set(), "each is told to have failed, and nothing else has"
        sidecar.until(lambda: directory(sidecar)["failures"] > 0)
        assert "Input/output error" in sidecar.log()
        goes_on(sidecar, client, store, set(), range(104, 108))
        answers(disk, client)
        sidecar.until_tier_serves()
        sidecar.until_clean()
        assert load(store, away) == away
        assert load(store, range(104, 108)) == set(range(104, 108)), "what could not be written was kept, and is written now"
        sidecar.until(lambda: nothing_held(sidecar))


def test_a_slow_disk_is_waited_for_and_hits_in_the_pool_are_not_slowed(tmp_path: Path, disk: SlowDisk) -> None:
    with (
        serving(tmp_path, disk.path, pool_size="32MiB") as sidecar,
        Client(sidecar.endpoint) as slow,
        Client(sidecar.endpoint) as quick,
    ):
        store = slow.open(LAYOUT)
        save_to_disk(sidecar, store, range(40))
        away = sorted(set(range(40)) - pooled(store, slow, range(40)))
        disk.hold("read")
        targets = [np.zeros(LAYOUT.shard_bytes, np.uint8) for _ in away]
        task = store.load([id_of(number) for number in away], 0, [[target] for target in targets])
        disk.until_held(1)
        others = quick.open(LAYOUT)
        for number in range(100, 108):
            assert save(others, [number]) == ["committed"]
            goes_on(sidecar, quick, others, {number}, range(0))
        assert not store.check(task)
        disk.slow(0.2, "read")
        while not store.check(task):
            goes_on(sidecar, quick, others, {107}, range(0))
        assert store.wait(task, PATIENCE_S) == []
        assert all(np.array_equal(target, content(number, 0, LAYOUT)) for number, target in zip(away, targets, strict=True))


@pytest.fixture
def small(tmp_path: Path, memory: Path) -> Iterator[Path]:
    """A file system of its own, of 40 MiB."""
    image, path = memory / "image", tmp_path / "small"
    path.mkdir()
    with image.open("wb") as file:
        file.truncate(40 << 20)
    for command in (["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(path)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{command[0]} does not work here: {done.stderr}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_saves_find_room_however_slowly_the_disk_takes_what_was_saved(tmp_path: Path, disk: SlowDisk) -> None:
    with serving(tmp_path, disk.path) as sidecar, Client(sidecar.endpoint) as client:
        store = client.open(LAYOUT)
        disk.hold("write")
        goes_on(sidecar, client, store, set(), range(4 * POOL_BLOCKS))
        assert 0 < sidecar.tier()["spilling"] < POOL_BLOCKS // 2
        assert sidecar.status()["items"]["evicted_dirty"] > 0, "and it is told what never came to the disk"
        disk.obey()
        sidecar.until_clean()
        last = pooled(store, client, range(4 * POOL_BLOCKS))
        assert len(last) == POOL_BLOCKS
        assert load(store, last) == last <= found(store, range(4 * POOL_BLOCKS))


def fill(path: Path) -> None:
    """Takes all room that there is."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


def test_a_disk_smaller_than_its_tier_and_then_filled_by_somebody_else_goes_on(tmp_path: Path, small: Path) -> None:
    with serving(tmp_path, small / "a") as sidecar, Client(sidecar.endpoint) as client:
        store = client.open(LAYOUT)
        assert "disk directory has less room than it may take" in sidecar.log()
        assert 0 < directory(sidecar)["slabs"] < directory(sidecar)["slabs_wanted"]
        fill(small / "somebody's")
        save_to_disk(sidecar, store, range(100))
        assert directory(sidecar)["evicted"] > 0, "it goes round in the room it has taken"
        there = pooled(store, client, range(100))
        on_disk = found(store, range(100))
        assert len(on_disk) > len(there)
        assert load(store, on_disk) == on_disk
        assert directory(sidecar)["errors"] == 0
        other = client.open(ODD)
        assert set(save(other, range(4))) == {"committed"}
        assert load(other, range(4)) == set(range(4))


def test_a_disk_that_became_read_only_is_told_and_the_pool_serves_on(tmp_path: Path, small: Path) -> None:
    with serving(tmp_path, small / "a", disk={**HASTY, **PATIENT}) as sidecar, Client(sidecar.endpoint) as client:
        store = client.open(LAYOUT)
        save_to_disk(sidecar, store, range(12))
        subprocess.run(["mount", "-o", "remount,abort", str(small)], check=True)  # as the kernel does after an error
        there = pooled(store, client, range(12))
        save(store, [50])
        sidecar.until(lambda: directory(sidecar)["state"] == "failed")
        assert "Read-only" in directory(sidecar)["reason"]
        assert "disk directory failed" in sidecar.log()
        assert "Read-only" in sidecar.log()
        goes_on(sidecar, client, store, there & pooled(store, client, there), range(100, 120))
        assert sidecar.stop() == 0


def test_a_directory_removed_under_it_goes_on_as_files_without_a_name(tmp_path: Path) -> None:
    with serving(tmp_path, tmp_path / "a") as sidecar, Client(sidecar.endpoint) as client:
        store = client.open(LAYOUT)
        save_to_disk(sidecar, store, range(12))
        shutil.rmtree(tmp_path / "a")
        save_to_disk(sidecar, store, range(12, 24))
        assert load(store, range(24)) == set(range(24))
        restart(sidecar)
        until(client.serving)
        sidecar.until_tier_serves()
        assert load(store, range(24)) == pooled(store, client, range(24))
        save_to_disk(sidecar, store, range(100, 124))
        assert load(store, range(100, 124)) == set(range(100, 124))
        sidecar.until(lambda: nothing_held(sidecar))


def test_two_sidecars_cannot_have_one_directory(tmp_path: Path) -> None:
    with serving(tmp_path, tmp_path / "a") as sidecar:
        with Sidecar(tmp_path / "second", pool_size=POOL_SIZE, config=disk_tier(tmp_path / "a"), start=False) as second:
            refused = second.try_again()
            assert f"{tmp_path / 'a'} is held by the sidecar with pid {sidecar.pid} on {sidecar.endpoint}" in refused
            assert not second.pool_path.exists(), "a pool that was made for nothing is not left"
            sidecar.stop()
            second.start()
            second.until_tier_serves()


# ---- the end, and what comes after it ------------------------------------------------------------------------------------------------
def test_what_only_the_pool_has_is_on_disk_after_sigterm(tmp_path: Path, disk: SlowDisk) -> None:
    """However long that takes, as long as the disk answers."""
    with serving(tmp_path, disk.path, disk={"HUNG_S": 5.0}) as sidecar, Client(sidecar.endpoint) as client:
        store = client.open(LAYOUT)
        disk.slow(0.5, "write")
        assert save(store, range(POOL_BLOCKS - 2)) == ["committed"] * (POOL_BLOCKS - 2)
        tag = client.new_tag()
        store.acquire([id_of(POOL_BLOCKS - 3)], tag)  # even what somebody has pinned
        assert sidecar.stop() == 0
        assert "writing to disk what only the pool has" in sidecar.log()
        assert "stopped before all blocks were on disk" not in sidecar.log()
        assert not sidecar.pool_path.exists()
        disk.obey()
        assert sidecar.start()["adopted"] == "0"
        sidecar.until_tier_serves()
        until(client.serving)
        assert load(store, range(POOL_BLOCKS)) == set(range(POOL_BLOCKS - 2))


def ends_with_all_on_disk(sidecar: Sidecar, client: Client) -> None:
    """Waits for the end of one that was told to, and starts the next."""
    assert sidecar.wait() == 0
    assert "stopped before all blocks were on disk" not in sidecar.log()
    sidecar.start()
    sidecar.until_tier_serves()
    until(client.serving)


def test_the_time_for_which_it_is_stopped_at_its_end_itself_is_no_silence_of_its_disk(tmp_path: Path, disk: SlowDisk) -> None:
    """As on a host that is suspended, where it goes on before its disk does."""
    hung_s = 2.0
    with (
        serving(tmp_path, disk.path, disk={"HUNG_S": hung_s, "STEP_S": hung_s / 1000}) as sidecar,  # hangs after a thousand looks
        Client(sidecar.endpoint) as client,
    ):
        store = client.open(LAYOUT)
        disk.hold("write")
        assert save(store, range(4)) == ["committed"] * 4
        disk.until_held(1)
        process = sidecar.process
        assert process is not None
        process.terminate()
        sidecar.until(lambda: "writing to disk what only the pool has: 0 of 4" in sidecar.log())
        process.send_signal(signal.SIGSTOP)
        time.sleep(hung_s + 0.5)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        disk.obey()
        ends_with_all_on_disk(sidecar, client)
        assert load(store, range(4)) == set(range(4))


@pytest.mark.parametrize("state", ["opening", "recovering"])
def test_a_sigterm_waits_for_a_disk_that_is_about_to_serve(tmp_path: Path, disk: SlowDisk, state: str) -> None:
    with serving(tmp_path, disk.path, disk={**PATIENT, "START_S": 0.5}) as sidecar, Client(sidecar.endpoint) as client:
        store = client.open(LAYOUT)
        save_to_disk(sidecar, store, [0])
        assert sidecar.stop() == 0
        disk.hold("look" if state == "opening" else "read")
        sidecar.start()
        disk.until_held(1)
        while directory(sidecar)["state"] != state:  # what it reads before its records
            disk.answer()
            disk.until_held(1)
        until(client.serving)
        assert save(store, range(1, 5)) == ["committed"] * 4
        process = sidecar.process
        assert process is not None
        process.terminate()
        sidecar.until(lambda: "blocks were on disk" in sidecar.log() or "writing to disk" in sidecar.log())
        disk.obey()
        ends_with_all_on_disk(sidecar, client)
        assert load(store, range(6)) == set(range(5))


def test_a_sigterm_waits_for_a_disk_that_is_about_to_serve_only_so_long(tmp_path: Path, disk: SlowDisk) -> None:
    with serving(tmp_path, disk.path, disk=HASTY) as sidecar, Client(sidecar.endpoint) as client:
        assert sidecar.stop() == 0
        disk.hold("look")
        sidecar.start()
        until(client.serving)
        assert save(client.open(LAYOUT), range(4)) == ["committed"] * 4
        process = sidecar.process
        assert process is not None
        process.terminate()
        sidecar.until(lambda: "stopped before all blocks were on disk lost=4 written=0" in sidecar.log())
        disk.obey()
        assert sidecar.wait() == 0


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_a_second_sigterm_ends_it_and_it_says_what_is_lost(tmp_path: Path, disk: SlowDisk, engine: str) -> None:
    runs(engine)
    with serving(tmp_path, disk.path, engine=engine, disk={"CLOSE_S": 0.3}) as sidecar, Client(sidecar.endpoint) as client:
        store = client.open(LAYOUT)
        save_to_disk(sidecar, store, [0])
        disk.hold("write")
        assert save(store, range(1, 6)) == ["committed"] * 5
        disk.until_held(1)
        process = sidecar.process
        assert process is not None
        process.terminate()
        sidecar.until(lambda: "writing to disk what only the pool has: 0 of 5" in sidecar.log())
        process.terminate()
        sidecar.until(lambda: "stopped pool=" in sidecar.log())
        assert "stopped before all blocks were on disk lost=5 written=0" in sidecar.log()
        assert not sidecar.pool_path.exists()
        if engine == "threads":  # which the kernel does not let go of
            disk.obey()
        assert sidecar.wait() == 0
        disk.obey()
        sidecar.start()
        sidecar.until_tier_serves()
        until(client.serving)
        assert load(store, [0]) == {0}
        load(store, range(1, 6))
        sidecar.until(lambda: nothing_held(sidecar))


def test_a_sidecar_that_ends_before_it_had_its_disk_leaves_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, tmp_path / "disk") as sidecar, Client(sidecar.endpoint) as client:
        save_to_disk(sidecar, client.open(LAYOUT), range(4))
        sidecar.kill()
        with open(tmp_path / "disk" / "00000.slab", "rb") as slab:
            fcntl.flock(slab, fcntl.LOCK_EX)  # as I/O of the killed one would
            sidecar.start()
            sidecar.until(lambda: sidecar.tier()["directories"][0]["state"] == "quarantine")
            assert sidecar.stop() == 0
        assert sorted(os.listdir(sidecar.run_directory)) == ["lock", "members"]


def test_a_warm_restart_over_transfers_loses_nothing(tmp_path: Path, disk: SlowDisk) -> None:
    with serving(tmp_path, disk.path) as sidecar, Client(sidecar.endpoint) as client:
        store = client.open(LAYOUT)
        save_to_disk(sidecar, store, range(12))
        disk.slow(0.05, "read", "write")
        for times in range(1, 4):
            away = sorted(set(range(12)) - pooled(store, client, range(12)))
            tasks = [store.prefetch([id_of(number) for number in away[:3]])]
            numbers = range(100 * times, 100 * times + 3)
            assert save(store, numbers) == ["committed"] * 3
            restart(sidecar)
            for task in tasks:
                store.wait(task, PATIENCE_S)
            until(client.serving)
            sidecar.until_tier_serves()
            assert load(store, numbers) == set(numbers)
            sidecar.until_clean()
            sidecar.until(lambda: nothing_held(sidecar))
        disk.obey()
        assert load(store, range(12)) == set(range(12))


def reading_from_a_disk_that_hangs(sidecar: Sidecar, client: Client, disk: SlowDisk, *kinds: str) -> tuple[Store, set[int]]:
    """What is in the pool when that is so."""
    store = client.open(LAYOUT)
    save_to_disk(sidecar, store, range(12))
    disk.hold(*kinds)
    there = pooled(store, client, range(12))
    store.wait(store.prefetch([id_of(min(set(range(12)) - there))]), PATIENCE_S)
    disk.until_held(1)
    return store, pooled(store, client, range(12))


def hang_up(sidecar: Sidecar) -> None:
    """Where a disk keeps it from restarting."""
    os.kill(sidecar.pid, signal.SIGHUP)
    assert sidecar.status()["pid"] == sidecar.pid  # it has had its turn


def test_a_restart_is_put_off_while_a_disk_does_not_answer(tmp_path: Path, disk: SlowDisk) -> None:
    with serving(tmp_path, disk.path, disk=HASTY) as sidecar, Client(sidecar.endpoint, tier_wait_s=0.3) as client:
        store, there = reading_from_a_disk_that_hangs(sidecar, client, disk, *ALL_KINDS)
        for times in (1, 2):
            hang_up(sidecar)
            while sidecar.log().count("restart put off, a disk does not answer; it serves on") < times:
                goes_on(sidecar, client, store, there, range(0))
        goes_on(sidecar, client, store, there, range(100, 101))
        assert sidecar.log().count(" ready ") == 1
        answers(disk, client)
        sidecar.until_tier_serves()
        sidecar.until(lambda: nothing_held(sidecar))
        assert load(store, range(12)) == set(range(12))


def test_a_restart_is_put_off_while_a_disk_keeps_a_thread_and_nothing_is_in_flight(tmp_path: Path, disk: SlowDisk) -> None:
    with serving(tmp_path, disk.path) as sidecar, Client(sidecar.endpoint, tier_wait_s=0.3) as client:
        store = client.open(LAYOUT)
        save_to_disk(sidecar, store, range(4))
        disk.hold("sync")
        disk.until_held(1)
        assert directory(sidecar)["in_flight"] == 0
        hang_up(sidecar)
        while "restart put off" not in sidecar.log():
            goes_on(sidecar, client, store, set(range(4)), range(0))
        answers(disk, client)
        sidecar.until(lambda: directory(sidecar)["silent_s"] == 0)
        restart(sidecar)
        until(client.serving)
        assert load(store, range(4)) == set(range(4))


def test_a_restart_waits_for_a_slow_disk_and_a_clear_is_answered_meanwhile(tmp_path: Path, disk: SlowDisk) -> None:
    config = disk_tier(disk.path, size="160MiB")
    with Sidecar(tmp_path / "sidecar", pool_size=POOL_SIZE, config=config, start=False) as sidecar:
        wait = f"loop.RESTART_WAIT_S = {LIFE_S}; disk.HUNG_S = {PATIENT['HUNG_S']}"
        sidecar.program(f"from hostkv.sidecar.tiers import disk; from hostkv.sidecar import loop; {wait}")
        sidecar.start()
        sidecar.until_tier_serves()
        with Client(sidecar.endpoint, tier_wait_s=0.3) as client:
            store, _ = reading_from_a_disk_that_hangs(sidecar, client, disk, "read")
            hang_up(sidecar)
            disk.slow(0.3, "read")
            sidecar.until(lambda: sidecar.log().count(" ready ") == 2)
            answers(disk, client)
            until(client.serving)
            there = pooled(store, client, range(12))
            assert len(there) == POOL_BLOCKS
            assert load(store, there) == there
            sidecar.until_tier_serves()
            assert load(store, range(12)) == set(range(12))
            sidecar.until(lambda: nothing_held(sidecar))
            disk.hold("read")
            client.tier_wait_s = 0.3
            store.wait(store.prefetch([id_of(min(set(range(12)) - pooled(store, client, range(12))))]), PATIENCE_S)
            disk.until_held(1)
            hang_up(sidecar)
            store.clear()
            assert sidecar.log().count(" ready ") == 2
            disk.obey()
            sidecar.until(lambda: sidecar.log().count(" ready ") == 3)
            assert "restart put off" not in sidecar.log()
            until(client.serving)
            sidecar.until_tier_serves()
            assert load(store, range(12)) == set()


def test_a_disk_that_hangs_before_the_first_transfer_is_given_up_too(tmp_path: Path, memory: Path, disk: SlowDisk) -> None:
    """The namespace of a block must be on its list first. The other directory takes what is saved then."""
    with serving(tmp_path, disk.path, memory / "other", disk=HASTY) as sidecar, Client(sidecar.endpoint, tier_wait_s=0.3) as client:
        disk.hold(*ALL_KINDS)
        store = client.open(LAYOUT)
        assert set(save(store, range(4))) == {"committed"}
        sidecar.until(lambda: sidecar.tier()["directories"][0]["state"] == "failed")
        assert "no answer" in sidecar.tier()["directories"][0]["reason"]
        sidecar.until_clean()
        assert sidecar.tier()["directories"][1]["writes"] == 4
        disk.obey()
        sidecar.until_tier_serves()
        sidecar.until(lambda: nothing_held(sidecar))


@pytest.mark.parametrize("engine, put_off", [("io_uring", True), ("threads", True), ("threads", False)])
def test_a_sigterm_ends_it_though_a_disk_does_not_answer_and_a_restart_was_asked_for(
    tmp_path: Path, disk: SlowDisk, engine: str, put_off: bool
) -> None:
    runs(engine)
    with serving(tmp_path, disk.path, engine=engine, disk=HASTY) as sidecar, Client(sidecar.endpoint, tier_wait_s=0.3) as client:
        reading_from_a_disk_that_hangs(sidecar, client, disk, "read")
        process = sidecar.process
        assert process is not None
        hang_up(sidecar)
        if put_off:
            sidecar.until(lambda: "restart put off" in sidecar.log())
        process.terminate()
        sidecar.until(lambda: "stopped pool=" in sidecar.log())
        sidecar.until(lambda: rundir.holder(sidecar.endpoint) is None)
        assert not sidecar.pool_path.exists()
        if engine == "threads":  # which the kernel does not let go of
            disk.obey()
        assert sidecar.wait() == 0
        assert "restarting" not in sidecar.log()


def test_a_restart_does_without_a_disk_that_hangs_while_nothing_is_in_flight(tmp_path: Path, disk: SlowDisk) -> None:
    with serving(tmp_path, disk.path, disk=HASTY) as sidecar, Client(sidecar.endpoint, tier_wait_s=0.3) as client:
        store = client.open(LAYOUT)
        save_to_disk(sidecar, store, range(12))
        there = pooled(store, client, range(12))
        disk.hold("look")
        restart(sidecar)
        until(client.serving)
        assert load(store, there) == there
        page = status_page(sidecar)
        assert f"{disk.path}  opening: no answer for 1 s" in page
        assert f"-> {disk.path} does not answer" in page
        answers(disk, client)
        sidecar.until_tier_serves()
        assert load(store, range(12)) == set(range(12))
