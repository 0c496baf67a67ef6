"""Memory that tables need and that is left: a training ends with a checkpoint before the kernel ends it."""

from .footprint import bytes_added, tables_added
from .room import Room, memory_left, resident_bytes
from .watch import MemoryWatch

__all__ = ["MemoryWatch", "Room", "bytes_added", "memory_left", "resident_bytes", "tables_added"]
