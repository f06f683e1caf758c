"""Two engines on one sidecar live through all at once: too little room, prefixes of each other's, aborts, failing loads, and a sidecar that
is killed. What the seed fixes is what is asked; how threads and processes meet differs from run to run, so it is not one test but many."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable

import pytest
from rig import BLOCK, Engine, Trouble, prompt
from test_parts import MODELS

from tests.support import Sidecar

Start = Callable[..., Engine]
REQUESTS = 160  # or more, until all has happened that shall
MOST = 20 * REQUESTS
KILLS = 2
BLOCKS = 40  # of an engine: two to four requests have room
HOW = {"plain": {}, "steps planned ahead": {"ahead": True}, "drafts": {"drafts": 3}, "drafts, ahead": {"drafts": 3, "ahead": True}}


def from_tree(draw: random.Random) -> list[int]:
    """A path in a tree of prefixes: two or three ways go on from each, after other lengths."""
    path: list[int] = []
    found: list[int] = []
    for _ in range(draw.randrange(1, 8)):
        path.append(draw.randrange(3 - len(path) % 2))
        found += prompt(random.Random(repr(path)).choice([7, 16, 40, 64]), path)
    return found


@pytest.mark.parametrize(
    "model, ranks, policy",
    [
        *(("plain", ranks, policy) for ranks in (1, 2) for policy in ("recompute", "fail")),
        ("two windows", 1, "recompute"),
        ("only windows", 1, "recompute"),
        ("unequal blocks", 2, "recompute"),
        ("states", 1, "fail"),
        ("steps planned ahead", 1, "recompute"),
        ("steps planned ahead", 2, "fail"),
        ("drafts", 1, "recompute"),
        ("drafts", 2, "fail"),
        ("drafts, ahead", 1, "recompute"),
    ],
)
def test_no_request_ever_stands_on_a_wrong_byte(
    sidecar_of: Callable[[str], Sidecar], start: Start, monkeypatch: pytest.MonkeyPatch, model: str, ranks: int, policy: str
) -> None:
    monkeypatch.undo()  # the client's own limits (conftest.py)
    kinds = {**HOW, **MODELS}[model]
    blocks = {**dict.fromkeys(HOW, BLOCKS), "two windows": 3 * BLOCKS, "states": 3 * BLOCKS // 2}.get(
        model, 9 * BLOCKS // 4
    )  # there are several groups
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw, of_loads, lock = random.Random(seed), random.Random(seed + 1), threading.Lock()
    sidecar = sidecar_of(f"{ranks}MiB")
    engines = [
        start(
            sidecar,
            ranks=ranks,
            policy=policy,
            blocks=blocks,
            max_model_len=(BLOCKS - 1) * BLOCK,
            extra={"save_decode": True},
            load_in_step_bytes=None if kinds else size,
            **kinds,
        )
        for size in (0, 4 * 8 << 10)
    ]
    seen: Counter[str] = Counter()
    trouble = Trouble()

    def fails(blocks: int) -> list[int]:
        with lock:
            failed = [at for at in range(blocks) if of_loads.random() < 0.04]
            seen["failed"] += len(failed)
            return failed

    def delay_s() -> float:
        with lock:
            return of_loads.choice([0, 0, 0.001, 0.01])

    trouble.fails, trouble.delay_s = fails, delay_s
    shall = {"failed", "aborted", "length", "external"}
    if not MODELS.get(model):  # those have more room, and it is seldom too little
        shall.add("preempted")
    if policy == "fail":
        shall.add("error")
    asked: list[list[int]] = []

    def count() -> Counter[str]:
        answers = [answer for engine in engines for answer in engine.answers.values()]
        now = seen + Counter(answer.finish for answer in answers if answer.finish)
        now["external"] = sum(answer.external for answer in answers) // BLOCK
        now["preempted"] = sum(engine.executor.preemptions for engine in engines)
        return now

    def asks_more() -> bool:
        return len(asked) < REQUESTS or (len(asked) < MOST and any(not count()[what] for what in shall))

    kill_at = sorted(draw.randrange(REQUESTS) for _ in range(KILLS))
    with trouble.on():
        while asks_more() or any(engine.has_work() for engine in engines):
            if kill_at and len(asked) >= kill_at[0]:
                kill_at.pop(0)
                sidecar.kill()
                restart_at = len(asked) + 10
            if sidecar.process.poll() is not None and (len(asked) >= restart_at or not asks_more()):
                sidecar.start()
            engine = draw.choice(engines)
            busy = sum(engine.scheduler.get_request_counts())
            if asks_more() and busy < 8 and draw.random() < 0.3:
                asked.append(from_tree(draw))
                engine.add(asked[-1], draw.choice([1, 4, 60]), name=f"request-{len(asked)}")
            elif busy and draw.random() < 0.03 and not any(told.invalid_block_ids for told in engine.executor.outputs):
                engine.abort(draw.choice(sorted(engine.scheduler.requests)))
                seen["aborted"] += 1
            elif not engine.has_work() and draw.random() < 0.1:
                engine.forget()
                seen["forgotten"] += 1
            engine.step()
    for engine in engines:
        engine.check_idle()
    sidecar.until(lambda: sidecar.status()["pins"] == 0)
    seen = count()
    print(dict(seen), sidecar.status()["items"])
    after = start(sidecar, ranks=ranks, blocks=blocks, max_model_len=(BLOCKS - 1) * BLOCK, **kinds)
    for one in asked:
        after.ask(one)
    assert all(seen[what] for what in shall), seen
    assert not seen["error"] or policy == "fail", seen
