"""Memory that shows who touches it: an argument's bytes end at a page that nobody may read or write.

Before the bytes lies a band of a known pattern. What an op may not write (the band, gaps between strided
rows, arguments that it only reads) is compared with a copy afterwards; what lies behind ends the process.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

PAGE = mmap.PAGESIZE
ROOM = 64 * PAGE
BAND = 256
PATTERN = b"\xa5"


class Arena:
    """Room for the bytes of one argument, or of two that share memory."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, ROOM + PAGE)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(self.bytes.data_ptr() + ROOM), ctypes.c_size_t(PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
        self.rooms: dict[torch.dtype, torch.Tensor] = {}

    def place(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Copies with their strides that begin at one byte and end with the room; None if they do not fit."""
        spans = [span(tensor) for tensor in tensors]
        start = ROOM - -(-max(spans, default=0) // 16) * 16
        if len(tensors) == 1:
            start = ROOM - spans[0]
        if start < BAND:
            return None
        self.begin = start - BAND
        self.memory[self.begin : ROOM] = PATTERN * (ROOM - self.begin)
        placed = []
        for tensor, size in zip(tensors, spans, strict=True):
            at, count = start // tensor.element_size(), size // tensor.element_size()
            room = self._room(tensor.dtype)
            placed.append(room.as_strided(tensor.shape, tensor.stride(), at))
            if tensor.is_contiguous():
                placed[-1].copy_(tensor)
            else:  # with what is in its gaps
                room[at : at + count].copy_(tensor.as_strided((count,), (1,)))
        self.before = self.memory[self.begin : ROOM]
        return placed

    def _room(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self.rooms:
            self.rooms[dtype] = self.bytes[:ROOM].view(dtype)
        return self.rooms[dtype]

    def spoiled(self, written: list[torch.Tensor]) -> bool:
        """Whether bytes changed that belong to none of the tensors `written`."""
        now = self.memory[self.begin : ROOM]
        if now == self.before:
            return False
        for tensor in (one.detach() for one in written):
            if tensor.dtype == torch.bool:  # torch's copies turn any byte but 0 into 1
                tensor = tensor.view(torch.uint8)
            kept = tensor.clone()
            self.memory[self.begin : ROOM] = self.before
            tensor.copy_(kept)
            self.before = self.memory[self.begin : ROOM]
            self.memory[self.begin : ROOM] = now
        return now != self.before


def span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + reach) * tensor.element_size()
