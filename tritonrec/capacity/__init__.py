"""Memory that tables need and that is left: a training ends with a checkpoint before the kernel ends it."""

from .footprint import Sizes, sizes_of, tables_added
from .room import Room, memory_left, peak_bytes, resident_bytes
from .watch import MemoryWatch

__all__ = [
    "MemoryWatch", "Room", "Sizes", "memory_left", "peak_bytes", "resident_bytes", "sizes_of", "tables_added",
]  # fmt: skip
