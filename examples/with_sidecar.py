"""Runs a command beside a sidecar of its own: with_sidecar.py [--pool-size 256MiB] -- COMMAND ...

The sidecar gets a run directory and a pool name nobody else has, the command finds it through HOSTKV_ENDPOINT, and both are gone
when the command ends. Where HOSTKV_ENDPOINT is set already, that sidecar is used and none is started.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile


def main() -> int:
    if "--" not in sys.argv[1:-1]:
        print(__doc__, file=sys.stderr)
        return 2
    split = sys.argv.index("--")
    flags, command = sys.argv[1:split], sys.argv[split + 1 :]
    if "HOSTKV_ENDPOINT" in os.environ:
        return subprocess.call(command)
    with tempfile.TemporaryDirectory(prefix="hostkv-") as run_directory:
        endpoint = f"ipc://{run_directory}/control.sock"
        serve = [sys.executable, "-m", "hostkv.sidecar.cli", "serve", "--endpoint", endpoint]
        serve += ["--pool-name", f"hostkv-{secrets.token_hex(4)}", *flags]
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the sidecar ends with us
        sidecar = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
        try:
            assert sidecar.stdout is not None
            ready = sidecar.stdout.readline()
            if not ready.startswith("hostkv ready"):
                print("the sidecar did not start; its message is above", file=sys.stderr)
                return sidecar.wait() or 1
            return subprocess.call(command, env={**os.environ, "HOSTKV_ENDPOINT": endpoint})
        finally:
            sidecar.send_signal(signal.SIGTERM)
            try:
                sidecar.wait(60)
            except subprocess.TimeoutExpired:
                sidecar.kill()


if __name__ == "__main__":
    sys.exit(main())
