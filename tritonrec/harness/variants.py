"""Variants of the harness's job: parts of the embedding system switched on, one at a time and together.

A variant changes the case, and its reference only where it changes what training computes: eviction does,
merging tables or dropping repeated keys does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..embedding import Eviction, Heat, TablePolicy
from .setup import Job


@dataclass(frozen=True)
class Variant:
    """Changes to `Job` and `WindowConfig`.

    Args:
        what: in a few words, for tables and help.
        both: changes to the job of the case and of its reference. case: changes to the case's job only.
        reference: changes to the reference's job only. window: changes to the case's `WindowConfig`.
        per_world: the batches depend on the world size, so each has a reference of its own.
    """

    what: str
    both: Mapping[str, Any] = field(default_factory=dict)
    case: Mapping[str, Any] = field(default_factory=dict)
    reference: Mapping[str, Any] = field(default_factory=dict)
    window: Mapping[str, Any] = field(default_factory=dict)
    per_world: bool = False

    def job(self, job: Job) -> Job:
        """The case's job."""
        return replace(job, **self.both, **self.case)

    def reference_job(self, job: Job) -> Job:
        """The reference's job."""
        return replace(job, **self.both, **self.reference)


EVERYTHING = TablePolicy(eviction=Eviction("lru", capacity=180, every=2), admission=2, heat=Heat(3, every=3))

VARIANTS: dict[str, Variant] = {
    "tiny-table": Variant(
        "tables grow from eight slots, in chunks of 16 rows",
        case={"slots": 8, "chunk_rows": 16},
        reference={"slots": 1 << 16},
    ),
    "dedup-none": Variant("repeated keys travel and are looked up", window={"dedup": "none"}),
    "dedup-exchange": Variant("dedup before the exchange only", window={"dedup": "exchange"}),
    "dedup-lookup": Variant("dedup before the lookup only", window={"dedup": "lookup"}),
    "lru": Variant(
        "the least recently used rows are evicted",
        both={"policy": TablePolicy(eviction=Eviction("lru", capacity=150))},
    ),
    "lfu": Variant(
        "the least frequently used rows are evicted",
        both={"policy": TablePolicy(eviction=Eviction("lfu", capacity=150, every=2))},
    ),
    "ttl": Variant(
        "rows unused for two steps are evicted", both={"policy": TablePolicy(eviction=Eviction("ttl", ttl=2))}
    ),
    "admission": Variant(
        "a key gets a row when it is asked for the second time", both={"policy": TablePolicy(admission=2)}
    ),
    "heat": Variant(
        "cold rows in half precision, hot ones in float32",
        both={"policy": TablePolicy(heat=Heat(threshold=2, every=2))},
    ),
    "policies": Variant("eviction, admission and heat together", both={"policy": EVERYTHING}),
    "accumulate": Variant("three batches make one update", window={"accumulate": 3}),
}
