"""Memory that this process may still take: of the machine, and of the memory cgroup of its container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""A cgroup of version 1 without a limit has a number above this."""


@dataclass(frozen=True)
class Room:
    """Bytes that are `left`, of a `limit`, and whose limit it is.

    The processes of the machine or container share both; `own` says that this process has them alone.
    """

    left: int
    limit: int
    of: str
    own: bool = False


def memory_left(limit: int | None = None, root: Path = Path("/")) -> Room:
    """The tightest bound of this process's memory.

    Args:
        limit: bytes of this process, resident; None: what the machine and the cgroups leave. Page cache that
            the kernel can drop counts as left, and no file that is mapped. Swap does not.
        root: of the file system, for tests.

    Raises OSError where the kernel does not tell, which is anywhere but on Linux.
    """
    if limit is not None:
        return Room(limit - resident_bytes(root), limit, "this process", own=True)
    sizes = dict(_sizes(root / "proc/meminfo", ":"))
    if not {"MemAvailable", "MemTotal"} <= sizes.keys():
        raise OSError(f"{root / 'proc/meminfo'} does not tell what memory is available")
    rooms = [Room(sizes["MemAvailable"] << 10, sizes["MemTotal"] << 10, "the machine"), *_of_cgroups(root)]
    return min(rooms, key=lambda room: room.left)


def resident_bytes(root: Path = Path("/")) -> int:
    """Bytes of this process that are in memory."""
    pages = int((root / "proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_bytes(root: Path = Path("/")) -> int:
    """Bytes of this process that were in memory at most."""
    lines = (root / "proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def _of_cgroups(root: Path) -> Iterator[Room]:
    """One for each limit above this process. A container may see its own cgroup as the root."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / _CGROUPS.relative_to("/") / controllers
        new = controllers == ""
        names = (
            ("memory.max", "memory.current") if new else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        here = top / path.lstrip("/")
        for folder in (here, *here.parents):
            if not folder.is_relative_to(top):
                break
            try:
                given, used = ((folder / name).read_text().strip() for name in names)
                stat = dict(_sizes(folder / "memory.stat", " "))
            except OSError:  # no such cgroup in this namespace, or the root, which has no limit
                continue
            if given == "max" or int(given) > _NO_LIMIT:
                continue
            # The kernel drops active pages too, such as of rows that are read often, but not of code in use.
            inactive, active, mapped = (
                stat.get(name if new else f"total_{name}", 0)
                for name in ("inactive_file", "active_file", "file_mapped" if new else "mapped_file")
            )
            droppable = inactive + max(active - mapped, 0)
            yield Room(int(given) - int(used) + droppable, int(given), f"the memory cgroup {folder}")


def _sizes(file: Path, separator: str) -> Iterator[tuple[str, int]]:
    for line in file.read_text().splitlines():
        name, _, value = line.partition(separator)
        yield name, int(value.split()[0])
