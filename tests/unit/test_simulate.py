"""`hostkv simulate`: reading traces, replaying them, the optimum, and what is printed and drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
from hostkv.sidecar import simulate as simulator
from hostkv.sidecar.errors import StartupError
from hostkv.sidecar.policies import POLICIES
from hostkv.sidecar.simulate import Hits, Trace, optimum, parse_sizes, read_trace, replay
from hypothesis import given
from hypothesis import strategies as st

from tests.support import hostkv

ROOT = Path(__file__).resolve().parents[2]
PATHS = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=3), min_size=5, max_size=8)  # of the tree of tests/unit/test_policies.py


def trace_of(*prompts: list[int]) -> Trace:
    parents = {key: before for keys in prompts for before, key in zip([None, *keys[:-1]], keys, strict=True)}
    return Trace([list(keys) for keys in prompts], parents, 512 * sum(map(len, prompts)), 1.0)


def tree_trace(paths: list[list[int]]) -> Trace:
    prompts = []
    for turns in paths:
        keys, block = [], 0
        for turn in turns:
            block = 3 * block + turn
            keys.append(block)
        prompts.append(keys)
    return trace_of(*prompts)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "chat.jsonl"
    with path.open("w") as file:
        subprocess.run([sys.executable, ROOT / "examples" / "make_trace.py", "300", "7"], stdout=file, check=True)
    return path


# ---- reading ---------------------------------------------------------------------------------------------------------------------------


def line(**changed: object) -> str:
    return json.dumps({"timestamp": 5, "input_length": 1100, "output_length": 9, "hash_ids": [1, 2, 3]} | changed)


def read(tmp_path: Path, *lines: str | bytes) -> Trace:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(each if isinstance(each, bytes) else each.encode() for each in lines))
    return read_trace(str(path))


def test_only_whole_blocks_count_and_all_tokens_do(tmp_path: Path) -> None:
    trace = read(
        tmp_path, line(), "", line(timestamp=1500, input_length=1024, hash_ids=[1, 2]), line(timestamp=2005, input_length=3, hash_ids=[9])
    )
    assert trace == Trace([[1, 2], [1, 2], []], {1: None, 2: 1}, 1100 + 1024 + 3, 2.0)
    assert trace.reusable() == 2


@pytest.mark.parametrize(
    "wrong, why",
    [
        ("{", "not JSON"),
        (b'{"timestamp": "\xff"}', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "timestamp is missing"),
        (b"\x1f\x8b\x08\x00", "not JSON"),
        ('{"timestamp": 6, "input_length": 3}', "hash_ids is missing"),
        (line(timestamp=-1), "timestamp is -1, must be milliseconds"),
        (line(timestamp="7"), "timestamp is '7'"),
        (line(timestamp=True), "timestamp is True"),
        (line(timestamp=float("nan")), "timestamp is nan"),
        (line(timestamp=4), "timestamp 4 is before that of the request before it, 5; sort the file"),
        (line(input_length=0), "input_length is 0"),
        (line(input_length=1100.0), "input_length is 1100.0"),
        (line(input_length=1 << 41), "input_length is 2199023255552"),
        (line(hash_ids=[1, 2]), "2 hash_ids for 1100 tokens, must be 3"),
        (line(hash_ids=[1, 2, 3, 4]), "4 hash_ids for 1100 tokens, must be 3"),
        (line(hash_ids=["a", "b", "c"]), "number the hashes if yours are texts"),
        (line(hash_ids=[1, 2, -3]), "whole numbers from 0 on"),
        (line(hash_ids="123"), "must be a list"),
        (line(hash_ids=[1, 2, 1]), "an id twice"),
        (line(hash_ids=[2, 1, 3]), "id 2 of hash_ids is the first, in line 1 it follows 1; equal ids must mean equal prefixes"),
        (line(hash_ids=[1, 3, 2]), "id 3 of hash_ids follows 1, in line 1 it follows 2"),
    ],
)
def test_a_wrong_line_is_named_with_its_fix(tmp_path: Path, wrong: str | bytes, why: str) -> None:
    with pytest.raises(StartupError) as error:
        read(tmp_path, line(), wrong)
    assert f"{tmp_path}/trace.jsonl:2: " in str(error.value)
    assert why in str(error.value)


def test_an_endless_line_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "MAX_LINE_BYTES", 1000)
    with pytest.raises(StartupError, match="jsonl:2: the line is over 1000 bytes"):
        read(tmp_path, line(), line(note="x" * 1000))


@pytest.mark.parametrize("content", ["", "\n \n", line(input_length=511, hash_ids=[1])])
def test_a_file_without_a_whole_block_is_no_trace(tmp_path: Path, content: str) -> None:
    with pytest.raises(StartupError, match="has no prompt of 512 tokens or more"):
        read(tmp_path, content)


@pytest.mark.parametrize("path", ["", "nowhere.jsonl"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, path: str) -> None:
    with pytest.raises(StartupError, match=f"{tmp_path}/{path}.* cannot be read: "):
        read_trace(f"{tmp_path}/{path}")


@pytest.mark.parametrize("value", ["", "64", "511", "64GB", "1GiB,", "-5", "1 GiB", "1.5GiB", "63MiB"])
def test_a_wrong_size_is_named(value: str) -> None:
    with pytest.raises(StartupError, match=r"^--pool has .*, must be sizes of a block \(512 tokens, 64 MiB\) or more"):
        parse_sizes("--pool", value, 128 << 10)


def test_sizes_are_bytes_with_a_unit_and_tokens_without() -> None:
    assert [tuple(size) for size in parse_sizes("--pool", "1GiB,512,64MiB,5120", 128 << 10)] == [
        ("512", 1), ("64MiB", 1), ("5120", 10), ("1GiB", 16),
    ]  # fmt: skip


# ---- the replay ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_with_room_for_all_everything_reusable_is_reused(policy: str) -> None:
    trace = trace_of([1, 2, 3], [1, 2, 4], [1, 2, 3, 5])
    assert replay(trace, policy, 5, 0) == Hits(trace.reusable(), 0) == Hits(5, 0)


def test_a_block_behind_a_missing_one_is_not_reused() -> None:
    trace = trace_of([1, 2, 3], [4], [1, 2, 3])  # 4 takes the place of 1
    assert replay(trace, "lru", 3, 0) == Hits(0, 0)
    assert replay(trace, "prefix", 3, 0) == Hits(2, 0), "it takes the place of 3"


def test_hits_of_pool_and_disk_are_told_apart_and_the_disk_fills_the_pool() -> None:
    trace = trace_of([1, 2], [3, 4], [1, 2], [1, 2])
    assert replay(trace, "lru", 2, 4) == Hits(2, 2)
    assert replay(trace, "lru", 2, 0) == Hits(2, 0)


def test_a_run_goes_on_from_the_pool_to_the_disk() -> None:
    assert replay(trace_of([1, 2, 3], [4], [1, 2, 3]), "prefix", 3, 4) == Hits(2, 1)


def test_what_comes_from_the_disk_is_used_in_the_pool() -> None:
    assert replay(trace_of([1], [2], [3], [1], [4], [5], [1]), "reuse", 2, 9) == Hits(1, 1)


def test_the_disk_hears_of_uses_that_the_pool_answers() -> None:
    trace = trace_of([1], [2], [1], [3], [4], [1])
    assert replay(trace, "lru", 2, 3) == Hits(1, 1), "the disk gave 2, since 1 was used after it, out of the pool"


def test_a_prompt_larger_than_the_pool_keeps_its_front() -> None:
    for policy in POLICIES:
        assert replay(trace_of([1, 2, 3, 4], [1, 2, 3, 4]), policy, 3, 0) == Hits(3, 0)
        assert replay(trace_of([1, 2, 3, 4], [1, 2, 3, 4]), policy, 1, 3) == Hits(1, 2)


def test_what_is_computed_again_behind_a_missing_block_counts_as_used() -> None:
    trace = trace_of([1, 2, 3], [4], [5], [1, 2, 3], [6], [1, 2, 3])  # 5 takes the place of 1, 6 that of 5
    assert replay(trace, "lru", 4, 0) == Hits(3, 0)


@pytest.mark.parametrize("policy", POLICIES)
@given(paths=PATHS, pool=st.integers(1, 5), disk=st.integers(0, 5))
def test_no_policy_beats_the_optimum(policy: str, paths: list[list[int]], pool: int, disk: int) -> None:
    trace = tree_trace(paths)
    hits = replay(trace, policy, pool, disk)
    assert hits.pool <= optimum(trace, pool)
    assert sum(hits) <= optimum(trace, pool + disk) <= trace.reusable()


def best_of_all(trace: Trace, capacity: int) -> int:
    """The most that any schedule reuses: every set of blocks that can be kept after each request, orphans too."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for keys in trace.prompts:
        after: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            now = hits + next((n for n, key in enumerate(keys) if key not in kept), len(keys))
            everything = kept | set(keys)
            for choice in combinations(sorted(everything), min(capacity, len(everything))):
                state = frozenset(choice)
                after[state] = max(now, after.get(state, 0))
        best = after
    return max(best.values())


