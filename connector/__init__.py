"""The client SDK, the Store, devices and engine connectors. Never imports the sidecar, nor torch at top level."""

from ..schemas.namespace import Layout, NamespaceError
from .client import Client, Counters
from .errors import DumpError, HostKVError, LoadError, QueueFull, SidecarRefused, SidecarUnavailable
from .store import Handles, Keys, Store
from .tasks import Task

__all__ = [
    "Client",
    "Counters",
    "DumpError",
    "Handles",
    "HostKVError",
    "Keys",
    "Layout",
    "LoadError",
    "NamespaceError",
    "QueueFull",
    "SidecarRefused",
    "SidecarUnavailable",
    "Store",
    "Task",
]
