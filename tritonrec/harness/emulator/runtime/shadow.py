"""Which warp used a place of memory last: races, and reads of shared memory that nobody wrote.

A cell of the shadow knows the last writer and the readers since: their block, the number of barriers that the
block had passed, and a bit for each warp. What the hardware fixes, and so is no race:

- accesses of one warp: its lanes execute an instruction together, and the next one after it;
- accesses of one block with a barrier between them;
- stores of the value that another warp has just stored: Triton gives one element to several threads, which
  all compute and store the same;
- atomics among each other; one that changes nothing, such as a lost compare-and-swap, is a read.
"""
# mypy: ignore-errors

from __future__ import annotations

from tritonrec.kernels.caches import njit

from .. import layout
from .access import load4, store4

# how two accesses collide, the last field of a fault
READ_AFTER_WRITE, WRITE_AFTER_READ, TWO_WRITES = 1, 2, 3


@njit(cache=True)
def note_read(cell, block, epoch, warp, atomic):
    """Note a read by a warp of block number `block` (from 1); 0, or how it collides."""
    bit = 1 << warp
    writer = load4(cell + layout.CELL_WRITER)
    if writer != 0 and not (atomic and writer & layout.ATOMIC):
        if writer & layout.BLOCK_OF_CELL != block:
            return READ_AFTER_WRITE
        if load4(cell + layout.CELL_WRITE_EPOCH) == epoch and not load4(cell + layout.CELL_WRITE_WARPS) & bit:
            return READ_AFTER_WRITE
        if writer & layout.ASYNC:
            return READ_AFTER_WRITE
    if atomic:  # a read that atomics may follow
        return 0
    reader = load4(cell + layout.CELL_READER)
    if reader == 0 or reader == block:
        if reader == block and load4(cell + layout.CELL_READ_EPOCH) == epoch:
            store4(cell + layout.CELL_READ_WARPS, load4(cell + layout.CELL_READ_WARPS) | bit)
        else:
            store4(cell + layout.CELL_READER, block)
            store4(cell + layout.CELL_READ_EPOCH, epoch)
            store4(cell + layout.CELL_READ_WARPS, bit)
    else:
        store4(cell + layout.CELL_READER, layout.SEVERAL)
    return 0


@njit(cache=True)
def note_write(cell, block, epoch, warp, changes, flags):
    """Note a write, which `changes` the value or not; `flags` are ATOMIC or ASYNC. 0, or how it collides."""
    if flags & layout.ATOMIC and not changes:
        return note_read(cell, block, epoch, warp, True)
    bit = 1 << warp
    writer = load4(cell + layout.CELL_WRITER)
    if writer != 0 and not (flags & layout.ATOMIC and writer & layout.ATOMIC):
        of_block = writer & layout.BLOCK_OF_CELL == block
        warps = load4(cell + layout.CELL_WRITE_WARPS)
        if not of_block or (load4(cell + layout.CELL_WRITE_EPOCH) == epoch and warps & ~bit):
            if changes:
                return TWO_WRITES
            if of_block:
                store4(cell + layout.CELL_WRITE_WARPS, warps | bit)
            return 0
    reader = load4(cell + layout.CELL_READER)
    if reader != 0:
        if reader != block:
            return WRITE_AFTER_READ
        if load4(cell + layout.CELL_READ_EPOCH) == epoch and load4(cell + layout.CELL_READ_WARPS) & ~bit:
            return WRITE_AFTER_READ
    store4(cell + layout.CELL_WRITER, block | flags)
    store4(cell + layout.CELL_WRITE_EPOCH, epoch)
    store4(cell + layout.CELL_WRITE_WARPS, bit)
    return 0
