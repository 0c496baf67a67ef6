"""What code of the caller's sets on modules, beside parameters, buffers and hooks."""

from __future__ import annotations

from collections import deque
from dataclasses import is_dataclass
from operator import is_not
from types import FunctionType, MethodType
from typing import Any

import torch

from ..kernels.checksums import checksum
from ..nn.context import has_global_hooks
from .diagnosis import Diagnosis

_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_PLAIN = {bool, int, float, str, type(None)}
DEPTH, MOST_PARTS, MOST_BITS = 3, 64, 1 << 16
"""Of values within values, of parts of one, and of elements of buffers, that are noted."""


def own_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """By name, of one module."""
    return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}


class Attributes:
    """What modules keep beside parameters and buffers: counters, what a first call caches, lists of results.

    Attributes:
        blamed: the module whose attribute a call has changed.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        own = [(path, module, own_attributes(module)) for path, module in model.named_modules()]
        # (module's name, attribute; what holds values; the values)
        self._kept: list[tuple[str, str, Any, Any]] = [
            (path, "", vars(module), values) for path, module, values in own
        ]
        for path, _, values in own:
            for name, value in values.items():
                holds = vars(value) if _is_of_the_caller(value) else value
                if type(holds) in (dict, list, set, deque):
                    self._kept.append((path, name, holds, holds.copy()))
        self.blamed: Diagnosis | None = None

    def put_back(self) -> None:
        """As they were; what else has changed inside of them stays."""
        # Identity and not equality: a call that replaces a value by an equal one has still written.
        for path, attribute, holds, before in self._kept:
            if isinstance(holds, dict):
                for name in [*before, *(holds.keys() - before.keys())]:
                    if attribute == "" and name in _OF_EVERY_MODULE:
                        continue
                    if holds.get(name, self) is not before.get(name, self):
                        self._note(path, attribute or str(name))
                        if name in before:
                            holds[name] = before[name]
                        else:
                            holds.pop(name)
            elif len(holds) != len(before) or any(map(is_not, holds, before)):
                self._note(path, attribute)
                if isinstance(holds, list):
                    holds[:] = before
                elif isinstance(holds, deque):
                    holds.clear()
                    holds.extend(before)
                else:
                    holds.symmetric_difference_update(holds ^ before)

    def _note(self, path: str, name: str) -> None:
        self.blamed = self.blamed or Diagnosis(
            None,
            path or type(self._model).__name__,
            f"its attribute {name} is state that one call leaves to the next; keep none between calls",
        )


def _is_of_the_caller(value: Any) -> bool:
    """Whether a value is an object that keeps attributes, and no module, tensor, class or function."""
    others = torch.nn.Module, torch.Tensor, type, FunctionType, MethodType
    return hasattr(value, "__dict__") and not isinstance(value, others)


def noted(model: torch.nn.Module) -> dict[str, Any]:
    """What a call of the model may read beside parameters, to be compared; values by what to call them."""
    found: dict[str, Any] = {"a hook of all modules": bool(has_global_hooks())}
    buffers: list[tuple[str, torch.Tensor]] = []
    for path, module in model.named_modules():
        place = path or type(model).__name__
        own = vars(module)
        found["the class of " + place] = type(module)
        for name in own.keys() - _OF_EVERY_MODULE:
            value = own[name]
            plain = type(value) in _PLAIN
            found[f"attribute {name} of {place}"] = value if plain else _noted_value(value, DEPTH)
        if own["_buffers"]:
            prefix = path and path + "."
            buffers += [(prefix + name, each) for name, each in own["_buffers"].items() if each is not None]
    # A checksum of large buffers at each result would cost
    # more than it tells: their versions are watched elsewhere.
    if sum(each.numel() for _, each in buffers) <= MOST_BITS:
        for name, each in buffers:
            if each.device.type == "cpu":
                found[f"buffer {name}"] = int(checksum(each))
    return found


def _noted_value(value: Any, depth: int) -> Any:
    """What changes with a value, and is none of its parts."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        frozen = type(value).__dataclass_params__.frozen  # type: ignore[attr-defined]
        value = value if frozen else vars(value)
    if isinstance(value, dict):
        value = [each for pair in value.items() for each in pair]
    if isinstance(value, (list, tuple)) and depth and len(value) <= MOST_PARTS:
        return [_noted_value(each, depth - 1) for each in value]
    return id(value)
