"""Who may use a sidecar: its own user, the members of the group that it is given, and who has a key over TCP; and nobody else. Processes of
several users are real ones, so those tests need root."""

from __future__ import annotations

import os
import random
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import zmq
import zmq.auth
from hostkv.schemas import messages as m

from tests.crash.puppet import Puppet
from tests.support import LIFE_S, PATIENCE_S, Sidecar, hostkv, until

IDS = [b"%d" % i for i in range(4)]
OWNER, MEMBER, OTHER_MEMBER, STRANGER, GROUP = 54321, 54322, 54323, 54324, 54400


def as_user(uid: int, *groups: int) -> list[str]:
    joined = ["--groups", ",".join(map(str, groups))] if groups else ["--clear-groups"]
    return ["setpriv", "--reuid", str(uid), "--regid", str(uid), *joined]


class User(Puppet):
    """A puppet of another user."""

    def __init__(self, sidecar: Owned, uid: int, *groups: int) -> None:
        super().__init__(sidecar.endpoint, as_user(uid, *groups), sidecar.python)


class Owned(Sidecar):
    """A sidecar of another user. `wrapper` is the command line in front of it."""

    def __init__(self, directory: Path, wrapper: list[str], config: str, umask: int = 0o022) -> None:
        self.wrapper, self.umask, self.python = wrapper, umask, f"{directory}/venv/bin/python"
        super().__init__(directory, config=config, start=False)

    def launch(self) -> subprocess.Popen[bytes]:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.wrapper, self.python, "-m", "hostkv.sidecar.cli", "serve", *self.arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                umask=self.umask,
                cwd="/",
            )
        return self.process

    def configure(self, config: str) -> None:
        (self.directory / "hostkv.yaml").write_text(config)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of OWNER that everybody can reach, as pytest's own and maybe Python's cannot be; so Python is there, as venv/."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be several users")
    with tempfile.TemporaryDirectory(prefix="hostkv-") as name, ExitStack() as ends:
        path = Path(name)
        path.chmod(0o755)
        os.chown(path, OWNER, OWNER)
        base, packages = path / "base", Path(zmq.__file__).parents[1]
        base.mkdir()
        subprocess.run(["mount", "--bind", sys.base_prefix, base], check=True)
        ends.callback(subprocess.run, ["umount", "--lazy", base], check=True)
        library = path / "venv" / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
        library.parent.mkdir(parents=True)
        library.symlink_to(packages)
        (path / "venv" / "pyvenv.cfg").write_text(f"home = {base}/bin\n")
        (path / "venv" / "bin").mkdir()
        (path / "venv" / "bin" / "python").symlink_to(base / Path(os.path.realpath(sys.executable)).relative_to(sys.base_prefix))
        tried = subprocess.run(
            [*as_user(STRANGER), "env", path / "venv" / "bin" / "python", "-c", "import hostkv.connector"],
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        if tried.returncode:
            assert "ermission denied" in tried.stderr, tried.stderr
            pytest.skip(f"other users may not read this checkout: {tried.stderr.splitlines()[-1]}")
        yield path


@contextmanager
def shared(place: Path, umask: int = 0o022) -> Iterator[Owned]:
    with Owned(place, as_user(OWNER, GROUP), f"group: {GROUP}\n", umask) as sidecar:
        sidecar.start()
        yield sidecar


def access(path: Path) -> tuple[int, int, int]:
    info = path.lstat()
    return info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode)


def refused(sidecar: Sidecar) -> str:
    process = sidecar.launch()
    out, _ = process.communicate(timeout=LIFE_S)
    assert (process.returncode, out) == (2, b""), sidecar.log()
    assert "Traceback" not in sidecar.log()
    assert not sidecar.pool_path.exists()
    return sidecar.log().splitlines()[-1]


# ---- a group ---------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_with_a_group_every_mode_is_as_told_also_after_somebody_changed_it(place: Path, umask: int) -> None:
    (place / "sidecar.log").touch()
    with shared(place, umask) as sidecar:
        run = sidecar.run_directory
        wanted = {
            run: 0o750,
            run / "members": 0o3770,
            run / "control.sock": 0o660,
            run / "attach.sock": 0o660,
            run / "lock": 0o640,
            sidecar.pool_path: 0o660,
            sidecar.tables_path: 0o640,
        }
        assert {path: access(path) for path in wanted} == {path: (OWNER, GROUP, mode) for path, mode in wanted.items()}
        sidecar.kill()
        for path in wanted:
            with suppress(FileNotFoundError):
                os.chown(path, OWNER, OWNER)
                path.chmod(0o700)
        assert sidecar.start()["adopted"] == "0"
        assert "earlier pool replaced" not in sidecar.log()
        assert {path: access(path) for path in wanted} == {path: (OWNER, GROUP, mode) for path, mode in wanted.items()}
        sidecar.kill()
        sidecar.configure("")
        sidecar.start()
        for path in (run / "members", run / "control.sock", run / "attach.sock", run / "lock", sidecar.pool_path, sidecar.tables_path):
            assert access(path)[2] & 0o077 == 0, f"{path} is nobody else's without a group"


