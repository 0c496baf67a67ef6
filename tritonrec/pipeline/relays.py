"""Lookups in two steps, within a node and between nodes: a row crosses to a node once, not once a rank.

    H nodes of L ranks; rank r = h L + l is rank l of node h, and its *rail* are the ranks l of all nodes

A key whose owner is rank l of any node goes to rank l of one's own node first, the *relay* for it. There the
keys of the node's L ranks are deduplicated, and what is left goes over the rail. Rows come back the same way,
and gradients are added up in the relay before they leave the node. L = 2, and ranks 0 and 1 look up keys that
rank 3 owns::

    rank 0: a b    relay, rank 1: a b c    owner, rank 3: a b c         3 rows cross, not 4
    rank 1: b c

A relay is the owner to the ranks of its node, and a rank that looks rows up to the owners on its rail: both
steps have the plans of `dist_plan`. Sums in fixed point have no order, so the bits are those of one step,
as far as no part of a sum leaves 64 bits. Float32 sums have one, and consistency "window" is refused
(`modes.schedule_of`), as are lookups without dedup before the exchange: relays would drop nothing.

The ranks of a node share links to other nodes, so bytes between nodes are what costs: at least the distinct
ids that a node looks up at another one. In one step they are those of every rank. The step within a node is
more work for the node. Where all links are alike it gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..kernels import launch
from .dist_plan import (
    InputDist,
    Lookups,
    RowDist,
    Splits,
    plan_lookups,
    plan_output_dist,
    repeated,
)
from .exchange_groups import ExchangeGroups
from .streams import to_device


@dataclass(frozen=True)
class Relay:
    """One table on a relay.

    Args:
        dist: the rows that the node looks up on this rail, as those of one rank.
        sent: which of these rows go to the ranks of the node with each micro-batch.
        gradients: to which of them the sums are added that come from there with each micro-batch.
    """

    dist: InputDist
    sent: RowDist
    gradients: RowDist


@dataclass(frozen=True)
class RelayPlan:
    """`Relay` before the host knows how many keys are left after the dedup of the node.

    Args:
        lookups: towards the owners. rows: (R,) int64, by key received the row of `Relay.dist`.
        splits, gradient_splits, last_use: of the keys received, as in `ReceivedKeys`.
    """

    lookups: Lookups
    rows: torch.Tensor
    splits: Splits
    gradient_splits: Splits
    last_use: torch.Tensor | None

    def relay(self, sizes: list[Splits]) -> Relay:
        """With the `sizes` of `lookups` on the host."""
        planned = plan_output_dist(self.rows, self.splits, self.last_use, self.gradient_splits)
        return Relay(self.lookups.input_dist(sizes), *planned)


def plan_relay(
    keys: torch.Tensor,
    last_use: torch.Tensor | None,
    splits: Splits,
    gradient_splits: Splits,
    owners: Callable[[torch.Tensor], torch.Tensor],
    nodes: int,
    padded: bool = False,
    groups: ExchangeGroups | None = None,
) -> RelayPlan:
    """Plan what a relay looks up for its node.

    Args:
        keys, last_use, splits, gradient_splits: received from the ranks of the node (`ReceivedKeys`).
        owners: keys -> the node of the owner, which has this rank's number there.
        nodes, padded, groups: as `world_size` and the others of `plan_lookups`.

    A key that several ranks look up comes with the first of their micro-batches, and its gradient leaves with
    the last. So of ``first_use`` it is listed in both.
    """
    count, device = len(splits), keys.device

    def numbers(splits: Splits) -> torch.Tensor:
        """(R,) the micro-batch of each key, in host memory."""
        by_rank = zip(*splits, strict=True)
        return torch.cat([repeated(list(sizes), torch.device("cpu")) for sizes in by_rank])

    # used[k] = the micro-batch with whose rows key k came.
    used = numbers(splits)
    if last_use is None and groups is not None:
        # A key is listed with the first micro-batch that shares both exchanges with it, so `plan_lookups`
        # drops its repeats and its rows and gradients keep their exchanges.
        used = _first_sharing(groups)[used, numbers(gradient_splits)]
    order = to_device(used.argsort(stable=True), device)
    listed = [part.clone() for part in keys[order].split(used.bincount(minlength=count).tolist())]
    sizes = list(map(len, listed))
    if last_use is not None:
        # With ``first_use`` a key is listed twice, at its first and at its last use: `plan_lookups` then
        # finds both. Only the first listing has an inverse that is needed.
        by_last, _counts = launch.counting_sort(last_use.long(), count)
        again = keys[by_last].split([sum(each) for each in gradient_splits])
        listed = [torch.cat(both) for both in zip(listed, again, strict=True)]
    lookups = plan_lookups(listed, owners, nodes, True, last_use is not None, padded, groups)
    inverse = [part[:size] for part, size in zip(lookups.inverse, sizes, strict=True)]
    # Back to the order in which the keys came from the node.
    rows = torch.empty_like(order).index_copy_(0, order, torch.cat(inverse))
    return RelayPlan(lookups, rows, splits, gradient_splits, last_use)


def _first_sharing(groups: ExchangeGroups) -> torch.Tensor:
    """[i][j] the first micro-batch whose rows come with those of i, and whose gradients leave with j's."""
    count = len(groups.rows_with)
    first = torch.zeros(count, count, dtype=torch.int64, device="cpu")
    # Backwards, so the first micro-batch of those that share is written last and stays.
    for each in reversed(range(count)):
        first[groups.rows_with[each], groups.gradients_with[each]] = each
    return first
