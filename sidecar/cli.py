"""The command line. Environment and argv are read here and nowhere else.

    serve   runs the sidecar in the foreground (serve.py)
    status  asks a running one (ask.py) and prints a page (page.py) or JSON
    stop    SIGTERM to the process that holds the run directory, and waits until it is gone
    clear   empties pool and tier of a running one, or those that one left (fsck.py)
    fsck    checks, and repairs, a pool and a disk tier that no sidecar serves (fsck.py)
    doctor  checks the host (doctor.py)
    keygen  makes the keys for TCP (keygen.py)
    simulate  replays a trace of requests against pools and disks (simulate.py)
    bench   is the connector's, run as a module of its own: the sidecar never imports the connector

Exit codes: 0 done, 1 nobody answers, it did not end, or faults were found, 2 wrong configuration, arguments or environment."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from importlib.metadata import version

from ..schemas.endpoint import default_endpoint
from . import rundir
from .config import DEFAULTS, KEYS, Config, load, tcp_address
from .errors import StartupError

STATUS_TIMEOUT_MS = 2000
STOP_TIMEOUT_S, STOP_PAUSE_S = 30.0, 0.05


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["bench"]:
        os.execv(sys.executable, [sys.executable, "-m", "hostkv.connector.bench", *arguments[1:]])
    options = _parser().parse_args(arguments)
    try:
        if options.command == "serve":
            from .serve import serve

            again = [sys.executable, *sys.orig_argv[1:]]  # exactly what was started: -m would import from the working directory
            if serve(_config(options, options.pool_size), version("hostkv"), again):
                os.execv(sys.executable, again)  # the locks are free with it
            return 0
        return _COMMANDS[options.command](options)
    except StartupError as error:
        print(f"hostkv: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hostkv", description="One KV cache per host for every LLM engine on it.")
    parser.add_argument("--version", action="version", version=f"hostkv {version('hostkv')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(["serve", *_COMMANDS, "bench"]))
    serve = commands.add_parser(
        "serve",
        help="run the sidecar in the foreground",
        description="Runs the sidecar in the foreground. SIGTERM removes the pool; SIGHUP starts anew on the same one (also a new "
        "version or configuration); after SIGKILL the next start finds everything again.",
        epilog=f"Keys of the file: {', '.join(KEYS)}. Capacities: blocks pool.max_blocks; pins and shards in flight alike, within bounds; "
        "1024 clients; 1024 namespaces. `hostkv status` shows them.",
    )
    status = commands.add_parser("status", help="show what a running sidecar holds, for whom, and how well it works")
    status.add_argument("--json", action="store_true", help="print everything as JSON")
    status.add_argument("--key", metavar="FILE", help="over tcp://: the NAME.key_secret that hostkv keygen made for this client")
    status.add_argument("--server-key", metavar="FILE", help="over tcp://: the sidecar's server.key")
    stop = commands.add_parser("stop", help="end a running sidecar and remove its pool")
    clear = commands.add_parser("clear", help="forget every block, in memory and on disk: of a running sidecar, or what one left")
    fsck = commands.add_parser(
        "fsck",
        help="check a pool and a disk tier that no sidecar serves",
        description="Checks the pool and tables that no sidecar serves, and the directories of the disk tier that --config names (without: "
        "those that a killed sidecar had), and changes nothing. Reads every block that has a checksum. Exit codes: 0 sound or repaired, 1 "
        "faults found, 2 something cannot be looked at.",
    )
    fsck.add_argument(
        "--fix", action="store_true", help="repair it; remove a pool where no sidecar can ever serve it again and nobody uses it"
    )
    fsck.add_argument("--quick", action="store_true", help="tables, records and lists only; do not read the blocks")
    doctor = commands.add_parser("doctor", help="check this host: memory, limits, permissions, versions, leftovers, each with its fix")
    doctor.add_argument("--disk", metavar="DIR", action="append", default=[], help="also check a directory for the disk tier")
    keygen = commands.add_parser("keygen", help="make the keys that clients over TCP need")
    keygen.add_argument("directory", metavar="DIR", help="where the sidecar's keys lie (tcp.keys)")
    keygen.add_argument("--client", metavar="NAME", action="append", default=[], help="also make keys for this client")
    simulate = commands.add_parser(
        "simulate",
        help="hit rates of pool and disk sizes and eviction policies on a trace of requests",
        description="Replays a trace of requests against pools alone, and above disks that are larger, once per eviction policy; prints "
        "how many of the prompt tokens are reused beside the most that can be, and draws the curves (with matplotlib: pip install "
        "matplotlib).",
        epilog="SIZES: comma-separated, of bytes with a unit (64GiB,1TiB), of tokens without (500000,2000000). The trace has one JSON "
        "object a line: timestamp (ms), input_length (tokens), hash_ids (one per 512 tokens of the prompt; equal ids mean equal prefixes).",
    )
    simulate.add_argument("trace", metavar="TRACE", help="the file of the trace")
    simulate.add_argument(
        "--pool", metavar="SIZES", default="64GiB,128GiB,256GiB,512GiB,1TiB,2TiB,4TiB", help="of the pool (default %(default)s)"
    )
    simulate.add_argument("--disk", metavar="SIZES", default="512GiB,2TiB", help="of the disk below it, '' for none (default %(default)s)")
    simulate.add_argument(
        "--bytes-per-token",
        metavar="N",
        type=int,
        default=128 << 10,
        help="of KV, all layers and ranks (default %(default)s: 8 KV heads of 128, 32 layers, 16 bits)",
    )
    simulate.add_argument(
        "--png", metavar="FILE", help="where the curves are drawn (default: named like the trace, in the working directory)"
    )
    commands.add_parser("bench", help="measure this machine beside its own limits (hostkv bench --help)", add_help=False)
    for command in (serve, doctor):
        command.add_argument("--pool-size", metavar="SIZE", help="payload bytes in shared memory, such as 16GiB (default 4GiB)")
    for command in (serve, clear, fsck, doctor):
        command.add_argument("--config", metavar="FILE", help="YAML file; flags win over it")
        command.add_argument("--pool-name", metavar="NAME", help="files /dev/shm/NAME and /dev/shm/NAME.tables (default hostkv)")
    for command in (serve, status, stop, clear, fsck, doctor):
        command.add_argument(
            "--endpoint", metavar="URL", help="ipc:///run/directory/control.sock (default: HOSTKV_ENDPOINT, else the run directory's)"
        )
    return parser


def _config(options: argparse.Namespace, pool_size: str | None = None) -> Config:
    flags = {"endpoint": options.endpoint, "pool.size": pool_size, "pool.name": options.pool_name}
    return load(options.config, flags, default_endpoint(os.environ, os.geteuid()))


def _endpoint(given: str | None) -> str:
    return load(None, {"endpoint": given}, default_endpoint(os.environ, os.geteuid())).endpoint


def _status(options: argparse.Namespace) -> int:
    from .ask import NoAnswer, ask_status, load_keys
    from .page import page

    endpoint = options.endpoint or default_endpoint(os.environ, os.geteuid())
    remote = (endpoint or "").startswith("tcp://")
    if [bool(options.key), bool(options.server_key)] != [remote, remote]:
        raise StartupError(
            f"{endpoint}: over tcp:// both --key NAME.key_secret and --server-key server.key are needed (hostkv keygen makes them), "
            "over ipc:// neither"
        )
    keys = None
    if endpoint is not None and remote:
        endpoint, keys = tcp_address(endpoint), load_keys(options.key, options.server_key)
    else:
        endpoint = _endpoint(endpoint)
    try:
        found = ask_status(endpoint, STATUS_TIMEOUT_MS, keys)
    except NoAnswer:
        if remote:
            why = "no sidecar listens there, it is another one's server.key, or it does not know this client's key"
        else:
            pid = rundir.holder(endpoint)
            why = "no sidecar runs there" if pid is None else f"pid {pid or '?'} holds the run directory but does not answer"
        print(f"hostkv: no answer from {endpoint} within {STATUS_TIMEOUT_MS // 1000} s: {why}", file=sys.stderr)
        return 1
    print(json.dumps(found, indent=2) if options.json else page(found))
    return 0


def _stop(options: argparse.Namespace) -> int:
    """Sends SIGTERM and waits until the lock is free, which is after pool and socket are gone."""
    endpoint = _endpoint(options.endpoint)
    pid = rundir.holder(endpoint)
    if pid is None:
        print(f"hostkv: no sidecar runs at {endpoint}; nothing to stop")
        return 0
    if pid == 0 or not _signal(pid):
        print(f"hostkv: {endpoint} is held by a process that cannot be signalled from here (pid {pid or 'unknown'})", file=sys.stderr)
        return 1
    print(f"hostkv: SIGTERM sent to pid {pid}, waiting for it to end", flush=True)
    end = time.monotonic() + STOP_TIMEOUT_S
    while rundir.holder(endpoint) == pid:
        if time.monotonic() > end:
            print(
                f"hostkv: pid {pid} has not ended within {STOP_TIMEOUT_S:.0f} s; if it writes to disk what only its pool has, it goes on "
                "with that (its log tells how far it is), and another hostkv stop has it skip the rest, which is lost then",
                file=sys.stderr,
            )
            return 1
        time.sleep(STOP_PAUSE_S)
    print(f"hostkv: pid {pid} has ended, its pool is removed")
    return 0


def _signal(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGTERM)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _clear(options: argparse.Namespace) -> int:
    from .fsck import clear

    return clear(_config(options), named=_names_a_pool(options))


def _fsck(options: argparse.Namespace) -> int:
    from .fsck import fsck

    return fsck(_config(options), named=_names_a_pool(options), fix=options.fix, quick=options.quick)


def _names_a_pool(options: argparse.Namespace) -> bool:
    """Otherwise the pool is meant that the run directory's last sidecar had."""
    return options.config is not None or options.pool_name is not None


def _doctor(options: argparse.Namespace) -> int:
    from .doctor import doctor

    config = _config(options, options.pool_size)
    # What `clear` needs of the file is where pools lie; with it, it also empties the disk tier.
    given = [("--config", options.config if config.pool_path != DEFAULTS["pool.path"] else None), ("--endpoint", options.endpoint)]
    flags = "".join(f" {flag} {shlex.quote(value)}" for flag, value in given if value is not None)
    return doctor(config, options.disk, flags)


def _keygen(options: argparse.Namespace) -> int:
    from .keygen import keygen

    print(keygen(options.directory, options.client))
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from .simulate import simulate

    return simulate(options.trace, options.pool, options.disk, options.bytes_per_token, options.png)


_COMMANDS = {
    "status": _status,
    "stop": _stop,
    "clear": _clear,
    "fsck": _fsck,
    "doctor": _doctor,
    "keygen": _keygen,
    "simulate": _simulate,
}


if __name__ == "__main__":
    sys.exit(main())
