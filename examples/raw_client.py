"""HostKV without its SDK: pyzmq, msgpack and the standard library, as schemas/PROTOCOL.md tells. It saves three blocks, looks them up,
loads them back and compares.

    hostkv serve --pool-size 1GiB &
    python examples/raw_client.py              # HOSTKV_ENDPOINT=ipc:///... where it is not the default

Expected output (the version is the sidecar's):

    hello: protocol 2.2, sidecar 0.3.0
    before saving: 0 of 3 blocks are there
    saved 3 blocks of 65536 bytes
    after saving: 3 of 3 blocks are there
    loaded 3 blocks: every byte is equal
"""

import fcntl
import hashlib
import mmap
import os
import secrets
import struct
import sys

import msgpack
import zmq

OK = 0
SHARD_BYTES = 65536


def encode_namespace(*fields):
    """Tag, length, value of each field, in order; tag 0 is the format version, 1."""
    parts = []
    for tag, value in enumerate((1, *fields)):
        if isinstance(value, int):
            raw = struct.pack("<Q", value)
        elif isinstance(value, str):
            raw = value.encode()
        else:
            raw = struct.pack(f"<{len(value)}Q", *value)
        parts.append(struct.pack("<BI", tag, len(raw)) + raw)
    return b"".join(parts)


def take_member_lock(run_directory):
    """A file of our own whose lock tells the sidecar, until we end, that we may touch the pool. It is never closed."""
    name = secrets.token_bytes(16)
    fd = os.open(os.path.join(run_directory, "members", name.hex()), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return name


class Sidecar:
    def __init__(self, endpoint):
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self.sent = 0

    def ask(self, verb, **fields):
        self.sent += 1
        self.socket.send(msgpack.packb({"verb": verb, "id": self.sent, **fields}))
        while self.socket.poll(2000):
            reply = msgpack.unpackb(self.socket.recv())
            if reply["id"] != self.sent:
                continue  # the late answer of an earlier question
            if "error" in reply:
                raise RuntimeError(f"{verb}: {reply['error']}: {reply['message']}")
            return reply
        raise TimeoutError(f"no answer to {verb}; start a sidecar with: hostkv serve --pool-size 1GiB")


def main():
    runtime = os.environ.get("XDG_RUNTIME_DIR", "/run")
    endpoint = os.environ.get("HOSTKV_ENDPOINT") or f"ipc://{runtime}/hostkv/control.sock"
    path = endpoint.removeprefix("ipc://")
    if not os.path.exists(path):
        sys.exit(f"no sidecar at {endpoint}; start one with: hostkv serve --pool-size 1GiB")
    sidecar = Sidecar(endpoint)
    hello = sidecar.ask(
        "hello",
        protocol=[2, 0],
        client=secrets.token_bytes(16),
        session=secrets.token_bytes(16),
        lock=take_member_lock(os.path.dirname(path)),
        pid=os.getpid(),
        name="raw_client",
    )
    print(f"hello: protocol {'.'.join(map(str, hello['protocol']))}, sidecar {hello['version']}")
    if hello["verify"]:
        sys.exit("this sidecar wants checksums (verify: load), which are xxh3: not in the standard library")

    # The namespace, in the order of schemas/namespace.py: model, revision, kv_dtype, layout_id, block_tokens, shard_bytes, shards,
    # layout_shape, layout_strides, tp_size, pp_size, pp_rank, cp_size, cp_rank, rank_rule, lora_name, lora_version, salt,
    # hash_algorithm, hash_root.
    sizes = (128, SHARD_BYTES, 1, (), (), 1, 1, 0, 1, 0)
    namespace = encode_namespace("example/raw", "1", "uint8", "opaque", *sizes, "", "", "", "", "", "")
    index = sidecar.ask("register", namespace=namespace)["index"]

    fingerprint = hashlib.sha256(namespace).digest()
    ids = [secrets.token_bytes(16) for _ in range(3)]  # an engine derives them from tokens; random ones are new at every run
    keys = b"".join(hashlib.sha256(fingerprint + bytes(32) + block_id).digest() for block_id in ids)
    payload = [secrets.token_bytes(SHARD_BYTES) for _ in ids]
    shards = struct.pack("<3H", 0, 0, 0)

    found = sidecar.ask("lookup", index=index, keys=keys)["found"]
    print(f"before saving: {found.count(OK)} of {len(ids)} blocks are there")

    with open(hello["pool_path"], "r+b") as file:
        pool = mmap.mmap(file.fileno(), hello["pool_bytes"])

    tag = secrets.randbits(64)
    granted = sidecar.ask("reserve", index=index, tag=tag, keys=keys, shards=shards)
    if granted["statuses"].count(OK) != len(ids):
        sys.exit(f"reserve: statuses {list(granted['statuses'])}; a pool that is full of blocks in use answers 3")
    for page, content in zip(struct.unpack("<3I", granted["pages"]), payload, strict=True):
        pool[page * 4096 : page * 4096 + SHARD_BYTES] = content
    handles = {"keys": keys, "shards": shards, "generations": granted["generations"]}
    committed = sidecar.ask("commit", tag=tag, **handles, checksums=bytes(8 * len(ids)))["statuses"]
    print(f"saved {committed.count(OK)} blocks of {SHARD_BYTES} bytes")

    found = sidecar.ask("lookup", index=index, keys=keys)["found"]
    print(f"after saving: {found.count(OK)} of {len(ids)} blocks are there")

    pins = sidecar.ask("acquire", index=index, tag=tag, keys=keys)
    loaded = [pool[page * 4096 : page * 4096 + SHARD_BYTES] for page in struct.unpack("<3I", pins["pages"])]
    sidecar.ask("release", tags=struct.pack("<Q", tag))
    equal = pins["statuses"].count(OK) == len(ids) and loaded == payload
    print(f"loaded {len(loaded)} blocks: {'every byte is equal' if equal else 'THE BYTES DIFFER'}")
    sidecar.ask("bye")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