def test_a_member_of_the_group_saves_loads_and_dies_and_what_it_held_comes_back(place: Path) -> None:
    with (
        shared(place) as sidecar,
        User(sidecar, MEMBER, GROUP) as first,
        User(sidecar, OTHER_MEMBER, GROUP) as second,
    ):
        assert first.do("answer = client.down_reason") == ""
        assert first.do(f"answer = save(store, {IDS!r})") == ["committed"] * len(IDS)
        assert second.do(f"answer = load(store, {IDS!r})") == [True] * len(IDS)
        locks = {access(path) for path in (sidecar.run_directory / "members").iterdir()}
        assert locks == {(MEMBER, GROUP, 0o640), (OTHER_MEMBER, GROUP, 0o640)}
        first.do("reserve(client, store, [b'x'], 5); store.acquire([b'0'], 6); client.attach_device()")
        os.kill(sidecar.pid, 1)
        until(lambda: sidecar.log().count(" ready ") == 2, sidecar.log)
        first.do("while not client.serving(): time.sleep(0.01)")
        assert (sidecar.status()["shards_in_flight"], sidecar.status()["pins"]) == (1, 1)
        first.kill()
        until(lambda: (sidecar.status()["shards_in_flight"], sidecar.status()["pins"]) == (0, 0))
        second.do("while not client.serving(): time.sleep(0.01)")
        assert second.do("answer = save(store, [b'x'])") == ["committed"]


def test_a_member_of_the_group_can_change_neither_the_tables_nor_the_locks_of_others(place: Path) -> None:
    with (
        shared(place) as sidecar,
        User(sidecar, MEMBER, GROUP) as member,
        User(sidecar, OTHER_MEMBER, GROUP),
    ):
        theirs = next(path for path in (sidecar.run_directory / "members").iterdir() if path.lstat().st_uid == OTHER_MEMBER)
        for attempt in (
            f"os.open({str(sidecar.tables_path)!r}, os.O_RDWR)",
            f"os.unlink({str(sidecar.tables_path)!r})",
            f"os.unlink({str(sidecar.pool_path)!r})",
            f"os.open({str(theirs)!r}, os.O_RDWR)",
            f"os.unlink({str(theirs)!r})",
            f"os.unlink({str(sidecar.run_directory / 'control.sock')!r})",
            f"os.open({str(sidecar.run_directory / 'lock')!r}, os.O_RDWR)",
            f"os.kill({sidecar.pid}, 9)",
        ):
            assert member.do(f"try: {attempt}\nexcept PermissionError: answer = 'refused'") == "refused", attempt
        assert member.do("answer = client.serving()")


def test_a_stranger_is_refused_and_runs_uncached(place: Path) -> None:
    with shared(place) as sidecar, User(sidecar, STRANGER) as stranger:
        serving, why = stranger.do("answer = client.serving(), client.down_reason")
        assert serving is False
        assert "Permission denied" in why
        assert stranger.do("answer = store.lookup([b'0'])") == [False]
        for path in (sidecar.pool_path, sidecar.tables_path, sidecar.run_directory / "members"):
            assert stranger.do(f"try: os.open({str(path)!r}, os.O_RDONLY)\nexcept PermissionError: answer = 'refused'") == "refused"


def test_a_group_that_the_sidecar_is_no_member_of_is_refused_with_the_fix(place: Path) -> None:
    with Owned(place, as_user(OWNER), f"group: {GROUP}\n") as sidecar:
        message = refused(sidecar)
        assert f"to group {GROUP}" in message
        assert "usermod -aG" in message


def test_a_run_directory_or_a_pool_of_somebody_else_is_refused(place: Path) -> None:
    with Owned(place, as_user(OWNER), "") as sidecar:
        for path in (sidecar.run_directory, sidecar.run_directory / "members"):
            path.mkdir(mode=0o700)
            os.chown(sidecar.run_directory, OWNER, OWNER)
            os.chown(path, MEMBER, MEMBER)
            assert f"{path} belongs to uid {MEMBER}" in refused(sidecar)
            os.chown(path, OWNER, OWNER)
        for path in (sidecar.tables_path, sidecar.pool_path):
            sidecar.start()
            sidecar.kill()
            os.chown(path, MEMBER, MEMBER)
            process = sidecar.launch()
            assert process.wait(PATIENCE_S) == 2
            assert f"{path} belongs to uid {MEMBER}" in sidecar.log().splitlines()[-1]
            assert path.exists()
            os.chown(path, OWNER, OWNER)


