"""A kernel cut into segments, and the frame in which their values pass from one to another."""

from __future__ import annotations

from dataclasses import dataclass, field

from .calls import CALLED, IGNORED, Call, call_of, space_of
from .lane import SPECIAL
from .ptx import Kernel, Statement

_SPECIAL = {name.split(".")[0] for name in SPECIAL}
_MOST_CALLS = 48
"""Calls behind one segment; more would need large buffers."""


@dataclass
class Segment:
    """Instructions of one lane, then calls, then perhaps a branch or an end."""

    number: int
    label: str
    statements: list[tuple[Statement, Call | None]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    after: list[Call] = field(default_factory=list)
    end: Statement | None = None


def cut(kernel: Kernel) -> tuple[list[Segment], list[Statement]]:
    """Segments in the order of the text, and the instructions of warps by their number."""
    segments: list[Segment] = []
    sites: list[Statement] = []
    for label, statements in kernel.blocks:
        current = Segment(len(segments), label)
        segments.append(current)
        waiting: set[str] = set()
        for s in statements:
            if s.name in IGNORED:
                continue
            call = None
            if s.name in CALLED and not (s.name == "ld" and space_of(s) == "param"):
                call = call_of(s)
                if call is None:
                    continue
                call.site = len(sites)
                sites.append(s)
            touched = {*s.sources, *s.results}
            full = call is not None and len(current.calls) == _MOST_CALLS
            if touched & waiting or full or (current.end is not None):
                following = Segment(len(segments), "", after=current.calls)
                segments.append(following)
                current, waiting = following, set()
            if s.name in ("bra", "ret", "exit", "trap"):
                if current.calls:
                    following = Segment(len(segments), "", after=current.calls)
                    segments.append(following)
                    current, waiting = following, set()
                current.end = s
                continue
            current.statements.append((s, call))
            if call is not None:
                current.calls.append(call)
                waiting |= {register for register, _ in call.outputs if register != "_"}
        if current.calls:
            segments.append(Segment(len(segments), "", after=current.calls))
    return segments, sites


class Frame:
    """A warp's memory: slots of registers that a segment reads before it writes them, and buffers of calls.

    Args:
        slots: register -> byte. size: in bytes.
    """

    def __init__(self, kernel: Kernel, segments: list[Segment]):
        self.slots: dict[str, int] = {}
        self.size = 0
        self._bits = kernel.bits
        self._place_registers(segments)
        self._place_buffers(segments)

    def _place_registers(self, segments: list[Segment]) -> None:
        """A slot in the frame for each register that a segment reads before it writes it."""
        for segment in segments:
            known = {r for call in segment.after for r, _ in call.outputs}
            for s, _ in segment.statements:
                for register in s.sources:
                    if register not in known:
                        self._slot(register)
                known.update(s.results)
            if segment.end is not None and segment.end.guard and segment.end.guard[0] not in known:
                self._slot(segment.end.guard[0])

    def _slot(self, register: str) -> None:
        if register in self.slots or register in _SPECIAL:
            return
        size = 32 * max(8, self._bits(register)) // 8
        self.slots[register] = self.size
        self.size += -(-size // 32) * 32

    def _place_buffers(self, segments: list[Segment]) -> None:
        """Calls of neighbouring segments use two regions in turn: one is read, the other filled."""
        most = 0
        for segment in segments:
            at = 0
            for call in segment.calls:
                call.place = at
                at += call.io_bytes
            most = max(most, at)
        for segment in segments:
            for call in segment.calls:
                call.place += self.size + (segment.number % 2) * most
        self.size += 2 * most
