"""Words on the command line that stand for a table's policy."""

from __future__ import annotations

from ...embedding import Eviction, PrecisionTiers, TablePolicy


def policy(evict: str, admission: int, tiers: str, admission_window: int = 1000) -> TablePolicy:
    """The policy of ``--evict``, ``--admission`` and ``--precision-tiers``; an empty string is none."""
    eviction = _eviction(evict) if evict else None
    return TablePolicy(eviction, admission, _tiers(tiers) if tiers else None, admission_window)


def _eviction(text: str) -> Eviction:
    kind, *numbers = text.split(":")
    if kind not in ("lru", "lfu", "ttl") or len(numbers) not in (1, 2):
        raise ValueError(f"--evict takes lru:ROWS, lfu:ROWS or ttl:STEPS, and maybe :EVERY, got {text!r}")
    amount, every = [*_whole("--evict", text, numbers), 1][:2]
    if kind == "ttl":
        return Eviction("ttl", ttl=amount, every=every)
    return Eviction("lru" if kind == "lru" else "lfu", capacity=amount, every=every)


def _tiers(text: str) -> PrecisionTiers:
    numbers = text.split(":")
    if len(numbers) != 2:
        raise ValueError(f"--precision-tiers takes THRESHOLD:EVERY, got {text!r}")
    threshold, every = _whole("--precision-tiers", text, numbers)
    return PrecisionTiers(threshold, every)


def _whole(option: str, text: str, numbers: list[str]) -> list[int]:
    try:
        return [int(number) for number in numbers]
    except ValueError:
        raise ValueError(f"{option} takes whole numbers, got {text!r}") from None
