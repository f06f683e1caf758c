"""Real vLLM engines for the tests, each in a child (forks.py) of this program: engine.py SOCKET READY.

A connection's first line configures the engine and is answered when it is ready; each further one is an operation, answered by one line:

    {"add": [{"id", "tokens" or "prompt", "max_tokens", "salt", "adapter", "params"}]}   ids are the test's own, params kv_transfer_params
    {"step": n}        runs n steps of the engine, or with 0 all that are left -> {"answers", "unfinished"}
    {"abort": [ids]}
    {"reset": true}    reset_prefix_cache(reset_connector=True)
    {"forget": true}   empties the engine's own prefix cache, not the sidecar's
    {"metrics": true}  -> {"metrics"}: the counters that vLLM shows Prometheus, by name, or by name and source of a hit
    {"events": true}   -> {"events"}: the KV events published since the start, where "events" in the configuration enables them
    {"let": true}      lets go what variants.HoldsLoads holds

Every answer carries "stats": the counters of the connector's two roles, and the blocks it reported as not loaded; and "serves": whether
both roles have found the sidecar that serves now. An error in the engine is answered with "error". A closed connection ends the engine
the ordinary way.
"""

from __future__ import annotations

import json
import os
import socket
import traceback
from dataclasses import asdict
from typing import Any

import msgspec
import pytest
import vllm.entrypoints.launchers.cli_args
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker  # noqa: F401  what an engine imports late, imported before the fork
from forks import fork_for_each_connection
from patience import be_patient
from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig, LoggingConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.logger import configure_logging_if_needed
from vllm.lora.request import LoRARequest


class Engine:
    def __init__(self, config: dict[str, Any]) -> None:
        if config["patient"]:
            be_patient(pytest.MonkeyPatch())
        transfer = None
        if config["connector"]:
            transfer = KVTransferConfig(
                kv_connector=config["connector"],
                kv_connector_module_path=config["module"],
                kv_role="kv_both",
                kv_connector_extra_config=config["extra"],
                kv_load_failure_policy=config["policy"],
            )
        self._llm = LLM(
            model=config["model"],
            dtype=config["dtype"],
            block_size=config["block_size"],
            max_model_len=config["max_model_len"],
            kv_cache_memory_bytes=config["kv_bytes"],
            max_num_seqs=4,
            max_num_batched_tokens=config["step_tokens"],
            tensor_parallel_size=config["tensor_parallel"],
            pipeline_parallel_size=config["pipeline_parallel"],
            worker_extension_cls="variants.Stage" if config["pipeline_parallel"] > 1 else "",
            enable_lora=config["lora"],
            max_lora_rank=8,
            enforce_eager=True,
            load_format=config["load_format"],
            speculative_config=config["speculative"],
            seed=0,
            disable_log_stats=False,
            kv_transfer_config=transfer,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if config["events"] else None,
        )
        if config["pipeline_parallel"] > 1:
            self._llm.collective_rpc("make_room_between_stages")
        self._engine = self._llm.llm_engine
        self._ids: dict[str, str] = {}  # the engine's -> the test's
        self._roles: dict[str, Any] = {}
        self._events: list[Any] = []
        if transfer is not None:
            scheduler = self._engine.engine_core.engine_core.scheduler
            scheduler.kv_event_publisher.publish = lambda batch: self._events.extend(map(msgspec.to_builtins, batch.events))
            self._roles = {"scheduler": scheduler.connector}
            if config["tensor_parallel"] * config["pipeline_parallel"] == 1:  # else the workers are in processes of their own
                self._roles["worker"] = get_kv_transfer_group()

    def do(self, operation: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        if "add" in operation:
            for request in operation["add"]:
                self._add(request)
        elif "step" in operation:
            answer = self._step(operation["step"])
        elif "abort" in operation:
            self._engine.abort_request([mine for mine, theirs in self._ids.items() if theirs in operation["abort"]], internal=True)
        elif "reset" in operation:
            answer["reset"] = self._llm.reset_prefix_cache(reset_connector=True)
        elif "forget" in operation:
            answer["forget"] = self._llm.reset_prefix_cache()
        elif "metrics" in operation:
            samples = [sample for metric in REGISTRY.collect() for sample in metric.samples if sample.name.endswith("_total")]
            answer["metrics"] = {f"{sample.name} {sample.labels.get('source', '')}".rstrip(): sample.value for sample in samples}
        elif "events" in operation:
            answer["events"] = self._events
        elif "let" in operation:
            self._roles["worker"].go.set()
        else:
            raise ValueError(f"unknown operation {operation}")
        answer["stats"] = {name: asdict(role.stats) for name, role in self._roles.items() if hasattr(role, "stats")}
        answer["reported"] = getattr(self._roles.get("worker"), "reported", [])
        links = [role._client.mapped() for role in self._roles.values() if hasattr(role, "_client")]
        answer["serves"] = all(link is not None and link.serves() for link in links)
        return answer

    def _add(self, request: dict[str, Any]) -> None:
        if "tokens" in request:
            prompt: dict[str, Any] = {"prompt_token_ids": request["tokens"]}
        else:
            text = self._llm.get_tokenizer().apply_chat_template(
                [{"role": "user", "content": request["prompt"]}], tokenize=False, add_generation_prompt=True
            )
            prompt = {"prompt": text}
        if request.get("salt"):
            prompt["cache_salt"] = request["salt"]
        extra = {"kv_transfer_params": request["params"]} if "params" in request else None
        params = SamplingParams(
            temperature=0, max_tokens=request["max_tokens"], ignore_eos=request.get("ignore_eos", True), extra_args=extra
        )
        adapter = LoRARequest("adapter", 1, request["adapter"]) if "adapter" in request else None
        self._ids[self._engine.add_request(request["id"], prompt, params, lora_request=adapter)] = request["id"]

    def _step(self, count: int) -> dict[str, Any]:
        answers = {}
        steps = 0
        while self._engine.has_unfinished_requests() and (not count or steps < count):
            steps += 1
            for output in self._engine.step():
                if output.finished:
                    completion = output.outputs[0]
                    answers[self._ids.get(output.request_id, output.request_id)] = {
                        "tokens": list(completion.token_ids),
                        "text": completion.text,
                        "finish": completion.finish_reason,
                        "prompt": list(output.prompt_token_ids),
                        "cached": output.num_cached_tokens,
                        "params": output.kv_transfer_params,
                        "ttft_s": output.metrics.first_token_latency,
                    }
        return {"answers": answers, "unfinished": self._engine.has_unfinished_requests()}

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def serve(connection: socket.socket) -> None:
    """One engine, in the child."""
    lines = connection.makefile("r")
    engine = None
    for line in lines:
        try:
            if engine is None:
                engine = Engine(json.loads(line))
                answer: dict[str, Any] = {"ready": os.getpid()}
            else:
                answer = engine.do(json.loads(line))
        except Exception as error:  # noqa: BLE001  the test judges it
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        connection.sendall(json.dumps(answer).encode() + b"\n")
    if engine is not None:
        engine.close()


if __name__ == "__main__":
    configure_logging_if_needed(LoggingConfig())  # a second of work for each engine
    fork_for_each_connection(serve)
