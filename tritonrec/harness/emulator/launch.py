"""One launch: memory around a program, its schedules, and what they find."""

from __future__ import annotations

import ctypes
import random
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import layout
from .arguments import ARENA, LARGE, Argument, Range, ranges_of, zeros
from .counts import Counts
from .faults import ScheduleError
from .messages import fault_of
from .program import Program
from .settings import Emulation

_MOST_COPIES = 1 << 14
"""Asynchronous copies of a warp that may be under way."""


@dataclass(frozen=True)
class Schedule:
    """In which order warps run."""

    policy: int
    resident: int
    late_copies: bool
    seed: int


def schedules_of(settings: Emulation, number: int) -> list[Schedule]:
    """Of launch `number`: the plain order first, then a warp late or early, then drawn ones."""
    found = []
    for turn in range(settings.schedules):
        chance = random.Random(f"{settings.seed}/{number}/{turn}")
        if settings.schedules > 1 and turn == 0:
            policy = layout.IN_ORDER
        elif turn == 1:
            policy = chance.choice((layout.LATE_WARP, layout.EARLY_WARP))
        else:
            policy = chance.choice((layout.LATE_WARP, layout.AT_RANDOM, layout.AT_RANDOM, layout.REVERSED))
        seed = chance.getrandbits(61) | 1
        found.append(Schedule(policy, chance.choice((1, 2, 4)), chance.random() < 0.7, seed))
    return found


