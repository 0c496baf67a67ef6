"""What the guard sees of a call of the model: ops that draw, or whose bits may depend on the place of a
value, and the functions of autograd by which its losses came.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .by_place import Call, may_differ
from .model_call import Shown

MOST_NODES = 512
"""Of a graph of autograd that are looked at."""


def path_of(shown: torch.Tensor | Shown) -> frozenset[tuple[str, str]]:
    """Pairs of functions of autograd of which one gets the other's result; loops of any length are alike."""
    tensors = [shown] if isinstance(shown, torch.Tensor) else list(shown.values())
    left, pairs = [each.grad_fn for each in tensors if each.grad_fn is not None], set[tuple[str, str]]()
    known = set(left)
    while left:
        node = left.pop()
        for before, _ in node.next_functions:
            if before is not None:
                pairs.add((node.name(), before.name()))
                if before not in known and len(known) < MOST_NODES:
                    known.add(before)
                    left.append(before)
    return frozenset(pairs)


class DrawError(Exception):
    """The op that draws."""


class Ops(TorchDispatchMode):
    """On this thread no op draws from a global generator; a reader of batches may, meanwhile.

    Attributes:
        by_place: calls of functions whose bits may depend on the place of a value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_place: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draws, by_place = _looks_of(func)
        if draws:
            taken = func._schema.arguments
            # The arguments as the op has them: defaults, then those by place, then those by name.
            given = {each.name: each.default_value for each in taken if each.has_default_value()}
            given |= dict(zip((each.name for each in taken), args, strict=False)) | (kwargs or {})
            # A dropout that is off draws nothing, whatever its tag says.
            idle = any(given.get(name) == 0 for name in ("p", "dropout_p", "dropout", "train", "training"))
            if not idle and given.get("generator") is None:
                raise DrawError(str(func))
        out = func(*args, **(kwargs or {}))
        if by_place and (call := Call.of(func, args, kwargs or {}, out)):
            self.by_place.append(call)
        return out


@cache
def _looks_of(func: Any) -> tuple[bool, bool]:
    """Whether an op may draw, and whether its bits may depend on places; most do neither."""
    return torch.Tag.nondeterministic_seeded in func.tags, may_differ(func)
