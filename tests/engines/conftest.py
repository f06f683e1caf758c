"""What the engine tests stand on: real vLLM processes (engine.py) and real sidecars, each with a pool and run directory of its own."""

from __future__ import annotations

import json
import random
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.forks import HERE, Child, started
from tests.support import Sidecar, disk_tier

ROOT = HERE.parents[1]
VENV = ROOT / ".venvs" / "vllm"
OPENMP = VENV / "lib" / "libiomp5.so"
MODELS = ROOT / ".cache" / "models"
ENVIRONMENT = {  # what lets a vLLM engine run well on two cores, alone in its process
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
    "KMP_BLOCKTIME": "0",
    **({"LD_PRELOAD": str(OPENMP)} if OPENMP.exists() else {}),
}


@contextmanager
def new_sidecar(disk: bool = False) -> Iterator[Sidecar]:
    """`disk`: with a tier beside its pool."""
    with tempfile.TemporaryDirectory(prefix="hostkv-") as directory:
        config = disk_tier(Path(directory, "disk"), size="2GiB") if disk else None
        with Sidecar(Path(directory), pool_size="256MiB", config=config) as sidecar:
            yield sidecar


def only_disk(sidecar: Sidecar) -> None:
    """Leaves what it has on its disk alone: its pool is a new one then."""
    sidecar.until_tier_serves()
    sidecar.until_clean()
    sidecar.stop()
    sidecar.start()
    sidecar.until_tier_serves()
    assert sidecar.status()["blocks"]["ready"] == 0


def no_pins(sidecar: Sidecar) -> None:
    """They are given back beside the engine, so soon, and not at once."""
    sidecar.until(lambda: sidecar.status()["pins"] == 0)


class EngineError(Exception):
    """The engine raised, or did not start."""


class Engine:
    """One engine process."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self._child = Child(path)
        try:
            self.do(**config)
        except EngineError:
            self.close()
            raise

    def do(self, **operation: Any) -> dict[str, Any]:
        answer = self._child.ask(operation)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer

    def ask(self, max_tokens: int = 8, **prompt: Any) -> dict[str, Any]:
        """One request alone: its answer, with "stats" and "reported" of the engine."""
        self.do(add=[{"id": "one", "max_tokens": max_tokens, **prompt}])
        done = self.do(step=0)
        return {**done["answers"]["one"], "stats": done["stats"], "reported": done.get("reported")}

    def close(self) -> None:
        """Ends the process and waits until it is gone."""
        self._child.end()


class Engines:
    """Starts engines and ends those that a test left."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._running: list[Engine] = []

    def start(self, sidecar: Sidecar | None = None, **config: Any) -> Engine:
        """An engine with the connector at `sidecar` (or at "extra"'s endpoint), or without any. "patient": see patience.py."""
        extra = {**({"endpoint": sidecar.endpoint, "tier_wait_s": 60.0} if sidecar else {}), **config.pop("extra", {})}
        defaults = {
            "model": str(MODELS / "tiny-a"),
            "dtype": "float32",
            "block_size": 32,
            "max_model_len": 4096,
            "kv_bytes": 256 << 20,
            "step_tokens": 4096,
            "connector": "HostKVConnector" if extra else "",
            "module": "hostkv.connector.vllm",
            "policy": "fail",  # vLLM's default: one promised block that does not come ends its request
            "tensor_parallel": 1,
            "pipeline_parallel": 1,
            "lora": False,
            "load_format": "auto",
            "speculative": None,
            "events": False,
            "patient": True,
        }
        engine = Engine(self._path, {**defaults, "extra": extra, **config})
        self._running.append(engine)
        return engine

    def close(self, engine: Engine) -> None:
        self._running.remove(engine)
        engine.close()

    def close_all(self) -> None:
        while self._running:
            self.close(self._running[-1])


@pytest.fixture(scope="session")
def engine_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all engines print."""
    return tmp_path_factory.mktemp("engines") / "engines.log"


@pytest.fixture(scope="session")
def engine_server(engine_log: Path) -> Iterator[Path]:
    """The process that has imported vLLM and forks engines."""
    python = VENV / "bin" / "python"
    for needed in (python, *(MODELS / name for name in ("smollm2-135m", "tiny-a", "tiny-b", "tiny-window", "tiny-delta"))):
        assert needed.exists(), f"{needed} is missing; run: make engine"
    print(f"\nimporting vLLM (half a minute); what the engines print is in {engine_log}", flush=True)
    with started([python, HERE / "engine.py"], engine_log, ENVIRONMENT) as path:
        yield path


@pytest.fixture
def engines(engine_server: Path) -> Iterator[Engines]:
    running = Engines(engine_server)
    yield running
    running.close_all()


@pytest.fixture
def sidecar() -> Iterator[Sidecar]:
    with new_sidecar() as sidecar:
        yield sidecar


@pytest.fixture
def sidecar_with_disk() -> Iterator[Sidecar]:
    with new_sidecar(disk=True) as sidecar:
        yield sidecar


@pytest.fixture(scope="session")
def plain(engine_server: Path) -> Iterator[Engine]:
    """An engine without HostKV: what the tokens of tiny-a have to be. Ask through `expect`."""
    engines = Engines(engine_server)
    yield engines.start()
    engines.close_all()


def tokens(count: int, seed: int = 7) -> list[int]:
    """A prompt for the tiny models."""
    draw = random.Random(seed)
    return [draw.randrange(4, 2048) for _ in range(count)]


def expect(plain: Engine, prompt: list[int], max_tokens: int = 8) -> list[int]:
    """The output of an engine that computes all of it."""
    plain.do(forget=True)
    answer = plain.ask(tokens=prompt, max_tokens=max_tokens)
    assert answer["cached"] == 0
    output: list[int] = answer["tokens"]
    return output


def write_adapter(folder: Path, seed: int) -> None:
    """A LoRA adapter of tiny-a's query and value projections, with random weights (Hugging Face's peft format)."""
    draw = np.random.default_rng(seed)
    header, data = {}, b""
    for layer in range(4):
        for projection, rows in (("q_proj", 256), ("v_proj", 128)):
            for name, shape in (("lora_A", (8, 256)), ("lora_B", (rows, 8))):
                values = draw.normal(0, 0.2, shape).astype(np.float32).tobytes()
                header[f"base_model.model.model.layers.{layer}.self_attn.{projection}.{name}.weight"] = {
                    "dtype": "F32",
                    "shape": shape,
                    "data_offsets": [len(data), len(data) + len(values)],
                }
                data += values
    described = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(described)) + described + data)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "tiny-a"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
