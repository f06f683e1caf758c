"""The command line: what each command prints and exits with, against a real sidecar and against none."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import zmq
from hostkv.connector import Client, Layout
from hostkv.schemas import messages as m
from hostkv.schemas.endpoint import default_endpoint
from hostkv.sidecar import cli
from hostkv.sidecar.page import page, size_text

from tests.cores import Driver, ident, keys, make_layout
from tests.support import PATIENCE_S, PATIENT_CLIENTS, Sidecar, hostkv, waiting_as


def answered(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line, which waits for a sidecar on a busy machine longer than users shall."""
    program = f"from hostkv.sidecar import cli; cli.STATUS_TIMEOUT_MS = {PATIENCE_S * 1000:.0f}; exit(cli.main())"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 2,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    with Sidecar(tmp_path_factory.mktemp("cli")) as sidecar:
        yield sidecar


def test_version() -> None:
    done = hostkv("--version")
    assert (done.returncode, done.stdout) == (0, f"hostkv {version('hostkv')}\n")


@pytest.mark.parametrize("arguments", [[], ["sevre"], ["serve", "--pool"], ["status", "--bogus"], ["stop", "now"], ["keygen"]])
def test_wrong_arguments_exit_with_2(arguments: list[str]) -> None:
    done = hostkv(*arguments)
    assert done.returncode == 2
    assert "usage: hostkv" in done.stderr


@pytest.mark.parametrize("command", ["serve", "status", "stop", "clear", "fsck", "doctor"])
def test_help_names_the_endpoint(command: str) -> None:
    done = hostkv(command, "--help")
    assert done.returncode == 0
    assert "--endpoint" in done.stdout


def test_status_prints_a_page(sidecar: Sidecar) -> None:
    done = answered("status", "--endpoint", sidecar.endpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"pid {sidecar.pid}" in done.stdout
    assert "64 MiB" in done.stdout


def test_status_takes_the_endpoint_from_the_environment(sidecar: Sidecar) -> None:
    done = answered("status", "--json", HOSTKV_ENDPOINT=sidecar.endpoint)
    assert json.loads(done.stdout)["pid"] == sidecar.pid


def test_the_flag_wins_over_the_environment(sidecar: Sidecar) -> None:
    done = answered("status", "--json", "--endpoint", sidecar.endpoint, HOSTKV_ENDPOINT="ipc:///nowhere/control.sock")
    assert json.loads(done.stdout)["pid"] == sidecar.pid


def test_status_json_is_the_whole_map(sidecar: Sidecar) -> None:
    done = answered("status", "--json", "--endpoint", sidecar.endpoint)
    assert set(json.loads(done.stdout)) == set(sidecar.status())


def test_status_of_nobody_is_told_within_its_bound_and_exits_with_1(tmp_path: Path) -> None:
    done = hostkv("status", "--endpoint", f"ipc://{tmp_path}/control.sock")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no sidecar runs there" in done.stderr
    assert "Traceback" not in done.stderr


def test_status_of_a_stopped_sidecar_names_the_pid(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar:
        os.kill(sidecar.pid, signal.SIGSTOP)
        done = hostkv("status", "--endpoint", sidecar.endpoint)
        assert done.returncode == 1
        assert f"pid {sidecar.pid} holds the run directory but does not answer" in done.stderr


@pytest.mark.parametrize("command", ["status", "stop", "clear", "fsck", "doctor"])
@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "nonsense", "ipc://relative", "ipc:///" + "x" * 200])
def test_a_wrong_endpoint_exits_with_2(command: str, endpoint: str) -> None:
    done = hostkv(command, "--endpoint", endpoint)
    assert done.returncode == 2
    assert endpoint in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["status", "stop", "clear", "fsck"])
