"""What a search has tried, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from ..environment import environment
from .configuration import Configuration

COVERED = (
    "mode", "consistency", "world_size", "replicas", "nodes", "micro_batches", "optimizer", "storage",
    "restart", "model", "precision", "exchange_precision", "exchange_sums", "dedup", "accumulate",
    "first_use", "exchanges", "skip_fetch", "clustering", "depth", "dynamic", "streamed", "balance",
    "merge", "replay",
)  # fmt: skip
"""Settings whose values are counted."""


@dataclass(frozen=True)
class Try:
    """A configuration that is no failure.

    Args:
        refused: the message of the public check that refuses it, without numbers; empty where it was equal to
            its reference in every bit.
        tensors, bytes: compared. shown: counts of rows and keys (evicted, kept, ...) above zero.
    """

    configuration: Configuration
    refused: str = ""
    tensors: int = 0
    bytes: int = 0
    shown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """A failing configuration.

    Args:
        configuration: the smallest found, its settings that differ from the simplest one.
        evidence: the first difference, or the error. command: tries it again.
        repeated: of `REPEATS` further runs, those that failed.
    """

    configuration: dict[str, Any]
    evidence: str
    command: str
    repeated: int


@dataclass
class FuzzReport:
    """What a search has tried.

    Args:
        identical: configurations, all different, that were equal to their references in every bit.
        refused: those that a public check refused before the first step, by its message without numbers.
        shrinking: further tries, while a failing configuration was made smaller.
        tensors, bytes: compared.
        covered: for each of `COVERED` how many of the identical configurations had each value.
        shown: for counts of rows and keys (evicted, kept, ...) how many of them had one above zero.
    """

    seed: int
    seconds: float = 0.0
    identical: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    shrinking: int = 0
    tensors: int = 0
    bytes: int = 0
    covered: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in COVERED})
    shown: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._counted: set[Configuration] = set()

    def count(self, tried: Try) -> None:
        """Count a configuration, once."""
        if tried.configuration in self._counted:
            return
        self._counted.add(tried.configuration)
        if tried.refused:
            self.refused[tried.refused] += 1
            return
        self.identical += 1
        self.tensors += tried.tensors
        self.bytes += tried.bytes
        self.shown.update(tried.shown)
        for name, values in self.covered.items():
            values[str(getattr(tried.configuration, name))] += 1

    def add_failure(self, failure: Failure) -> bool:
        """Whether it is new."""
        if failure.configuration in [each.configuration for each in self.failures]:
            return False
        self.failures.append(failure)
        return True

    @property
    def tried(self) -> int:
        """Configurations drawn, those that were refused among them."""
        return self.identical + self.refused.total() + len(self.failures)

    @property
    def line(self) -> str:
        """The counts, in words."""
        return f"{self.identical} identical, {self.refused.total()} refused, {len(self.failures)} failed"

    def as_json(self) -> dict[str, Any]:
        """With the most frequent messages and counts first."""
        return {
            "environment": environment(),
            "tried": self.tried,
            "seed": self.seed,
            "seconds": self.seconds,
            "identical": self.identical,
            "refused": dict(self.refused.most_common()),
            "shrinking": self.shrinking,
            "tensors": self.tensors,
            "bytes": self.bytes,
            "covered": {name: dict(sorted(values.items())) for name, values in self.covered.items()},
            "shown": dict(self.shown.most_common()),
            "failures": [asdict(each) for each in self.failures],
        }