# ---- TCP -------------------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """The sidecar's, of a client it knows (alice), and of one that it does not (mallory, in another directory)."""
    assert hostkv("keygen", str(tmp_path / "keys"), "--client", "alice").returncode == 0
    assert hostkv("keygen", str(tmp_path / "others"), "--client", "mallory").returncode == 0
    return tmp_path / "keys"


def free_port() -> int:
    """Of those that the system gives to nobody who does not ask for them by number, where there are such."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.choice(range(max(1024, given // 2), given) or range(1024, 1 << 16))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@pytest.fixture
def listening(tmp_path: Path, keys: Path) -> Iterator[Sidecar]:
    with Sidecar(tmp_path, config=f"tcp: {{listen: '127.0.0.1:{free_port()}', keys: {keys}}}", start=False) as sidecar:
        yield sidecar


def address(sidecar: Sidecar) -> str:
    text = (sidecar.directory / "hostkv.yaml").read_text()
    return "tcp://" + text.split("'")[1]


@contextmanager
def dealer(endpoint: str, key: Path | None = None, server: Path | None = None) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    if key is not None and server is not None:
        socket.curve_publickey, secret = zmq.auth.load_certificate(key)
        assert secret is not None
        socket.curve_secretkey = secret
        socket.curve_serverkey, _ = zmq.auth.load_certificate(server)
    try:
        socket.connect(endpoint)
        yield socket
    finally:
        socket.close()
        context.term()


STATUS = m.encode_request(m.StatusRequest(), 1)


def test_tcp_answers_only_who_has_a_key_that_it_knows(listening: Sidecar, keys: Path) -> None:
    listening.start()
    alice, server = keys / "clients" / "alice.key_secret", keys / "server.key"
    mallory, wrong = keys.parent / "others" / "clients" / "mallory.key_secret", keys.parent / "others" / "server.key"
    tcp = address(listening)
    with (
        dealer(tcp) as keyless,
        dealer(tcp, alice, wrong) as mistaken,
        dealer(tcp, mallory, server) as unknown,
        dealer(tcp, alice, server) as known,
        dealer(listening.endpoint) as local,
    ):
        for client in (keyless, mistaken, unknown, known, local):
            with suppress(zmq.Again):  # what was refused already takes nothing
                client.send(STATUS, zmq.NOBLOCK)
        for client in (local, known):
            assert client.poll(int(PATIENCE_S * 1000))
            _, _, reply = m.decode_reply(client.recv(), m.StatusRequest())
            assert isinstance(reply, m.StatusReply)
        for _ in range(100):  # whoever may has been answered many times by now
            for client in (local, known):
                client.send(STATUS)
                assert client.poll(int(PATIENCE_S * 1000))
                client.recv()
        for client in (keyless, mistaken, unknown):
            assert not client.poll(200)
        assert listening.status()["requests"]["status"] == 2 + 200 + 1, "not one request of the others came through"

    def asked(key: Path) -> int:
        return hostkv("status", "--endpoint", tcp, "--key", str(key), "--server-key", str(server)).returncode

    until(lambda: asked(alice) == 0)
    assert asked(mallory) == 1
    with Puppet(listening.endpoint) as engine:
        assert engine.do("answer = save(store, [b'0'])") == ["committed"], "the Unix socket knows nothing of keys"


def test_tcp_goes_on_after_a_restart_on_the_same_pool(listening: Sidecar, keys: Path) -> None:
    listening.start()
    os.kill(listening.pid, 1)
    until(lambda: listening.log().count(" ready ") == 2, listening.log)
    with dealer(address(listening), keys / "clients" / "alice.key_secret", keys / "server.key") as known:
        known.send(STATUS)
        assert known.poll(int(PATIENCE_S * 1000))
    assert listening.stop() == 0
    assert not listening.pool_path.exists()


@pytest.mark.parametrize(
    "change, says",
    [
        ("no secret", "cannot read"),
        ("open secret", "chmod 0600"),
        ("public in its place", "holds no secret key"),
        ("junk", "is no key file"),
        ("no client", "hostkv keygen"),
        ("junk client", "No public key found"),
        ("port taken", "cannot bind tcp://"),
    ],
)
def test_tcp_without_what_it_needs_is_refused_by_name(listening: Sidecar, keys: Path, change: str, says: str) -> None:
    secret, client = keys / "server.key_secret", keys / "clients" / "alice.key"
    with socket.socket() as taken:
        if change == "no secret":
            secret.unlink()
        elif change == "open secret":
            secret.chmod(0o644)
        elif change == "public in its place":
            secret.write_bytes((keys / "server.key").read_bytes())
        elif change == "junk":
            secret.write_bytes(zlib.compress(b"junk"))
        elif change == "no client":
            client.unlink()
        elif change == "junk client":
            client.write_text("junk")
        else:
            host, port = address(listening).removeprefix("tcp://").split(":")
            taken.bind((host, int(port)))
            taken.listen()
        assert says in refused(listening)
        assert not listening.tables_path.exists()