def test_a_run_directory_that_is_none_of_ours_is_told(tmp_path: Path, command: str) -> None:
    (tmp_path / "lock").symlink_to("elsewhere")
    done = hostkv(command, "--endpoint", f"ipc://{tmp_path}/control.sock")
    assert done.returncode == 2
    assert "cannot open" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "reply, code, words",
    [
        (m.encode_reply(m.ErrorReply("VERSION", "too\x1bold"), 1, bytes(16)), 2, "the sidecar answers VERSION: too?old"),
        (b"\xc1 no msgpack", 1, "no answer"),
        (m.encode_reply(m.Empty(), 1, bytes(16)), 1, "no answer"),
    ],
    ids=["error", "garbage", "another reply"],
)
def test_what_else_answers_is_told(tmp_path: Path, reply: bytes, code: int, words: str) -> None:
    endpoint = f"ipc://{tmp_path}/control.sock"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.ROUTER) as peer:
        peer.bind(endpoint)
        with ThreadPoolExecutor(1) as asking:
            asked = asking.submit(answered, "status", "--endpoint", endpoint)
            assert peer.poll(int(PATIENCE_S * 1000))
            connection, _ = peer.recv_multipart()
            peer.send_multipart((connection, reply))
            done = asked.result()
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_stop_ends_it_and_says_so(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar:
        assert sidecar.process is not None
        done = subprocess.Popen(
            [sys.executable, "-m", "hostkv.sidecar.cli", "stop", "--endpoint", sidecar.endpoint], stdout=subprocess.PIPE, text=True
        )
        assert sidecar.process.wait(PATIENCE_S) == 0
        out, _ = done.communicate(timeout=PATIENCE_S)
        assert done.returncode == 0
        assert f"pid {sidecar.pid} has ended" in out
        assert not sidecar.pool_path.exists()


def test_stop_of_nobody_is_done_already(tmp_path: Path) -> None:
    done = hostkv("stop", "--endpoint", f"ipc://{tmp_path}/control.sock")
    assert done.returncode == 0
    assert "nothing to stop" in done.stdout


def test_stop_does_not_signal_the_pid_that_a_killed_sidecar_left(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar:
        sidecar.kill()
        (sidecar.run_directory / "lock").write_text(f"{os.getpid()}\n")
        done = hostkv("stop", "--endpoint", sidecar.endpoint)
        assert done.returncode == 0
        assert "nothing to stop" in done.stdout


# ---- keys and TCP -------------------------------------------------------------------------------------------------------------------
def modes(directory: Path) -> dict[str, int]:
    return {str(path.relative_to(directory)): path.stat().st_mode & 0o777 for path in [directory, *directory.rglob("*")]}


def test_keygen_makes_keys_that_nobody_else_can_read_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        done = hostkv("keygen", str(tmp_path / "keys"), "--client", "a", "--client", "b")
    finally:
        os.umask(before)
    assert (done.returncode, done.stderr) == (0, "")
    assert modes(tmp_path / "keys") == {
        ".": 0o700,
        "clients": 0o700,
        "server.key": 0o644,
        "server.key_secret": 0o600,
        **{f"clients/{name}.key": 0o644 for name in "ab"},
        **{f"clients/{name}.key_secret": 0o600 for name in "ab"},
    }
    assert f"tcp: {{listen: HOST:PORT, keys: {tmp_path}/keys}}" in done.stdout


def test_keygen_keeps_what_is_there_and_says_so(tmp_path: Path) -> None:
    assert "No client has a key yet" in hostkv("keygen", str(tmp_path / "keys")).stdout
    before = (tmp_path / "keys" / "server.key_secret").read_bytes()
    done = hostkv("keygen", str(tmp_path / "keys"), "--client", "later")
    assert done.returncode == 0
    assert f"kept {tmp_path}/keys/server.key" in done.stdout
    assert f"made {tmp_path}/keys/clients/later.key" in done.stdout
    assert "No client has a key yet" not in done.stdout
    assert (tmp_path / "keys" / "server.key_secret").read_bytes() == before


@pytest.mark.parametrize("name", ["", "..", "a/b", "-x", "a b", "x" * 101])
def test_keygen_refuses_names_that_are_no_file_names(tmp_path: Path, name: str) -> None:
    done = hostkv("keygen", str(tmp_path / "keys"), f"--client={name}")
    assert (done.returncode, repr(name) in done.stderr) == (2, True)
    assert not (tmp_path / "keys").exists()


def test_keygen_names_half_of_a_pair_and_a_directory_that_others_may_write_to(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    (keys / "server.key").write_text("half")
    done = hostkv("keygen", str(keys))
    assert (done.returncode, f"{keys}/server.key is there without its other half" in done.stderr) == (2, True)
    keys.chmod(0o777)
    done = hostkv("keygen", str(keys))
    assert (done.returncode, f"{keys} must be a directory" in done.stderr) == (2, True)


def unused_port() -> int:
    """Of those that no connection gets of itself: it stays unused until somebody wants just this one."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sidecar, str, Path]]:
    """A sidecar on TCP, its endpoint there, and its keys, with those of client a."""
    directory = tmp_path_factory.mktemp("tcp")
    assert hostkv("keygen", f"{directory}/keys", "--client", "a").returncode == 0
    address = f"127.0.0.1:{unused_port()}"
    with Sidecar(directory / "sidecar", config=f"tcp: {{listen: '{address}', keys: {directory}/keys}}") as sidecar:
        yield sidecar, f"tcp://{address}", directory / "keys"


def test_status_over_tcp_takes_the_clients_key_and_the_servers(remote: tuple[Sidecar, str, Path]) -> None:
    sidecar, endpoint, keys = remote
    done = answered(
        "status", "--json", "--endpoint", endpoint, "--key", f"{keys}/clients/a.key_secret", "--server-key", f"{keys}/server.key"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["pid"] == sidecar.pid


def test_status_over_tcp_with_a_key_that_the_sidecar_does_not_know_is_told(remote: tuple[Sidecar, str, Path], tmp_path: Path) -> None:
    _, endpoint, keys = remote
    hostkv("keygen", str(tmp_path), "--client", "stranger")
    done = hostkv(
        "status", "--endpoint", endpoint, "--key", f"{tmp_path}/clients/stranger.key_secret", "--server-key", f"{keys}/server.key"
    )
    assert done.returncode == 1
    assert "does not know this client's key" in done.stderr


@pytest.mark.parametrize("flags", [[], ["--key", "a"], ["--server-key", "a"]])
def test_status_over_tcp_without_keys_names_the_flags(flags: list[str]) -> None:
    done = hostkv("status", "--endpoint", "tcp://127.0.0.1:9401", *flags)
    assert done.returncode == 2
    assert "--key NAME.key_secret and --server-key server.key" in done.stderr


def test_keys_belong_to_tcp_only(sidecar: Sidecar) -> None:
    done = hostkv("status", "--endpoint", sidecar.endpoint, "--key", "a", "--server-key", "b")
    assert (done.returncode, "over ipc:// neither" in done.stderr) == (2, True)


@pytest.mark.parametrize("content", [None, "", 'curve\n    public-key = "short"\n    secret-key = "short"\n'])
def test_a_file_that_is_no_key_is_named(tmp_path: Path, content: str | None) -> None:
    key = tmp_path / "a.key_secret"
    if content is not None:
        key.write_text(content)
    done = hostkv("status", "--endpoint", "tcp://127.0.0.1:9401", "--key", str(key), "--server-key", str(key))
    assert (done.returncode, str(key) in done.stderr) == (2, True)
    assert "Traceback" not in done.stderr


def test_the_public_half_is_no_key_for_a_client(tmp_path: Path) -> None:
    hostkv("keygen", str(tmp_path))
    key = f"{tmp_path}/server.key"
    done = hostkv("status", "--endpoint", "tcp://127.0.0.1:9401", "--key", key, "--server-key", key)
    assert (done.returncode, "holds no secret key" in done.stderr) == (2, True)


@pytest.mark.parametrize("endpoint", ["tcp://", "tcp://host", "tcp://host:0", "tcp://host:99999", "tcp://a b:1"])
def test_a_tcp_endpoint_is_a_host_and_a_port(tmp_path: Path, endpoint: str) -> None:
    hostkv("keygen", str(tmp_path), "--client", "a")
    done = hostkv("status", "--endpoint", endpoint, "--key", f"{tmp_path}/clients/a.key_secret", "--server-key", f"{tmp_path}/server.key")
    assert (done.returncode, "HOST:PORT" in done.stderr) == (2, True)


def test_bench_is_the_connectors_and_gets_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: called.append(arguments) or sys.exit(0))
    with pytest.raises(SystemExit):
        cli.main(["bench", "--json", "--help"])
    assert called == [[sys.executable, "-m", "hostkv.connector.bench", "--json", "--help"]]


@pytest.mark.parametrize(
    "environment, uid, expected",
    [
        ({"HOSTKV_ENDPOINT": "ipc:///a/s", "XDG_RUNTIME_DIR": "/x"}, 0, "ipc:///a/s"),
        ({"XDG_RUNTIME_DIR": "/x"}, 0, "ipc:///x/hostkv/control.sock"),
        ({}, 0, "ipc:///run/hostkv/control.sock"),
        ({"HOSTKV_ENDPOINT": ""}, 0, "ipc:///run/hostkv/control.sock"),
        ({}, 1000, None),
    ],
)
def test_where_the_endpoint_is_looked_for(environment: dict[str, str], uid: int, expected: str | None) -> None:
    assert default_endpoint(environment, uid) == expected


def test_the_page_shows_what_is_held_and_by_whom() -> None:
    core = Driver()
    core.hello(b"A")
    core.write(b"A", core.register(b"A", make_layout("org/na\x1bme")), [1, 2])
    text = page(core.core.status(core.now_ns))
    assert "2 ready" in text
    assert "2 blocks of 1 x 64 KiB  org/na?me" in text
    assert "c1 (pid 1)" in text
    core.close()


def test_the_page_shows_hits_and_misses() -> None:
    core = Driver()
    core.hello(b"A")
    index = core.register(b"A")
    core.write(b"A", index, [1])
    core.ask(b"A", m.Acquire(index, 1, keys(1, 2, 3, 4)))
    assert "1 acquired, 3 missed (25% of 4 asked for)" in page(core.core.status(core.now_ns))
    core.close()


def test_the_page_shows_who_hangs_ends_and_has_a_device() -> None:
    core = Driver()
    core.hello(b"A", client=1, session=1)
    core.hello(b"B", client=2, session=2)
    core.locks[ident(1)] = 7
    for _ in range(5):
        core.watch(10**9)
    assert core.core.attach(ident(2))
    core.die(2)
    text = page(core.core.status(core.now_ns))
    assert "c1 (pid 1, hung for 4.0s)" in text
    assert "c2 (pid 2, device, ending)" in text
    core.close()


def test_the_page_shows_what_checksums_and_limits_did() -> None:
    core = Driver()
    status = core.core.status(core.now_ns)
    assert "verify" not in page(status)
    assert "eviction: lru" in page(status)
    status["pool"]["verify"] = True
    status["items"] |= {"throttled": 11, "discarded": 12}
    status["sessions_silenced"] = 13
    text = page(status)
    for words in ("verify: load", "11 throttled", "12 discarded", "13 lost their pins because they hung"):
        assert words in text
    core.close()


# ---- the page of a disk tier --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tiered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The status of a sidecar with two directories and four blocks, all on disk."""
    path = tmp_path_factory.mktemp("tiered")
    with Sidecar(path, config=f"tiers: [{{type: disk, path: [{path}/a, {path}/b], size: 64MiB}}]") as sidecar:
        with waiting_as(PATIENT_CLIENTS), Client(sidecar.endpoint) as client:
            sidecar.until(client.serving)
            store = client.open(Layout(model="m", revision="1", kv_dtype="uint8", layout_id="opaque", block_tokens=16, shard_bytes=1 << 20))
            store.wait(store.dump([b"a", b"b", b"c", b"d"], 0, [[bytes(1 << 20)]] * 4))
            sidecar.until(lambda: sidecar.status()["tiers"][0]["spilled"] == 4)
            sidecar.until(lambda: all(each["state"] == "serving" for each in sidecar.status()["tiers"][0]["directories"]))
        yield sidecar.status()


@pytest.fixture
def tier(tiered: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """That of its tier, to be changed by one test."""
    before = copy.deepcopy(tiered)
    (tier,) = tiered["tiers"]
    yield tier
    tiered.update(before)


def test_the_page_shows_what_lies_on_disk_and_where(tiered: dict[str, Any], tier: dict[str, Any]) -> None:
    text = page(tiered)
    assert "4 MiB of 64 MiB  by " in text
    for directory in tier["directories"]:
        blocks = directory["blocks"]
        assert f"{directory['path']}  serving; {size_text(blocks << 20)} of " in text
        assert f", {blocks} blocks; read 0.0 GB, written 0.0 GB\n" in text, "no counter of faults is shown that is 0"
    assert "4 blocks written, 0 on their way, 0 in the pool only (0 B)" in text
    assert "0 acquired (0 from the pool, 0 from disk)" in text
    assert "->" not in text


def test_the_page_without_a_tier_says_nothing_of_disks() -> None:
    core = Driver()
    assert "disk" not in page(core.core.status(core.now_ns))
    core.close()


def test_the_page_shows_what_a_directory_is_up_to(tiered: dict[str, Any], tier: dict[str, Any]) -> None:
    a, b = tier["directories"]
    a |= {
        "state": "recovering",
        "slabs_recovered": 3,
        "blocks_recovered": 77,
        "slabs": 8,
        "direct": False,
        "slabs_wanted": 9,
        "silent_s": 4.0,
    }
    b |= {
        "state": "quarantine",
        "reason": "I/O of an earlier sidecar is under way on x\x1b",
        "retry_in_s": 0.2,
        "read_bytes": 2_340_000_000,
    }
    text = page(tiered)
    assert f"{a['path']}  recovering 3 of 8 slabs, 77 blocks so far; " in text
    assert "room for 8 of 9 slabs only; buffered (no O_DIRECT there); " in text
    assert "no answer for 4.0s" in text
    assert f"{b['path']}  quarantine: I/O of an earlier sidecar is under way on x?; looked at again in 0.2s; " in text
    assert "read 2.3 GB" in text


def test_the_page_shows_a_directory_that_failed_and_when_it_is_tried_again(tiered: dict[str, Any], tier: dict[str, Any]) -> None:
    a, b = tier["directories"]
    for name in ("used_bytes", "total_bytes", "blocks"):
        del a[name]  # it is out of the index
    a |= {"state": "failed", "reason": "Input/output error, 8 errors in a row", "retry_in_s": 61.0, "errors": 8, "failures": 1}
    text = page(tiered)
    assert f"{a['path']}  FAILED: Input/output error, 8 errors in a row; looked at again in 1m 1s; " in text
    assert ", 8 errors, 1 times out of service" in text
    assert "->" not in text, "the other one serves"
    b["state"] = "failed"
    assert "-> no directory serves" in page(tiered)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"engine": "threads", "engine_why": "built without liburing"}, "by threads and not io_uring (built without liburing)"),
        ({"spilling": 5, "spills_failed": 6, "too_large": 7}, "5 on their way, 0 in the pool only (0 B), 6 failed, 7 too large for a slab"),
        ({"reading": 5, "wanted": 6, "corrupt": 7}, "5 on their way, 6 asked for, 7 corrupt"),
        ({"not_quiet": ["/x", "/y"]}, "-> an earlier sidecar may still be reading or writing in /x, /y"),
    ],
)
def test_the_page_shows_what_a_tier_does(tiered: dict[str, Any], tier: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    assert words not in page(tiered)
    tier |= changes
    assert words in page(tiered)


def test_the_page_says_what_to_do_when_disks_do_not_keep_up_or_the_index_is_full(tiered: dict[str, Any], tier: dict[str, Any]) -> None:
    tiered["pool"]["used_bytes"] = 60 << 20
    tiered["blocks"] |= {"total": 60, "dirty": 31}
    assert "31 in the pool only (31 MiB)" in page(tiered)
    assert "->" not in page(tiered)
    tiered["blocks"]["dirty"] = 33
    tiered["items"]["evicted_dirty"] = 9
    assert "-> most of the pool is not on disk" in page(tiered)
    assert "33 in the pool only (33 MiB), 9 evicted before they were on disk" in page(tiered)
    tier["index"]["max_blocks"] = 4
    assert "-> the index is full" in page(tiered)
    assert "raise max_blocks of the tier over 4" in page(tiered)


def test_the_page_tells_from_where_blocks_came(tiered: dict[str, Any], tier: dict[str, Any]) -> None:
    tiered["items"]["acquired"] = 10
    tier["promoted"] = 4
    assert "10 acquired (6 from the pool, 4 from disk)" in page(tiered)
    tier["promoted"] = 11  # prefetched, and never asked for
    assert "10 acquired (0 from the pool, 10 from disk)" in page(tiered)


@pytest.mark.parametrize("style", ["text", "json"])
def test_the_log_is_one_line_per_event(tmp_path: Path, style: str) -> None:
    with Sidecar(tmp_path, config=f"log: {{format: {style}, level: debug}}") as sidecar:
        sidecar.stop()
        lines = [line for line in sidecar.log().splitlines() if not line.startswith("hostkv: ")]
    assert len(lines) == 2
    if style == "json":
        assert [json.loads(line)["event"] for line in lines] == ["ready", "stopped"]
    else:
        assert " info ready adopted=0 " in lines[0]
