"""What HostKV's processes agree on: messages, error codes, namespaces and byte layouts. Imports nothing of ours."""
