"""Real SGLang servers for the tests: serve_sglang.py SOCKET READY, whose children (forks.py) become `sglang.launch_server`.

A connection carries one line, {"args", "environment", "log"}, and is answered with {"pid"}. Closed at the other end it ends the server the
ordinary way; here it is closed when the last process of the server is gone.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading

import hostkv.connector.sglang
import pytest
from forks import fork_for_each_connection
from patience import be_patient
from sglang import launch_server
from sglang.srt.entrypoints import http_server  # noqa: F401  what a server imports late, imported before the fork
from sglang.srt.managers import detokenizer_manager, scheduler  # noqa: F401
from sglang.srt.mem_cache.storage import backend_factory  # noqa: F401
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.models import registry  # noqa: F401
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils import kill_process_tree


def serve(connection: socket.socket) -> None:
    """The server, in the child: what sglang.launch_server does when it is run, but its processes are forked, not started anew."""
    wanted = json.loads(connection.makefile("r").readline())
    os.environ.update(wanted["environment"])
    be_patient(
        pytest.MonkeyPatch(), hostkv.connector.sglang, wait_s=5
    )  # a test stops the sidecar, and SGLang waits ten seconds for a thread
    log = os.open(wanted["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for standard in (1, 2):
        os.dup2(log, standard)
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None
    connection.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")
    threading.Thread(target=lambda: connection.recv(1) or os.kill(os.getpid(), signal.SIGTERM), daemon=True).start()
    load_plugins()
    try:
        launch_server.run_server(prepare_server_args(wanted["args"]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    get_hash_str([1] * 16, None, 16)  # is compiled the first time, and loaded in seconds later
    fork_for_each_connection(serve)
