"""What the connector's hooks cost a step of vLLM's engine: `.venvs/vllm/bin/python tests/engines/inside/hooks.py [--profile CASE]`.

All hooks of both roles together, in microseconds of the calling thread, median and 90th percentile over steps; below each case its dearest
hooks. Each hook is timed around its call, and the clock's own cost taken off. On a busy machine the median is the figure to look at. A
model of more layers adds two empty hooks for each.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from hostkv.connector.store import Store
from rig import BLOCK, Engine, full_attention, prompt

from tests.support import Sidecar

STEPS = 300
RUNNING, WAITING, LONG = 8, 64, 100 * BLOCK
LARGE, SMALL = "2GiB", "512MiB"  # pools
HOOKS = (
    *("get_num_new_matched_tokens", "update_state_after_alloc", "get_external_cache_hit_sources", "get_loaded_kv_cache_group_ids"),
    *("build_connector_meta", "update_connector_output", "request_finished_all_groups", "take_events", "get_kv_connector_stats"),
    *("has_pending_block_frees", "has_pending_push_work", "on_new_request", "handle_preemptions", "bind_connector_metadata"),
    *("start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save", "get_transfer_results", "get_block_ids_with_load_errors"),
    *("get_kv_connector_kv_cache_events", "build_connector_worker_meta", "clear_connector_metadata"),
)


class Clock:
    """Times the hooks of an engine's connectors, with a profile or without."""

    def __init__(self, engine: Engine, profile: cProfile.Profile | None) -> None:
        self.ns: Counter[str] = Counter()
        self._profile = profile
        for connector in (engine.connector, *engine.executor.connectors):
            for hook in HOOKS:
                setattr(connector, hook, self._timed(hook, getattr(connector, hook)))
        empty = [self._of(self._timed("empty", lambda: None)) for _ in range(1000)]
        self._own_ns = int(statistics.median(empty))

    def _of(self, call: Callable[[], Any]) -> int:
        self.ns.clear()
        call()
        return self.ns["empty"]

    def _timed(self, hook: str, call: Callable[..., Any]) -> Callable[..., Any]:
        now, own, ns, profile = time.perf_counter_ns, lambda: self._own_ns, self.ns, self._profile
        self._own_ns = 0

        def timed(*arguments: Any, **more: Any) -> Any:
            if profile is not None:
                profile.enable()
            started = now()
            result = call(*arguments, **more)
            ended = now()
            if profile is not None:
                profile.disable()
            ns[hook] += ended - started - own()
            return result

        return timed


def step(engine: Engine) -> None:
    """One step, also where vLLM would rather sleep."""
    output = engine.scheduler.schedule()
    engine.scheduler.update_from_output(output, engine.executor.execute_model(output) or engine.executor.sample_tokens(None))


def measure(case: str, engine: Engine, profiled: str | None, steps: int = STEPS) -> None:
    profile = cProfile.Profile() if profiled and profiled in case else None
    clock = Clock(engine, profile)
    totals: list[float] = []
    by_hook: dict[str, list[float]] = {hook: [] for hook in HOOKS}
    for _ in range(steps):
        clock.ns.clear()
        step(engine)
        totals.append(sum(clock.ns.values()) / 1000)
        for hook, found in by_hook.items():
            found.append(clock.ns[hook] / 1000)
    ninetieth = sorted(totals)[len(totals) * 9 // 10]
    print(f"{case:<78} {statistics.median(totals):8.1f} {ninetieth:8.1f}")
    dearest = sorted(((statistics.median(found), hook) for hook, found in by_hook.items()), reverse=True)[:4]
    print("   " + ", ".join(f"{hook} {median:.1f}" for median, hook in dearest if median))
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    for connector in (engine.connector, *engine.executor.connectors):
        for hook in HOOKS:
            delattr(connector, hook)


def cases(folder: Path, pool: str, waiting: list[list[int]], profiled: str | None) -> None:
    """A quarter of the pool may be pinned for requests that wait, which the second case is about."""
    share = "pins have room" if pool == LARGE else "pins have room for few"
    answered = threading.Event()
    acquire = Store.acquire

    def late(store: Store, *arguments: Any, **more: Any) -> Any:
        answered.wait()
        return acquire(store, *arguments, **more)

    specs = full_attention(heads=4, head_size=64)  # 64 KiB a block
    with Sidecar(folder / pool, pool_size=pool) as sidecar:
        saver = Engine(folder, sidecar.endpoint, blocks=400, specs=specs)
        for one in waiting:
            saver.ask(one)
        saver.close()
        engine = Engine(folder, sidecar.endpoint, blocks=1100, specs=specs, max_model_len=4096, max_num_seqs=256)
        if pool == LARGE:
            measure("a) nothing to do", engine, profiled)
        for i in range(RUNNING):
            engine.add(prompt(100, "running", i), 1900)
        engine.step_until(lambda: len(engine.scheduler.running) == RUNNING)
        engine.step()
        if pool == LARGE:
            measure(f"b) {RUNNING} requests decode", engine, profiled)
        Store.acquire = late  # type: ignore[method-assign,assignment]
        for one in waiting:
            engine.add(one)
        measure(f"c) the step in which {WAITING} of {LONG // BLOCK} blocks come, {share}", engine, profiled, steps=1)
        measure(f"c) they wait for their queries, {share}", engine, profiled)
        answered.set()
        Store.acquire = acquire  # type: ignore[method-assign]
        engine.await_queries()
        if pool == LARGE:
            blocks = engine.scheduler.kv_cache_manager.block_pool
            taken = blocks.get_new_blocks(blocks.get_num_free_blocks() - RUNNING * 10)  # for those that run, and no other
            measure("c) they wait with pins for room in the engine", engine, profiled, steps=100)
            blocks.free_blocks(taken)
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", metavar="CASE", help="prints a profile of the cases whose name has this in it")
    profiled = parser.parse_args().profile
    waiting = [prompt(LONG, "waiting", i) for i in range(WAITING)]
    print(f"{'microseconds of all hooks of one step':<78} {'median':>8} {'90th':>8}")
    with tempfile.TemporaryDirectory(prefix="hostkv-") as folder:
        for pool in (LARGE, SMALL):
            cases(Path(folder), pool, waiting, profiled)


if __name__ == "__main__":
    main()
