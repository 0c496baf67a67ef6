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
PATTERN = 0xA5


class Arena:
    """Room for the bytes of one argument, or of two that share memory."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, ROOM + PAGE)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(self.bytes.data_ptr() + ROOM), ctypes.c_size_t(PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    def place(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Copies with their strides that begin at one byte and end with the room; None if they do not fit."""
        spans = [span(tensor) for tensor in tensors]
        self.start = ROOM - -(-max(spans, default=0) // 16) * 16
        if len(tensors) == 1:
            self.start = ROOM - spans[0]
        if self.start < BAND:
            return None
        self.bytes[self.start - BAND : ROOM] = PATTERN
        placed = []
        for tensor in tensors:
            room = self.bytes[:ROOM].view(tensor.dtype)
            at = self.start // tensor.element_size()
            placed.append(room.as_strided(tensor.shape, tensor.stride(), at))
            flat = (max(span(tensor), 0) // tensor.element_size(),)
            room[at : at + flat[0]].copy_(tensor.as_strided(flat, (1,)))
        self.before = self.bytes[self.start - BAND : ROOM].clone()
        self.placed = placed
        return placed

    def spoiled(self, written: list[torch.Tensor]) -> bool:
        """Whether bytes changed that belong to none of the tensors `written`."""
        now = self.bytes[self.start - BAND : ROOM].clone()
        if torch.equal(now, self.before):
            return False
        for tensor in (one.detach() for one in written):
            if tensor.dtype == torch.bool:  # torch's copies turn any byte but 0 into 1
                tensor = tensor.view(torch.uint8)
            kept = tensor.clone()
            self.bytes[self.start - BAND : ROOM] = self.before
            tensor.copy_(kept)
            self.before = self.bytes[self.start - BAND : ROOM].clone()
            self.bytes[self.start - BAND : ROOM] = now
        return not torch.equal(now, self.before)


def span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the last."""
    if tensor.numel() == 0:
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + reach) * tensor.element_size()
