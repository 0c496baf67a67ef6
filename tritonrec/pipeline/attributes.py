"""What code of the caller's sets on modules, beside parameters, buffers and hooks."""

from __future__ import annotations

from typing import Any

import torch

from .diagnosis import Diagnosis

_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


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
        self._before = [(path, module, own_attributes(module)) for path, module in model.named_modules()]
        self._contents = [
            (path, name, value, value.copy())
            for path, _, own in self._before
            for name, value in own.items()
            if type(value) in (dict, list, set)
        ]
        self.blamed: Diagnosis | None = None

    def put_back(self) -> None:
        """As they were; what else has changed inside of them stays."""
        for path, module, before in self._before:
            now = own_attributes(module)
            for name in {**before, **now}:
                if now.get(name, self) is before.get(name, self):
                    continue
                self._note(path, name)
                vars(module).pop(name, None)
                if name in before:
                    vars(module)[name] = before[name]
        for path, name, value, contents in self._contents:
            if len(value) != len(contents) or any(
                one is not other for one, other in zip(_parts(value), _parts(contents), strict=True)
            ):
                self._note(path, name)
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(contents)

    def _note(self, path: str, name: str) -> None:
        self.blamed = self.blamed or Diagnosis(
            None,
            path or type(self._model).__name__,
            f"its attribute {name} is state that one call leaves to the next; keep none between calls",
        )


def _parts(values: Any) -> list[Any]:
    """Of a list, a set or a dict, whose values count too."""
    return [*values, *values.values()] if isinstance(values, dict) else [*values]
