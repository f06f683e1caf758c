"""A model that computes nothing and notices everything: what it writes into a block says which tokens it stands for, and before it uses
a block it compares every byte.

What a token leaves in a layer's KV is a function of all tokens up to it (of their hash, `Text`), the layer and the rank. So a block that
belongs to another prefix, another layer, another rank, or that was overwritten a moment too early, is found by the first request that
stands on it, at the byte. Layers are taken in an engine's order: all scheduled tokens are written into a layer before anything in it is
read. A request that read wrong bytes writes wrong bytes into the layers above, as a real one would, and samples a token that no right
one does; whether wrong bytes are excused, because the connector has reported them in the same step, is for the executor to say.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

Words = npt.NDArray[np.uint64]

VOCABULARY = 2048
POISON = VOCABULARY - 1  # sampled by a request that stands on wrong bytes, and by no other
LONGEST = 1 << 16  # tokens of a request
_STEP = np.full(LONGEST + 1, 0x9E3779B97F4A7C15, np.uint64)
_STEP[0] = 1
_POWERS = np.cumprod(_STEP, dtype=np.uint64)
_STEP[1:] = pow(0x9E3779B97F4A7C15, -1, 1 << 64)
_INVERSES = np.cumprod(_STEP, dtype=np.uint64)


def _mixed(words: Words) -> Words:
    """The finalizer of splitmix64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def number(*what: object) -> int:
    """64 bits that stand for it."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "little")


class Text:
    """Tokens, and for each of them the hash of all up to it: a polynomial modulo 2^64, mixed. `means` is what else the KV depends on;
    `instead`: by position, what an input other than its token is (of an image, or an embedding)."""

    def __init__(self, tokens: Sequence[int], means: object = None, instead: dict[int, object] | None = None) -> None:
        self.tokens: list[int] = []
        self._instead = {at: number(what) for at, what in (instead or {}).items()}
        self._sums = np.array([number(means)], np.uint64)  # before each token and after the last
        self.hashes = np.zeros(0, np.uint64)
        self.append(tokens)

    def copy(self) -> Text:
        text = copy.copy(self)
        text.tokens = list(self.tokens)
        return text

    def append(self, tokens: Sequence[int]) -> None:
        first, last = len(self.tokens), len(self.tokens) + len(tokens)
        self.tokens += tokens
        inputs = np.array([self._instead.get(at, token) for at, token in enumerate(tokens, first)], np.uint64)
        sums = self._sums[-1] + np.cumsum(_mixed(inputs + np.uint64(1)) * _INVERSES[first + 1 : last + 1], dtype=np.uint64)
        self._sums = np.concatenate([self._sums, sums])
        self.hashes = np.concatenate([self.hashes, _mixed(sums * _POWERS[first + 1 : last + 1])])

    def cut(self, tokens: int) -> None:
        """Takes back all but the first so many."""
        del self.tokens[tokens:]
        self._sums, self.hashes = self._sums[: tokens + 1], self.hashes[:tokens]

    def next_token(self) -> int:
        return int(self.hashes[-1] % np.uint64(POISON))


class Wrong(NamedTuple):
    """The first wrong token that a request read in one layer."""

    request_id: str
    rank: int
    layer: str
    block_id: int
    token: int

    def __str__(self) -> str:
        return (
            f"request {self.request_id} read wrong bytes: rank {self.rank}, layer {self.layer}, block {self.block_id}, token {self.token}"
        )


class Layer:
    """One layer's KV on one rank."""

    def __init__(self, name: str, rank: int, group: int, spec: KVCacheSpec, cache: torch.Tensor) -> None:
        self.name = name
        self.rank = rank if not isinstance(spec, MLAAttentionSpec) else 0  # of latent attention all have the same
        self.group = group
        self.cache = cache
        self.is_state = isinstance(spec, MambaSpec)
        self._spec = spec
        words: Words = cache.view(torch.int64).numpy().view(np.uint64)  # [blocks, heads, tokens of a block, words of one token's content]
        self._words = words
        shape = (words.shape[1], words.shape[3])
        self._factors = _mixed(np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(number(name, self.rank))).reshape(shape) | np.uint64(
            1
        )

    def _first_read(self, start: int) -> int:
        """The first token that one at `start` attends to."""
        if isinstance(self._spec, SlidingWindowSpec):
            return max(0, start - self._spec.sliding_window + 1)
        if isinstance(self._spec, ChunkedLocalAttentionSpec):
            return start // self._spec.attention_chunk_size * self._spec.attention_chunk_size
        return 0

    def _places(self, block_ids: list[int], first: int, end: int) -> tuple[Any, Any]:
        """(block, position in it) of each token; of a state, which is kept as the last token left it, in its block."""
        at = np.arange(first, end)
        blocks = np.array(block_ids)[at // self._spec.block_size]
        return blocks, at % self._spec.block_size if isinstance(self._spec, AttentionSpec) else np.zeros_like(at)

    def zero(self, block_ids: list[int]) -> None:
        if isinstance(self._spec, FullAttentionSpec):  # as the CPU's model runner
            self.cache[block_ids] = 0

    def carry(self, block_ids: list[int], start: int, end: int) -> tuple[int, int] | None:
        """From which block to which a state is copied before a step, because it goes on in the block of the step's last token."""
        if not self.is_state or not start:
            return None
        return block_ids[(start - 1) // self._spec.block_size], block_ids[(end - 1) // self._spec.block_size]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            sources, targets = zip(*pairs, strict=True)
            self._words[list(targets)] = self._words[list(sources)]

    def write(self, text: Text, block_ids: list[int], start: int, end: int, flaw: np.uint64) -> set[int]:
        """Tokens `start` to `end`; the blocks written. `flaw` is 0 but for a request that read something wrong."""
        first = start if isinstance(self._spec, AttentionSpec) else end - 1
        blocks, positions = self._places(block_ids, first, end)
        assert blocks.all(), f"{self.name} is to write tokens {first} to {end} into the null block"
        self._words[blocks, :, positions, :] = (text.hashes[first:end] ^ flaw)[:, None, None] * self._factors
        return set(blocks.tolist())

    def read(self, request_id: str, text: Text, block_ids: list[int], start: int, end: int) -> Wrong | None:
        """Compares what the tokens `start` to `end` attend to."""
        if isinstance(self._spec, AttentionSpec):
            first, last = self._first_read(start), end
        else:
            first, last = max(0, start - 1), start
            block_ids = [block_ids[(end - 1) // self._spec.block_size]] * len(block_ids)  # see carry
        blocks, positions = self._places(block_ids, first, last)
        right = self._words[blocks, :, positions, :] == text.hashes[first:last][:, None, None] * self._factors
        if right.all():
            return None
        at = int(np.flatnonzero(~right.all(axis=(1, 2)))[0])
        return Wrong(request_id, self.rank, self.name, int(blocks[at]), first + at)


class Rank:
    """The layers of one rank."""

    def __init__(self, rank: int, config: KVCacheConfig, caches: dict[str, torch.Tensor]) -> None:
        self.caches = list(caches.values())
        self.layers: list[Layer] = []
        for number_of_group, group in enumerate(config.kv_cache_groups):
            for name in group.layer_names:
                spec = group.kv_cache_spec
                if isinstance(spec, UniformTypeKVCacheSpecs):
                    spec = spec.kv_cache_specs[name]
                assert isinstance(spec, AttentionSpec | MambaSpec), spec
                self.layers.append(Layer(name, rank, number_of_group, spec, caches[name]))

    def zero(self, block_ids: list[int]) -> None:
        for layer in self.layers:
            layer.zero(block_ids)


class Request:
    """What a worker knows of a request."""

    def __init__(self, new: NewRequestData, text: Text) -> None:
        self.text = text
        self.prompt_tokens = len(text.tokens)
        self.block_ids = [list(ids) for ids in new.block_ids]
        self.computed = new.num_computed_tokens


class Batch:
    """The requests that the workers know, as vLLM's model runner keeps them. `texts`: what the prompts are, by request."""

    def __init__(self, texts: dict[str, Text]) -> None:
        self._texts = texts
        self.requests: dict[str, Request] = {}

    def update(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_req_ids:
            self.requests.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self.requests[new.req_id] = Request(new, self._texts[new.req_id].copy())
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            request = self.requests[request_id]
            request.text.cut(request.prompt_tokens + cached.num_output_tokens[i])  # what was sampled in a step that failed
            # A step that was planned ahead counts on all drafts of the one before.
            request.computed = min(cached.num_computed_tokens[i], len(request.text.tokens) - 1)
            new_ids = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                assert new_ids is not None
                request.block_ids = [list(ids) for ids in new_ids]
            elif new_ids is not None:
                for ids, more in zip(request.block_ids, new_ids, strict=True):
                    ids += more
