"""What code of the caller's sets on modules, beside parameters, buffers and hooks."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import is_dataclass
from dis import get_instructions
from functools import cache, cached_property, partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from ..kernels.checksums import checksum, same_bits
from ..nn.context import has_global_hooks
from .caller_state import Same
from .compiled import ONE_CALLS, Compilation
from .diagnosis import Diagnosis

_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_HOOKS_OF_MODULES = _OF_EVERY_MODULE - {"_parameters", "_buffers", "_modules"}
_PLAIN = {bool, int, float, str, type(None)}
_BEHIND = {
    MethodType: "__self__ __func__", partial: "func keywords", staticmethod: "__func__",
    classmethod: "__func__", property: "fget", cached_property: "func", CellType: "cell_contents",
}  # fmt: skip
"""What leads to other values, and by which names."""
_CACHE = type(cache(int))
_CONTAINERS = dict, list, tuple, set, deque
_OTHERS = {"torch", "tritonrec", "numpy", *sys.stdlib_module_names} - {
    "types", "collections", "argparse", "_thread",
}  # fmt: skip
"""Packages whose objects keep state of their own."""
DEPTH, MOST_PARTS, MOST_BITS, MOST_VALUES = 3, 64, 1 << 16, 1 << 20
"""Of values within values, of parts of one, of elements of buffers and of those of arrays, that are noted."""


class Attributes:
    """What calls may keep beside parameters and buffers: counters, a first call's values, lists of results.

    Containers, arrays and objects are followed `DEPTH` deep: from attributes of modules, their classes and
    their parameters, and from what functions of these close over or name.

    Attributes:
        blamed: the module whose attribute a call has changed.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        # (module's name, attribute; what holds values; the values)
        self._kept: list[tuple[str, str, Any, Any]] = []
        # by id, with the values, so that no id is given to another one meanwhile
        self._seen: dict[int, Any] = {id(each): each for each in [*model.parameters(), *model.buffers()]}
        self._modules = {id(each) for each in model.modules()}
        # By levels: what a long way reaches first would be followed less far than by a short one.
        levels: list[list[tuple[str, str, Any]]] = [[] for _ in range(DEPTH + 2)]
        for path, module in model.named_modules():
            own = [module, *map(vars, module.parameters(recurse=False)), *type(module).__mro__]
            levels[-1] += [(path, "", value) for value in own]
        for depth in range(DEPTH + 1, 0, -1):
            for path, name, value in levels[depth]:  # which grows
                self._keep(path, name, value, depth, levels)
        self.blamed: Diagnosis | None = None
        self._changed: list[tuple[Any, Any, list[Any]]] = []

    def _keep(
        self, path: str, name: str, value: Any, depth: int, levels: list[list[tuple[str, str, Any]]]
    ) -> None:
        if type(value) in _PLAIN or id(value) in self._seen or not _may_change(value):
            return
        if id(value) in self._modules and depth <= DEPTH:  # which has a turn of its own
            return
        self._seen[id(value)] = value
        before = _parts(value)
        self._kept.append((path, name, value, before))
        if not isinstance(before, dict) or (isinstance(value, _CONTAINERS) and len(before) > MOST_PARTS):
            return
        names = "" if isinstance(value, (type, FunctionType)) else name
        below = depth if isinstance(value, (tuple, *_BEHIND)) else depth - 1
        for part, each in before.items():
            if not isinstance(value, torch.nn.Module) or part not in _HOOKS_OF_MODULES or each:
                levels[below].append((path, names or str(part), each))

    def put_back(self) -> None:
        """As they were; what else has changed inside of them stays."""
        for path, attribute, value, before in self._kept:
            now = _parts(value)
            if isinstance(before, dict):
                # Identity and not equality: a call that replaces a value by an equal one has still written.
                changed = [each for each in before | now if now.get(each, self) is not before.get(each, self)]
                if isinstance(value, FunctionType):  # what it only reads the caller may have set meanwhile
                    read, written = _globals_of(value.__code__)
                    changed = [each for each in changed if each in written or each not in read]
            else:
                changed = [attribute] if _moved(before, now) else []
            if changed:
                self.blamed = self.blamed or Diagnosis(
                    None,
                    path or type(self._model).__name__,
                    f"its attribute {attribute or changed[0]} is state that one call leaves to the next; "
                    "keep none between calls",
                )
                self._changed.append((value, before, changed))
                _set(value, before, changed)

    def put_back_changed(self) -> None:
        """Once more, what calls were seen to change, and nothing that the caller has set since."""
        for value, before, changed in self._changed:
            _set(value, before, changed)


def _may_change(value: Any) -> bool:
    """Whether a value has parts that a call may set. What others than the caller may set, as a loader's, has
    none: torch, this library and Python keep their own state.
    """
    if isinstance(value, torch.Tensor):
        return value.numel() <= MOST_VALUES and not value.is_inference()
    if isinstance(value, np.ndarray):
        return value.size <= MOST_VALUES and not value.dtype.hasobject
    if isinstance(value, _CONTAINERS):
        return len(value) <= MOST_VALUES
    if isinstance(value, (*_BEHIND, torch.nn.Module)):
        return True
    if isinstance(value, (type, FunctionType, _CACHE)):
        return not _is_installed(value.__module__)
    owner = type(value)
    return owner.__module__.partition(".")[0] not in _OTHERS and not hasattr(owner, "__next__")


