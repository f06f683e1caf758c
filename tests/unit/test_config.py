"""Every key of the configuration: its default, and what it says to a wrong type, unit and range."""

from __future__ import annotations

import grp
from pathlib import Path
from typing import Any

import pytest
import yaml
from hostkv.sidecar.config import GIB, KEYS, KIB, MIB, Config, DiskTier, StartupError, default_extent_bytes, load, socket_path

ENDPOINT = "ipc:///run/hostkv/control.sock"


def read(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "hostkv.yaml"
    file.write_text(text)
    return load(str(file), {}, ENDPOINT)


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(StartupError) as caught:
        read(tmp_path, text)
    return str(caught.value)


def nested(key: str, value: Any) -> str:
    section, _, name = key.rpartition(".")
    return yaml.safe_dump({section: {name: value}} if section else {name: value})


def test_defaults() -> None:
    assert load(None, {}, ENDPOINT) == Config(
        endpoint=ENDPOINT,
        pool_name="hostkv",
        pool_bytes=4 * GIB,
        pool_path="/dev/shm",
        extent_bytes=64 * MIB,
        max_blocks=65536,
        eviction="lru",
        verify=False,
        group_id=-1,
        tcp_listen="",
        tcp_keys="",
        log_level="info",
        log_format="text",
        tiers=[],
    )


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert read(tmp_path, "") == load(None, {}, ENDPOINT)


def test_every_key_is_read(tmp_path: Path) -> None:
    text = """
    endpoint: ipc:///tmp/x/control.sock
    pool: {name: n, size: 1GiB, path: /mnt/shm, extent_size: 32MiB, max_blocks: 5000}
    eviction: reuse
    verify: load
    group: 1234
    tcp: {listen: "127.0.0.1:9401", keys: /etc/hostkv/keys}
    log: {level: debug, format: json}
    tiers:
      - {type: disk, path: [/nvme0/kv, /nvme1/kv], size: 3TiB, max_blocks: 4096, engine: threads, min_reuse: 2}
    """
    assert read(tmp_path, text) == Config(
        endpoint="ipc:///tmp/x/control.sock",
        pool_name="n",
        pool_bytes=GIB,
        pool_path="/mnt/shm",
        extent_bytes=32 * MIB,
        max_blocks=5000,
        eviction="reuse",
        verify=True,
        group_id=1234,
        tcp_listen="127.0.0.1:9401",
        tcp_keys="/etc/hostkv/keys",
        log_level="debug",
        log_format="json",
        tiers=[DiskTier(["/nvme0/kv", "/nvme1/kv"], 3 << 40, 4096, "threads", 2)],
    )


@pytest.mark.parametrize("text", ["verify: off", "verify: 'off'", "verify: no", "verify: false"])
def test_off_is_off_however_yaml_reads_it(tmp_path: Path, text: str) -> None:
    assert not read(tmp_path, text).verify


def test_a_group_is_found_by_its_name(tmp_path: Path) -> None:
    known = grp.getgrall()[-1]
    assert read(tmp_path, nested("group", known.gr_name)).group_id == known.gr_gid


def test_an_unknown_group_is_named(tmp_path: Path) -> None:
    assert "group is 'no-such-group'" in refused(tmp_path, "group: no-such-group")


@pytest.mark.parametrize("listen", ["127.0.0.1:1", "*:9401", "[::1]:65535", "node-7.example.org:9401"])
def test_tcp_listens_at_a_host_and_a_port(tmp_path: Path, listen: str) -> None:
    assert read(tmp_path, yaml.safe_dump({"tcp": {"listen": listen, "keys": "/k"}})).tcp_listen == listen


@pytest.mark.parametrize("given, absent", [("listen: 'h:1'", "tcp.keys"), ("keys: /k", "tcp.listen")])
def test_tcp_needs_both_of_its_keys(tmp_path: Path, given: str, absent: str) -> None:
    message = refused(tmp_path, f"tcp: {{{given}}}")
    assert f"{absent} is not" in message
    assert "keygen" in message


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("pool: {name: a, size: 1GiB}")
    config = load(str(file), {"pool.size": "2GiB", "pool.name": None}, ENDPOINT)
    assert (config.pool_name, config.pool_bytes) == ("a", 2 * GIB)


@pytest.mark.parametrize(
    "pool, extent",
    [(MIB, 128 * KIB), (64 * MIB, 8 * MIB), (510 * MIB, 66846720), (512 * MIB, 64 * MIB), (16 * GIB, 64 * MIB), (100 * GIB, 400 * MIB)],
)
def test_extents_grow_with_the_pool(pool: int, extent: int) -> None:
    assert default_extent_bytes(pool) == extent
    assert extent % 4096 == 0


WRONG_TYPES: list[tuple[str, Any]] = [(key, value) for key in KEYS for value in ([1], {"a": 1}, True, None, 1.5)]
WRONG = [
    *WRONG_TYPES,
    *[(key, 7) for key in KEYS if key not in ("pool.max_blocks", "group")],
    ("pool.max_blocks", "4096"),
    ("pool.max_blocks", 0),
    ("pool.max_blocks", -1),
    ("pool.max_blocks", 100_000_001),
    *[
        (key, unit)
        for key in ("pool.size", "pool.extent_size")
        for unit in ("16", "16GB", "16gib", "16 GiB", "GiB", "-1GiB", "1.5GiB", "16G", "")
    ],
    ("pool.size", "0GiB"),
    ("pool.size", "1020KiB"),
    ("pool.size", "16TiB"),
    ("pool.size", "1025KiB"),
    ("pool.size", "99999999999999999999GiB"),
    ("pool.extent_size", "0MiB"),
    ("pool.extent_size", "5KiB"),
    ("pool.extent_size", "8GiB"),
    ("pool.extent_size", "4KiB"),
    ("pool.name", ""),
    ("pool.name", "a/b"),
    ("pool.name", ".."),
    ("pool.name", ".x"),
    ("pool.name", "a.tables"),
    ("pool.name", "a" * 201),
    ("pool.name", "a\nb"),
    ("pool.name", "ü"),
    ("pool.path", "relative"),
    ("pool.path", ""),
    ("eviction", "fifo"),
    ("eviction", "s3fifo"),
    ("eviction", "prefix"),
    ("verify", "on"),
    ("verify", "save"),
    ("group", -1),
    ("group", (1 << 32) - 1),
    ("group", ""),
    ("group", "a\0b"),
    ("tcp.listen", "127.0.0.1"),
    ("tcp.listen", "127.0.0.1:0"),
    ("tcp.listen", "127.0.0.1:65536"),
    ("tcp.listen", ":9401"),
    ("tcp.listen", "tcp://127.0.0.1:9401"),
    ("tcp.listen", "::1:9401"),
    ("tcp.listen", "h:1\n"),
    ("tcp.keys", "keys"),
    ("tcp.keys", ""),
    ("log.level", "loud"),
    ("log.level", "INFO"),
    ("log.format", "xml"),
    ("endpoint", "tcp://127.0.0.1:1"),
    ("endpoint", "ipc://relative/control.sock"),
    ("endpoint", "ipc://@abstract"),
    ("endpoint", "ipc:///run/"),
    ("endpoint", "/run/control.sock"),
    ("endpoint", "ipc:///" + "x" * 107),
]


@pytest.mark.parametrize("key, value", WRONG, ids=lambda v: repr(v)[:30])
def test_a_wrong_value_names_key_value_and_what_is_expected(tmp_path: Path, key: str, value: Any) -> None:
    message = refused(tmp_path, nested(key, value))
    assert key in message
    assert "must be" in message or key == "endpoint"
    if type(value) is str and len(value) < 50 and key != "pool.extent_size":
        assert repr(value) in message


def test_a_decimal_unit_is_answered_with_the_binary_one(tmp_path: Path) -> None:
    assert "16GiB" in refused(tmp_path, "pool: {size: 16GB}")


@pytest.mark.parametrize(
    "key, near", [("pool.siez", "pool.size"), ("pool.nam", "pool.name"), ("evicton", "eviction"), ("endpoit", "endpoint")]
)
def test_an_unknown_key_names_the_nearest(tmp_path: Path, key: str, near: str) -> None:
    message = refused(tmp_path, nested(key, "x"))
    assert f"{key} is not a key; did you mean {near}?" in message


@pytest.mark.parametrize(
    "text",
    ["[1]", "7", "pool: 7", "pool: [1]", "pool:", "{", "a: b: c", "1: 2", "pool: {1: 2}", "? [1]\n: 2", "eviction: 2001-13-45", "[" * 3000],
)
def test_a_file_of_the_wrong_shape_is_refused_by_name(tmp_path: Path, text: str) -> None:
    assert "hostkv.yaml" in refused(tmp_path, text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "binary"
    file.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent", tmp_path, file):
        with pytest.raises(StartupError, match=path.name):
            load(str(path), {}, ENDPOINT)


def test_a_tcp_endpoint_names_the_key_for_tcp(tmp_path: Path) -> None:
    assert "tcp.listen" in refused(tmp_path, "endpoint: tcp://127.0.0.1:9401")


def test_no_run_directory_to_default_to_names_the_flag() -> None:
    with pytest.raises(StartupError, match="--endpoint"):
        load(None, {}, None)


def test_the_longest_socket_path_that_the_kernel_takes_is_taken() -> None:
    path = "/" + "x" * 106
    assert socket_path(f"ipc://{path}") == path


def test_bytes_count_in_a_socket_path_not_characters() -> None:
    with pytest.raises(StartupError, match="107"):
        socket_path("ipc:///" + "ü" * 60)


@pytest.mark.parametrize(
    "value, says",
    [
        ("disk", "a list of one map"),
        ([], "a list of one map"),
        ([{"type": "disk", "path": "/a", "size": "1GiB"}] * 2, "a list of one map"),
        ([{"type": "disk", "path": "/a"}], "a map with size"),
        ([{"type": "s3", "path": "/a", "size": "1GiB"}], "whose type is disk"),
        ([{"type": "disk", "path": "a", "size": "1GiB"}], "whose path is the absolute path"),
        ([{"type": "disk", "path": ["/a", "/b/../a"], "size": "1GiB"}], "list of different ones"),
        ([{"type": "disk", "path": [], "size": "1GiB"}], "whose path is the absolute path"),
        ([{"type": "disk", "path": "/a", "size": "1MiB"}], "whose size is a size of 65536KiB"),
        ([{"type": "disk", "path": "/a", "size": "1GiB", "engine": "aio"}], "whose engine is one of auto, io_uring, threads"),
        ([{"type": "disk", "path": "/a", "size": "1GiB", "min_reuse": 16}], "whose min_reuse is an integer of 0..15"),
        ([{"type": "disk", "path": "/a", "size": "1GiB", "max_block": 5}], "and of nothing else (max_block)"),
    ],
)
def test_a_tier_that_cannot_be_had_is_told_what_it_must_be(tmp_path: Path, value: Any, says: str) -> None:
    assert says in refused(tmp_path, yaml.safe_dump({"tiers": value}))


def test_a_tier_on_one_directory_has_room_in_its_index_for_blocks_of_256_kib(tmp_path: Path) -> None:
    text = "tiers: [{type: disk, path: /a, size: 1GiB}]"
    assert read(tmp_path, text).tiers == [DiskTier(["/a"], GIB, 4096, "auto", 0)]
