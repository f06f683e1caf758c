"""The client's side of one peer, in the peer's own Python; standard library only. The peer's program gives `serve` an object; each line
that comes in names one of its methods with arguments, and is answered by one line. Every method times itself: no pipe is in a figure.

    open(size, count)   objects of `size` bytes, `count` a batch, filled with bytes that differ
    save(batch)         seconds to save a batch that is new
    load(batch)         seconds to load it into the same memory, emptied before; compared with what was saved
    clear()             nothing is stored any more
    keep(count)         `count` objects of those sizes are stored under one prefix
    lookup(count)       seconds to learn that the first `count` of them are there
    lookup_kept(count)  the same, and they stay until they are loaded or given back
    round_trip()        seconds of the smallest request
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

CHUNK_TOKENS, PIECE_BYTES = 256, 512 << 10  # of 8 KV heads of 128 in 16 bits: a layer's keys, or values, of a chunk


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def median_of(times: int, call: Callable[[], Any]) -> float:
    return statistics.median(timed(call) for _ in range(times))


def serve(peer: Any) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"done": getattr(peer, request.pop("do"))(**request)}
        except Exception as error:  # noqa: BLE001  whoever asked judges it
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    peer.close()
