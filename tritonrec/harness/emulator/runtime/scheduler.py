"""Which lanes of a warp, and which warp of the resident blocks, run next."""
# mypy: ignore-errors

from __future__ import annotations

from tritonrec.kernels.caches import njit

from .. import layout
from .access import draw, fault, field, increase, load8, note_fault, put, resume, store8

ALL = 0xFFFFFFFF
LONG = 1 << 16
"""Fuel of a warp that nobody interrupts; it ends so that a hang is seen."""


@njit(cache=True)
def select_lanes(warp):
    """Run the lanes that are furthest behind: those with the smallest place in the program."""
    live, least = field(warp, layout.WARP_LIVE), 1 << 62
    for lane in range(32):
        if (live >> lane) & 1:
            least = min(least, load8(warp + 8 * (layout.WARP_LANE_PCS + lane)))
    mask = 0
    for lane in range(32):
        if (live >> lane) & 1 and load8(warp + 8 * (layout.WARP_LANE_PCS + lane)) == least:
            mask |= 1 << lane
    put(warp, layout.WARP_MASK, mask)
    put(warp, layout.WARP_PC, least)


@njit(cache=True)
def move_lanes(warp, lanes, pc):
    for lane in range(32):
        if (lanes >> lane) & 1:
            store8(warp + 8 * (layout.WARP_LANE_PCS + lane), pc)


@njit(cache=True)
def branch(warp, site, taken, io, pc_taken, pc_next):
    """The running lanes part: `taken` go to one place, the others to another."""
    mask = field(warp, layout.WARP_MASK)
    move_lanes(warp, taken, pc_taken)
    move_lanes(warp, mask & ~taken, pc_next)
    select_lanes(warp)
    return 0


@njit(cache=True)
def leave(warp, site, lanes, io, _a, _b):
    """Lanes end; layout.FINISHED when none is left."""
    live = field(warp, layout.WARP_LIVE) & ~lanes
    put(warp, layout.WARP_LIVE, live)
    if live == 0:
        return layout.FINISHED
    select_lanes(warp)
    return 0


@njit(cache=True)
def converge(warp, site, lanes, io, pc, _):
    """Wait at `pc` for all lanes of the warp; lanes that are beyond never come."""
    move_lanes(warp, field(warp, layout.WARP_MASK), pc)
    select_lanes(warp)
    if field(warp, layout.WARP_PC) == pc and field(warp, layout.WARP_MASK) != field(warp, layout.WARP_LIVE):
        missing = field(warp, layout.WARP_LIVE) & ~field(warp, layout.WARP_MASK)
        lane = 0
        while not (missing >> lane) & 1:
            lane += 1
        return fault(warp, layout.DIVERGED, site, lane, 0, 0, 0, field(warp, layout.WARP_MASK))
    return 0


