"""`hostkv simulate`: replays a trace of requests against pools and disks of several sizes, once per policy (policies.py).

What is replayed. Requests come one after the other; each is over before the next one begins. A request finds the longest unbroken run
of blocks from the front of its prompt that are in the pool or on the disk; a block behind a missing one is of no use to it. All of the
run is reused, what was on the disk is also brought into the pool and used there, and all blocks behind it are computed and saved: into
the pool, and to the disk at once. Blocks that go from the pool stay on the disk, so the disk holds (nearly) all that the pool holds. The
disk's policy is told of each use, also where the pool answered. The blocks of the request itself are pinned meanwhile: what finds no room
beside them is not kept.

Only whole blocks count; the rate is tokens reused of all tokens of all prompts, the last partial block's included. What engines keep in
device memory, and answers, which no prompt has yet, are not in it.

The optimum is Belady's, which knows the future: after each request it keeps, of what it had and what came, the blocks that are used
again soonest, and of those used again by the same request the ones nearer to the front. No schedule reuses more. Drop the rule of the
unbroken run for a moment: each use of a block after its first one is then one gain, to be had by keeping the block from one request to
the other, at most `capacity` blocks at a time; to drop what is needed last whenever there are too many gives the most gains (Belady
1966; Faigle and Nawijn 1995 for intervals). Whatever uses a block uses its parents, so a parent is used again no later than its child,
and in a tie the child goes first: so what is kept never has a hole, and each of these gains is a block of an unbroken run. For a pool
above a disk it is a bound: it is given the room of both, as if no block were in both, and must only reach what they reach together."""

from __future__ import annotations

import heapq
import importlib.util
import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .config import GIB, KIB, MIB, TIB
from .errors import StartupError
from .page import size_text
from .policies import POLICIES, Policy

BLOCK_TOKENS = 512
MAX_BYTES_PER_TOKEN = 1 << 30
MAX_LINE_BYTES = 16 << 20
OPTIMUM = "optimum"
_UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}


class Trace(NamedTuple):
    prompts: list[list[int]]  # the whole blocks of each, in order
    parents: dict[int, int | None]  # of each block the one before it
    tokens: int  # of all prompts
    duration_s: float

    def reusable(self) -> int:
        """Blocks that are found where nothing ever goes."""
        return sum(map(len, self.prompts)) - len(self.parents)


class Hits(NamedTuple):
    pool: int  # blocks
    disk: int


# ---- the trace -------------------------------------------------------------------------------------------------------------------------


def read_trace(path: str) -> Trace:
    """Raises StartupError that names the line and what to do about it."""
    prompts: list[list[int]] = []
    before: dict[int, tuple[int | None, int]] = {}  # of each id: the one before it, and the line that said so
    parents: dict[int, int | None] = {}
    tokens, first_ms, last_ms = 0, 0.0, 0.0
    for number, text in _lines(path):
        try:
            time_ms, length, ids = _request(text)
            if prompts and time_ms < last_ms:
                raise _Wrong(f"timestamp {time_ms:g} is before that of the request before it, {last_ms:g}; sort the file by timestamp")
            parent = None
            for key in ids:
                earlier, line = before.setdefault(key, (parent, number))
                if earlier != parent:
                    here, there = (f"follows {each}" if each is not None else "is the first" for each in (parent, earlier))
                    raise _Wrong(
                        f"id {key} of hash_ids {here}, in line {line} it {there}; equal ids must mean equal prefixes: hash each block "
                        "with all before it"
                    )
                parent = key
        except _Wrong as wrong:
            raise StartupError(f"{path}:{number}: {wrong}") from None
        first_ms, last_ms = time_ms if not prompts else first_ms, time_ms
        tokens += length
        whole = ids[: length // BLOCK_TOKENS]
        parents.update((key, before[key][0]) for key in whole)
        prompts.append(whole)
    if not parents:
        raise StartupError(f"{path} has no prompt of {BLOCK_TOKENS} tokens or more; give a file of JSON lines, one request each")
    return Trace(prompts, parents, tokens, (last_ms - first_ms) / 1000)


class _Wrong(Exception):
    """What is wrong with a line, and what to do."""


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    try:
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                if len(line) == MAX_LINE_BYTES:
                    raise StartupError(f"{path}:{number}: the line is over {MAX_LINE_BYTES} bytes; one request a line is expected")
                if line.strip():
                    yield number, line
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}; give a trace of JSON lines") from None


