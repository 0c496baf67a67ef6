# mypy: ignore-errors
"""Tiles of jagged sequences in Triton: who works on what, and rows in and out of memory.

The tiles of all sequences are listed on the device by `order_kernel`, the longest walks first. The host knows
a bound of their number, cdiv(rows, BLOCK_M) + B, launches that many programs, and waits for nothing; a
program that finds no tile leaves at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritonrec.kernels.gradients import remembered

MOST_PROGRAMS = 65535  # a launch may have no more along an axis


class Layout(NamedTuple):
    """Where sequences lie, and what they are made of; a None compiles its part away."""

    offsets_ptr: torch.Tensor  # (B + 1,), of keys
    rows_ptr: torch.Tensor | None  # (B + 1,), of queries where they are fewer
    targets_ptr: torch.Tensor | None  # (B,)
    contexts_ptr: torch.Tensor | None  # (B,)


@triton.jit
def tile_of(ptr, strides, begin, head, row, dim, BLOCK_D: tl.constexpr):
    """Addresses (rows, BLOCK_D) of one head of a (L, H, D) tensor, and which of the columns exist."""
    feature = tl.arange(0, BLOCK_D)
    # begin is int64, and so is the product with the stride; features lie side by side
    address = ptr + head * strides[1] + (begin + row)[:, None] * strides[0] + feature[None, :]
    return address, (feature < dim)[None, :]


@triton.jit
def load_rows(ptr, strides, begin, head, row, length, dim, BLOCK_D: tl.constexpr, least=0):
    """Places [least, length) of a head; 0 elsewhere, which adds nothing to a product."""
    address, exists = tile_of(ptr, strides, begin, head, row, dim, BLOCK_D)
    return tl.load(address, mask=((row >= least) & (row < length))[:, None] & exists, other=0.0)


@triton.jit
def store_rows(value, ptr, strides, begin, head, row, length, dim, BLOCK_D: tl.constexpr, least=0):
    """Write places [least, length) of a head, rounded to the tensor's dtype."""
    address, exists = tile_of(ptr, strides, begin, head, row, dim, BLOCK_D)
    mask = ((row >= least) & (row < length))[:, None] & exists
    tl.store(address, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def open_sequence(sequence, layout):
    """(first token, length, history, contexts, first query's place, row of q of a query at place 0)."""
    # int64: rows of all sequences together may pass 2**31 elements
    begin = tl.load(layout.offsets_ptr + sequence).to(tl.int64)
    length = (tl.load(layout.offsets_ptr + sequence + 1) - begin).to(tl.int32)
    hidden = 0
    # Queries are the last tokens of their sequence, so place i of the sequence is row origin + i of q.
    origin = begin
    if layout.rows_ptr is not None:
        first = tl.load(layout.rows_ptr + sequence).to(tl.int64)
        hidden = length - (tl.load(layout.rows_ptr + sequence + 1) - first).to(tl.int32)
        origin = first - hidden
    history = length
    if layout.targets_ptr is not None:
        history = length - tl.load(layout.targets_ptr + sequence).to(tl.int32)
    contexts = 0
    if layout.contexts_ptr is not None:
        contexts = tl.load(layout.contexts_ptr + sequence).to(tl.int32)
    return begin, length, history, contexts, hidden, origin


@triton.jit
def count_blocks(sequence, num_sequences, offsets_ptr, rows_ptr, BLOCK_M: tl.constexpr):
    """Blocks of BLOCK_M places that hold queries; without `rows_ptr`, that hold tokens."""
    real = sequence < num_sequences
    length = tl.load(offsets_ptr + sequence + 1, mask=real, other=0).to(tl.int64)
    length -= tl.load(offsets_ptr + sequence, mask=real, other=0).to(tl.int64)
    blocks = (length + BLOCK_M - 1) // BLOCK_M
    if rows_ptr is not None:
        rows = tl.load(rows_ptr + sequence + 1, mask=real, other=0).to(tl.int64)
        rows -= tl.load(rows_ptr + sequence, mask=real, other=0).to(tl.int64)
        # blocks in which no token has a query drop out
        blocks = tl.where(rows > 0, blocks - (length - rows) // BLOCK_M, 0)
    return blocks


@triton.jit
def order_kernel(
    tiles_ptr, count_ptr, offsets_ptr, rows_ptr, num_sequences, room,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """List (level, sequence) of every block as ``level << 32 | sequence``, the highest level first.

    A sequence of n blocks has levels 0 to n - 1. A program writes the tiles of one level: behind those of all
    higher ones, which it counts.
    """
    level = tl.program_id(0).to(tl.int64)
    higher = tl.zeros((), tl.int64)
    total = tl.zeros((), tl.int64)
    for first in range(tl.full((), 0, tl.int64), num_sequences, BLOCK):
        sequence = first + tl.arange(0, BLOCK)
        blocks = count_blocks(sequence, num_sequences, offsets_ptr, rows_ptr, BLOCK_M)
        higher += tl.sum(tl.maximum(blocks - level - 1, 0), axis=0)
        total += tl.sum(blocks, axis=0)
    for first in range(tl.full((), 0, tl.int64), num_sequences, BLOCK):
        sequence = first + tl.arange(0, BLOCK)
        here = (count_blocks(sequence, num_sequences, offsets_ptr, rows_ptr, BLOCK_M) > level).to(tl.int64)
        # Behind all tiles of higher levels, in the order of the sequences: the list is the same in every run.
        at = higher + tl.cumsum(here, axis=0) - 1
        # offsets that contradict the host's bound must not write behind the list
        tl.store(tiles_ptr + at, (level << 32) + sequence, mask=(here > 0) & (at < room))
        higher += tl.sum(here, axis=0)
    if level == 0:
        tl.store(count_ptr, tl.minimum(total, room))


@triton.jit
def find_tile(tile, tiles_ptr):
    """(level, sequence)."""
    entry = tl.load(tiles_ptr + tile)
    return (entry >> 32).to(tl.int32), entry & 0xFFFFFFFF


def tiles_of(call, rows: int, own: int, by_query: bool) -> Tiles:
    """`Tiles`, which layers with blocks of one size share, and forward and backward."""
    if by_query and call.delta_offsets is not None:
        return Tiles(call, rows, own, True)
    key = "tiles", rows, own, call.max_seq_len
    return remembered(call.seq_offsets, key, lambda: Tiles(call, rows, own, False))


class Tiles:
    """The listed tiles of one way to cut the sequences of a call: `arguments` of kernels, and a bound."""

    def __init__(self, call, rows: int, own: int, by_query: bool):
        """`rows`: of all sequences; `by_query`: blocks that hold queries, or blocks that hold tokens."""
        delta = call.delta_offsets if by_query else None
        sequences = call.num_sequences
        # queries that begin and end inside a block take one block more than tokens do
        self.bound = triton.cdiv(rows, own) + sequences * (1 if delta is None else 2)
        device = call.seq_offsets.device
        self.listed = torch.empty(self.bound, dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        levels = triton.cdiv(call.max_seq_len, own)
        if levels and sequences:
            order_kernel[(levels,)](
                self.listed, self.count, call.seq_offsets.contiguous(),
                None if delta is None else delta.contiguous(), sequences, self.bound, BLOCK_M=own,
                BLOCK=min(1024, triton.next_power_of_2(sequences)),
            )  # fmt: skip

    def grid(self, heads: int) -> tuple[int]:
        return (max(1, min(self.bound * heads, MOST_PROGRAMS)),)
