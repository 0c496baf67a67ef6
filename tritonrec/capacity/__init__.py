"""Memory that tables need and that is left: a training ends with a checkpoint before the kernel ends it."""

from ..room import Room, memory_left, peak_bytes, resident_bytes
from .footprint import Foretold, Sizes, foretell, sizes_of, tables_added
from .watch import MemoryWatch

__all__ = [
    "Foretold", "MemoryWatch", "Room", "Sizes", "foretell", "memory_left", "peak_bytes", "resident_bytes",
    "sizes_of", "tables_added",
]  # fmt: skip
