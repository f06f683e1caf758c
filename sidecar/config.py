"""Configuration: one YAML file, and flags that win over it. Every key has a default, a unit and a check, all in KEYS below; an unknown
key or a value that fails its check is a StartupError that names key, value and what is expected. Nothing here reads the environment."""

from __future__ import annotations

import grp
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from ..schemas.endpoint import MAX_SOCKET_PATH_BYTES
from .errors import StartupError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
PAGE = 4096
MAX_EXTENTS = 1 << 16
NO_ID = (1 << 32) - 1  # what chown takes for "leave it"
MAX_NAME_BYTES = 200  # with ".tables" it must fit a file name of 255 bytes
DEFAULTS = {
    "pool.name": "hostkv",
    "pool.size": "4GiB",
    "pool.path": "/dev/shm",
    "eviction": "lru",
    "verify": "off",
    "log.level": "info",
    "log.format": "text",
}
_UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}


@dataclass(frozen=True, slots=True)
class Config:
    endpoint: str
    pool_name: str
    pool_bytes: int
    pool_path: str
    extent_bytes: int
    max_blocks: int
    eviction: str
    verify: bool  # blocks are checked against their checksums when they are loaded
    group_id: int  # of the group whose members may use the pool besides us, -1: nobody
    tcp_listen: str  # HOST:PORT, "": none
    tcp_keys: str  # the directory that hostkv keygen made
    log_level: str
    log_format: str
    tiers: list[DiskTier]


@dataclass(frozen=True, slots=True)
class DiskTier:
    """`size` bytes over all directories; `max_blocks`: what the index of what is on disk has room for, some 70 bytes of memory each.
    `min_reuse`: only blocks that were used again so often are written."""

    paths: list[str]
    size_bytes: int
    max_blocks: int
    engine: str
    min_reuse: int


