"""Keys of one lookup to the ranks that own them, their rows back, and gradients the way of the keys.

    W ranks   n occurrences here   S distinct keys sent   R keys received   K distinct keys received

With one rank nothing is sent: the K keys are those of the occurrences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..distributed.communicator import Communicator
from ..kernels import launch
from ..kernels.fixed_point.errors import FRACTION_BITS
from .key_layout import KeyLayout
from .selection import distinct
from .table import DynamicTable


@dataclass(frozen=True)
class Route:
    """The way of one table's keys.

    Args:
        inverse: (n,) int64, occurrence -> row received, of S.
        keys: (K,) int64, what this rank looks up as their owner.
        received: (R,) int64, key received -> which of `keys`; None with one rank.
        send, receive: [r] keys sent to and received from rank r.
    """

    inverse: torch.Tensor
    keys: torch.Tensor
    received: torch.Tensor | None
    send: list[int]
    receive: list[int]

    def rows(self, over: Communicator, values: torch.Tensor) -> torch.Tensor:
        """The rows (S, dim) of this rank's occurrences, from those of `keys` (K, dim) on every rank."""
        if self.received is None:
            return values
        return over.all_to_all(launch.gather_rows(values, self.received), self.receive, self.send)

    def sums(
        self, over: Communicator, gradient: torch.Tensor, consistency: str, bags: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The sums (K, dim) by key of every rank's `gradient` (n, dim) float32: float32 or fixed point.

        With `bags` (n,) it is (m, dim), the gradient of bags, and that of an occurrence is its bag's.
        """
        options = consistency, FRACTION_BITS, "embedding gradient"
        sums = launch.segment_sum(gradient.contiguous(), self.inverse, sum(self.send), *options, None, bags)
        if self.received is None:
            return sums
        # Sums by key travel, not occurrences: in fixed point the
        # owner's sum has the bits of one sum over all ranks.
        received = over.all_to_all(sums, self.send, self.receive)
        return launch.segment_sum(received, self.received, len(self.keys), *options)


def rows_of_owners(
    tables: Sequence[DynamicTable],
    keys: Sequence[torch.Tensor],
    over: Communicator,
    read: Callable[[DynamicTable, torch.Tensor], torch.Tensor],
) -> tuple[list[Route], list[torch.Tensor]]:
    """Routes of the keys (n,) of each table, and the rows (S, dim) that came; collective over the ranks.

    `read` gives the rows (K, dim) of a table's keys (K,) that this rank owns, on the table's device.
    """
    if not all(over.supports(each.device) for each in keys):
        keys = [each.cpu() for each in keys]
    routes = plan_routes(keys, [table.layout for table in tables], over)
    rows = []
    for table, route in zip(tables, routes, strict=True):
        values = read(table, route.keys.to(table.device))
        rows.append(route.rows(over, values.to(route.keys.device)))
    return routes, rows


def plan_routes(
    keys: Sequence[torch.Tensor], layouts: Sequence[KeyLayout], over: Communicator
) -> list[Route]:
    """A route for each table, from the keys (n,) int64 of its occurrences; collective over the ranks."""
    found = [distinct(each, padded=False) for each in keys]
    if over.world_size == 1:
        return [Route(one.inverse, one.keys, None, [len(one.keys)], [len(one.keys)]) for one in found]
    sorted_by_owner = [
        launch.bucketize(layout.ids(one.keys), over.world_size)
        for one, layout in zip(found, layouts, strict=True)
    ]
    send = torch.stack([counts for _, counts in sorted_by_owner], 1).cpu()  # (W, tables)
    receive = over.all_to_all_equal(send)
    routes = []
    for one, (order, _), to, of in zip(found, sorted_by_owner, send.t(), receive.t(), strict=True):
        # The inverse of the sort by owner: distinct key -> its
        # place among those sent, which is that of its row.
        place = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        arrived = over.all_to_all(one.keys[order], to.tolist(), of.tolist())
        own = distinct(arrived, padded=False)
        routes.append(Route(place[one.inverse], own.keys, own.inverse, to.tolist(), of.tolist()))
    return routes
