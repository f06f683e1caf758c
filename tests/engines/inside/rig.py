"""vLLM's engine core, with our connector in both roles and a real sidecar behind it, around a model that checks every byte (model.py).

What is vLLM's own: EngineCore with its Scheduler, KV cache manager, block pool and hashing, the grouping and allocation of KV memory, the
order of the connector's hooks in a step (KVConnectorModelRunnerMixin) and the gathering of what several ranks report
(KVOutputAggregator). What is ours stands in for the executor: all ranks live in this process, and run layer by layer side by side, as
ranks do that exchange sums. With several of them what goes to and comes from a rank is pickled, as between processes.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import vllm.distributed.kv_transfer.kv_transfer_state as kv_transfer_state
import vllm.distributed.parallel_state as parallel_state
import vllm.v1.engine.core as engine_core
from hostkv.connector.store import Store
from hostkv.connector.vllm import HostKVConnector
from model import POISON, VOCABULARY, Batch, Layer, Rank, Text, Wrong, number
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache, copy_kv_cache_blocks_inplace

from tests.engines.llama import make_model

BLOCK = 16  # tokens
PATIENCE_S = 180.0  # far over what anything takes


def prompt(tokens: int, *which: object) -> list[int]:
    """A prompt of so many tokens; another one for other `which`, of which a longer one starts like a shorter one."""
    draw = random.Random(repr(which))
    return [draw.randrange(VOCABULARY) for _ in range(tokens)]


class WrongBytes(AssertionError):
    """A request used KV that is not what it should be, and nobody had said so."""


def full_attention(layers: int = 2, block_tokens: int = BLOCK, heads: int = 2, head_size: int = 16) -> dict[str, KVCacheSpec]:
    """The KV of a plain model on one rank: 4 KiB a block and layer."""
    return {
        f"model.layers.{i}.attn": FullAttentionSpec(block_size=block_tokens, num_kv_heads=heads, head_size=head_size, dtype=torch.float32)
        for i in range(layers)
    }


@contextmanager
def _as_rank(rank: int, connector: Any) -> Iterator[None]:
    """What a worker process of this rank finds in its globals."""
    before = parallel_state._TP, kv_transfer_state._KV_CONNECTOR_AGENT
    parallel_state._TP = SimpleNamespace(rank_in_group=rank)  # type: ignore[assignment]
    kv_transfer_state._KV_CONNECTOR_AGENT = connector
    try:
        yield
    finally:
        parallel_state._TP, kv_transfer_state._KV_CONNECTOR_AGENT = before


class _AttentionLayer:
    """What the connector asks a layer of the model. `isa`: how the CPU's kernel orders the keys in a block."""

    def __init__(self, backend: str) -> None:
        self.isa = "vec"
        self._backend = backend

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: self._backend)


