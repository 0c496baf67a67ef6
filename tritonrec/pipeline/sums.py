"""Sums of gradients: in fixed point, or in float32 in a fixed order; how ranks exchange them.

A row of int64 sums takes twice the bytes of a float32 row, and most of these are the sign's. So fixed-point
sums of the host are sent packed over links (`ops.pack_rows`): each row in as many bytes as it needs, exactly.
How many these are only the device knows of an accelerator's sums: those are sent whole, and no host waits. So
are those of processes on one machine, to which a copy of more bytes costs less than packing them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from .. import ops
from ..distributed import Communicator
from ..host_memory import gives_back
from ..kernels import launch
from ..kernels.compilation import say_once
from ..kernels.deferred import NONE, first_bad
from ..kernels.dispatch import on_host
from ..kernels.padding import report
from .dist_plan import column_sums
from .reduce_scatter import ReduceScatter
from .streams import to_device, to_host
from .window import LookupCounts, WindowConfig

NAME = "embedding gradient"
LOSS_BITS = 24
"""Fraction bits of the mean loss: losses are larger than gradients, and only shown. 24 bits reach 2**39."""


class Sent(NamedTuple):
    """Sums of a table on their way to their owners.

    values: (N, dim) sums here. rows: (K,) int64, which of them to send, grouped by rank; `input_splits` has
    how many to each.
    out: (S, dim) sums to add to. targets: (k,) int64, the row of each received sum, grouped by rank;
    `output_splits` has how many from each.
    """

    values: torch.Tensor
    rows: torch.Tensor
    input_splits: list[int]
    out: torch.Tensor
    targets: torch.Tensor
    output_splits: list[int]


@dataclass
class Sums:
    """Gradient sums of one run. Fixed point makes them independent of order; "window" fixes the order.

    Args:
        config: consistency and fraction bits of the run. device: of the sums.
        copied: messages are copies by the processors that compute (`Communicators.copies_messages`).
    """

    config: WindowConfig
    device: torch.device
    copied: bool = False

    @property
    def exact(self) -> bool:
        return self.config.consistency == "batch"

    @property
    def packed(self) -> bool:
        """Whether ranks send each other sums in the bytes they need."""
        choice, over_links = self.config.exchange.sums, self.device.type == "cpu" and not self.copied
        return self.exact and (choice == "packed" or (choice == "auto" and over_links))

    def zeros(self, rows: int, dim: int) -> torch.Tensor:
        """(rows, dim), of the type that sums have."""
        dtype = torch.int64 if self.exact else torch.float32
        if self.device.type == "cpu" and gives_back(rows * dim * dtype.itemsize):
            say_once(
                "steps free blocks of over 32 MiB, which the kernel takes and zeroes each time: call "
                "tritonrec.host_memory.keep_freed_memory() first (docs/embedding.md#memory)"
            )
        return torch.zeros(rows, dim, dtype=dtype, device=self.device)

    def add(self, values: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, name: str) -> None:
        """out[rows[k]] += values[k], of gradients (K, dim) or of sums."""
        config = self.config
        options = config.consistency, config.fraction_bits, name
        launch.segment_sum_into(out, values, rows, out.shape[0], *options)

    def send_to_owners(
        self, sent: LookupCounts | None, over: Communicator, parts: Sequence[Sent], name: str = NAME
    ) -> None:
        """Add sums of every rank to those of their owners: those of several tables in one message.

        Args:
            sent: counts the bytes, if given. over: the ranks. parts: of each table.
        """
        if not self.packed or over.world_size == 1:
            gathered = [launch.gather_rows(part.values, part.rows) for part in parts]
            if over.world_size > 1:
                splits = [part.input_splits for part in parts], [part.output_splits for part in parts]
                gathered = all_to_all_of_tables(sent, over, gathered, *splits)
            for part, values in zip(parts, gathered, strict=True):
                self.add(values, part.targets, part.out, name)
            return
        # This rank's own sums go from `values` to `out` directly. Each of the others gets two messages: the
        # width in bytes of each row, then the rows, whose lengths follow from the widths.
        planned = []
        for part in parts:
            own, others, send = _apart(part.rows, part.input_splits, over.rank)
            to_own, to_others, receive = _apart(part.targets, part.output_splits, over.rank)
            options = "batch", self.config.fraction_bits, name, None, own
            launch.segment_sum_into(part.out, part.values, to_own, len(part.out), *options)
            planned.append((*launch.pack_rows(part.values, others), send, to_others, receive))
        widths, packed, sends, targets, receives = zip(*planned, strict=True)
        their_widths = all_to_all_of_tables(sent, over, widths, sends, receives)
        # One wait of the host for all.
        read = to_host(torch.cat([*widths, *their_widths])).split(list(map(len, [*widths, *their_widths])))
        count, dims = len(parts), [part.values.shape[1] for part in parts]
        lengths = list(map(ops.packed_bytes, read[:count], sends, dims))
        their_lengths = list(map(ops.packed_bytes, read[count:], receives, dims))
        theirs = all_to_all_of_tables(sent, over, packed, lengths, their_lengths)
        for part, *came in zip(parts, targets, their_widths, theirs, strict=True):
            launch.add_packed_rows(part.out, *came, name, self.config.fraction_bits)

    def all_reduce_mean(
        self,
        sent: LookupCounts | None,
        over: Communicator,
        values: torch.Tensor,
        plan: ReduceScatter,
        normalizer: int,
        name: str = NAME,
    ) -> torch.Tensor:
        """(sum of the plan's sizes, dim) float32, the sums of all ranks over the normalizer, on every rank.

        A reduce-scatter, and an all-gather of the means, which are shorter than fixed-point sums.
        """
        mean = self.reduce_scatter_mean(sent, over, values, plan, normalizer, name)
        # An all-gather as an all-to-all: the same part for every rank, parts of different sizes.
        mean, sizes = mean.repeat(over.world_size, 1), [len(mean)] * over.world_size
        return counted_all_to_all(sent, over, mean, sizes, plan.sizes)

    def reduce_scatter_mean(
        self,
        sent: LookupCounts | None,
        over: Communicator,
        values: torch.Tensor,
        plan: ReduceScatter,
        normalizer: int,
        name: str = NAME,
    ) -> torch.Tensor:
        """(size of this rank's part, dim) float32, the sums of all ranks over the normalizer."""
        sums = self.zeros(plan.sizes[over.rank], values.shape[1])
        order, rows = (to_device(each, self.device) for each in (plan.order, plan.rows))
        part = Sent(values, order, plan.input_splits, sums, rows, plan.output_splits)
        self.send_to_owners(sent, over, [part], name)
        return self.divide(sums, normalizer)

    def mean(self, sums: torch.Tensor, normalizer: int, name: str = NAME) -> torch.Tensor:
        """Sums over samples to the gradient of the mean loss, or FloatingPointError."""
        return self.finite(self.divide(sums, normalizer), name)

    def divide(self, sums: torch.Tensor, normalizer: int) -> torch.Tensor:
        """Sums divided by the loss normalizer: the loss terms of all ranks and batches that `sums` cover."""
        divisor = float(max(normalizer, 1))
        if not self.exact:
            return sums / divisor
        return launch.from_fixed_point(sums, divisor, self.config.fraction_bits)

    def total(self, losses: torch.Tensor) -> torch.Tensor:
        """(1,) the sum of losses (B,) float32, of the type that sums have, with `LOSS_BITS`."""
        if not self.exact:
            return losses.double().sum().float().view(1)
        one = torch.zeros_like(losses, dtype=torch.int64)
        total = launch.segment_sum(losses.unsqueeze(1), one, 1, "batch", LOSS_BITS, "losses of the samples")
        return total.view(1)

    def mean_loss(self, mean: torch.Tensor) -> float:
        """The mean loss per term, from `divide` of the `total` of all ranks."""
        # `divide` took the loss's sum, of LOSS_BITS, for one of
        # fraction_bits. A power of two mends it without error.
        return float(mean) * (2.0 ** (self.config.fraction_bits - LOSS_BITS) if self.exact else 1.0)

    def finite(self, means: torch.Tensor, name: str | Callable[[int], str]) -> torch.Tensor:
        """`means`, or FloatingPointError; fixed-point sums are finite already.

        Args:
            name: of all values, or of the one at a position.
        """
        if self.exact or not means.numel():
            return means
        if on_host(means) and math.isfinite(float(means.sum())):  # a sum of what is not finite is not either
            return means
        shape, bad = tuple(means.shape), ~torch.isfinite(means.reshape(-1))

        def named(position: int) -> str:
            return (
                f"{name}: gradient at {_index(position, shape)}" if isinstance(name, str) else name(position)
            )

        def late(code: int) -> FloatingPointError:
            return FloatingPointError(f"{named(code - 1)} is not finite")

        def error(code: int) -> FloatingPointError:
            return FloatingPointError(f"{named(code - 1)} is {float(means.reshape(-1)[code - 1])}")

        first = torch.where(bad.any(), bad.to(torch.int8).argmax(), NONE).view(1)
        report(first_bad(first) if on_host(means) else first, None, error, late)
        return means


def _index(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the element at a flat position."""
    return tuple(int(i) for i in np.unravel_index(position, shape))


def counted_all_to_all(
    sent: LookupCounts | None,
    over: Communicator,
    values: torch.Tensor,
    input_splits: list[int],
    output_splits: list[int],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`Communicator.all_to_all`; the bytes that leave this rank are counted in `sent`, if it is given."""
    if sent is not None:
        others = sum(input_splits) - input_splits[over.rank]
        sent.row_bytes += others * values[:1].numel() * values.element_size()
    return over.all_to_all(values, input_splits, output_splits, out)


def all_to_all_of_tables(
    sent: LookupCounts | None,
    over: Communicator,
    values: Sequence[torch.Tensor],
    input_splits: Sequence[list[int]],
    output_splits: Sequence[list[int]],
    outs: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """`counted_all_to_all` of several tables' rows (n, ...) of one dtype, as one message to each rank::

        of rank 0: table 0, table 1, ... | of rank 1: table 0, table 1, ... | ...

    One table, or one rank, needs no copies.
    """
    if len(values) == 1 or over.world_size == 1:
        given = [values, input_splits, output_splits, *([] if outs is None else [outs])]
        return [counted_all_to_all(sent, over, *each) for each in zip(*given, strict=True)]
    sizes = [math.prod(each.shape[1:]) for each in values]
    send, receive = (
        [[rows * size for rows in each] for each, size in zip(splits, sizes, strict=True)]
        for splits in (input_splits, output_splits)
    )
    parts = (each.reshape(-1).split(elements) for each, elements in zip(values, send, strict=True))
    message = torch.cat([part for of_rank in zip(*parts, strict=True) for part in of_rank])
    came = counted_all_to_all(sent, over, message, column_sums(send), column_sums(receive))
    pieces = came.split([elements for of_rank in zip(*receive, strict=True) for elements in of_rank])
    found = []
    for number, each in enumerate(values):
        out = None if outs is None else outs[number].view(-1)
        found.append(torch.cat(pieces[number :: len(values)], out=out).view(-1, *each.shape[1:]))
    return found


def _apart(rows: torch.Tensor, counts: list[int], rank: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """This rank's part of `rows`, grouped by rank; the others' parts; their counts, here none."""
    # rows    | of rank 0 | ... | of this rank | ... |
    #         0         before      before + own
    before, own = sum(counts[:rank]), counts[rank]
    others = torch.cat([rows[:before], rows[before + own :]])
    return rows[before : before + own], others, [*counts[:rank], 0, *counts[rank + 1 :]]
