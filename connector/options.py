"""What an engine's user writes into the engine's own extra configuration for us."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any


def check_options(where: str, given: Mapping[str, Any], known: Mapping[str, type], others: Sequence[str] = ()) -> dict[str, Any]:
    """Those of `given` that are ours. `known`: each with its type; `others`: keys that somebody else reads. ValueError: an option that
    cannot be honoured is a start-up error."""
    for key, value in given.items():
        if key in others:
            continue
        if key not in known:
            names = [*known, *others]
            nearest = difflib.get_close_matches(str(key), names, n=1, cutoff=0)[0]
            raise ValueError(f"{where}: {key!r} is unknown, the nearest known key is {nearest!r} (known: {', '.join(names)})")
        if type(value) is not known[key] and not (known[key] is float and type(value) is int):
            raise ValueError(f"{where}: {key!r} is {value!r}, must be a {known[key].__name__}")
    return {key: value for key, value in given.items() if key in known}
