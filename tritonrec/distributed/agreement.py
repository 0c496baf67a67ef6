"""Comparison of the settings that must be equal on all ranks, once, before they are used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol

SHOWN = 5
"""Largest number of settings in an error."""


class SupportsGather(Protocol):
    """A group of ranks, as `Communicator` is."""

    world_size: int

    def all_gather_texts(self, text: str) -> list[str]: ...


class RanksDisagreeError(ValueError):
    """Ranks of one run have different settings, models or batches."""


def check_ranks_agree(communicator: SupportsGather, settings: Mapping[str, object]) -> None:
    """Raise `RanksDisagreeError` on every rank where a setting differs between two ranks.

    Collective. Settings are compared by ``str``, so floats by all their bits. The error names the settings,
    and for each the values of rank 0 and of the first rank that differs.
    """
    if communicator.world_size == 1:
        return
    mine = json.dumps({name: str(value) for name, value in settings.items()})
    first, *others = (json.loads(text) for text in communicator.all_gather_texts(mine))
    differences = []
    for name in dict.fromkeys([*first, *(name for other in others for name in other)]):
        for rank, other in enumerate(others, 1):
            if other.get(name) != first.get(name):
                differences.append(
                    f"rank {rank} has {_show(name, other)} and rank 0 has {_show(name, first)}"
                )
                break
    if differences:
        more = f"; {len(differences) - SHOWN} more settings differ" if len(differences) > SHOWN else ""
        raise RanksDisagreeError("; ".join(differences[:SHOWN]) + more + ": give every rank the same")


def _show(name: str, settings: Mapping[str, str]) -> str:
    return f"{name}={settings[name]}" if name in settings else f"no {name}"
