"""What the engine tests stand on: real vLLM processes (engine.py) and real sidecars, each with a pool and run directory of its own."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostkv.connector import Client

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VENV = ROOT / ".venvs" / "vllm"
MODELS = ROOT / ".cache" / "models"
START_S = 300  # bounds of what may hang, far above what it takes
ANSWER_S = 300
ENVIRONMENT = {  # what lets a vLLM engine run well on two cores, alone in its process
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
    "KMP_BLOCKTIME": "0",
}


class Sidecar:
    """One pool; `start`, `kill` and `stop` are its sidecar's. `disk`: with a tier of 2 GiB beside it."""

    def __init__(self, directory: Path, disk: bool = False) -> None:
        self.endpoint = f"ipc://{directory}/control.sock"
        self._log = directory / "sidecar.log"
        self._pool = f"hostkv-test-{secrets.token_hex(4)}"
        self._config = directory / "hostkv.yaml"
        self._config.write_text(f"tiers: [{{type: disk, path: {directory}/disk, size: 2GiB}}]\n" if disk else "")
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> Sidecar:
        serve = [sys.executable, "-m", "hostkv.sidecar.cli", "serve", "--config", str(self._config), "--endpoint", self.endpoint]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [*serve, "--pool-name", self._pool, "--pool-size", "512MiB"], stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdout is not None
        assert "ready" in self._process.stdout.readline(), self._log.read_text()
        return self

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self.send(number)
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        if self._process is None:
            self.start()  # only a sidecar removes a pool
        self._end(signal.SIGTERM)

    def status(self) -> dict[str, Any]:
        with Client(self.endpoint) as client:
            return client.status()


class EngineError(Exception):
    """The engine raised, or did not start."""


class Engine:
    """One engine process."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(path))
        self._socket.settimeout(ANSWER_S)
        self._lines = self._socket.makefile("r")
        try:
            self.do(**config)
        except EngineError:
            self.close()
            raise

    def do(self, **operation: Any) -> dict[str, Any]:
        self._socket.sendall(json.dumps(operation).encode() + b"\n")
        answer: dict[str, Any] = json.loads(self._lines.readline() or '{"error": "the engine process is gone"}')
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
        self._socket.shutdown(socket.SHUT_WR)
        self._lines.read()
        self._lines.close()
        self._socket.close()


class Engines:
    """Starts engines and ends those that a test left."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._running: list[Engine] = []

    def start(self, sidecar: Sidecar | None = None, **config: Any) -> Engine:
        """An engine with the connector at `sidecar` (or at "extra"'s endpoint), or without any."""
        extra = {**({"endpoint": sidecar.endpoint} if sidecar else {}), **config.pop("extra", {})}
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
    environment = {**os.environ, **ENVIRONMENT}
    openmp = VENV / "lib" / "libiomp5.so"
    if openmp.exists():
        environment["LD_PRELOAD"] = str(openmp)
    shared_memory = Path("/dev/shm")
    before = set(shared_memory.iterdir())
    with tempfile.TemporaryDirectory(prefix="hostkv-") as short, engine_log.open("w") as log:
        path = Path(short) / "engines.sock"
        print(f"\nimporting vLLM (half a minute); what the engines print is in {log.name}", flush=True)
        reader, writer = os.pipe()
        command = [str(python), str(HERE / "engine.py"), str(path), str(writer)]
        server = subprocess.Popen(command, env=environment, cwd=HERE, stdout=log, stderr=subprocess.STDOUT, pass_fds=[writer])
        try:
            os.close(writer)
            with open(reader, "rb") as ready:
                assert ready.read(1), f"vLLM does not import: {Path(log.name).read_text()[-2000:]}"
            yield path
        finally:
            server.terminate()
            server.wait()
            for left in set(shared_memory.glob("__KMP_REGISTERED_LIB_*")) - before:  # vLLM kills its workers, so OpenMP does not tidy up
                if not Path("/proc", left.name.split("_")[5]).exists():
                    left.unlink()


@pytest.fixture
def engines(engine_server: Path) -> Iterator[Engines]:
    running = Engines(engine_server)
    yield running
    running.close_all()


@pytest.fixture
def sidecar() -> Iterator[Sidecar]:
    with ExitStack() as stack:
        sidecar = Sidecar(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hostkv-"))))
        stack.callback(sidecar.stop)
        yield sidecar.start()


@pytest.fixture
def sidecar_with_disk() -> Iterator[Sidecar]:
    with ExitStack() as stack:
        sidecar = Sidecar(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hostkv-"))), disk=True)
        stack.callback(sidecar.stop)
        yield sidecar.start()


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
