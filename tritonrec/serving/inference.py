"""The inference loop with a bounded lag (arXiv 2512.19342, section IV, Listing 2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch


class SupportsExchange(Protocol):
    """What the loop asks of an exchange; `BoundedLagAllToAll` has it."""

    bound: int

    def start(self, values: torch.Tensor, send: list[int]) -> Any:
        """Send rows off; the handle's ``wait()`` returns the rows that came, and how many from each rank."""

    def drain(self) -> None: ...


class ServedModel(Protocol):
    """A model whose embedding rows come from other ranks; see `TableWiseDLRM`."""

    def lookup(self, batch: Any) -> tuple[torch.Tensor, list[int]]:
        """Rows (n, d) of this rank's tables grouped by the rank that needs them, and how many each needs."""

    def bottom(self, batch: Any) -> Any:
        """What needs no rows, for this rank's samples."""

    def top(self, batch: Any, x: Any, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Predictions for this rank's samples, from what `bottom` returned and the rows (m, d) that came,
        grouped by the rank they came from, and how many came from each."""


@torch.no_grad()
def infer(model: ServedModel, batches: Iterable[Any], exchange: SupportsExchange) -> Iterator[torch.Tensor]:
    """Yield the predictions for this rank's samples of every batch, in order.

    Each batch's lookup is sent off at once; its predictions follow when the exchange is complete, at the
    latest `exchange.bound` batches later, so up to that many batches are held back. The last ones are drained
    when `batches` ends. The result does not depend on the bound, in any bit: tables and weights stand still.

    All ranks must run the same number of batches, and run to the end: those that go on would wait for one
    that stopped. Nothing here but the exchange makes ranks wait for each other. Raises what
    `BoundedLagAllToAll.start` raises, and waiting for it.
    """
    waiting: deque[tuple[Any, Any, Any]] = deque()
    for batch in batches:
        started = exchange.start(*model.lookup(batch))
        waiting.append((batch, model.bottom(batch), started))
        if len(waiting) > exchange.bound:
            yield _finish(model, *waiting.popleft())
    while waiting:
        yield _finish(model, *waiting.popleft())
    exchange.drain()


def _finish(model: ServedModel, batch: Any, x: Any, started: Any) -> torch.Tensor:
    return model.top(batch, x, *started.wait())
