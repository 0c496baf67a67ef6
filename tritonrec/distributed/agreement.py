"""Settings that have to be equal on all ranks, compared once, before anything is exchanged by them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol

SHOWN = 5
"""Settings that an error names."""


class GathersTexts(Protocol):
    """A group of ranks, as `Communicator` is."""

    world_size: int

    def gather_texts(self, text: str) -> list[str]: ...


class RanksDisagreeError(ValueError):
    """Ranks of one run have different settings, models or batches."""


def demand_equal(communicator: GathersTexts, settings: Mapping[str, object]) -> None:
    """Raise `RanksDisagreeError` on every rank where a setting differs between two of them.

    Collective; nothing happens with one rank. Settings are equal where ``str`` of them is, so that floats
    are equal in every bit. The error names the settings, and for each rank 0 and the first that differs.
    """
    if communicator.world_size == 1:
        return
    mine = json.dumps({name: str(value) for name, value in settings.items()})
    first, *others = (json.loads(text) for text in communicator.gather_texts(mine))
    differences = []
    for name in dict.fromkeys([*first, *(name for other in others for name in other)]):
        for rank, other in enumerate(others, 1):
            if other.get(name) != first.get(name):
                differences.append(
                    f"rank {rank} has {_said(name, other)} and rank 0 has {_said(name, first)}"
                )
                break
    if differences:
        more = f"; {len(differences) - SHOWN} more settings differ" if len(differences) > SHOWN else ""
        raise RanksDisagreeError("; ".join(differences[:SHOWN]) + more + ": give every rank the same")


def _said(name: str, settings: Mapping[str, str]) -> str:
    return f"{name}={settings[name]}" if name in settings else f"no {name}"