@njit(cache=True)
def start_block(launch, slot, number, warps):
    """Put a block into a slot."""
    block = field(launch, layout.LAUNCH_BLOCKS) + 8 * layout.BLOCK_WORDS * slot
    x, y = field(launch, layout.LAUNCH_GRID_X), field(launch, layout.LAUNCH_GRID_X + 1)
    put(block, layout.BLOCK_X, number % x)
    put(block, layout.BLOCK_X + 1, number // x % y)
    put(block, layout.BLOCK_X + 2, number // x // y)
    put(block, layout.BLOCK_LINEAR, number)
    put(block, layout.BLOCK_EPOCH, field(block, layout.BLOCK_EPOCH) + 1)
    put(block, layout.BLOCK_FIRST_EPOCH, field(block, layout.BLOCK_EPOCH))
    put(block, layout.BLOCK_LIVE, warps)
    put(block, layout.BLOCK_WAITING, 0)
    put(block, layout.BLOCK_INSTRUCTIONS, 0)
    late = draw(launch, layout.LAUNCH_RANDOM) % warps
    for index in range(warps):
        warp = field(block, layout.BLOCK_FIRST_WARP) + 8 * layout.WARP_WORDS * index
        threads = field(launch, layout.LAUNCH_THREADS) - 32 * index
        lanes = ALL if threads >= 32 else (1 << threads) - 1
        put(warp, layout.WARP_MASK, lanes)
        put(warp, layout.WARP_LIVE, lanes)
        put(warp, layout.WARP_PC, 0)
        put(warp, layout.WARP_STATUS, layout.READY)
        put(warp, layout.WARP_NUM_COPIES, 0)
        put(warp, layout.WARP_GROUP, 0)
        put(warp, layout.WARP_LATE, 1 if index == late else 0)
        move_lanes(warp, lanes, 0)


@njit(cache=True)
def ready_warps(launch, total):
    """How many of the warps are ready, and of those how many are late ones."""
    ready, special = 0, 0
    for i in range(total):
        warp = field(launch, layout.LAUNCH_WARPS) + 8 * layout.WARP_WORDS * i
        if field(warp, layout.WARP_STATUS) == layout.READY:
            ready += 1
            special += field(warp, layout.WARP_LATE)
    return ready, special


@njit(cache=True)
def next_warp(launch, total, after, fair):
    """The warp to run, or -1; in order, from the one after `after` on. `fair`: each has its turn."""
    policy = layout.IN_ORDER if fair else field(launch, layout.LAUNCH_POLICY)
    ready, special = ready_warps(launch, total)
    if ready == 0:
        return -1
    only = -1
    if policy == layout.LATE_WARP and special < ready:
        only, ready = 0, ready - special
    elif policy == layout.EARLY_WARP and special > 0:
        only, ready = 1, special
    turn = 0 if policy in (layout.IN_ORDER, layout.REVERSED) else draw(launch, layout.LAUNCH_RANDOM) % ready
    for i in range(total):
        number = (after + 1 + i) % total
        if policy == layout.REVERSED:
            number = total - 1 - i
        warp = field(launch, layout.LAUNCH_WARPS) + 8 * layout.WARP_WORDS * number
        if field(warp, layout.WARP_STATUS) == layout.READY and (
            only < 0 or field(warp, layout.WARP_LATE) == only
        ):
            if turn == 0:
                return number
            turn -= 1
    return -1


@njit(cache=True)
def open_barrier(launch, block, warps):
    """Let all warps of a block pass, if all have come; 0, or a fault."""
    if field(block, layout.BLOCK_WAITING) == 0 or field(block, layout.BLOCK_WAITING) < field(
        block, layout.BLOCK_LIVE
    ):
        return 0
    if field(block, layout.BLOCK_LIVE) < warps:
        return missed_barrier(launch, block, warps)
    site = -1
    for index in range(warps):
        warp = field(block, layout.BLOCK_FIRST_WARP) + 8 * layout.WARP_WORDS * index
        if site >= 0 and field(warp, layout.WARP_BARRIER_SITE) != site:
            return fault(
                warp, layout.BARRIERS_DIFFER, field(warp, layout.WARP_BARRIER_SITE), 0, 0, 0, 0, site
            )
        site = field(warp, layout.WARP_BARRIER_SITE)
        put(warp, layout.WARP_STATUS, layout.READY)
    late = draw(launch, layout.LAUNCH_RANDOM) % warps
    for index in range(warps):
        put(
            field(block, layout.BLOCK_FIRST_WARP) + 8 * layout.WARP_WORDS * index,
            layout.WARP_LATE,
            1 if index == late else 0,
        )
    put(block, layout.BLOCK_WAITING, 0)
    increase(block, layout.BLOCK_EPOCH, 1)
    increase(launch, layout.LAUNCH_BARRIERS, 1)
    increase(launch, layout.LAUNCH_PROGRESS, 1)
    return 0


@njit(cache=True)
def missed_barrier(launch, block, warps):
    """The fault of warps that wait for one that has ended."""
    gone, waits = -1, -1
    for index in range(warps):
        warp = field(block, layout.BLOCK_FIRST_WARP) + 8 * layout.WARP_WORDS * index
        if field(warp, layout.WARP_STATUS) == layout.DONE:
            gone = index
        elif field(warp, layout.WARP_STATUS) == layout.AT_BARRIER:
            waits = index
    warp = field(block, layout.BLOCK_FIRST_WARP) + 8 * layout.WARP_WORDS * waits
    return fault(warp, layout.BARRIER_MISSED, field(warp, layout.WARP_BARRIER_SITE), 0, 0, 0, 0, gone)


@njit(cache=True)
def fuel_of(launch):
    """Accesses that a warp makes before another one runs."""
    if field(launch, layout.LAUNCH_POLICY) in (
        layout.IN_ORDER,
        layout.REVERSED,
        layout.LATE_WARP,
        layout.EARLY_WARP,
    ):
        return LONG
    number = draw(launch, layout.LAUNCH_RANDOM)
    return 1 + (number >> 8) % (1 << (number & 7))


@njit(cache=True, nogil=True)
def run_grid(launch):
    """Run every block of a launch; the kind of the fault, or 0."""
    x, y, z = (
        field(launch, layout.LAUNCH_GRID_X),
        field(launch, layout.LAUNCH_GRID_X + 1),
        field(launch, layout.LAUNCH_GRID_X + 2),
    )
    total, warps = x * y * z, (field(launch, layout.LAUNCH_THREADS) + 31) // 32
    slots, policy = field(launch, layout.LAUNCH_RESIDENT), field(launch, layout.LAUNCH_POLICY)
    first, started, running, last, quiet = 0, 0, 0, -1, 0
    if policy == layout.AT_RANDOM:
        first = draw(launch, layout.LAUNCH_RANDOM) % max(1, total)
    progress = field(launch, layout.LAUNCH_PROGRESS)
    while started < total or running:
        for slot in range(slots):
            block = field(launch, layout.LAUNCH_BLOCKS) + 8 * layout.BLOCK_WORDS * slot
            if started < total and field(block, layout.BLOCK_LIVE) == 0:
                number = (first + started) % total
                start_block(launch, slot, total - 1 - number if policy == layout.REVERSED else number, warps)
                started += 1
                running += 1
        # resident warps make progress, so one that waits for another does not keep it from running
        number = next_warp(launch, slots * warps, last, quiet > LONG)
        if number < 0:  # every warp waits, which `open_barrier` has judged already
            return field(launch, layout.FAULT_KIND)
        warp = field(launch, layout.LAUNCH_WARPS) + 8 * layout.WARP_WORDS * number
        block = field(warp, layout.WARP_BLOCK)
        fuel = fuel_of(launch)
        put(warp, layout.WARP_FUEL, fuel)
        reason = resume(field(launch, layout.LAUNCH_PROGRAM), warp)
        if reason == layout.PREEMPTED:
            last = number
            if field(launch, layout.LAUNCH_PROGRESS) == progress:
                quiet += fuel
                if quiet > field(launch, layout.LAUNCH_PATIENCE):
                    note_fault(launch, warp, layout.HANG, -1, 0, 0, 0, 0, 0)
            else:
                quiet = 0
            progress = field(launch, layout.LAUNCH_PROGRESS)
        elif reason == layout.BARRIER:
            last = number - 1
            put(warp, layout.WARP_STATUS, layout.AT_BARRIER)
            increase(block, layout.BLOCK_WAITING, 1)
            open_barrier(launch, block, warps)
        elif reason == layout.FINISHED:
            put(warp, layout.WARP_STATUS, layout.DONE)
            increase(block, layout.BLOCK_LIVE, -1)
            increase(launch, layout.LAUNCH_INSTRUCTIONS, field(warp, layout.WARP_INSTRUCTIONS))
            increase(block, layout.BLOCK_INSTRUCTIONS, field(warp, layout.WARP_INSTRUCTIONS))
            increase(launch, layout.LAUNCH_PROGRESS, 1)
            put(warp, layout.WARP_INSTRUCTIONS, 0)
            if field(block, layout.BLOCK_LIVE) == 0:
                running -= 1
                most = field(launch, layout.LAUNCH_MOST_INSTRUCTIONS)
                most = max(most, field(block, layout.BLOCK_INSTRUCTIONS))
                put(launch, layout.LAUNCH_MOST_INSTRUCTIONS, most)
            elif field(block, layout.BLOCK_WAITING) > 0:
                missed_barrier(launch, block, warps)
        elif reason == layout.FAULTED:
            return field(launch, layout.FAULT_KIND)
        if field(launch, layout.FAULT_KIND):
            return field(launch, layout.FAULT_KIND)
    return 0
