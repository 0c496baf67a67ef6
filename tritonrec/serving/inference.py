"""The inference loop with a bounded lag (arXiv 2512.19342, section IV, Listing 2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from ..data.batch import iterator_of
from ..pipeline.results import to_be_taken


class RowExchange(Protocol):
    """`BoundedLagAllToAll`, or another exchange of rows between ranks."""

    bound: int

    def start(self, values: torch.Tensor, send: list[int]) -> Any:
        """Send rows; the result's ``wait()`` returns the received rows, and their number from each rank."""

    def drain(self) -> None: ...


class ServedModel(Protocol):
    """A model with tables on other ranks; see `TableWiseDLRM`."""

    def lookup(self, batch: Any) -> tuple[torch.Tensor, list[int]]:
        """Rows (n, d) of this rank's tables grouped by destination rank, and the number for each rank."""

    def bottom(self, batch: Any) -> Any:
        """The part of the model without embeddings, for this rank's samples."""

    def top(self, batch: Any, x: Any, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Predictions for this rank's samples, from `x` of `bottom` and the received rows (m, d), grouped by
        source rank, `counts` from each."""


@torch.no_grad()
@to_be_taken
def infer(model: ServedModel, batches: Iterable[Any], exchange: RowExchange) -> Iterator[torch.Tensor]:
    """Yield the predictions for this rank's samples of every batch, in order.

    Each batch's rows are sent at once. Its predictions follow when the exchange is complete, at most
    `exchange.bound` batches later; the last ones follow after the end of `batches`. Tables and weights do not
    change, so the result does not depend on the bound, in any bit.

    All ranks must run the same number of batches, to the end: the others would wait for one that stopped.
    Only the exchange makes ranks wait for each other. Raises the errors of `BoundedLagAllToAll.start` and
    `Exchange.wait`.
    """
    waiting: deque[tuple[Any, Any, Any]] = deque()
    for batch in iterator_of(batches, "infer"):
        started = exchange.start(*model.lookup(batch))
        waiting.append((batch, model.bottom(batch), started))
        if len(waiting) > exchange.bound:
            yield _finish(model, *waiting.popleft())
    while waiting:
        yield _finish(model, *waiting.popleft())
    exchange.drain()


def _finish(model: ServedModel, batch: Any, x: Any, started: Any) -> torch.Tensor:
    return model.top(batch, x, *started.wait())
