"""Settings: fields of dataclasses whose help and range stand beside the default."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from functools import cache, wraps
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np

MOST = 2**31 - 1
"""Of a count, where no smaller number is absurd."""
MOST_SEED = 2**63 - 1
KEY = "setting"
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SCALARS: dict[Any, Any] = {
    bool: (bool, np.bool_), int: Integral, float: Real, str: str, NoneType: NoneType,
}  # fmt: skip
Plan = TypeVar("Plan")
Made = TypeVar("Made")


def no_copy(instead: str) -> Any:
    """A `__reduce_ex__`, which copies and pickles ask for, of what has files, threads or groups."""

    def __reduce_ex__(self: Any, protocol: object) -> str:
        raise TypeError(f"a {type(self).__name__} has no copy and no pickle: {instead}")

    return __reduce_ex__


@dataclass(frozen=True)
class Setting:
    """Metadata of a field.

    Args:
        help: one sentence. least, most: bounds of a number, or of each number of a tuple; None for none.
        option: its name on a command line; by default the field's.
        panel: the group of options that shows it; by default that of the dataclass.
    """

    help: str
    least: float | None = None
    most: float | None = None
    option: str | None = None
    panel: str | None = None

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError where a number, or one in a tuple, lies beyond the bounds."""
        least = -math.inf if self.least is None else self.least
        most = math.inf if self.most is None else self.most
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, (int, float)) and not least <= one <= most:
                bounds = "a number" if least == -most == -math.inf else f"in [{least}, {most}]"
                raise ValueError(f"{name} must be {bounds}, got {value}")


def setting(
    default: Any,
    help: str,
    least: float | None = None,
    most: float | None = None,
    *,
    option: str | None = None,
    panel: str | None = None,
) -> Any:
    """A field of a dataclass that a user may set; see `Setting`."""
    return field(default=default, metadata={KEY: Setting(help, least, most, option, panel)})


def check_number(
    name: str, value: float, below: float = math.inf, *, positive: bool = False, least: float = 0.0
) -> None:
    """Raise ValueError for a number outside [least, below), (least, below) where `positive`, and for NaN."""
    if not least <= value < below or (positive and value == least):
        raise ValueError(f"{name} must lie in {'(' if positive else '['}{least:g}, {below:g}), got {value}")


def counts_of(state: Mapping[str, Any], *names: str) -> tuple[int, ...]:
    """Whole numbers from 0 of a saved state, whose type is anything; ValueError naming what is none."""
    for name in names:
        value = state.get(name)
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} of a saved state must be a whole number from 0, got {value!r:.40}")
    return tuple(int(state[name]) for name in names)


def bytes_of(memory: int | str, name: str = "memory") -> int:
    """A number of bytes, or ``"2GiB"``; ValueError naming `name` for anything else."""
    if isinstance(memory, int) and not isinstance(memory, bool) and memory >= 0:
        return memory
    found = re.fullmatch(r"(\d+) ?([KMGT]iB|)", memory) if isinstance(memory, str) else None
    if found is None:
        raise ValueError(f"{name} must be bytes, or such as '512MiB' or '2GiB', got {memory!r}")
    return int(found[1]) * _UNITS[found[2]]


def typed(made: Made) -> Made:
    """A class or a function that takes numbers, text, booleans, lists of names, and objects of ours and
    torch's as annotated.

    Numbers of numpy become Python's, and a list where a tuple is kept becomes one. Anything else, as ``"4"``
    or ``4.5`` for an int, 1 for a bool, or a text for several, is a TypeError that names the argument; a
    number beyond the bounds of its `Setting`, or a word that is none of its `Literal`, a ValueError. What has
    other annotations is not looked at. So a class checks itself only what several of its arguments say
    together.
    """
    call: Any = vars(made)["__init__"] if isinstance(made, type) else made
    taken, called = inspect.signature(call), getattr(made, "__qualname__", "")
    called = called.removesuffix(".__init__")
    # Not yet: annotations may name classes that stand below this one.
    hints = cache(lambda: _hints(call))
    known = {
        each.name: each.metadata[KEY]
        for each in (fields(made) if is_dataclass(made) else ())
        if KEY in each.metadata
    }

    @wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            given = taken.bind(*args, **kwargs)
        except TypeError:
            return call(*args, **kwargs)  # which says what is wrong
        for name, value in given.arguments.items():
            if name in hints():
                given.arguments[name] = _of_kind(value, hints()[name], f"{called}: {name}")
            if name in known:
                known[name].check(f"{called}: {name}", given.arguments[name])
        return call(*given.args, **given.kwargs)

    if not isinstance(made, type):
        return checked  # type: ignore[return-value]
    made.__init__ = checked  # type: ignore[misc]
    return made


