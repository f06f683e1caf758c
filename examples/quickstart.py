"""Two processes, one cache: this process saves blocks of bytes, a second one finds and loads them. No engine, no torch.

    hostkv serve --pool-size 1GiB &
    python examples/quickstart.py              # HOSTKV_ENDPOINT=ipc:///... where it is not the default

Expected output (process numbers and times are yours):

    process 4242 saved 64 blocks of 1 MiB in 13.1 ms (5.1 GB/s)
    process 4250 found 64 of 64 blocks in 0.03 ms
    process 4250 loaded them in 11.7 ms (5.7 GB/s): every byte is equal
"""

import hashlib
import os
import secrets
import subprocess
import sys
import time

from hostkv.connector import Client, Layout

COUNT = 64
LAYOUT = Layout(model="example/quickstart", revision="1", kv_dtype="uint8", layout_id="opaque", block_tokens=128, shard_bytes=1 << 20)


def connect():
    client = Client(name="quickstart")
    if not client.serving():
        sys.exit(f"no sidecar: {client.down_reason}")
    client.warm(10)  # first touches of fresh memory would be most of the time shown
    return client


def ids_of(conversation):
    """An engine derives ids from tokens and the blocks before; here they are numbered."""
    return [f"{conversation}/{i}".encode() for i in range(COUNT)]


def digest(blocks):
    sha = hashlib.sha256()
    for block in blocks:
        sha.update(block)
    return sha.hexdigest()


def report(verb, seconds):
    size = COUNT * LAYOUT.shard_bytes
    return f"{verb} in {seconds * 1e3:.1f} ms ({size / seconds / 1e9:.1f} GB/s)"


def save():
    conversation = secrets.token_hex(8)
    blocks = [bytearray(secrets.token_bytes(LAYOUT.shard_bytes)) for _ in range(COUNT)]
    with connect() as client:
        store = client.open(LAYOUT)
        start = time.perf_counter()
        store.wait(store.dump(ids_of(conversation), 0, [[block] for block in blocks]))
        print(f"process {os.getpid()} {report(f'saved {COUNT} blocks of 1 MiB', time.perf_counter() - start)}", flush=True)
    return subprocess.run([sys.executable, __file__, conversation, digest(blocks)], check=False).returncode


def load(conversation, expected):
    blocks = [bytearray(LAYOUT.shard_bytes) for _ in range(COUNT)]
    ids = ids_of(conversation)
    with connect() as client:
        store = client.open(LAYOUT)
        start = time.perf_counter()
        found = store.lookup_on_prefix(ids) + 1
        print(f"process {os.getpid()} found {found} of {COUNT} blocks in {(time.perf_counter() - start) * 1e3:.2f} ms")
        start = time.perf_counter()
        store.wait(store.load(ids, 0, [[block] for block in blocks]))
        seconds = time.perf_counter() - start
    equal = digest(blocks) == expected
    print(f"process {os.getpid()} {report('loaded them', seconds)}: {'every byte is equal' if equal else 'THE BYTES DIFFER'}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(load(*sys.argv[1:]) if len(sys.argv) == 3 else save())
