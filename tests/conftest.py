"""Makes `tests.support` importable however pytest is started, and sets how long Hypothesis tries: `--hypothesis-profile=soak` for long."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell starts us in the background, and so by all we start

tried = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", max_examples=60, derandomize=True, **tried)  # the same in every run; `soak` looks for others
settings.register_profile("soak", max_examples=5000, **tried)
settings.load_profile("default")


@pytest.fixture
def patient_clients() -> Iterator[None]:
    from tests.support import PATIENT_CLIENTS, waiting_as

    with waiting_as(PATIENT_CLIENTS):
        yield
