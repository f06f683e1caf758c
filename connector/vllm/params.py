"""What a request may ask for in its `kv_transfer_params`, beside what other connectors and proxies put there.

Clients write them, so nothing in them is an error: what cannot be understood is told in the engine's log, a bounded number of times, and
the request runs as if it were not there.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import difflib
from typing import Any

from vllm.logger import init_logger

logger = init_logger("vllm.hostkv")

ANSWER = "hostkv"  # under which the answer's kv_transfer_params have ours; a proxy may send it along with the next request
NAMES = ("no_load", "no_save", "priority")
PRIORITIES = ("normal", "low")
# What vLLM's own connectors and its front ends read there.
OTHERS = {
    *("do_remote_prefill", "do_remote_decode", "transfer_id", "tp_size", "pp_size", "dcp_size", "is_request_leader"),
    *("prompt_token_ids", "include_output_tokens", "hidden_states_path", "disagg_spec", "ret_first_tok", "first_tok"),
    *("max_load_tokens", "max_offload_tokens", "kv_load_tiers", "num_lmcache_extra_cached_tokens"),
}
OTHERS_BEGIN = ("remote_", "lmcache.", "_")
MAX_TOLD = 32
MAX_SHOWN = 64  # characters of what a client wrote


class Params:
    """Reads them, and remembers what it has told of."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def read(self, params: Any) -> set[str]:
        """What the request asks for: "no_load", "no_save", "low_priority"."""
        asked = set()
        for key, value in params.items() if isinstance(params, dict) else ():
            if key == "priority":
                if value == "low":
                    asked.add("low_priority")
                elif value not in PRIORITIES:
                    self._tell(f"'priority' is {_shown(value)}, must be {' or '.join(map(repr, PRIORITIES))}")
            elif key in NAMES:
                if value is True:
                    asked.add(key)
                elif value is not False:
                    self._tell(f"{key!r} is {_shown(value)}, must be true or false")
            elif key != ANSWER and key not in OTHERS and not str(key).startswith(OTHERS_BEGIN):
                nearest = difflib.get_close_matches(str(key)[:MAX_SHOWN], NAMES, n=1, cutoff=0)[0]
                self._tell(f"{_shown(key)} is unknown, the nearest known key is {nearest!r} (known: {', '.join(NAMES)})")
        return asked

    def _tell(self, what: str) -> None:
        if what not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(what)
            logger.warning("HostKV: kv_transfer_params of a request: %s; it is ignored", what)


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "…"