@given(paths=PATHS, capacity=st.integers(1, 4))
def test_the_optimum_is_the_best_of_all_schedules(paths: list[list[int]], capacity: int) -> None:
    trace = tree_trace(paths)
    assert optimum(trace, capacity) == best_of_all(trace, capacity)


def test_the_optimum_knows_the_future() -> None:
    trace = trace_of([1], [2], [3], [4], [1], [2])
    assert optimum(trace, 2) == 2
    assert optimum(trace, 1) == 1


# ---- the command -----------------------------------------------------------------------------------------------------------------------


def test_the_example_trace_is_the_same_for_the_same_seed_and_readable(chat: Path) -> None:
    again = subprocess.run([sys.executable, ROOT / "examples" / "make_trace.py", "300", "7"], capture_output=True, check=True)
    assert again.stdout == chat.read_bytes()
    trace = read_trace(str(chat))
    assert len(trace.prompts) == 300
    assert trace.reusable() > 0


def test_the_tables_show_each_policy_beside_the_optimum(chat: Path, tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    done = hostkv("simulate", str(chat), "--pool", "512KiB,2MiB,1GiB", "--disk", "4MiB", "--bytes-per-token", "64", "--png", str(picture))
    assert done.returncode == 0, done.stderr
    assert not done.stderr or done.stderr.startswith("Matplotlib is building the font cache"), "which it says where that takes five seconds"
    trace = read_trace(str(chat))
    assert f"{chat}: 300 requests in " in done.stdout
    lines = [text.split() for text in done.stdout.splitlines()]
    alone = lines.index(["pool", "alone"])
    assert lines[alone + 1] == ["pool", "lasts", *POLICIES, "optimum"]
    blocks = {"512KiB": 16, "2MiB": 64, "1GiB": 32768}
    for row, (size, capacity) in zip(lines[alone + 2 : alone + 5], blocks.items(), strict=True):
        hits = [replay(trace, policy, capacity, 0).pool for policy in POLICIES] + [optimum(trace, capacity)]
        assert [row[0], *row[3:]] == [size, *(f"{100 * 512 * each / trace.tokens:.2f}" for each in hits)]
    above = next(n for n, text in enumerate(lines) if text[:6] == ["pool", "above", "a", "disk", "of", "4MiB,"])
    assert [row[0] for row in lines[above + 2 : above + 4]] == ["512KiB", "2MiB"]
    assert not lines[above + 4], "no pool that is larger than the disk"
    pool, disk = replay(trace, "prefix", 64, 128)
    percent = [f"{100 * 512 * each / trace.tokens:.2f}" for each in (pool + disk, pool, disk, optimum(trace, 192))]
    assert lines[above + 3][-6:] == [percent[0], "=", percent[1], "+", percent[2], percent[3]]
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_picture_is_named_like_the_trace(
    chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert simulator.simulate(str(chat), "100000", "", 64, None) == 0
    assert "the curves are in chat.png" in capsys.readouterr().out
    assert (tmp_path / "chat.png").stat().st_size > 10_000


def test_without_matplotlib_there_is_no_picture_and_it_says_so(
    chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert simulator.simulate(str(chat), "100000", "", 64, None) == 0
    assert "pip install matplotlib" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    with pytest.raises(StartupError, match=r"x\.png cannot be drawn without matplotlib"):
        simulator.simulate(str(chat), "100000", "", 64, "x.png")


def test_a_picture_that_cannot_be_written_is_named(chat: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=f"{tmp_path} cannot be written: Is a directory"):
        simulator.simulate(str(chat), "100000", "", 64, str(tmp_path))


@pytest.mark.parametrize(
    "flags, why",
    [
        (["--pool", "64GB"], "--pool has '64GB'"),
        (["--disk", "x"], "--disk has 'x'"),
        (["--bytes-per-token", "0"], "--bytes-per-token is 0, must be 1.."),
    ],
)
def test_wrong_flags_are_told_before_the_replay(chat: Path, flags: list[str], why: str) -> None:
    done = hostkv("simulate", str(chat), *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"hostkv: {why}")
