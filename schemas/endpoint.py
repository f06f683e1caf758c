"""Where a sidecar is found when nobody says where: one answer for the daemon, the command line and the clients."""

from __future__ import annotations

from collections.abc import Mapping

MAX_SOCKET_PATH_BYTES = 107  # sun_path of Linux, less the final zero
ATTACH_SOCKET = "attach.sock"  # in the run directory, beside the endpoint


def default_endpoint(environment: Mapping[str, str], uid: int) -> str | None:
    """HOSTKV_ENDPOINT, else the control socket in the default run directory; None where there is none. `uid`: the effective one."""
    given = environment.get("HOSTKV_ENDPOINT")
    if given:
        return given
    runtime = environment.get("XDG_RUNTIME_DIR")
    if runtime:
        return f"ipc://{runtime}/hostkv/control.sock"
    return "ipc:///run/hostkv/control.sock" if uid == 0 else None