class RigExecutor(Executor):
    """Runs the ranks in lockstep. `specs`, `layout`: see Engine."""

    specs: dict[str, KVCacheSpec]
    layout: str

    def _init_executor(self) -> None:
        self.ranks = self.parallel_config.world_size
        self.texts: dict[str, Text] = {}
        self.batch = Batch(self.texts)
        self.models: list[Rank] = []
        self.connectors: list[Any] = []
        self.before_step: Callable[[SchedulerOutput], None] = lambda output: None
        self.during_step: Callable[[SchedulerOutput], None] = lambda output: None
        self.outputs: list[KVConnectorOutput] = []  # of the last step, by rank
        self.preemptions = 0
        self.tolerated: set[str] = set()  # requests that may stand on wrong bytes, because vLLM has them do so
        self._draw = random.Random(0)
        self._drafts: dict[str, list[int]] = {}  # by request: what may come next
        self._proposed: list[str] = []  # in the last step
        self._executed: list[ModelRunnerOutput | None] = []

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, non_block: bool = False) -> list[Any]:
        raise NotImplementedError(method)

    def check_health(self) -> None:
        pass

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return [self.specs] * self.ranks

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [[self.layout]] * self.ranks

    def set_kv_cache_layout(self, layout_name: str) -> None:
        self.cache_config.kv_cache_layout = layout_name

    def determine_available_memory(self) -> list[int]:
        return [1 << 40] * self.ranks

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        for rank, config in enumerate(kv_cache_configs):
            caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[self.layout])
            self.models.append(Rank(rank, config, caches))
            if self.vllm_config.kv_transfer_config is not None:
                with _as_rank(rank, None):
                    connector = KVConnectorFactory.create_connector(self.vllm_config, KVConnectorRole.WORKER, config)
                    connector.register_kv_caches(caches)
                self.connectors.append(connector)
        self._blocks = kv_cache_configs[0].num_blocks

    def compile_or_warm_up_model(self) -> None:
        pass

    def get_kv_connector_handshake_metadata(self) -> list[Any]:
        told = [{(0, rank): connector.get_handshake_metadata()} for rank, connector in enumerate(self.connectors)]
        return [] if any(None in by_rank.values() for by_rank in told) else told

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """As vLLM's model runner: of a step with tokens the result is asked for by sample_tokens."""
        result = self._execute(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            self._executed.append(result)
            result = None
        return _future(result) if non_block else result

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        result = self._executed.pop(0)
        return _future(result) if non_block else result

    def take_draft_token_ids(self) -> DraftTokenIds:
        return DraftTokenIds(self._proposed, [self._drafts[request_id] for request_id in self._proposed])

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.before_step(output)
        self.preemptions += len(output.preempted_req_ids or ())
        self.batch.update(output)
        drafted = output.scheduled_spec_decode_tokens  # or how many are, where a new request fills its step up to as many
        drafts = {name: self._drafts.get(name, [0] * len(places))[: len(places)] for name, places in drafted.items()}
        for request_id, tokens in drafts.items():
            self.batch.requests[request_id].text.append(tokens)
        self._prepare_blocks(output)
        sent = [pickle.loads(pickle.dumps(output)) if self.ranks > 1 else output for _ in range(self.ranks)]
        wrong: list[Wrong] = []
        flawed_blocks: set[int] = set()
        told: list[KVConnectorOutput] = []
        with set_forward_context(None, self.vllm_config), ExitStack() as steps:
            for rank, connector in enumerate(self.connectors):
                with _as_rank(rank, connector):
                    connector.handle_preemptions(sent[rank].kv_connector_metadata)
                    step = KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(sent[rank])
                    told.append(steps.enter_context(step))  # type: ignore[arg-type]
            self.during_step(output)
            if output.total_num_scheduled_tokens:
                wrong, flawed_blocks = self._forward(output)
        self.outputs = told
        reported = set().union(*(one.invalid_block_ids for one in told))
        for one in wrong:
            if one.block_id not in reported | flawed_blocks and one.request_id not in self.tolerated:
                raise WrongBytes(str(one))
        sampled = self._sample(output, drafts, {one.request_id for one in wrong})
        self._propose(sampled)
        results = [_result(sampled, told[rank] if told else None) for rank in range(self.ranks)]
        if self.connectors and self.ranks > 1:
            results = [pickle.loads(pickle.dumps(result)) for result in results]
            assert self.kv_output_aggregator is not None
            aggregated = self.kv_output_aggregator.aggregate(results)  # type: ignore[arg-type]
            assert aggregated is not None
            return aggregated
        return results[0]

    def _prepare_blocks(self, output: SchedulerOutput) -> None:
        """What a model runner does to blocks before a step."""
        for model in self.models:
            if output.new_block_ids_to_zero:
                model.zero(output.new_block_ids_to_zero)
            if output.kv_cache_block_copies:
                copy_kv_cache_blocks_inplace(model.caches, self._blocks, output.kv_cache_block_copies)
            for layer in model.layers:
                pairs = []
                for request_id, tokens in output.num_scheduled_tokens.items():
                    request = self.batch.requests[request_id]
                    pairs.append(layer.carry(request.block_ids[layer.group], request.computed, request.computed + tokens))
                layer.copy([pair for pair in pairs if pair is not None])

    def _forward(self, output: SchedulerOutput) -> tuple[list[Wrong], set[int]]:
        """What was read wrong, and the blocks written by those who had."""
        wrong: dict[str, Wrong] = {}
        flawed_blocks: set[int] = set()
        flaws = {request_id: np.uint64(self._draw.getrandbits(64) | 1) for request_id in output.num_scheduled_tokens}
        for layers in zip(*(model.layers for model in self.models), strict=True):
            name = layers[0].name
            for connector in self.connectors:
                connector.wait_for_layer_load(name)
            found: list[Wrong] = []
            for layer in layers:
                if layer.is_state:  # which is read and then replaced
                    self._read(layer, output, wrong, found)
                for request_id, tokens in output.num_scheduled_tokens.items():
                    request = self.batch.requests[request_id]
                    start, end = request.computed, request.computed + tokens
                    is_wrong = request_id in wrong or any(one.request_id == request_id for one in found)
                    flaw = flaws[request_id] if is_wrong else np.uint64(0)
                    written = layer.write(request.text, request.block_ids[layer.group], start, end, flaw)
                    if flaw:
                        flawed_blocks |= written
                if not layer.is_state:
                    self._read(layer, output, wrong, found)
            for one in found:  # after all ranks have read: each of them has its share in the sum
                wrong.setdefault(one.request_id, one)
            for connector, layer in zip(self.connectors, layers, strict=False):
                connector.save_kv_layer(name, layer.cache, None)
        return list(wrong.values()), flawed_blocks

    def _read(self, layer: Layer, output: SchedulerOutput, wrong: dict[str, Wrong], found: list[Wrong]) -> None:
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self.batch.requests[request_id]
            start, end = request.computed, request.computed + tokens
            if request_id not in wrong and (one := layer.read(request_id, request.text, request.block_ids[layer.group], start, end)):
                found.append(one)

    def _sample(self, output: SchedulerOutput, drafts: dict[str, list[int]], wrong: set[str]) -> dict[str, list[int]]:
        """The token that comes next, and what comes after the drafts that were right."""
        sampled: dict[str, list[int]] = {}
        for request_id, tokens in output.num_scheduled_tokens.items():
            request, drafted = self.batch.requests[request_id], drafts.get(request_id, [])
            text, found = request.text, []
            if request.computed + tokens == len(text.tokens):  # else there is more of the prompt to come
                text.cut(len(text.tokens) - len(drafted))
                for draft in [*drafted, None]:
                    found.append(POISON if request_id in wrong else text.next_token())
                    text.append(found[-1:])
                    if draft != found[-1]:
                        break
            sampled[request_id] = found
        return sampled

    def _propose(self, sampled: Iterable[str]) -> None:
        """Each token is wrong now and then, and what follows a wrong one is of no use."""
        speculative = self.vllm_config.speculative_config
        self._proposed = list(sampled) if speculative else []
        for request_id in self._proposed:
            text = self.batch.requests[request_id].text.copy()
            for _ in range(speculative.num_speculative_tokens):  # type: ignore[union-attr]
                text.append([text.next_token() if self._draw.random() < 0.8 else self._draw.randrange(VOCABULARY)])
            self._drafts[request_id] = text.tokens[-speculative.num_speculative_tokens :]  # type: ignore[union-attr]

    def shutdown(self) -> None:
        for connector in self.connectors:
            connector.shutdown()


def _future(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def _result(sampled: dict[str, list[int]], told: KVConnectorOutput | None) -> ModelRunnerOutput:
    if not sampled:
        return ModelRunnerOutput.with_kv_conn_output_only(told)
    index = {request_id: i for i, request_id in enumerate(sampled)}
    return ModelRunnerOutput(
        req_ids=list(sampled), req_id_to_index=index, sampled_token_ids=list(sampled.values()), kv_connector_output=told
    )


@dataclass
class Answer:
    """What came of a request. `finish`: "length", "error" or "abort", None while it runs; `cached`: tokens that it did not compute when it
    was admitted first, of them `external` from the connector."""

    prompt: list[int]
    max_tokens: int
    text: Text
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    cached: int = 0
    external: int = 0
    params: dict[str, Any] | None = None


class Engine:
    """One engine: `blocks` blocks of KV memory of the layers `specs` on each of `ranks` ranks. `connector`: the name of a class and where
    it is, None for an engine without. `ahead`: a step is planned before it is known what came of the one before. `drafts`: so many tokens
    are guessed and verified in a step. `replica`: which one of two data-parallel ones. A request's answer is compared with what the model
    says of its prompt."""

    def __init__(
        self,
        folder: Path,
        endpoint: str | None,
        *,
        specs: dict[str, KVCacheSpec] | None = None,
        blocks: int = 128,
        ranks: int = 1,
        policy: str = "recompute",
        connector: tuple[str, str | None] | None = ("HostKVConnector", "hostkv.connector.vllm"),
        extra: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        layout: str = "LBHNC",
        backends: dict[str, str] | None = None,
        load_in_step_bytes: int | None = None,
        ahead: bool = False,
        drafts: int = 0,
        replica: int | None = None,
        **arguments: Any,
    ) -> None:
        self.answers: dict[str, Answer] = {}
        specs = full_attention() if specs is None else specs
        executor = type("Executor", (RigExecutor,), {"specs": specs, "layout": layout})
        if drafts:
            arguments["speculative_config"] = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
        model = {"dtype": "float32", "num_hidden_layers": 2, **(model or {})}
        self.config = _config(folder, model, ranks, executor, blocks, specs, arguments)
        self.config.scheduler_config.async_scheduling = ahead  # after the CPU's platform has said no
        for name in specs:
            self.config.compilation_config.static_forward_context[name] = _AttentionLayer((backends or {}).get(name, "CPU_ATTN"))
        if connector is not None:
            self.config.kv_transfer_config = KVTransferConfig(
                kv_connector=connector[0],
                kv_connector_module_path=connector[1],
                kv_role="kv_both",
                kv_load_failure_policy=policy,
                kv_connector_extra_config={**({"endpoint": endpoint} if endpoint else {}), **(extra or {})},
            )
        if replica is not None:  # what vLLM changes in the process of each
            parallel = self.config.parallel_config
            parallel.data_parallel_size, parallel.data_parallel_rank = 2, replica
            parallel.data_parallel_rank_local = parallel.data_parallel_index = replica
            self.config.kv_transfer_config.engine_id += f"_dp{replica}"
        self.core = engine_core.EngineCore(self.config, executor, log_stats=True)
        assert (self.core.batch_queue is not None) == ahead
        self.scheduler: Any = self.core.scheduler
        self.executor: RigExecutor = self.core.model_executor  # type: ignore[assignment]
        self.connector: Any = self.scheduler.connector
        self.ours = [role for one in (self.connector, *self.executor.connectors) for role in _roles(one)]
        if load_in_step_bytes is not None:
            self.ours[0].load_in_step_bytes = load_in_step_bytes

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 1,
        *,
        name: str | None = None,
        salt: str | None = None,
        means: object = None,
        instead: dict[int, object] | None = None,
        params: dict[str, Any] | None = None,
        **more: Any,
    ) -> str:
        """A request; its name. `means` and `instead`: see Text; `more`: arguments of vLLM's Request."""
        name = name or f"request-{len(self.answers)}"
        request = Request(
            request_id=name,
            prompt_token_ids=more.pop("prompt_token_ids", list(prompt)),
            sampling_params=SamplingParams(
                temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params} if params else None
            ),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=self.core.request_block_hasher,
            **more,
        )
        text = Text(prompt, (salt, means), instead)
        self.executor.texts[name] = text
        self.answers[name] = Answer(list(prompt), max_tokens, text)
        self.core.add_request(request)
        return name

    def step(self) -> None:
        """One step of the engine's loop."""
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        for output in (one for of_client in (outputs or {}).values() for one in of_client.outputs):
            answer = self.answers[output.request_id]
            answer.tokens += output.new_token_ids
            if output.prefill_stats is not None:
                answer.cached = output.prefill_stats.num_cached_tokens
                answer.external = output.prefill_stats.num_external_cached_tokens
            if output.finished:
                answer.finish = str(output.finish_reason)
                answer.params = output.kv_transfer_params
                self._check(output.request_id, answer)
        if not executed and self.has_work():
            time.sleep(0.001)  # as EngineCoreProc does

    def _check(self, name: str, answer: Answer) -> None:
        text = answer.text.copy()
        for token in answer.tokens if name not in self.executor.tolerated else ():
            assert token == text.next_token(), f"{name} was answered by a step that read wrong bytes"
            text.append([token])
        if answer.finish == "length":
            assert len(answer.tokens) == answer.max_tokens

    def run(self) -> None:
        """Steps until nothing is left to do."""
        self.step_until(lambda: not self.has_work())

    def has_work(self) -> bool:
        return bool(self.scheduler.has_requests() or self.core.batch_queue)

    def step_until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, f"it did not happen within {PATIENCE_S} s"
            self.step()

    def await_queries(self) -> None:
        """Steps once, so that all requests are looked up, and waits until the sidecar has answered: the next step admits them together."""
        self.step()
        end = time.monotonic() + PATIENCE_S
        while any(query.handles is None for tracked in self.ours[0]._requests.values() for query in tracked.queries):
            assert time.monotonic() < end, "no answer"
            time.sleep(0.001)

    def ask(self, prompt: Sequence[int], max_tokens: int = 1, **more: Any) -> Answer:
        """One request alone, to its end."""
        name = self.add(prompt, max_tokens, **more)
        self.run()
        return self.answers[name]

    def abort(self, *names: str) -> None:
        for name in names:
            self.answers[name].finish = "abort"
        self.core.abort_requests(list(names))

    def forget(self) -> None:
        """Empties the engine's own prefix cache."""
        assert self.core.reset_prefix_cache()

    def check_idle(self) -> None:
        """Of requests that are over nothing is left, in the engine or in the connector."""
        scheduler = self.scheduler
        assert not scheduler.requests
        assert not scheduler.running
        assert scheduler.get_request_counts() == (0, 0)
        for left in ("deferred_waiting", "finished_recving_kv_req_ids", "failed_recving_kv_req_ids", "_inflight_prefills"):
            assert not getattr(scheduler, left), left
        manager = scheduler.kv_cache_manager
        for single in manager.coordinator.single_type_managers:
            assert not single.req_to_blocks
            assert not single.num_cached_block
        pool = manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "all but the null block"
        assert not [block for block in pool.blocks if block.ref_cnt and not block.is_null]
        if self.executor.ranks > 1:
            assert not self.executor.kv_output_aggregator._recv_remaining_count  # type: ignore[union-attr]
        for role in self.ours:
            for left in ("_requests", "_waiting", "_flying", "_saving", "_loads", "landed", "_failed", "_loaded", "_saves"):
                assert not getattr(role, left, None), f"{type(role).__name__}.{left}"

    def close(self) -> None:
        self.executor.shutdown()
        self.scheduler.shutdown()


