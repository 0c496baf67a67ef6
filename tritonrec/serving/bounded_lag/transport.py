"""The ways of an exchange's rows to the other ranks, behind one interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from .messages import Deadline, Layout

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

TRANSPORTS = ("auto", "shared", "mpi", "messages")
"""``auto`` is ``shared`` where all ranks are processes of one host. Elsewhere it is ``mpi`` in ranks of
mpiexec with mpi4py and a capacity, and ``messages`` without."""


class Disagreement(RuntimeError):
    """Two ranks disagree about an exchange, and this rank is the one that says so."""


class Exchange:
    """A started exchange; `wait` returns the received rows.

    Args:
        finish_through: completes this exchange, and before it every older one, within a timeout.
    """

    def __init__(
        self,
        finish_through: Callable[[Exchange, timedelta | None], None],
        number: int,
        values: torch.Tensor,
        send: list[int],
        receive: list[int] | None,
        out: torch.Tensor | None,
    ):
        self.number, self.send, self.receive, self.out = number, send, receive, out
        self.layout = Layout.of(values)
        self.done = False
        self.counts: list[int] = []
        self.values: torch.Tensor | None = None
        self.like = values[:0]
        self._finish_through = finish_through

    def size(self, rows: int) -> int:
        """Bytes of `rows` rows."""
        return rows * self.layout.row_bytes

    def make_out(self, rank: int) -> torch.Tensor:
        """The tensor for sum(counts) received rows. Raises Disagreement where `out` has another length."""
        total = sum(self.counts)
        if self.out is None:
            return self.like.new_empty((total, *self.like.shape[1:]))
        if len(self.out) != total:
            raise Disagreement(
                f"out has {len(self.out)} rows, and rank {rank} received {total} in all-to-all "
                f"{self.number}: give `out` as many rows as are sent to this rank"
            )
        return self.out

    def wait(self, timeout: timedelta | None = None) -> tuple[torch.Tensor, list[int]]:
        """Complete this exchange, and before it every older one, within `timeout` or the all-to-all's.

        Returns:
            (sum(counts), ...) rows grouped by source rank, and the number of rows from each rank.

        Raises RankDiedError naming a rank that died or sent nothing within the timeout, and RuntimeError
        where two ranks disagree about rows, dtype, width, bound or capacity.
        """
        self._finish_through(self, timeout)
        assert self.values is not None
        return self.values, self.counts


class Transport(Protocol):
    """Moves the rows of numbered exchanges, of which at most bound + 1 are in flight, to the other ranks.

    All methods raise RankDiedError naming a rank that is missing at the deadline, or has ended.
    """

    name: str
    """Of `TRANSPORTS`."""

    @property
    def buffer_bytes(self) -> int:
        """Memory of this rank's buffers."""

    def begin(self, number: int, deadline: Deadline) -> None:
        """Wait until the buffers of exchange `number` may be written."""

    def post(self, exchange: Exchange, values: torch.Tensor) -> None:
        """Send the rows; they may be changed afterwards."""

    def finish(self, exchange: Exchange, deadline: Deadline) -> torch.Tensor:
        """Wait for all ranks' rows, set `exchange.counts`, and return the rows by source.

        Raises Disagreement where headers differ from what this rank expects.
        """

    def started(self, number: int, in_flight: int) -> list[int]:
        """The exchanges that each rank is known to have started, as this rank starts exchange `number`."""

    def drain(self, number: int, deadline: Deadline) -> None:
        """Wait until everything before exchange `number` is sent."""

    def report(self, number: int, problem: str, died: bool) -> None:
        """Let the other ranks fail with `problem` as well; `died` where a rank is missing."""


def others(rank: int, world_size: int) -> list[int]:
    """The other ranks, from the next one on."""
    return [(rank + step) % world_size for step in range(1, world_size)]
