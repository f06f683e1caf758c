"""What users write into an engine's extra configuration."""

from __future__ import annotations

from typing import Any

import pytest
from hostkv.connector.options import check_options

KNOWN = {"endpoint": str, "copy_threads": int, "tier_wait_s": float}


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({}, {}),
        ({"endpoint": "a", "copy_threads": 2, "tier_wait_s": 0.5}, {"endpoint": "a", "copy_threads": 2, "tier_wait_s": 0.5}),
        ({"tier_wait_s": 3, "backend": object()}, {"tier_wait_s": 3}),
    ],
)
def test_what_is_ours_is_taken(given: dict[str, Any], ours: dict[str, Any]) -> None:
    assert check_options("flag", given, KNOWN, ["backend"]) == ours


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"endpiont": "a"},
            "flag: 'endpiont' is unknown, the nearest known key is 'endpoint' (known: endpoint, copy_threads, tier_wait_s, backend)",
        ),
        ({"backends": "a"}, "the nearest known key is 'backend'"),
        ({1: "a"}, "flag: 1 is unknown"),
        ({"copy_threads": 2.0}, "flag: 'copy_threads' is 2.0, must be a int"),
        ({"copy_threads": True}, "must be a int"),
        ({"tier_wait_s": "1"}, "must be a float"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(given: dict[Any, Any], why: str) -> None:
    with pytest.raises(ValueError) as raised:
        check_options("flag", given, KNOWN, ["backend"])
    assert why in str(raised.value)
