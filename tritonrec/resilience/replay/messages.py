"""Tensors as one message of bytes, and the tensors of a batch: nothing that comes from a rank is executed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from ...data import Batch
from ...data.jagged import Movable
from ...distributed import CorruptionError
from ...kernels.checksums import as_bytes, checksum

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
WORD = 8
"""Bytes to whose multiples tensors are filled up, so that each can be seen in its dtype."""

Part = TypeVar("Part", bound=Movable)


def pack(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """(n,) uint8 on `device`: a checksum, the number of the header's words, the header, and the tensors."""
    header = [len(tensors)]
    for each in tensors:
        header += [DTYPES.index(each.dtype), each.dim(), *each.shape]
    words = torch.tensor([len(header), *header], dtype=torch.int64, device=device)
    parts = [words.view(torch.uint8)]
    for each in tensors:
        held = as_bytes(each.detach().to(device))
        parts += [held, held.new_zeros(-len(held) % WORD)]
    content = torch.cat(parts)
    return torch.cat([checksum(content).view(1).view(torch.uint8), content])


def unpack(message: torch.Tensor, sender: int, receiver: int) -> list[torch.Tensor]:
    """The tensors of `pack`. Raises `CorruptionError` for a message with other bits than it was sent with."""
    sent, content = message[:WORD].view(torch.int64), message[WORD:]
    if int(sent) != int(checksum(content)):
        raise CorruptionError(
            f"a message from rank {sender} has other bits at rank {receiver} than when it was sent (replay): "
            "check the link and the memory of both",
            (sender, receiver),
        )
    size = int(content[:WORD].view(torch.int64))
    header = iter(content[WORD : WORD * (1 + size)].view(torch.int64).tolist())
    tensors, start = [], WORD * (1 + size)
    for _ in range(next(header)):
        dtype = DTYPES[next(header)]
        shape = [next(header) for _ in range(next(header))]
        length = math.prod(shape) * dtype.itemsize
        tensors.append(content[start : start + length].view(dtype).view(shape))
        start += length + -length % WORD
    return tensors


def rebuilt(like: Batch, tensors: Iterator[torch.Tensor]) -> Batch:
    """A batch of other samples: its `tensors`, and everything else from a batch of the same step."""
    return _rebuilt(like, tensors)


def _rebuilt(like: Part, tensors: Iterator[torch.Tensor]) -> Part:
    changes: dict[str, Any] = {}
    for name in (each.name for each in fields(like)):  # type: ignore[arg-type]
        value = getattr(like, name)
        if isinstance(value, torch.Tensor):
            changes[name] = next(tensors)
        elif isinstance(value, Movable):
            changes[name] = _rebuilt(value, tensors)
    return replace(like, **changes)  # type: ignore[type-var]
