"""How much of a prefix is there, where it consists of several parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import Part


def longest(parts: Sequence[Part], found: Sequence[tuple[int, Sequence[object]]], computed: int) -> int:
    """Tokens of the longest prefix of which each part has what it needs beyond `computed` tokens; `computed` where there is none.

    found[i]: the number of a block of part i, and which are there from that one on (true or false), up to the longest prefix that may be
    asked for. A part that a prefix needs whole has to be there from `computed` on; of another one only what the end reaches back to.
    """
    step = math.lcm(*(part.layout.block_tokens for part in parts))
    tokens = min((first + len(there)) * part.layout.block_tokens for part, (first, there) in zip(parts, found, strict=True))
    for part, (first, there) in zip(parts, found, strict=True):
        if not part.reach:
            run = sum(1 for _ in takewhile(bool, there)) if first <= part.first(computed, tokens) else 0
            tokens = min(tokens, (first + run) * part.layout.block_tokens if run else computed)
    runs = [_runs(there) if part.reach else [] for part, (_, there) in zip(parts, found, strict=True)]
    tokens -= tokens % step
    while tokens > computed:
        for part, (first, _), ends in zip(parts, found, runs, strict=True):
            last = tokens // part.layout.block_tokens - 1
            if part.reach and (last < first or ends[last - first] < last + 1 - part.first(computed, tokens)):
                break
        else:
            return tokens
        tokens -= step
    return computed


def _runs(there: Sequence[object]) -> list[int]:
    """How many in a row are there up to each, with it."""
    runs, run = [], 0
    for one in there:
        run = run + 1 if one else 0
        runs.append(run)
    return runs
