"""Comparison of the ranks' collectives before each call.

gloo compares nothing: ranks that call different collectives, or give tensors of different sizes, end or
stall, and ranks with different dtypes misread each other's bits. Here each rank first sends a description of
its call to all others, and receives theirs. This costs a small message to each rank, and a wait.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from ...distributed.watch import RankDiedError
from .messages import TAG, Deadline, SupportsMessages

CALLS_TAG = TAG - 1
LENGTH = 256
"""Bytes of a description."""


def describe_call(name: str, tensors: Any, opts: Any = None) -> str:
    """A call in words: name, root, reduction, and the sizes and dtypes that must agree between ranks."""
    words = [name]
    if hasattr(opts, "reduceOp"):
        words.append(opts.reduceOp.op.name)
    if hasattr(opts, "rootRank"):
        words.append(f"root {opts.rootRank}")
    flat = _flat(tensors)
    shown = [f"{each.numel()} {str(each.dtype).removeprefix('torch.')}" for each in flat[:8]]
    if len(flat) > 8:
        shown.append(f"{len(flat) - 8} further tensors of {sum(each.nbytes for each in flat[8:])} bytes")
    return " ".join(words) + (f" of {' and '.join(shown)}" if shown else "")


def _flat(tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [each for part in tensors for each in _flat(part)]


class CallCheck:
    """Compares each call of this rank with those of the others.

    Args:
        group: with tagged messages; its tag `CALLS_TAG` is used here only.
        timeout: of the wait for the other ranks.
    """

    def __init__(self, group: SupportsMessages, timeout: timedelta):
        self.group, self.timeout = group, timeout
        self.calls = 0

    def __call__(self, call: str) -> None:
        """Wait until all ranks are at the same call.

        Raises RuntimeError naming two calls that differ, and RankDiedError naming a rank that is missing.
        """
        rank, number = self.group.rank(), self.calls
        self.calls += 1
        mine = torch.zeros(LENGTH, dtype=torch.uint8)
        text = f"{number}:{call}".encode()[:LENGTH]
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        theirs = torch.zeros(self.group.size(), LENGTH, dtype=torch.uint8)
        others = [peer for peer in range(self.group.size()) if peer != rank]
        received = [(peer, self.group.recv([theirs[peer]], peer, CALLS_TAG)) for peer in others]
        sent = [(peer, self.group.send([mine], peer, CALLS_TAG)) for peer in others]
        deadline = Deadline(self.timeout)
        for peer, work in (*received, *sent):
            try:
                work.wait(deadline.left)
            except RuntimeError as error:
                why = f"within {deadline.seconds:g} s" if deadline.is_over else f"and is gone: {error}"
                raise RankDiedError(
                    f"rank {peer} did not come to collective {number}, {call}, {why}"
                ) from error
        for peer in others:
            at, _, other = bytes(theirs[peer].tolist()).rstrip(b"\0").decode(errors="replace").partition(":")
            # `text` and not `call`: theirs was cut at LENGTH, too.
            if (at, other) != (str(number), text.decode(errors="replace").partition(":")[2]):
                raise RuntimeError(
                    f"rank {peer} calls {other} as its collective {at}, and rank {rank} calls {call} as its "
                    f"collective {number}: make the same calls on all ranks, with one size and dtype"
                )


SYMMETRIC_ARGUMENTS: dict[str, Callable[..., Any]] = {
    "allgather": lambda outputs, inputs: inputs,
    "_allgather_base": lambda output, input: input,
    "gather": lambda outputs, inputs: inputs,
    "reduce_scatter": lambda outputs, inputs: outputs,
    "_reduce_scatter_base": lambda output, input: output,
    "scatter": lambda outputs, inputs: outputs,
}
"""Of collectives with outputs and inputs, the arguments that must agree between ranks."""
