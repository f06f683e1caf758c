"""HostKV's client waits for its sidecar for a second at most, and what comes later is a miss. Tests that demand hits give it longer, since
a machine may have no time for the sidecar."""

from __future__ import annotations

from types import ModuleType

import pytest
from hostkv.connector import client


def be_patient(patch: pytest.MonkeyPatch, sglang: ModuleType | None = None, wait_s: float = 30.0) -> None:
    """In this process and those that it forks. `sglang`: hostkv.connector.sglang."""
    assert client.Client.__init__.__kwdefaults__
    patch.setattr(client, "STALE_NS", int(wait_s * 0.9e9))  # one that hangs is known to when the first request has waited in vain
    patch.setattr(client, "RECONNECT_WAIT_S", wait_s)
    patch.setitem(client.Client.__init__.__kwdefaults__, "timeout_s", wait_s)
    if sglang is not None:
        patch.setattr(sglang, "TIMEOUT_S", wait_s)
        patch.setattr(sglang, "TIER_WAIT_S", wait_s)
