"""Which weights computed a block: the model's name and revision for a namespace.

A prefix is the same for two engines only when their weights are. Called once per engine start by the engine connectors; reads the
model's files whole and nothing else, imports no tensor library, and never guesses: a model that cannot be told apart from another one
is refused, and the engine then runs uncached.

* a Hugging Face snapshot: the repository's name and the commit it is of;
* any other local folder (or a single weights file): a fingerprint of what lies in it, so that copies of one folder share and two
  fine-tunes of one name do not.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..cext import xxh3_64

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
CHUNK_BYTES = 4 << 20  # hashed while it is still in the processor's cache
READERS = 8  # files read at a time
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
        'name one with "revision" in the extra config'
    )


def weights_fingerprint(model: Path) -> str:
    """What stands for the folder of a model or an adapter, or for a single weights file: "weights:" and 64 hex digits.

    Covers every byte of the weights, of the configuration files and of the code that comes with a model, at several GB/s where the files
    are in the page cache. Chunks are hashed with xxh3: files that differ by chance or by training have the same with 2^-64. Somebody who
    makes files that collide could as well have made the weights do what he wants; whoever installs weights trusts them. Raises
    IdentityError when there are no weights.
    """
    files = _files(model)
    digest = hashlib.sha256()
    try:
        with ThreadPoolExecutor(READERS) as readers:
            for file, content in zip(files, readers.map(_content, files), strict=True):
                name = file.name.encode()
                digest.update(struct.pack("<Q", len(name)) + name + content)
    except OSError as error:
        raise IdentityError(f"cannot read {error.filename}: {error.strerror}") from error
    return f"weights:{digest.hexdigest()}"


def weights_state(model: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Differs when weights_fingerprint() may; costs a look at the folder."""
    try:
        return tuple((file.name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for file in _files(model) for stat in [file.stat()])
    except OSError as error:
        raise IdentityError(f"cannot read {error.filename}: {error.strerror}") from error


def _files(model: Path) -> list[Path]:
    """All that decides what the model computes."""
    if model.is_file():
        return [model]
    if not model.is_dir():
        raise IdentityError(f"{model} is not on this machine's disk")
    files = sorted(f for f in model.iterdir() if (f.suffix in (*WEIGHT_SUFFIXES, ".py") or f.name in CONFIG_FILES) and f.is_file())
    if not any(f.suffix in WEIGHT_SUFFIXES for f in files):
        raise IdentityError(f"{model} holds no weights ({', '.join('*' + s for s in WEIGHT_SUFFIXES)})")
    return files


def _content(file: Path) -> bytes:
    """Digest of the file's bytes. It is read and not mapped: a mapped file that somebody truncates kills the process."""
    digest = hashlib.sha256()
    size = 0
    chunk = memoryview(bytearray(CHUNK_BYTES))
    with file.open("rb") as handle:
        while count := handle.readinto(chunk):
            digest.update(struct.pack("<Q", xxh3_64(chunk[:count])))
            size += count
    return digest.digest() + struct.pack("<Q", size)
