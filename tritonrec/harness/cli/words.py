"""Words on the command line: lists separated by commas, and short forms of a table's policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer

from ...callbacks import Direction
from ...embedding import Eviction, PrecisionTiers
from ...embedding.policy import EvictionPolicy
from ...settings import Setting
from ..train.run import Resume, StoppingRule

MOST_NUMBER = 65_536


def names(text: str, known: tuple[str, ...], option: str) -> list[str]:
    """Some of `known`, from words separated by commas; BadParameter naming `option` otherwise."""
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        raise typer.BadParameter(f"{option} takes some of {', '.join(known)}, got {text!r}")
    return chosen


def shares(text: str, option: str) -> tuple[float, ...]:
    """Shares from 0 to 1, separated by commas; BadParameter naming `option` otherwise."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= share <= 1 for share in found):
        raise typer.BadParameter(f"{option} takes shares from 0 to 1, separated by commas, got {text!r}")
    return found


def numbers(text: str, option: str, least: float = 1, most: float = MOST_NUMBER) -> list[int]:
    """Whole numbers in a range, separated by commas; BadParameter naming `option` otherwise."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least or max(found) > most:
        raise typer.BadParameter(
            f"{option} takes whole numbers from {least} to {most}, separated by commas, got {text!r}"
        )
    return found


def eviction(text: str, option: str = "--evict") -> Eviction | None:
    """``lru:ROWS``, ``lfu:2GiB`` or ``ttl:STEPS``, with ``:EVERY`` behind it; an empty string is none."""
    if not text:
        return None
    kind, *amounts = text.split(":")
    if kind not in ("lru", "lfu", "ttl") or len(amounts) not in (1, 2):
        raise ValueError(f"{option} takes lru:ROWS, lfu:ROWS or ttl:STEPS, and maybe :EVERY, got {text!r}")
    policy: EvictionPolicy = "lru" if kind == "lru" else "lfu"
    if kind != "ttl" and amounts[0].endswith("iB"):
        (every,) = _whole(option, text, amounts[1:] or ["1"])
        return Eviction(policy, capacity=amounts[0], every=every)
    amount, every = [*_whole(option, text, amounts), 1][:2]
    if kind == "ttl":
        return Eviction("ttl", ttl=amount, every=every)
    return Eviction(policy, capacity=amount, every=every)


def precision_tiers(text: str, option: str = "--precision-tiers") -> PrecisionTiers | None:
    """``THRESHOLD:EVERY`` or ``SIZE:EVERY``; an empty string is none."""
    if not text:
        return None
    amounts = text.split(":")
    if len(amounts) != 2:
        raise ValueError(f"{option} takes THRESHOLD:EVERY or SIZE:EVERY, got {text!r}")
    if amounts[0].endswith("iB"):
        return PrecisionTiers(amounts[0], *_whole(option, text, amounts[1:]))
    return PrecisionTiers(*_whole(option, text, amounts))


def _whole(option: str, text: str, amounts: list[str]) -> list[int]:
    try:
        return [int(amount) for amount in amounts]
    except ValueError:
        raise ValueError(f"{option} takes whole numbers, got {text!r}") from None


def stopping_rule(text: str, option: str = "--early-stopping") -> StoppingRule | None:
    """``METRIC:PATIENCE``, with ``:max`` or ``:min`` behind it; an empty string is none."""
    if not text:
        return None
    metric, *rest = text.split(":")
    if not metric or len(rest) not in (1, 2) or rest[1:] not in ([], ["max"], ["min"]):
        raise ValueError(f"{option} takes METRIC:PATIENCE, and maybe :max or :min, got {text!r}")
    (patience,) = _whole(option, text, rest[:1])
    mode: Direction | None = None if len(rest) == 1 else "max" if rest[1] == "max" else "min"
    if patience < 1:
        raise ValueError(f"{option} takes a patience of at least 1, got {text!r}")
    return StoppingRule(metric, patience, mode)


RESUMING: dict[Resume, str] = {False: "no", True: "yes", "auto": "auto"}


def resuming(text: str, option: str) -> Resume:
    """``no``, ``yes`` or ``auto``; ValueError naming `option` otherwise."""
    for value, word in RESUMING.items():
        if text == word:
            return value
    raise ValueError(f"{option} takes yes, no or auto, got {text!r}")


@dataclass(frozen=True)
class Words:
    """How values of a type are written: `text` of a default, `parse` of (text, option, setting)."""

    text: Callable[[Any], str]
    parse: Callable[[str, str, Setting], Any]


def _list(parse: Callable[[str, str, Setting], Any]) -> Words:
    return Words(lambda values: ",".join(map(str, values)), parse)


def _numbers(text: str, option: str, setting: Setting) -> tuple[int, ...]:
    least, most = setting.least, setting.most
    return tuple(numbers(text, option, 1 if least is None else least, MOST_NUMBER if most is None else most))


def _texts(text: str, option: str) -> tuple[str, ...]:
    found = tuple(part for word in text.split(",") if (part := word.strip()))
    if text and not found:
        raise ValueError(f"{option} takes words separated by commas, got {text!r}")
    return found


PARSERS: dict[Any, Words] = {
    tuple[int, ...]: _list(_numbers),
    tuple[float, ...]: _list(lambda text, option, _: shares(text, option)),
    tuple[str, ...]: _list(lambda text, option, _: _texts(text, option)),
    Eviction | None: Words(lambda _: "", lambda text, option, _: eviction(text, option)),
    StoppingRule | None: Words(lambda _: "", lambda text, option, _: stopping_rule(text, option)),
    Resume: Words(lambda value: RESUMING[value], lambda text, option, _: resuming(text, option)),
    PrecisionTiers | None: Words(lambda _: "", lambda text, option, _: precision_tiers(text, option)),
}
"""By type; values of all others are one word each."""