def _hints(call: Any) -> dict[str, Any]:
    """Annotations of arguments, without those that name what is imported for types alone."""
    found = {}
    for name, hint in call.__annotations__.items():
        with suppress(NameError):
            found[name] = eval(hint, call.__globals__) if isinstance(hint, str) else hint
    return found


def _of_kind(value: Any, hint: Any, name: str) -> Any:
    if get_origin(hint) is Literal and value not in get_args(hint):
        raise ValueError(f"{name} must be one of {', '.join(map(str, get_args(hint)))}, got {value!r}")
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    several = [get_origin(kind) for kind in kinds if get_args(kind) in ((str,), (str, ...))]
    if isinstance(value, str) and str not in kinds and several:  # whose letters it would be
        raise TypeError(f"{name} must be several names, got the text {value!r}: write {value.split(',')}")
    if isinstance(value, list) and several == [tuple]:
        return tuple(value)
    if all(kind in _SCALARS or _is_own(kind) for kind in kinds):
        # True is an Integral of Python's, and means something else.
        booleans = isinstance(value, _SCALARS[bool]) and bool not in kinds
        if booleans or not any(isinstance(value, _SCALARS.get(kind, kind)) for kind in kinds):
            shown = repr(value) if len(repr(value)) <= 100 else f"a {type(value).__name__}"
            expected = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
            raise TypeError(f"{name} must be of type {expected}, got {shown}")
    return value.item() if isinstance(value, np.generic) else value


def _is_own(kind: Any) -> bool:
    own = isinstance(kind, type) and kind.__module__.partition(".")[0] in ("tritonrec", "torch")
    return own and not getattr(kind, "_is_protocol", False)


def seed_setting() -> Any:
    """The seed of a run; dataclasses that have one are given the same."""
    return setting(0, "Of everything that is drawn.", -MOST_SEED, MOST_SEED)


def option_of(each: Field) -> str:
    """The name under which a field of a dataclass is an option."""
    known: Setting | None = each.metadata.get(KEY)
    return (known and known.option) or each.name


def values_by_option(plan: Any) -> dict[str, Any]:
    """The values of a dataclass, and of those inside it that are no setting themselves, by option."""
    found: dict[str, Any] = {}
    for each in fields(plan):
        value = getattr(plan, each.name)
        found |= values_by_option(value) if _holds_settings(each, value) else {option_of(each): value}
    return found


def with_values(plan: Plan, values: Mapping[str, Any]) -> Plan:
    """`plan` with other values by option, as `values_by_option` names them, or with other records in it.

    Raises TypeError for an unknown name.
    """
    changes, left = dict[str, Any](), dict(values)
    for each in fields(plan):  # type: ignore[arg-type]
        value = getattr(plan, each.name)
        if option_of(each) in left:
            changes[each.name] = left.pop(option_of(each))
        elif _holds_settings(each, value):
            inner = values_by_option(value).keys() & left.keys()
            changes[each.name] = with_values(value, {option: left.pop(option) for option in inner})
    if left:
        raise TypeError(f"{type(plan).__name__} has no {', '.join(sorted(left))}")
    return replace(plan, **changes)  # type: ignore[type-var]


def _holds_settings(each: Field, value: Any) -> bool:
    return KEY not in each.metadata and is_dataclass(value)


def in_bytes(size: float) -> str:
    """``1.5 GiB`` or ``300 MiB``."""
    return f"{size / (1 << 30):.1f} GiB" if abs(size) >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"