def packed(program: Program, values: list[Any]) -> bytes:
    """The kernel's parameters as bytes; two addresses of scratch memory, which nobody uses, come last."""
    values = [*values, 0, 0]
    if len(values) != len(program.parameters):
        raise ValueError(f"{program.name} has {len(program.parameters)} parameters, got {len(values)} values")
    out = bytearray(max(16, program.parameter_bytes))
    for value, parameter in zip(values, program.parameters, strict=True):
        size = int(parameter.kind[1:]) // 8
        if isinstance(value, float):
            data = struct.pack("<f" if size == 4 else "<d", value)
        else:
            data = (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        out[parameter.offset : parameter.offset + size] = data
    return bytes(out)


class Launch:
    """A program with its arguments.

    Args:
        grid: programs along each axis. shared: bytes of shared memory. values: of the parameters in order.
        fresh: addresses of storages that ``torch.empty`` made.
    """

    def __init__(
        self,
        program: Program,
        grid: tuple[int, int, int],
        shared: int,
        values: list[Any],
        arguments: list[Argument],
        settings: Emulation,
        fresh: set[int],
    ):
        self.program, self.grid, self.shared, self.settings = program, grid, shared, settings
        self.arguments = arguments
        self.parameters = packed(program, values)
        self.ranges = ranges_of(arguments, fresh)

    def run(self, number: int) -> Counts:
        """Run every schedule from the same memory, and compare; the counts of the first one."""
        schedules = schedules_of(self.settings, number)
        if len(schedules) == 1 or any(each.end - each.begin > LARGE for each in self.ranges):
            return self._once(schedules[-1])
        before = [self._copy(each) for each in self.ranges]
        first, counts = None, Counts()
        for schedule in schedules:
            if first is not None:
                for memory, content in zip(self.ranges, before, strict=True):
                    ctypes.memmove(memory.begin, content.ctypes.data, content.nbytes)
            counts_now = self._once(schedule)
            after = [self._copy(each) for each in self.ranges]
            if first is None:
                first, counts = after, counts_now
            else:
                self._compare(first, after)
        return counts

    @staticmethod
    def _copy(memory: Range) -> np.ndarray:
        size = memory.end - memory.begin
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(memory.begin)).copy()

    def _compare(self, first: list[np.ndarray], other: list[np.ndarray]) -> None:
        for memory, one, two in zip(self.ranges, first, other, strict=True):
            for at in np.flatnonzero(one != two):
                address = memory.begin + int(at)
                owners = [a for a in self.arguments if a.begin <= address < a.end]
                if any(each.varies for each in owners):
                    continue
                owner = owners[0]
                raise ScheduleError(
                    f"{self.program.name}: {owner.name}[{owner.element(address)}] differs between two orders "
                    f"of the warps, byte {one[at]} and {two[at]}: order the accesses by a barrier or another "
                    "launch, or declare the argument with `kernels.races.declared`"
                )

    def _once(self, schedule: Schedule) -> Counts:
        from .runtime.functions import compiled
        from .runtime.scheduler import run_grid

        program = self.program
        _, functions = compiled()
        blocks = self.grid[0] * self.grid[1] * self.grid[2]
        if blocks == 0:
            return Counts()
        warps = -(-program.threads // 32)
        slots = min(schedule.resident, blocks)
        at, launch = ARENA.words("launch", layout.LAUNCH_WORDS)
        parameters = np.frombuffer(self.parameters, np.uint8)
        launch[layout.LAUNCH_PROGRAM] = program.address
        launch[layout.LAUNCH_FUNCTIONS] = functions.ctypes.data
        launch[layout.LAUNCH_GRID_X : layout.LAUNCH_GRID_Z + 1] = self.grid
        launch[layout.LAUNCH_THREADS] = program.threads
        launch[layout.LAUNCH_PARAMETERS] = parameters.ctypes.data
        launch[layout.LAUNCH_SHARED_BYTES] = self.shared
        launch[layout.LAUNCH_SHARED_SHIFT] = program.shared_bytes.bit_length() - 1
        launch[layout.LAUNCH_CHECKS] = self.settings.races
        launch[layout.LAUNCH_RANDOM] = schedule.seed
        launch[layout.LAUNCH_LATE_COPIES] = schedule.late_copies
        launch[layout.LAUNCH_POLICY] = schedule.policy
        launch[layout.LAUNCH_RESIDENT] = slots
        launch[layout.LAUNCH_PATIENCE] = self.settings.patience
        launch[layout.LAUNCH_MAX_COPIES] = _MOST_COPIES
        launch[layout.LAUNCH_POISON] = self.settings.uninitialised
        shadows = self._place_ranges(launch)
        self._place_blocks(launch, slots, warps)
        kind = run_grid(at)
        ARENA.epoch = int(self._epochs(slots)) + 1
        del shadows, parameters
        if kind:
            raise fault_of(launch, program, self.arguments, self.grid)
        return Counts(
            int(launch[layout.LAUNCH_INSTRUCTIONS]), int(launch[layout.LAUNCH_BYTES_READ]),
            int(launch[layout.LAUNCH_BYTES_WRITTEN]), int(launch[layout.LAUNCH_BARRIERS]),
            int(launch[layout.LAUNCH_MOST_INSTRUCTIONS]),
        )  # fmt: skip

    def _place_ranges(self, launch: np.ndarray) -> list[np.ndarray]:
        at, table = ARENA.words("ranges", max(1, len(self.ranges)) * layout.RANGE_WORDS)
        shadows = []
        for row, memory in zip(table.reshape(-1, layout.RANGE_WORDS), self.ranges, strict=False):
            shift = memory.item.bit_length() - 1
            cells = ((memory.end - memory.begin) >> shift) + 1
            shadow = zeros(cells * layout.CELL_BYTES if self.settings.races else 8)
            shadows.append(shadow)
            flags = layout.UNCHECKED * memory.races | layout.FRESH * memory.fresh
            row[:] = memory.begin, memory.end, shadow.ctypes.data, shift, flags
        launch[layout.LAUNCH_NUM_RANGES], launch[layout.LAUNCH_RANGES] = len(self.ranges), at
        return shadows

    def _place_blocks(self, launch: np.ndarray, slots: int, warps: int) -> None:
        at_blocks, blocks = ARENA.words("blocks", slots * layout.BLOCK_WORDS)
        at_warps, table = ARENA.words("warps", slots * warps * layout.WARP_WORDS)
        frame = -(-self.program.frame_bytes // 128) * 128
        frames = ARENA.take("frames", frame * slots * warps)
        shared = -(-(self.shared + 1) // 128) * 128
        at_shared = ARENA.take("shared", shared * slots)
        at_shadow = ARENA.take("shadow", shared * layout.CELL_BYTES * slots)
        copy_bytes = 8 * layout.COPY_WORDS * _MOST_COPIES
        copies = ARENA.take("copies", copy_bytes * slots * warps)
        launch[layout.LAUNCH_BLOCKS], launch[layout.LAUNCH_WARPS] = at_blocks, at_warps
        for slot, block in enumerate(blocks.reshape(slots, -1)):
            block[layout.BLOCK_SHARED] = at_shared + shared * slot
            block[layout.BLOCK_SHADOW] = at_shadow + shared * layout.CELL_BYTES * slot
            block[layout.BLOCK_EPOCH] = ARENA.epoch
            block[layout.BLOCK_FIRST_WARP] = at_warps + 8 * layout.WARP_WORDS * warps * slot
        for number, warp in enumerate(table.reshape(slots * warps, -1)):
            slot, index = divmod(number, warps)
            warp[layout.WARP_LAUNCH] = launch.ctypes.data
            warp[layout.WARP_BLOCK] = at_blocks + 8 * layout.BLOCK_WORDS * slot
            warp[layout.WARP_INDEX], warp[layout.WARP_STATUS] = index, layout.DONE
            warp[layout.WARP_FRAME] = frames + frame * number
            warp[layout.WARP_COPIES] = copies + copy_bytes * number
        self._blocks = blocks

    def _epochs(self, slots: int) -> int:
        return int(self._blocks.reshape(slots, -1)[:, layout.BLOCK_EPOCH].max())