def _roles(connector: Any) -> list[Any]:
    """What is ours in a connector: our Scheduler or Worker, or those of vLLM's MultiConnector."""
    if hasattr(connector, "sub_connectors"):
        return [role for child in connector.sub_connectors for role in _roles(child)]
    return [connector._scheduler or connector._worker] if isinstance(connector, HostKVConnector) else []


def _config(
    folder: Path, model: dict[str, Any], ranks: int, executor: type, blocks: int, specs: dict[str, KVCacheSpec], arguments: dict[str, Any]
) -> VllmConfig:
    """An engine's configuration for such a model (llama.py)."""
    defaults = {
        "model": str(make_model(folder / f"model-{number(model):x}", **model)),
        "skip_tokenizer_init": True,
        "tensor_parallel_size": ranks,
        "distributed_executor_backend": executor,
        "block_size": max(spec.block_size for spec in specs.values()),
        "num_gpu_blocks_override": blocks,
        "max_model_len": min(1 << 15, (blocks - 1) * min(spec.block_size for spec in specs.values())),
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 64,
        "enforce_eager": True,
        "seed": 0,
    }
    return EngineArgs(**{**defaults, **arguments}).create_engine_config()


class Trouble:
    """What reads of blocks meet, in this process, while it is `on`: some fail, and leave other bytes where the block should be."""

    def __init__(self) -> None:
        self.fails: Callable[[int], Sequence[int]] = lambda blocks: ()  # which of so many blocks of a read; called in several threads
        self.delay_s: Callable[[], float] = lambda: 0.0
        self.told = True  # False: a failure is not reported, so that we see whether it is noticed

    @contextmanager
    def on(self) -> Iterator[None]:
        whole = Store.read

        def read(store: Store, handles: Any, shard: Any, addresses: Any) -> list[int]:
            time.sleep(self.delay_s())
            failed = set(whole(store, handles, shard, addresses))
            for block in self.fails(len(handles)):
                for address, size in zip(addresses[block].tolist(), store._pieces(addresses.shape[1]), strict=True):
                    ctypes.memset(address, 0xEE, size)
                if self.told:
                    failed.add(block)
            return sorted(failed)

        Store.read = read  # type: ignore[method-assign]
        try:
            yield
        finally:
            Store.read = whole  # type: ignore[method-assign]


engine_core.freeze_gc_heap = lambda: None  # a second of work for each engine