def load(path: str | None, flags: dict[str, str | None], default_endpoint: str | None) -> Config:
    """The configuration of `path` (None: no file) with `flags`, keyed like the file ("pool.size"), over it. `default_endpoint` is used
    where neither has one; None means that there is no run directory to put it in."""
    values: dict[str, Any] = dict(DEFAULTS)
    sources = dict.fromkeys(KEYS, "")
    if path is not None:
        for key, value in _read(path).items():
            values[key], sources[key] = value, f"{path}: "
    for key, flag in flags.items():
        if flag is not None:
            values[key], sources[key] = flag, "command line: "
    if "endpoint" not in values:
        if default_endpoint is None:
            raise StartupError(
                "endpoint has no default here, XDG_RUNTIME_DIR is not set; give --endpoint ipc:///some/private/directory/control.sock"
            )
        values["endpoint"], sources["endpoint"] = default_endpoint, "environment: "
    checked = {key: _check(sources[key], key, value) for key, value in values.items()}
    pool_bytes = checked["pool.size"]
    extent_bytes = checked.get("pool.extent_size", default_extent_bytes(pool_bytes))
    if extent_bytes > pool_bytes:
        raise StartupError(f"{sources['pool.extent_size']}pool.extent_size is {extent_bytes} bytes, must be 4096..{pool_bytes} (pool.size)")
    if pool_bytes // extent_bytes > MAX_EXTENTS:
        raise StartupError(
            f"{sources['pool.extent_size']}pool.extent_size is {extent_bytes} bytes, must be at least pool.size / {MAX_EXTENTS} "
            f"({-(-pool_bytes // MAX_EXTENTS)} bytes)"
        )
    if ("tcp.listen" in checked) != ("tcp.keys" in checked):
        there, absent = ("tcp.listen", "tcp.keys") if "tcp.listen" in checked else ("tcp.keys", "tcp.listen")
        raise StartupError(f"{sources[there]}{there} is given and {absent} is not; TCP needs both (hostkv keygen DIR makes the keys)")
    return Config(
        endpoint=checked["endpoint"],
        pool_name=checked["pool.name"],
        pool_bytes=pool_bytes,
        pool_path=checked["pool.path"],
        extent_bytes=extent_bytes,
        max_blocks=checked.get("pool.max_blocks", max(1024, pool_bytes // (64 * KIB))),
        eviction=checked["eviction"],
        verify=checked["verify"],
        group_id=checked.get("group", -1),
        tcp_listen=checked.get("tcp.listen", ""),
        tcp_keys=checked.get("tcp.keys", ""),
        log_level=checked["log.level"],
        log_format=checked["log.format"],
        tiers=checked.get("tiers", []),
    )


def default_extent_bytes(pool_bytes: int) -> int:
    """64 MiB, so that blocks of several sizes live side by side and big blocks fit; more for pools over 16 GiB, to keep at most 256
    extents. A pool under 512 MiB would have too few of them for two block sizes to share it, so it is cut into eight."""
    if pool_bytes < 512 * MIB:
        return pool_bytes // 8 // PAGE * PAGE
    if pool_bytes <= 16 * GIB:
        return 64 * MIB
    return -(-pool_bytes // 256 // (2 * MIB)) * (2 * MIB)


def socket_path(endpoint: str) -> str:
    """The path of the socket of an `ipc://` endpoint; its directory is the run directory. Raises StartupError on any other endpoint."""
    if endpoint.startswith("tcp://"):
        raise StartupError(
            f"endpoint is {endpoint!r}, must be ipc://, such as ipc:///run/hostkv/control.sock; for TCP beside it: tcp.listen"
        )
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or not os.path.isabs(path) or path.endswith("/") or "\0" in path:
        raise StartupError(f"endpoint is {endpoint!r}, must be ipc:// and an absolute path, such as ipc:///run/hostkv/control.sock")
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        raise StartupError(f"endpoint is {endpoint!r}: its path is not UTF-8; use another run directory") from None
    if size > MAX_SOCKET_PATH_BYTES:
        raise StartupError(
            f"endpoint is {endpoint!r}: its path has {size} bytes, the kernel takes {MAX_SOCKET_PATH_BYTES}; use a shorter run directory"
        )
    return path


def _read(path: str) -> dict[str, Any]:
    """The file's keys, flattened to "pool.size"."""
    try:
        with open(path, encoding="utf-8") as file:
            tree = yaml.safe_load(file)
    except OSError as error:
        raise StartupError(f"--config {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise StartupError(f"--config {path}: not UTF-8") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that does not exist is a ValueError
        raise StartupError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    sections = {key.partition(".")[0] for key in KEYS if "." in key}
    found: dict[str, Any] = {}
    if tree is None:
        return found
    if not isinstance(tree, dict):
        raise StartupError(f"{path}: holds {_kind(tree)}, must be a map of {', '.join(sorted(KEYS))}")
    for name, value in tree.items():
        if name not in sections:
            found[_known(path, str(name))] = value
            continue
        if not isinstance(value, dict):
            keys = ", ".join(sorted(key for key in KEYS if key.startswith(f"{name}.")))
            raise StartupError(f"{path}: {name} is {_kind(value)}, must be a map of {keys}")
        for part, inner in value.items():
            found[_known(path, f"{name}.{part}")] = inner
    return found


def _known(path: str, key: str) -> str:
    if key not in KEYS:
        import difflib

        near = difflib.get_close_matches(key, KEYS, 1, 0.0)
        raise StartupError(f"{path}: {key} is not a key; did you mean {near[0]}?")
    return key


def _check(source: str, key: str, value: object) -> Any:
    try:
        return KEYS[key](value)
    except _Wrong as wrong:
        raise StartupError(f"{source}{key} is {value!r} ({_kind(value)}), must be {wrong}") from None


def _kind(value: object) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "a map"}
    return "nothing" if value is None else names.get(type(value), type(value).__name__)


class _Wrong(Exception):
    """What a value must be instead."""


def _size(low: int, high: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        expected = f"a size of {low // KIB}KiB..{high // TIB}TiB in KiB, MiB, GiB or TiB, such as 16GiB"
        match = re.fullmatch(r"([0-9]{1,15})([A-Za-z]*)", value) if type(value) is str else None
        if match is None:
            raise _Wrong(expected)
        number, unit = int(match[1]), match[2]
        if unit not in _UNITS:
            binary = f"{unit[:1].upper()}iB"
            raise _Wrong(f"in binary units: {number}{binary}, not {number}{unit}" if unit and binary in _UNITS else expected)
        if not low <= number * _UNITS[unit] <= high:
            raise _Wrong(expected)
        size = number * _UNITS[unit]
        if size % PAGE:
            raise _Wrong(f"a multiple of {PAGE // KIB}KiB")
        return size

    return check


def _integer(low: int, high: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _Wrong(f"an integer of {low}..{high}")
        return value

    return check


def _one_of(*known: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        if type(value) is not str or value not in known:
            raise _Wrong(f"one of {', '.join(known)}" if len(known) > 1 else f"{known[0]}, the only one in this version")
        return value

    return check


def _endpoint(value: object) -> str:
    if type(value) is not str:
        raise _Wrong("a string such as ipc:///run/hostkv/control.sock")
    socket_path(value)
    return value


def _pool_name(value: object) -> str:
    pattern = rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{MAX_NAME_BYTES - 1}}}"
    if type(value) is not str or not re.fullmatch(pattern, value) or value.endswith((".tables", ".index")):
        raise _Wrong(
            f"a file name of 1..{MAX_NAME_BYTES} letters, digits, '.', '_' or '-', not starting with '.' or '-', not ending in "
            ".tables or .index"
        )
    return value


def _directory(example: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        if type(value) is not str or not os.path.isabs(value) or "\0" in value:
            raise _Wrong(f"the absolute path of a directory{example}")
        return value

    return check


def _verify(value: object) -> bool:
    if value is False or value == "off":  # YAML reads a bare off as false
        return False
    if value != "load":
        raise _Wrong("off or load")
    return True


def _group(value: object) -> int:
    """The id of a group, which needs no name where a number is given: containers often have none for it."""
    if type(value) is int and 0 <= value < NO_ID:
        return value
    if type(value) is not str:
        raise _Wrong(f"a group's name or its number of 0..{NO_ID - 1}")
    try:
        return grp.getgrnam(value).gr_gid
    except (KeyError, ValueError):
        raise _Wrong("a group that this host knows (getent group), or its number") from None


def tcp_address(endpoint: str) -> str:
    """The endpoint, if it is `tcp://` and a host and a port. Raises StartupError on any other."""
    try:
        _listen(endpoint.removeprefix("tcp://"))
    except _Wrong as wrong:
        raise StartupError(f"endpoint is {endpoint!r}, must be tcp:// and {wrong}") from None
    return endpoint


def _listen(value: object) -> str:
    match = re.fullmatch(r"(\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", value) if type(value) is str else None
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise _Wrong("HOST:PORT, such as 10.0.0.5:9401 or [::1]:9401")
    return match[0]


def _tiers(value: object) -> list[DiskTier]:
    """Each has `type`, and the keys of that type. One so far."""
    if type(value) is not list or len(value) != 1 or type(value[0]) is not dict:
        raise _Wrong("a list of one map, such as [{type: disk, path: /nvme0/hostkv, size: 1TiB}]")
    tier = dict(value[0])
    found: dict[str, Any] = {}
    for key, check in _DISK.items():
        if key not in tier:
            if key in ("type", "path", "size"):
                raise _Wrong(f"a map with {key}; tiers[0] has {', '.join(map(str, tier)) or 'nothing'}")
            continue
        try:
            found[key] = check(tier.pop(key))
        except _Wrong as wrong:
            raise _Wrong(f"a map whose {key} is {wrong}") from None
    if tier:
        raise _Wrong(f"a map of {', '.join(_DISK)}, and of nothing else ({', '.join(map(str, tier))})")
    return [
        DiskTier(
            found["path"],
            found["size"],
            found.get("max_blocks", max(1024, found["size"] // (256 * KIB))),
            found.get("engine", "auto"),
            found.get("min_reuse", 0),
        )
    ]


def _paths(value: object) -> list[str]:
    check = _directory("")
    paths = [check(each) for each in (value if type(value) is list else [value])]
    if not paths or len({os.path.normpath(path) for path in paths}) < len(paths):  # asks no disk, which may hang
        raise _Wrong("the absolute path of a directory, or a list of different ones")
    return paths


_DISK: dict[str, Callable[[object], Any]] = {
    "type": _one_of("disk"),
    "path": _paths,
    "size": _size(64 * MIB, 1024 * TIB),
    "max_blocks": _integer(1024, 1 << 30),
    "engine": _one_of("auto", "io_uring", "threads"),
    "min_reuse": _integer(0, 15),
}
KEYS: dict[str, Callable[[object], Any]] = {
    "endpoint": _endpoint,
    "pool.name": _pool_name,
    "pool.size": _size(1 * MIB, 15 * TIB),  # pages are numbered by uint32
    "pool.path": _directory(" on a tmpfs, such as /dev/shm"),
    "pool.extent_size": _size(PAGE, 16 * TIB),
    "pool.max_blocks": _integer(1, 100_000_000),
    "eviction": _one_of("lru", "reuse"),
    "verify": _verify,
    "group": _group,
    "tcp.listen": _listen,
    "tcp.keys": _directory(" that hostkv keygen made"),
    "tiers": _tiers,
    "log.level": _one_of("debug", "info", "warning", "error"),
    "log.format": _one_of("text", "json"),
}
