"""From what the caller has (buffers, numpy arrays, torch tensors, raw addresses) to the table of addresses that a batch copy takes.

The CPU is the only device yet: memory is addressed as it lies, and whatever holds it is kept alive as long as the table. A file per
accelerator joins here, with the same contract. torch is never imported: a tensor is what has data_ptr().
"""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Sequence
from typing import Any

from ..cext import buffer_address

_NULL = bytes(8)


class Addresses:
    """`table`: uint64 addresses, row after row; a row is one block's shard, cut into `pieces` pieces. `owners` keep the memory alive."""

    __slots__ = ("owners", "pieces", "table")

    def __init__(self, table: array[int] | memoryview, pieces: int, owners: Sequence[object] = ()) -> None:
        self.table = table
        self.pieces = pieces
        self.owners = owners

    def rows(self, first: int, last: int) -> array[int] | memoryview:
        return self.table[first * self.pieces : last * self.pieces]

    def select(self, rows: Sequence[int]) -> array[int]:
        picked = array("Q")
        for row in rows:
            picked.extend(self.table[row * self.pieces : (row + 1) * self.pieces])
        return picked


def from_addresses(addresses: Any, rows: int) -> Addresses:
    """`addresses`: rows x m integers as a list of lists, or any buffer of 64-bit integers (numpy array, array) with rows * m of them. A
    buffer is referred to, not copied. The caller vouches for what lies there. ValueError or TypeError names what is wrong."""
    table: array[int] | memoryview
    if isinstance(addresses, (list, tuple)):
        _same_length("addresses", len(addresses), rows)
        flat = list(
            itertools.chain.from_iterable(row if isinstance(row, (list, tuple)) else _row(row, i) for i, row in enumerate(addresses))
        )
        pieces = len(flat) // rows
        for i, row in enumerate(addresses):
            if len(row) != pieces:
                raise ValueError(
                    f"addresses[{i}] has {len(row)} entries, addresses[0] has {len(addresses[0])}; every block has equally many pieces"
                )
        try:
            table = array("Q", flat)
        except (TypeError, OverflowError):
            at = next(i for i, value in enumerate(flat) if not _is_address(value))
            raise TypeError(f"addresses[{at // pieces}][{at % pieces}] is {flat[at]!r}, must be an integer address below 2**64") from None
    else:
        try:
            view = memoryview(addresses)
        except TypeError:
            raise TypeError(f"addresses is a {type(addresses).__name__}, must be a list of lists or an array of 64-bit integers") from None
        if view.itemsize != 8 or view.format.lstrip("@=<") not in ("Q", "q", "L", "l", "N", "n", "P"):
            raise TypeError(f"addresses has items of format {view.format!r}, must be 64-bit integers (numpy.uint64)")
        if not view.c_contiguous:
            raise ValueError("addresses is not contiguous; pass numpy.ascontiguousarray(addresses)")
        if view.ndim > 1:
            _same_length("addresses", (view.shape or (0,))[0], rows)
        table = view.cast("B").cast("Q")
        pieces = len(table) // rows
    if not pieces or len(table) != rows * pieces:
        raise ValueError(f"addresses has {len(table)} entries for {rows} blocks; every block has equally many pieces, at least one")
    if _NULL in table.tobytes() and 0 in table:  # the first test is fast and nearly exact
        at = list(table).index(0)
        raise ValueError(f"addresses[{at // pieces}][{at % pieces}] is 0, must be the address of memory that is allocated")
    return Addresses(table, pieces)


def from_tensors(tensors: Any, rows: int, piece_bytes: Sequence[int] | None, row_bytes: int, writable: bool) -> Addresses:
    """tensors[i][j]: piece j of block i, a contiguous buffer or CPU tensor of piece_bytes[j] bytes (row_bytes / m where that is None).
    ValueError or TypeError names the first one that does not fit."""
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"tensors is a {type(tensors).__name__}, must be a list with one list of buffers per id")
    _same_length("tensors", len(tensors), rows)
    table = array("Q")
    owners: list[object] = []
    sizes: Sequence[int] = ()
    for i, row in enumerate(tensors):
        if not isinstance(row, (list, tuple)):
            raise TypeError(f"tensors[{i}] is a {type(row).__name__}, must be a list of buffers, one per piece")
        if not i:
            sizes = split(piece_bytes, row_bytes, len(row))
        if len(row) != len(sizes):
            raise ValueError(f"tensors[{i}] has {len(row)} buffers, a block has {len(sizes)} pieces")
        for j, piece in enumerate(row):
            address, size, owner = _locate(piece, writable, f"tensors[{i}][{j}]")
            if size != sizes[j]:
                raise ValueError(f"tensors[{i}][{j}] has {size} bytes, must be {sizes[j]} (piece {j} of shard_bytes={row_bytes})")
            table.append(address)
            owners.append(owner)
    return Addresses(table, len(sizes), owners)


def split(piece_bytes: Sequence[int] | None, row_bytes: int, pieces: int) -> Sequence[int]:
    """The sizes of `pieces` pieces of a shard of `row_bytes`: those the store was opened with, or equal ones."""
    if piece_bytes is not None:
        if len(piece_bytes) != pieces:
            raise ValueError(f"a block has {pieces} pieces here, the store was opened with {len(piece_bytes)} piece_bytes")
        return piece_bytes
    if pieces < 1 or row_bytes % pieces:
        raise ValueError(f"shard_bytes={row_bytes} does not divide into {pieces} equal pieces; pass piece_bytes to client.open()")
    return (row_bytes // pieces,) * pieces


def _locate(piece: Any, writable: bool, what: str) -> tuple[int, int, object]:
    """(address, bytes, what must stay alive) of one buffer or CPU tensor."""
    if hasattr(piece, "data_ptr"):
        if piece.device.type != "cpu":
            raise ValueError(f"{what} is on device {piece.device}, must be on the CPU; pass tensor.cpu()")
        if not piece.is_contiguous():
            raise ValueError(f"{what} is not contiguous; pass tensor.contiguous()")
        return piece.data_ptr(), piece.numel() * piece.element_size(), piece
    try:
        address, size = buffer_address(piece, writable)
        # A view of a bytearray or array keeps it from being resized; numpy refuses that by itself, and lacks a format for some dtypes.
        return address, size, piece if hasattr(piece, "__array_interface__") else memoryview(piece)
    except TypeError:
        raise TypeError(f"{what} is a {type(piece).__name__}, must be a buffer (bytearray, numpy array, CPU tensor)") from None
    except (BufferError, ValueError) as error:
        need = "a contiguous, writable buffer" if writable else "a contiguous buffer"
        raise ValueError(f"{what} is not usable ({error}); it must be {need}") from None


def _row(row: Any, i: int) -> Any:
    try:
        return memoryview(row).tolist()
    except TypeError:
        raise TypeError(f"addresses[{i}] is {row!r}, must be a list of addresses, one per piece") from None


def _is_address(value: Any) -> bool:
    try:
        return 0 <= operator.index(value) < 1 << 64
    except TypeError:
        return False


def _same_length(what: str, length: int, ids: int) -> None:
    if length != ids:
        raise ValueError(f"{what} has {length} rows for {ids} ids, must have one per id")
