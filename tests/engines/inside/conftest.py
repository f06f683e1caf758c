"""Runs in vLLM's environment, which has pytest and nothing else of our test tools: `make test-engines`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rig import Engine

    from tests.support import Sidecar

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for tests.support
for name, value in {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}.items():
    os.environ.setdefault(name, value)  # before vLLM is imported


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that undoes all has the client's own limits."""
    from tests.engines.patience import be_patient

    be_patient(monkeypatch)


@pytest.fixture
def sidecar_of(tmp_path: Path) -> Iterator[Callable[[str], Sidecar]]:
    """Starts one with a pool of this size."""
    from tests.support import Sidecar

    with ExitStack() as sidecars:
        yield lambda size: sidecars.enter_context(Sidecar(tmp_path, pool_size=size))


@pytest.fixture
def sidecar(sidecar_of: Callable[[str], Sidecar]) -> Sidecar:
    return sidecar_of("64MiB")


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    """Starts engines; those that a test leaves are closed."""
    from rig import Engine

    folder = tmp_path_factory.getbasetemp() / "models"
    with ExitStack() as engines:

        def start(sidecar: Sidecar | None, **more: Any) -> Engine:
            engine = Engine(folder, sidecar.endpoint if sidecar else None, **more)
            engines.callback(engine.close)
            return engine

        yield start
