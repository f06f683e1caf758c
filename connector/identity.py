"""Which weights computed a block: the model's name and revision for a namespace.

A prefix is the same for two engines only when their weights are. Called once per engine start by the engine connectors; reads a few
MiB of the model's files and nothing else, imports no tensor library, and never guesses: a model that cannot be told apart from
another one is refused, and the engine then runs uncached.

* a Hugging Face snapshot: the repository's name and the commit it is of;
* any other local folder (or a single weights file): a fingerprint of what lies in it, so that copies of one folder share and two
  fine-tunes of one name do not.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from pathlib import Path

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CONFIG_FILES = (  # each of them changes what the same weights compute
    "config.json",
    "adapter_config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
EDGE_BYTES = 1 << 20  # read from both ends of a weights file: the start holds the names, shapes and places of its tensors
SAMPLES = 64
SAMPLE_BYTES = 4096
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"models--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$")


class IdentityError(ValueError):
    """The weights cannot be told apart from others; the message says what would help."""


def model_identity(model: str, commit: str | None = None, revision: str | None = None) -> tuple[str, str]:
    """(name, revision) of `model`, a local path or a hub name.

    commit: what the hub said this model is, where the engine knows it. revision: the user's own word for it, which wins.
    Raises IdentityError when none of them tells.
    """
    path = Path(model)
    snapshot = _SNAPSHOT.search(os.path.abspath(path)) if path.exists() else None
    if snapshot:
        name, commit = snapshot["name"].replace("--", "/"), snapshot["commit"]
    else:
        name = Path(os.path.realpath(path)).name if path.exists() else model
    if revision:
        return name, revision
    if snapshot or (not path.exists() and commit and _COMMIT.fullmatch(commit)):
        return name, f"commit:{commit}"
    if path.exists():
        return name, weights_fingerprint(path)
    raise IdentityError(
        f"no revision of model {model!r} is known (it is no local folder, and the hub gave no commit hash); "
        'name one with "revision" in kv_connector_extra_config'
    )


def weights_fingerprint(model: Path) -> str:
    """What stands for the folder of a model or an adapter, or for a single weights file: "weights:" and 64 hex digits.

    Covers the configuration files whole, and of each weights file its name, size, both ends and evenly spaced samples: enough for
    another training run or quantization to show, without reading hundreds of GiB. Raises IdentityError when there are no weights.
    """
    if model.is_file():
        files, configs = [model], []
    elif not model.is_dir():
        raise IdentityError(f"{model} is not on this machine's disk")
    else:
        files = sorted(f for f in model.iterdir() if f.suffix in WEIGHT_SUFFIXES and f.is_file())
        configs = [model / name for name in CONFIG_FILES if (model / name).is_file()]
    if not files:
        raise IdentityError(f"{model} holds no weights ({', '.join('*' + s for s in WEIGHT_SUFFIXES)})")
    digest = hashlib.sha256()
    try:
        for file in configs:
            content = file.read_bytes()
            _add(digest, file.name.encode(), content)
        for file in files:
            _add_samples(digest, file)
    except OSError as error:
        raise IdentityError(f"cannot read {error.filename}: {error.strerror}") from error
    return f"weights:{digest.hexdigest()}"


def _add(digest: hashlib._Hash, *parts: bytes) -> None:
    for part in parts:
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)


def _add_samples(digest: hashlib._Hash, file: Path) -> None:
    with file.open("rb", buffering=0) as handle:
        size = os.fstat(handle.fileno()).st_size
        _add(digest, file.name.encode(), struct.pack("<Q", size))
        if size <= 2 * EDGE_BYTES + SAMPLES * SAMPLE_BYTES:
            places = [(0, size)]
        else:
            middle = size - 2 * EDGE_BYTES - SAMPLE_BYTES
            places = [(0, EDGE_BYTES)]
            places += [(EDGE_BYTES + middle * i // (SAMPLES - 1), SAMPLE_BYTES) for i in range(SAMPLES)]
            places.append((size - EDGE_BYTES, EDGE_BYTES))
        for offset, length in places:
            _add(digest, os.pread(handle.fileno(), length, offset))