def _request(text: bytes) -> tuple[float, int, list[int]]:
    """timestamp (ms), input_length and hash_ids of one line."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Wrong(f"not JSON ({error}); one request a line is expected, unpacked and in UTF-8") from None
    if type(fields) is not dict:
        raise _Wrong('not a JSON object; a line looks like {"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [0, 1]}')
    missing = [name for name in ("timestamp", "input_length", "hash_ids") if name not in fields]
    if missing:
        raise _Wrong(f"{missing[0]} is missing; each line needs timestamp (ms), input_length (tokens) and hash_ids")
    time_ms, length, ids = fields["timestamp"], fields["input_length"], fields["hash_ids"]
    if type(time_ms) not in (int, float) or not 0 <= time_ms < 1e15:
        raise _Wrong(f"timestamp is {time_ms!r:.40}, must be milliseconds, a number from 0 on")
    if type(length) is not int or not 1 <= length <= 1 << 40:
        raise _Wrong(f"input_length is {length!r:.40}, must be the tokens of the prompt, a whole number from 1 on")
    if type(ids) is not list or not all(type(key) is int and key >= 0 for key in ids):
        raise _Wrong("hash_ids must be a list of whole numbers from 0 on; number the hashes if yours are texts")
    blocks = -(-length // BLOCK_TOKENS)
    if len(ids) != blocks:
        raise _Wrong(
            f"{len(ids)} hash_ids for {length} tokens, must be {blocks}: one per {BLOCK_TOKENS} tokens, of which the last may be partial"
        )
    if len(set(ids)) != len(ids):
        raise _Wrong("hash_ids has an id twice; equal ids must mean equal prefixes: hash each block with all before it")
    return time_ms, length, ids


# ---- the replay ------------------------------------------------------------------------------------------------------------------------


class Directory:
    """What is in one tier. Its policy proposes what goes, it disposes: never what is busy, and never more than has to go."""

    def __init__(self, policy: Policy, capacity: int) -> None:
        self.blocks: set[int] = set()
        self._policy = policy
        self._capacity = capacity

    def use(self, keys: Sequence[int]) -> None:
        self._policy.use([key for key in keys if key in self.blocks])

    def save(self, keys: Sequence[int], parents: dict[int, int | None], busy: Collection[int]) -> None:
        """Takes in those of the blocks that are not here, until there is no room that others do not need."""
        for key in keys:
            if key in self.blocks:
                continue
            if len(self.blocks) == self._capacity:
                victim = self._policy.victim(busy)
                if victim is None:
                    return
                self._policy.remove(victim)
                self.blocks.remove(victim)
            self._policy.add(key, parents[key])
            self.blocks.add(key)


def replay(trace: Trace, policy: str, pool_blocks: int, disk_blocks: int) -> Hits:
    """`disk_blocks` 0: no disk."""
    pool, disk = (Directory(POLICIES[policy](capacity), capacity) for capacity in (pool_blocks, disk_blocks))
    pool_hits = disk_hits = 0
    for prompt in trace.prompts:
        run = 0
        for key in prompt:
            if key in pool.blocks:
                pool_hits += 1
            elif key in disk.blocks:
                disk_hits += 1
            else:
                break
            run += 1
        busy = set(prompt)
        pool.use(prompt)
        promoted = [key for key in prompt[:run] if key not in pool.blocks]
        pool.save(promoted, trace.parents, busy)
        pool.use(promoted)
        pool.save(prompt[run:], trace.parents, busy)
        if disk_blocks:
            disk.use(prompt)
            disk.save(prompt[run:], trace.parents, busy)
    return Hits(pool_hits, disk_hits)


def optimum(trace: Trace, capacity: int) -> int:
    """How many blocks can be reused at most with room for `capacity`."""
    hits = 0
    kept: set[int] = set()
    order: list[tuple[int, int, int]] = []  # a heap: what goes first; uses that have been are behind all that are to come
    for prompt, nexts in zip(trace.prompts, _next_uses(trace.prompts), strict=True):
        hits += next((run for run, key in enumerate(prompt) if key not in kept), len(prompt))
        for depth, (key, following) in enumerate(zip(prompt, nexts, strict=True)):
            if following is None:
                kept.discard(key)
            else:
                kept.add(key)
                heapq.heappush(order, (-following, -depth, key))
        while len(kept) > capacity:
            kept.remove(heapq.heappop(order)[2])
    return hits


def _next_uses(prompts: list[list[int]]) -> list[list[int | None]]:
    """Of each block of each prompt: the number of the next request that has it."""
    following: dict[int, int] = {}
    nexts: list[list[int | None]] = []
    for number in range(len(prompts) - 1, -1, -1):
        nexts.append([following.get(key) for key in prompts[number]])
        following.update(dict.fromkeys(prompts[number], number))
    return nexts[::-1]


# ---- what is printed and drawn ---------------------------------------------------------------------------------------------------------


class Size(NamedTuple):
    text: str
    blocks: int


def parse_sizes(flag: str, value: str, bytes_per_token: int) -> list[Size]:
    """The sizes of a comma-separated list, smallest first: of bytes with a unit, of tokens without. Raises StartupError."""
    sizes = []
    for text in value.split(","):
        match = re.fullmatch(r"([0-9]{1,15})([KMGT]iB)?", text)
        tokens = 0 if match is None else int(match[1]) * _UNITS[match[2]] // bytes_per_token if match[2] else int(match[1])
        if tokens < BLOCK_TOKENS:
            raise StartupError(
                f"{flag} has {text!r}, must be sizes of a block ({BLOCK_TOKENS} tokens, {size_text(BLOCK_TOKENS * bytes_per_token)}) or "
                "more, in KiB, MiB, GiB or TiB or a number of tokens, such as 64GiB,1TiB or 500000,2000000"
            )
        sizes.append(Size(text, tokens // BLOCK_TOKENS))
    return sorted(sizes, key=lambda size: size.blocks)


def simulate(path: str, pools: str, disks: str, bytes_per_token: int, picture: str | None) -> int:
    """Prints each line as soon as it is known, then draws them into `picture` (None: named like the trace, in the working directory)."""
    if not 1 <= bytes_per_token <= MAX_BYTES_PER_TOKEN:
        raise StartupError(f"--bytes-per-token is {bytes_per_token}, must be 1..{MAX_BYTES_PER_TOKEN}")
    pool_sizes = parse_sizes("--pool", pools, bytes_per_token)
    disk_sizes = parse_sizes("--disk", disks, bytes_per_token) if disks else []
    drawable = importlib.util.find_spec("matplotlib") is not None
    if picture is not None and not drawable:
        raise StartupError(f"{picture} cannot be drawn without matplotlib; pip install matplotlib, or leave out --png")
    trace = read_trace(path)
    new_tokens = BLOCK_TOKENS * len(trace.parents)
    print(
        f"{path}: {len(trace.prompts)} requests in {trace.duration_s:.0f} s, {trace.tokens} prompt tokens, "
        f"{_rate(trace, trace.reusable())} % of them reusable; {new_tokens} tokens of blocks, {size_text(new_tokens * bytes_per_token)} "
        f"at {bytes_per_token} bytes a token.\nIn % of all prompt tokens. lasts: until as many tokens are new as there is room for.\n"
    )
    curves = [_table(trace, pool_sizes, None)]
    for disk in disk_sizes:
        above = [pool for pool in pool_sizes if pool.blocks < disk.blocks]
        if above:
            curves.append(_table(trace, above, disk))
    if not drawable:
        print("no curve is drawn: matplotlib is missing; pip install matplotlib")
        return 0
    picture = picture or f"{Path(path).stem}.png"
    _draw(picture, Path(path).name, curves)
    print(f"the curves are in {picture}")
    return 0


class Curves(NamedTuple):
    title: str
    pools: list[Size]
    rates: dict[str, list[float]]  # of each policy and the optimum: % of all prompt tokens, one for each pool


def _rate(trace: Trace, blocks: int) -> str:
    return f"{_percent(trace, blocks):.2f}"


def _percent(trace: Trace, blocks: int) -> float:
    return 100 * blocks * BLOCK_TOKENS / trace.tokens


def _table(trace: Trace, pools: list[Size], disk: Size | None) -> Curves:
    title = f"pool above a disk of {disk.text}" if disk else "pool alone"
    width = 22 if disk else 8
    curves = Curves(title, pools, {name: [] for name in (*POLICIES, OPTIMUM)})
    print(f"{title}{', reused in all = from the pool + from the disk' if disk else ''}")
    print(f"{'pool':>8}  {'lasts':>7} {''.join(f'{name:>{width}}' for name in POLICIES)}{'bound' if disk else OPTIMUM:>9}")
    for pool in pools:
        cells = []
        for name in POLICIES:
            hits = replay(trace, name, pool.blocks, disk.blocks if disk else 0)
            curves.rates[name].append(_percent(trace, sum(hits)))
            cells.append(_rate(trace, sum(hits)) + (f" = {_rate(trace, hits.pool):>5} + {_rate(trace, hits.disk):>5}" if disk else ""))
        best = optimum(trace, pool.blocks + (disk.blocks if disk else 0))
        curves.rates[OPTIMUM].append(_percent(trace, best))
        lasts_s = pool.blocks * trace.duration_s / len(trace.parents)
        print(f"{pool.text:>8}  {lasts_s:>5.0f} s {''.join(f'{cell:>{width}}' for cell in cells)}{_rate(trace, best):>9}", flush=True)
    print()
    return curves


def _draw(picture: str, name: str, curves: list[Curves]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 5 * len(curves), 5), layout="constrained")
    figure.suptitle(f"Prompt tokens reused, {name}", parse_math=False)
    for axes, each in zip(figure.subplots(1, len(curves), sharey=True, squeeze=False)[0], curves, strict=True):
        for policy, rates in each.rates.items():
            axes.plot([pool.blocks for pool in each.pools], rates, "k--" if policy == OPTIMUM else "o-", label=policy)
        axes.set_xscale("log", base=2)
        axes.set_xticks([pool.blocks for pool in each.pools], [pool.text for pool in each.pools], rotation=45, minor=False)
        axes.set_xlabel("pool")
        axes.set_ylim(bottom=0)
        axes.set_title(each.title)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("% of all prompt tokens")
    figure.axes[0].legend()
    try:
        figure.savefig(picture, format="png", dpi=120)
    except OSError as error:
        raise StartupError(f"{picture} cannot be written: {error.strerror}; give another file with --png") from None
