"""The command line. Environment and argv are read here and nowhere else.

    serve   runs the sidecar in the foreground (serve.py)
    status  asks a running one and prints a page (page.py) or JSON
    stop    SIGTERM to the process that holds the run directory, and waits until it is gone
    bench   is the connector's, run as a module of its own: the sidecar never imports the connector

Exit codes: 0 done, 1 nobody answers or it did not end, 2 wrong configuration, arguments or environment."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from importlib.metadata import version

from ..schemas.endpoint import default_endpoint
from . import rundir
from .config import KEYS, load
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

            flags = {"endpoint": options.endpoint, "pool.size": options.pool_size, "pool.name": options.pool_name}
            if serve(load(options.config, flags, default_endpoint(os.environ, os.geteuid())), version("hostkv")):
                os.execv(sys.executable, [sys.executable, "-m", "hostkv.sidecar.cli", *arguments])  # the locks are free with it
            return 0
        endpoint = _endpoint(options.endpoint)
        return _status(endpoint, options.json) if options.command == "status" else _stop(endpoint)
    except StartupError as error:
        print(f"hostkv: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hostkv", description="One KV cache per host for every LLM engine on it.")
    parser.add_argument("--version", action="version", version=f"hostkv {version('hostkv')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="serve|status|stop|bench")
    serve = commands.add_parser(
        "serve",
        help="run the sidecar in the foreground",
        description="Runs the sidecar in the foreground. SIGTERM removes the pool; SIGHUP starts anew on the same one (also a new "
        "version or configuration); after SIGKILL the next start finds everything again.",
        epilog=f"Keys of the file: {', '.join(KEYS)}. Capacities: blocks pool.max_blocks; pins and shards in flight alike, within bounds; "
        "1024 clients; 1024 namespaces. `hostkv status` shows them.",
    )
    serve.add_argument("--config", metavar="FILE", help="YAML file; flags win over it")
    serve.add_argument("--pool-size", metavar="SIZE", help="payload bytes in shared memory, such as 16GiB (default 4GiB)")
    serve.add_argument("--pool-name", metavar="NAME", help="files /dev/shm/NAME and /dev/shm/NAME.tables (default hostkv)")
    status = commands.add_parser("status", help="show what a running sidecar holds, for whom, and how well it works")
    status.add_argument("--json", action="store_true", help="print everything as JSON")
    stop = commands.add_parser("stop", help="end a running sidecar and remove its pool")
    commands.add_parser("bench", help="measure this machine beside its own limits (hostkv bench --help)", add_help=False)
    for command in (serve, status, stop):
        command.add_argument(
            "--endpoint", metavar="URL", help="ipc:///run/directory/control.sock (default: HOSTKV_ENDPOINT, else the run directory's)"
        )
    return parser


def _endpoint(given: str | None) -> str:
    return load(None, {"endpoint": given}, default_endpoint(os.environ, os.geteuid())).endpoint


def _status(endpoint: str, as_json: bool) -> int:
    from .ask import ask_status
    from .page import page

    found = ask_status(endpoint, STATUS_TIMEOUT_MS)
    if found is None:
        pid = rundir.holder(endpoint)
        why = "no sidecar runs there" if pid is None else f"pid {pid or '?'} holds the run directory but does not answer"
        print(f"hostkv: no answer from {endpoint} within {STATUS_TIMEOUT_MS // 1000} s: {why}", file=sys.stderr)
        return 1
    print(json.dumps(found, indent=2) if as_json else page(found))
    return 0


def _stop(endpoint: str) -> int:
    """Sends SIGTERM and waits until the lock is free, which is after pool and socket are gone."""
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
                f"hostkv: pid {pid} has not ended within {STOP_TIMEOUT_S:.0f} s; kill -9 {pid} ends it and keeps the pool", file=sys.stderr
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


if __name__ == "__main__":
    sys.exit(main())
