"""Who computes the scores of an evaluation's batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

Scored = Callable[[Iterable[Any], Callable[[Any], Tensor]], Iterator[tuple[Any, Tensor]]]
"""Of batches and what scores one, each batch with its scores, in order."""


def one_by_one(batches: Iterable[Any], score: Callable[[Any], Tensor]) -> Iterator[tuple[Any, Tensor]]:
    """A process by itself; ranks share them by `tritonrec.pipeline.RowsOfRanks.scored`."""
    return ((batch, score(batch)) for batch in batches)
