"""The command line: what each command prints and exits with, against a real sidecar and against none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from hostkv.schemas.endpoint import default_endpoint
from hostkv.sidecar import cli
from hostkv.sidecar.page import page

from tests.cores import Driver, keys, make_layout
from tests.support import PATIENCE_S, Sidecar, hostkv, status_json


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    with Sidecar(tmp_path_factory.mktemp("cli")) as sidecar:
        yield sidecar


def test_version() -> None:
    done = hostkv("--version")
    assert (done.returncode, done.stdout) == (0, f"hostkv {version('hostkv')}\n")


@pytest.mark.parametrize("arguments", [[], ["sevre"], ["serve", "--pool"], ["status", "--bogus"], ["stop", "now"]])
def test_wrong_arguments_exit_with_2(arguments: list[str]) -> None:
    done = hostkv(*arguments)
    assert done.returncode == 2
    assert "usage: hostkv" in done.stderr


@pytest.mark.parametrize("command", ["serve", "status", "stop"])
def test_help_names_the_endpoint(command: str) -> None:
    done = hostkv(command, "--help")
    assert done.returncode == 0
    assert "--endpoint" in done.stdout


def test_status_prints_a_page(sidecar: Sidecar) -> None:
    done = hostkv("status", "--endpoint", sidecar.endpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"pid {sidecar.pid}" in done.stdout
    assert "64 MiB" in done.stdout


def test_status_takes_the_endpoint_from_the_environment(sidecar: Sidecar) -> None:
    done = hostkv("status", "--json", HOSTKV_ENDPOINT=sidecar.endpoint)
    assert json.loads(done.stdout)["pid"] == sidecar.pid


def test_the_flag_wins_over_the_environment(sidecar: Sidecar) -> None:
    done = hostkv("status", "--json", "--endpoint", sidecar.endpoint, HOSTKV_ENDPOINT="ipc:///nowhere/control.sock")
    assert json.loads(done.stdout)["pid"] == sidecar.pid


def test_status_json_is_the_whole_map(sidecar: Sidecar) -> None:
    assert set(status_json(sidecar.endpoint)) == set(sidecar.status())


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


@pytest.mark.parametrize("command", ["status", "stop"])
@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "nonsense", "ipc://relative", "ipc:///" + "x" * 200])
def test_a_wrong_endpoint_exits_with_2(command: str, endpoint: str) -> None:
    done = hostkv(command, "--endpoint", endpoint)
    assert done.returncode == 2
    assert endpoint in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["status", "stop"])
def test_a_run_directory_that_is_none_of_ours_is_told(tmp_path: Path, command: str) -> None:
    (tmp_path / "lock").symlink_to("elsewhere")
    done = hostkv(command, "--endpoint", f"ipc://{tmp_path}/control.sock")
    assert done.returncode == 2
    assert "cannot open" in done.stderr
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
    from hostkv.schemas import messages as m

    core = Driver()
    core.hello(b"A")
    index = core.register(b"A")
    core.write(b"A", index, [1])
    core.ask(b"A", m.Acquire(index, 1, keys(1, 2, 3, 4)))
    assert "1 acquired, 3 missed (25% of 4 asked for)" in page(core.core.status(core.now_ns))
    core.close()


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
