"""Places in the memory that compiled programs, the runtime and Python share; every field has 8 bytes."""

(
    LAUNCH_PROGRAM, LAUNCH_FUNCTIONS, LAUNCH_GRID_X, LAUNCH_GRID_Y, LAUNCH_GRID_Z, LAUNCH_THREADS,
    LAUNCH_PARAMETERS, LAUNCH_SHARED_BYTES, LAUNCH_NUM_RANGES, LAUNCH_RANGES, LAUNCH_CHECKS, LAUNCH_RANDOM,
    LAUNCH_LATE_COPIES, LAUNCH_POLICY, LAUNCH_PROGRESS, LAUNCH_BYTES_READ, LAUNCH_BYTES_WRITTEN,
    LAUNCH_BARRIERS, LAUNCH_INSTRUCTIONS, LAUNCH_RESIDENT, LAUNCH_BLOCKS, LAUNCH_WARPS, LAUNCH_FRAME_BYTES,
    LAUNCH_PATIENCE, FAULT_KIND, FAULT_SITE, FAULT_PC, FAULT_BLOCK, FAULT_WARP, FAULT_LANE,
    FAULT_ADDRESS, FAULT_SIZE, FAULT_OTHER_BLOCK, FAULT_OTHER_WARPS, FAULT_DETAIL, LAUNCH_MAX_COPIES,
    LAUNCH_POISON, LAUNCH_SHARED_SHIFT, LAUNCH_MOST_INSTRUCTIONS, LAUNCH_WORDS,
) = range(40)  # fmt: skip

(
    WARP_LAUNCH, WARP_BLOCK, WARP_INDEX, WARP_MASK, WARP_LIVE, WARP_PC, WARP_STATUS, WARP_FRAME,
    WARP_INSTRUCTIONS, WARP_FUEL, WARP_BARRIER_SITE, WARP_COPIES, WARP_NUM_COPIES, WARP_GROUP, WARP_SITE,
    WARP_LATE, WARP_LANE_PCS,
) = range(17)  # fmt: skip
WARP_WORDS = WARP_LANE_PCS + 32

(
    BLOCK_X, BLOCK_Y, BLOCK_Z, BLOCK_SHARED, BLOCK_SHADOW, BLOCK_EPOCH, BLOCK_FIRST_EPOCH, BLOCK_LIVE,
    BLOCK_WAITING, BLOCK_LINEAR, BLOCK_FIRST_WARP, BLOCK_INSTRUCTIONS, BLOCK_WORDS,
) = range(13)  # fmt: skip

# a range of global memory: begin, end, its shadow, log2 of the bytes of a cell, flags
RANGE_BEGIN, RANGE_END, RANGE_SHADOW, RANGE_SHIFT, RANGE_FLAGS, RANGE_WORDS = range(6)
UNCHECKED, FRESH = 1, 2
"""Flags of a range: declared races; allocated by ``torch.empty``."""

# a cell of the shadow of memory, 6 words of 4 bytes
CELL_WRITER, CELL_WRITE_EPOCH, CELL_WRITE_WARPS, CELL_READER, CELL_READ_EPOCH, CELL_READ_WARPS = range(
    0, 24, 4
)
CELL_BYTES = 24
ATOMIC, ASYNC = 1 << 30, 1 << 29
"""Flags of a cell's writer: an atomic; an asynchronous copy that has not landed."""
BLOCK_OF_CELL = ASYNC - 1
SEVERAL = BLOCK_OF_CELL
"""Readers of several blocks."""

READY, AT_BARRIER, DONE = range(3)
"""Status of a warp."""

CONTINUE, PREEMPTED, BARRIER, FINISHED, FAULTED = range(5)
"""Why a program returns."""

(
    NO_FAULT, RACE, OUTSIDE, MISALIGNED, UNINITIALISED, DIVERGED, BARRIER_MISSED, BARRIERS_DIFFER, HANG,
    TOO_MANY, OUTSIDE_SHARED,
) = range(11)  # fmt: skip

IN_ORDER, LATE_WARP, EARLY_WARP, AT_RANDOM, REVERSED = range(5)
"""Which warp runs next."""

# what a call of the runtime reads and writes: predicate mask, an address of each lane, data
IO_MASK, IO_ADDRESS, IO_DATA = 0, 16, 16 + 32 * 8

COPY_WORDS = 5
"""An asynchronous copy: to, from, bytes, bytes of the source, group."""
POISON = 0xFFC5A5A5
"""A NaN with which ``torch.empty`` begins."""
