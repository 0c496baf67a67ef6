"""Comparison of the settings that must be equal on all ranks, once, before they are used."""

from __future__ import annotations

import json
from collections.abc import Mapping

from .communicator import Communicator

SHOWN = 5
"""Largest number of settings in an error."""


class RanksDisagreeError(ValueError):
    """Ranks of one run have different settings, models or batches."""


def check_ranks_agree(communicator: Communicator, settings: Mapping[str, object]) -> None:
    """Raise `RanksDisagreeError` on every rank where a setting differs between two ranks.

    Collective. Settings are compared by ``str``, so floats by all their bits. The error names the settings,
    and for each the values of rank 0 and of the first rank that differs.
    """
    if communicator.world_size == 1:
        return
    mine = json.dumps({name: str(value) for name, value in settings.items()})
    texts = communicator.all_gather_texts(mine)
    if found := differences({rank: json.loads(text) for rank, text in enumerate(texts)}):
        raise RanksDisagreeError(f"{'; '.join(found)}: give every rank the same")


def differences(settings: Mapping[int, Mapping[str, str]]) -> list[str]:
    """By rank settings, lowest rank first: a text for each that differs, of the first rank that has another.

    At most `SHOWN`, and one that counts the others.
    """
    if not settings:
        return []
    (lowest, first), *others = settings.items()
    found = []
    for name in dict.fromkeys([*first, *(name for _, other in others for name in other)]):
        for rank, other in others:
            if other.get(name) != first.get(name):
                found.append(
                    f"rank {rank} has {_show(name, other)} and rank {lowest} has {_show(name, first)}"
                )
                break
    more = [f"{len(found) - SHOWN} more settings differ"] if len(found) > SHOWN else []
    return found[:SHOWN] + more


def _show(name: str, settings: Mapping[str, str]) -> str:
    return f"{name}={settings[name]}" if name in settings else f"no {name}"
