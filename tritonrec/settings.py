"""Settings: fields of dataclasses whose help and range stand beside the default."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MOST = 2**31 - 1
"""Of a count, where no smaller number is absurd."""
MOST_SEED = 2**63 - 1
KEY = "setting"


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
