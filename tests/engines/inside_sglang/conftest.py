"""Runs in SGLang's environment, which has pytest and nothing else of our test tools: `make test-engines`."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rig import Rank

    from tests.support import Sidecar

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for tests.support
os.environ.setdefault("HF_HUB_OFFLINE", "1")
collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["test_*.py"]
warnings.filterwarnings("ignore")  # SGLang's, about devices that are not here


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that undoes all has the client's own limits."""
    from hostkv.connector import sglang

    from tests.engines.patience import be_patient

    be_patient(monkeypatch, sglang)


@pytest.fixture(scope="session")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """For the tests that do nothing to it."""
    from tests.support import Sidecar

    with Sidecar(tmp_path_factory.mktemp("sidecar")) as sidecar:
        yield sidecar


@pytest.fixture
def own_sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    from tests.support import Sidecar

    with Sidecar(tmp_path) as sidecar:
        yield sidecar


@pytest.fixture(autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> None:
    """This process is the scheduler of an engine, of which no other test has the like."""
    import rig

    rig.weight_version = request.node.nodeid
    rig.serve(tmp_path_factory.getbasetemp() / "model")


@pytest.fixture
def rank() -> Iterator[Callable[..., Rank]]:
    """Makes ranks; those that a test leaves are closed."""
    from rig import Rank

    with ExitStack() as ranks:

        def make(sidecar: Sidecar | str, **more: Any) -> Rank:
            one = Rank(sidecar if isinstance(sidecar, str) else sidecar.endpoint, **more)
            ranks.callback(one.close)
            return one

        yield make
