"""Sums of gradients: on the exact grid, or in float32 in a fixed order; how they travel between ranks.

A row of int64 sums takes twice the bytes of a float32 row, and most of these are the sign's. So sums on the
grid travel packed (`ops.pack_rows`): each row in as many bytes as it needs, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import ops
from ..distributed import Communicator
from .shares import Shares
from .streams import to_device
from .window import Sent, WindowConfig

NAME = "embedding gradient"
LOSS_BITS = 24
"""Losses are larger than gradients, and no more than looked at: a grid of 2**-24 reaches 2**39."""


@dataclass
class Sums:
    """Gradient sums of one run. Fixed point makes them independent of order; "window" fixes the order.

    Args:
        config: consistency and grid of the run. device: of the sums.
    """

    config: WindowConfig
    device: torch.device

    @property
    def exact(self) -> bool:
        return self.config.consistency == "batch"

    def zeros(self, rows: int, dim: int) -> torch.Tensor:
        """(rows, dim), of the type that sums have."""
        dtype = torch.int64 if self.exact else torch.float32
        return torch.zeros(rows, dim, dtype=dtype, device=self.device)

    def add(self, values: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, name: str) -> None:
        """out[rows[k]] += values[k], of gradients (K, dim) or of sums."""
        ops.segment_sum(
            values,
            rows,
            len(out),
            consistency=self.config.consistency,
            out=out,
            fraction_bits=self.config.fraction_bits,
            name=name,
        )

    def exchange(
        self,
        sent: Sent | None,
        over: Communicator,
        values: torch.Tensor,
        rows: torch.Tensor,
        send: list[int],
        out: torch.Tensor,
        targets: torch.Tensor,
        receive: list[int],
        name: str = NAME,
    ) -> None:
        """Add sums of every rank to those of their owners.

        Args:
            sent: counts the bytes, if given. over: the ranks.
            values: (N, dim) sums here. rows: (K,) int64, which of them go, grouped by rank; `send` says how
                many to each.
            out: (S, dim) sums to add to. targets: (k,) int64, where each that comes belongs, grouped by rank;
                `receive` says how many from each.
        """
        if not self.exact:
            came = travel(sent, over, ops.gather_rows(values, rows), send, receive)
            self.add(came, targets, out, name)
            return
        own, leaving, send = _apart(rows, send, over.rank)
        to_own, arriving, receive = _apart(targets, receive, over.rank)
        self.add(ops.gather_rows(values, own), to_own, out, name)
        if over.world_size == 1:
            return
        dim = values.shape[1]
        widths, packed = ops.pack_rows(values, leaving)
        their_widths = travel(sent, over, widths, send, receive)
        lengths = (ops.packed_bytes(widths, send, dim), ops.packed_bytes(their_widths, receive, dim))
        theirs = travel(sent, over, packed, *lengths)
        ops.add_packed_rows(
            out, arriving, their_widths, theirs, name=name, fraction_bits=self.config.fraction_bits
        )

    def means(
        self,
        sent: Sent | None,
        over: Communicator,
        values: torch.Tensor,
        shares: Shares,
        terms: int,
        name: str = NAME,
    ) -> torch.Tensor:
        """(sum of the shares' sizes, dim) means of the sums of all ranks.

        Each rank adds up a share of the rows and hands its means on, which are shorter than sums on the grid.
        """
        size = shares.sizes[over.rank]
        sums = self.zeros(size, values.shape[1])
        order, rows = (to_device(each, self.device) for each in (shares.order, shares.rows))
        self.exchange(sent, over, values, order, shares.send, sums, rows, shares.receive, name)
        mean = self.over(sums, terms).repeat(over.world_size, 1)
        return travel(sent, over, mean, [size] * over.world_size, shares.sizes)

    def mean(self, sums: torch.Tensor, terms: int, name: str = NAME) -> torch.Tensor:
        """Sums over samples to the gradient of the mean loss per term, or FloatingPointError."""
        return self.finite(self.over(sums, terms), name)

    def over(self, sums: torch.Tensor, terms: int) -> torch.Tensor:
        """Sums over the terms of the loss, those of all ranks and batches that `sums` cover."""
        divisor = float(max(terms, 1))
        return (
            ops.from_fixed_point(sums, divisor, self.config.fraction_bits) if self.exact else sums / divisor
        )

    def total(self, losses: torch.Tensor) -> torch.Tensor:
        """(1,) the sum of losses (B,) float32, of the type that sums have: on the grid of `LOSS_BITS`."""
        if not self.exact:
            return losses.double().sum().float().view(1)
        one = torch.zeros_like(losses, dtype=torch.int64)
        total = ops.segment_sum(
            losses.unsqueeze(1),
            one,
            1,
            consistency="batch",
            fraction_bits=LOSS_BITS,
            name="losses of the samples",
        )
        return total.view(1)

    def mean_loss(self, mean: torch.Tensor) -> float:
        """The mean loss per term, from what `over` makes of a `total` of all ranks."""
        return float(mean) * (2.0 ** (self.config.fraction_bits - LOSS_BITS) if self.exact else 1.0)

    def finite(self, means: torch.Tensor, name: str) -> torch.Tensor:
        """`means`, or FloatingPointError; sums on the grid are finite already."""
        if not self.exact:
            finite = torch.isfinite(means)
            if not bool(finite.all()):
                index = tuple((~finite).nonzero()[0].tolist())
                raise FloatingPointError(f"{name}: gradient at {index} is {float(means[index])}")
        return means


def travel(
    sent: Sent | None,
    over: Communicator,
    values: torch.Tensor,
    send: list[int],
    receive: list[int],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`Communicator.all_to_all`, its bytes counted in `sent`, if it is given."""
    if sent is not None:
        sent.bytes += (sum(send) - send[over.rank]) * values[:1].numel() * values.element_size()
    return over.all_to_all(values, send, receive, out)


def _apart(rows: torch.Tensor, counts: list[int], rank: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """This rank's part of `rows`, grouped by rank; the others' parts; their counts, here none."""
    before, own = sum(counts[:rank]), counts[rank]
    others = torch.cat([rows[:before], rows[before + own :]])
    return rows[before : before + own], others, [*counts[:rank], 0, *counts[rank + 1 :]]
