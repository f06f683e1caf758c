"""Connectors that go wrong where the world would: loaded by the engines of the tests instead of the real one."""

from __future__ import annotations

import dataclasses
import math
import struct
import threading
from typing import Any

import pytest
import torch
from hostkv.connector.vllm import HostKVConnector
from patience import be_patient


class Patient(HostKVConnector):
    """For servers, whose processes only a connector can reach."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        be_patient(pytest.MonkeyPatch())
        super().__init__(*args, **kwargs)


class LosesABlock(HostKVConnector):
    """The slot of the promised block FAILS of the prefix's part PART is given to somebody else before the copy: its generation is no longer
    what it was, and what arrives is another block's bytes."""

    PART = 0
    FAILS = 3

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reported: list[list[int]] = []  # pairs: the block the engine had asked for, those reported

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        lost = [load.reads[self.PART] for load in self._plan().loads]
        for read in lost:
            generations = bytearray(read.handles.generations)
            generation = struct.unpack_from("<Q", generations, self.FAILS * 8)[0]
            struct.pack_into("<Q", generations, self.FAILS * 8, generation - 1)
            read.handles = dataclasses.replace(read.handles, generations=bytes(generations))
            self.reported.append([read.block_ids[0][self.FAILS]])
        super().start_load_kv(forward_context, **kwargs)
        assert self._worker
        for read in lost:
            for cache in self._worker._caches:
                cache[read.block_ids[0][self.FAILS]] = 3.0

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = super().get_block_ids_with_load_errors()
        if failed:
            self.reported.append(sorted(failed))
        return failed


class LosesTheStart(LosesABlock):
    """Of what a prefix needs of the second part: of a window the first block, or the state."""

    PART = 1
    FAILS = 0


class StrangeLayout(HostKVConnector):
    """An engine whose blocks are not one run of bytes per layer."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches({name: cache[..., ::2] for name, cache in kv_caches.items()})


class WorkerStaysBehind(HostKVConnector):
    """A worker that does not get through to a sidecar that was restarted, while the scheduler does."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._client._next_try_s = math.inf


class LoadsBeside(HostKVConnector):
    """Loads go on beside the steps, however small they are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._scheduler:
            self._scheduler.load_in_step_bytes = 0


class LosesABlockBeside(LosesABlock, LoadsBeside):
    pass


class HoldsLoads(LoadsBeside):
    """Its loads wait until the test lets them go (engine.py)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.go = threading.Event()
        if self._worker:
            read = self._worker._read

            def when_let_go(mine: Any, load: Any) -> Any:
                self.go.wait()
                return read(mine, load)

            self._worker._read = when_let_go  # type: ignore[method-assign]

    def shutdown(self) -> None:
        self.go.set()
        super().shutdown()


class Stage:
    """What is added to a worker of a pipeline: on CPUs vLLM makes the room for what comes from the stage before in a trial run, which it
    only does where it compiles the model."""

    def make_room_between_stages(self) -> None:
        runner = self.model_runner  # type: ignore[attr-defined]
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
