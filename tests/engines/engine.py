"""Real vLLM engines for the tests: engine.py SOCKET READY.

Importing vLLM takes half a minute, so this process does it once, listens on a Unix socket (and says so with one byte on the descriptor
READY), and forks one child for every connection: a process of its own in which one engine lives and dies. A connection carries JSON
lines. The first one configures the engine and is answered when it is ready; each further one is an operation, answered by one line:

    {"add": [{"id", "tokens" or "prompt", "max_tokens", "salt", "adapter", "params"}]}   ids are the test's own, params kv_transfer_params
    {"step": n}        runs n steps of the engine, or with 0 all that are left -> {"answers", "unfinished"}
    {"abort": [ids]}
    {"reset": true}    reset_prefix_cache(reset_connector=True)
    {"forget": true}   empties the engine's own prefix cache, not the sidecar's
    {"metrics": true}  -> {"metrics"}: the counters that vLLM shows Prometheus, by name, or by name and source of a hit
    {"events": true}   -> {"events"}: the KV events published since the start, where "events" in the configuration enables them

Every answer carries "stats": the counters of the connector's two roles, and the blocks it reported as not loaded. An error in the engine
is answered with "error". A closed connection ends the engine the ordinary way.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from dataclasses import asdict
from typing import Any

import msgspec
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker  # noqa: F401  what an engine imports late, imported before the fork
from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.lora.request import LoRARequest


class Engine:
    def __init__(self, config: dict[str, Any]) -> None:
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
        else:
            raise ValueError(f"unknown operation {operation}")
        answer["stats"] = {name: asdict(role.stats) for name, role in self._roles.items() if hasattr(role, "stats")}
        answer["reported"] = getattr(self._roles.get("worker"), "reported", [])
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


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # OpenMP removes its file from /dev/shm at an ordinary exit
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        with open(int(sys.argv[2]), "wb") as ready:
            ready.write(b"1")
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                serve(connection)
                return
            connection.close()


if __name__ == "__main__":
    main()
