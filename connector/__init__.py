"""The client SDK, the Store, devices and engine connectors. Never imports the sidecar, nor torch at top level."""
