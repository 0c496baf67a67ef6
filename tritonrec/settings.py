"""Settings: fields of dataclasses whose help and range stand beside the default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

MOST = 2**31 - 1
"""Of a count, where no smaller number is absurd."""
MOST_SEED = 2**63 - 1
KEY = "setting"
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
Plan = TypeVar("Plan")


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


def bytes_of(memory: int | str) -> int:
    """A number of bytes, or ``"2GiB"``; ValueError for anything else."""
    if isinstance(memory, int) and not isinstance(memory, bool) and memory >= 0:
        return memory
    found = re.fullmatch(r"(\d+) ?([KMGT]iB|)", memory) if isinstance(memory, str) else None
    if found is None:
        raise ValueError(f"memory must be bytes, or such as '512MiB' or '2GiB', got {memory!r}")
    return int(found[1]) * _UNITS[found[2]]
