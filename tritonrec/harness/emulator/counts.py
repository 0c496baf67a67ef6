"""What ran: instructions, bytes and barriers of each kernel."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Counts:
    """Of one launch: instructions of warps, bytes of global memory, barriers of blocks.

    most: instructions of the program that has most of them.
    """

    instructions: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    barriers: int = 0
    most: int = 0

    def add(self, other: Counts) -> None:
        self.instructions += other.instructions
        self.bytes_read += other.bytes_read
        self.bytes_written += other.bytes_written
        self.barriers += other.barriers
        self.most = max(self.most, other.most)


@dataclass
class Row:
    """What ran of one kernel."""

    launches: int = 0
    programs: int = 0
    compiled: int = 0
    seconds: float = 0.0
    counts: Counts = field(default_factory=Counts)


def table(rows: dict[str, Row]) -> str:
    """By kernel: launches, instructions of warps, bytes of global memory, barriers, programs, seconds."""
    titles = (
        "kernel", "launches", "instructions", "most of one", "read", "written", "barriers", "programs",
        "compiled", "s",
    )  # fmt: skip
    lines: list[tuple[str, ...]] = [titles]
    for name, row in sorted(rows.items()):
        counts = row.counts
        numbers = (
            row.launches, counts.instructions, counts.most, counts.bytes_read, counts.bytes_written,
            counts.barriers, row.programs, row.compiled,
        )  # fmt: skip
        lines.append((name, *(f"{number:,}" for number in numbers), f"{row.seconds:.2f}"))
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