@cache
def _is_installed(name: str) -> bool:
    """Whether a module is of an installed package, whose classes and functions fill caches of their own."""
    file = Path(getattr(sys.modules.get(name), "__file__", None) or "")
    return name.partition(".")[0] in _OTHERS or not {"site-packages", "dist-packages"}.isdisjoint(file.parts)


def _parts(value: Any) -> Any:
    """What a value holds, by names; of an array a copy, of a tensor its version too."""
    if isinstance(value, torch.Tensor):
        return value._version, value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return dict(dict.items(value))  # not by an item's own way to be read, which may make another value
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    if isinstance(value, set):
        return dict.fromkeys(value)
    if isinstance(value, _CACHE):
        return {"calls": value.cache_info().currsize, **vars(value)}
    if isinstance(value, FunctionType):
        code, globals_ = value.__code__, value.__globals__
        named = frozenset().union(*_globals_of(code))
        found = {name: globals_[name] for name in named if name in globals_}
        found |= dict(zip(code.co_freevars, value.__closure__ or (), strict=False))
        own = ("__defaults__", "__kwdefaults__", "__dict__")
        return found | {name: getattr(value, name) for name in own}
    names = _BEHIND.get(type(value), "").split()
    for kind in () if names else type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return found | dict(getattr(value, "__dict__", {}))


@cache
def _globals_of(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Names of the globals that a function, or one inside of it, reads; and of those that it sets."""
    read, written = set[str](), set[str]()
    for each in get_instructions(code):
        if each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            written.add(each.argval)
        elif each.opname == "LOAD_GLOBAL":
            read.add(each.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            of_inner = _globals_of(inner)
            read, written = read | of_inner[0], written | of_inner[1]
    return frozenset(read), frozenset(written)


def _moved(before: Any, now: Any) -> bool:
    """Whether an array has other values, or a tensor was written to."""
    return before[0] != now[0] if isinstance(before, tuple) else before.tobytes() != now.tobytes()


def _set(value: Any, before: Any, changed: list[Any]) -> None:
    """Give it these parts again."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.copy_(before[1])
    elif isinstance(value, np.ndarray):
        value[...] = before
    elif isinstance(value, (list, deque, set)):
        value.clear()
        value.update(before) if isinstance(value, set) else value.extend(before.values())
    elif isinstance(value, _CACHE):
        value.cache_clear()
    else:
        own: Any = value.__globals__ if isinstance(value, FunctionType) else value
        if not isinstance(own, (dict, type)):
            own = getattr(own, "__dict__", own)
        put: Any
        drop: Any
        put, drop = (setattr, delattr) if isinstance(own, type) else (object.__setattr__, object.__delattr__)
        if isinstance(own, dict):
            kind = OrderedDict if isinstance(own, OrderedDict) else dict
            put, drop = kind.__setitem__, kind.__delitem__
        now = _parts(value)
        for name in changed:
            if name in before:
                put(own, name, before[name])
            elif name in now:
                drop(own, name)


class Contents:
    """Tensors by name, as they were: copies of the smallest, `MOST_VALUES` values in all, and checksums."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._before, left = dict[str, torch.Tensor](), MOST_VALUES
        self._copied = set[str]()
        for name, each in sorted(tensors.items(), key=lambda item: item[1].numel()):
            left -= each.numel()
            if left >= 0:
                self._copied.add(name)
            self._before[name] = each.detach().clone() if left >= 0 else checksum(each)

    def copied(self, name: str) -> bool:
        """Whether `put_back` can give this one its values."""
        return name in self._copied

    def put_back(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """The first of these that has other bits, also by a write to ``.data``, which counts no version.

        It is as it was again where it was copied.
        """
        for name, before in self._before.items():
            if (now := tensors.get(name)) is not None:
                copied = name in self._copied
                if not same_bits(now.detach() if copied else checksum(now), before):
                    if copied:
                        now.data.copy_(before)
                    return name
        return None


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
    if is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        frozen = type(value).__dataclass_params__.frozen  # type: ignore[attr-defined]
        value = value if frozen else vars(value)
    if isinstance(value, dict):
        value = [each for pair in value.items() for each in pair]
    if isinstance(value, (list, tuple)) and depth and len(value) <= MOST_PARTS:
        return [_noted_value(each, depth - 1) for each in value]
    return Same(value)


@contextmanager
def without_traces(model: torch.nn.Module) -> Iterator[tuple[dict[str, torch.Tensor], Attributes]]:
    """Inside, the model is called beside its training. Yields buffers and attributes as before."""
    buffers = {name: each.clone() for name, each in model.named_buffers()}
    attributes = Attributes(model)
    try:
        with ExitStack() as stack:
            if Compilation(model, None).compiles:  # which has a comparison of its own
                stack.enter_context(ONE_CALLS)
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield buffers, attributes
    finally:
        put_back(model, buffers)
        attributes.put_back()


def put_back(model: torch.nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, each in model.named_buffers():
            if name in buffers and not same_bits(each, buffers[name]):
                each.copy_(buffers[name])
