"""A sidecar that is absent, killed, full or stopped: a miss or a dropped page, never a wrong byte, and no call that hangs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rig import PAGE, Rank, hashes, kv_pool

from tests.support import PATIENCE_S, Sidecar, disk_tier

Make = Callable[..., Rank]
KEYS = hashes(4)


def in_time(call: Callable[[], Any]) -> Any:
    """What it returns; fails when it does not."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert results, "the call hangs"
    return results[0]


def misses(one: Rank) -> None:
    indices = one.alloc(4)
    assert in_time(lambda: one.storage.batch_set_v1(KEYS, indices)) == [False] * 4
    assert in_time(lambda: one.storage.batch_get_v1(KEYS, indices)) == [False] * 4
    assert in_time(lambda: one.storage.batch_exists(KEYS)) == 0
    one.pool.free(indices)


def test_no_sidecar_yet(tmp_path: Path, rank: Make, caplog: pytest.LogCaptureFixture) -> None:
    sidecar = Sidecar(tmp_path, start=False)
    with sidecar:
        one = rank(sidecar)
        misses(one)
        misses(one)
        assert one.storage.counts.dropped == one.storage.counts.lost == 8
        assert caplog.text.count("pages were not stored") == 1
        sidecar.start()
        sidecar.until(one.storage._client.serving)
        saved = one.save(KEYS)
        assert one.load(KEYS) == saved


def test_sidecar_killed_between_set_and_get(own_sidecar: Sidecar, rank: Make) -> None:
    one = rank(own_sidecar)
    saved = one.save(KEYS)
    own_sidecar.kill()
    assert one.load(KEYS) in (saved, [])  # it is in memory, as long as the tables seem to be served
    misses(one)
    own_sidecar.start()
    own_sidecar.until(one.storage._client.serving)
    assert one.storage.batch_exists(KEYS) == 4
    assert one.load(KEYS) == saved


def test_a_sidecar_that_goes_between_copy_and_commit(own_sidecar: Sidecar, rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which SGLang was not told of: it was told that they are being stored."""
    one = rank(own_sidecar)
    store = one.storage._parts["kv"].store
    commit = store.commit

    def after_a_kill(placed: Any) -> bytes:
        own_sidecar.kill()
        return commit(placed)

    monkeypatch.setattr(store, "commit", after_a_kill)
    assert one.storage.batch_set_v1(KEYS, one.alloc(4)) == [True] * 4
    in_time(lambda: one.storage.settle() or True)
    assert (one.storage.counts.saved, one.storage.counts.dropped) == (0, 4)
    monkeypatch.undo()
    own_sidecar.start()
    own_sidecar.until(one.storage._client.serving)
    own_sidecar.until(lambda: own_sidecar.status()["shards_in_flight"] == 0)
    saved = one.save(KEYS)
    assert one.load(KEYS) == saved


def test_pages_come_back_from_disk(tmp_path: Path, rank: Make) -> None:
    """After a restart of the sidecar that leaves nothing in memory."""
    with Sidecar(tmp_path, config=disk_tier(tmp_path / "disk")) as sidecar:
        sidecar.until_tier_serves()
        saved = rank(sidecar).save(KEYS)
        sidecar.until_clean()
        sidecar.stop()
        sidecar.start()
        sidecar.until_tier_serves()
        one = rank(sidecar)
        assert sidecar.status()["blocks"]["ready"] == 0
        assert one.storage.batch_exists([*KEYS, *hashes(1, "absent")]) == 4
        sidecar.until(lambda: sidecar.status()["blocks"]["ready"] == 4)  # on their way since that question
        assert one.load(KEYS) == saved
        sidecar.stop()
        sidecar.start()
        sidecar.until_tier_serves()
        one = rank(sidecar)
        sidecar.until(one.storage._client.serving)
        assert one.load(KEYS) == saved  # without having asked


def test_a_full_pool_drops_pages_and_says_so(tmp_path: Path, rank: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Its blocks are all pinned, so nothing gives way."""
    with Sidecar(tmp_path, pool_size="8MiB") as sidecar:
        one = rank(sidecar, pool=kv_pool("page_first", False, page=PAGE, pages=40, heads=64))
        store = one.storage._parts["kv"].store
        room = 8 * 2**20 // store.layout.slot_bytes
        kept = 0
        while kept < room:  # of other prompts, as another engine holds them
            keys = hashes(8, kept)
            indices = one.alloc(8)
            results = one.storage.batch_set_v1(keys, indices)
            one.storage.settle()
            one.pool.free(indices)
            if not all(results):
                break
            handles = store.acquire([bytes.fromhex(key) for key in keys], one.storage._client.new_tag())
            kept += 8
            assert handles.run == 8
        indices = one.alloc(4)
        assert one.storage.batch_set_v1(KEYS, indices) == [False] * 4
        assert one.storage.counts.dropped >= 4
        assert "were not stored by now, with what follows them: the pool is full" in caplog.text


def test_a_damaged_page_ends_the_run(tmp_path: Path, rank: Make) -> None:
    with Sidecar(tmp_path, config="verify: load\n") as sidecar:
        one = rank(sidecar)
        saved = one.save(KEYS)
        with sidecar.pool_path.open("r+b") as pool:
            at = pool.read().index(saved[2])
            pool.seek(at + 5)
            pool.write(bytes([saved[2][5] ^ 1]))
        assert one.load(KEYS) == saved[:2]
        assert one.storage.counts.lost == 2
        sidecar.until(lambda: one.storage.batch_exists(KEYS) == 2)
        assert one.save(KEYS[2:3]) != saved[2:3]
        assert len(one.load(KEYS)) == 4


def test_a_stopped_sidecar_delays_nobody_for_long(own_sidecar: Sidecar, rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = rank(own_sidecar).save(KEYS)
    monkeypatch.undo()  # the client's own limits (conftest.py)
    one, other = rank(own_sidecar), rank(own_sidecar)
    os.kill(own_sidecar.pid, signal.SIGSTOP)
    indices = one.alloc(4)
    first = in_time(lambda: one.storage.batch_get_v1(KEYS, indices))
    assert first in ([False] * 4, [True] * 4)
    one.pool.free(indices)
    misses(one)
    in_time(lambda: other.storage.close() or True)
    in_time(lambda: one.storage.close() or True)
    os.kill(own_sidecar.pid, signal.SIGCONT)
    again = rank(own_sidecar)
    own_sidecar.until(lambda: again.load(KEYS) == saved)


def test_close_twice_and_attach_again(sidecar: Sidecar, rank: Make) -> None:
    one = rank(sidecar)
    saved = one.save(KEYS)
    one.storage.close()
    one.storage.close()
    assert rank(sidecar).load(KEYS) == saved
