"""Losses in which the samples of a batch see each other, as in-batch softmax does, exact for any cut.

A model that has a `window_loss` is computed in two passes (GradCache, Gao et al. 2021, arXiv 2101.06983)::

    represent     forward of each micro-batch, whose graph is dropped: what its samples show to the others
    window_loss   what all ranks' samples show, in the order of their ids; from it the losses of this
                  rank's samples, a micro-batch's at a time, and the gradients of what was shown
    compute       forward of each micro-batch again, and backward from these gradients

Rows and parameters are frozen meanwhile, so the second forward gives the same. No bit depends on the cut or
on the ranks: the order is that of ids; a sample's loss is computed row by row against the whole batch; what a
sample gets as a candidate of others is a sum over their rows, made of terms in fixed point like the gradient
of a parameter, and sent to the rank that has the sample. Dimensions: b samples of a micro-batch or rank, B of
the global batch.
"""

from __future__ import annotations

import zlib
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ..data import Batch
from ..distributed import Communicator
from ..kernels.philox.device_seed import Seed
from ..nn import GradientAccumulator
from ..nn.context import recording
from .model_call import ID, ByName, CallerSettings, Column, Represented, See, Shown, backward_of, samples_of
from .precision import unscaled
from .streams import to_host
from .sums import Sent, Sums, counted_all_to_all
from .window import LookupCounts

NAME = "what the samples show each other"


class WindowLossModel(Protocol):
    """A model whose losses are of the whole global batch: a module with these two methods."""

    def __call__(self, batch: Batch, rows: dict[str, torch.Tensor], seed: int) -> Shown:
        """What each sample shows to the others, by name: tensors (b, ...), each row of its sample alone.

        Those with a gradient are float32, as embeddings of users and items.
        """

    def window_loss(self, own: Shown, window: Shown, positions: torch.Tensor) -> torch.Tensor:
        """Losses (b,) float32 of the samples that show `own`, each of its own row and the `window` alone.

        The `window` is what all samples of the global batch show, (B, ...), in the order of their ids; `own`
        are at `positions`, (b,) int64. At consistency ``"batch"`` the gradient of a tensor of it goes through
        an op with exact sums: ``ops.linear(own["user"], window["item"])``.
        """


@dataclass(frozen=True)
class WindowLoss:
    """Of a micro-batch: what was shown, the losses (b,) float32, and the gradients (b, ...) by name."""

    represented: Represented
    losses: torch.Tensor
    gradients: Shown

    def again(self, represented: Represented) -> Shown:
        """The gradients, for the second forward. Raises ValueError where it shows something else."""
        self.represented.check_again(represented)
        return self.gradients


class Gathered(NamedTuple):
    """What all samples of a global batch show; nothing on a rank without samples."""

    shown: Shown  # (B, ...) by name, in the order of sample ids
    trained: list[Column]  # of it: those with a gradient
    ids: torch.Tensor  # (B,) int64
    positions: torch.Tensor  # (b,) int64, where this rank's samples are
    places: torch.Tensor  # (B,) int64, where those of each rank are, one rank after the other
    sent: list[int]  # samples to each rank
    came: list[int]  # and from each

    def zeros(self, exact: bool) -> Shown:
        """(B, ...) by name, for sums of the gradients of `shown`."""
        dtype = torch.int64 if exact else torch.float32
        return {each.name: torch.zeros_like(self.shown[each.name], dtype=dtype) for each in self.trained}

    def of_candidates(self, totals: Shown, sums: Sums, over: Communicator, counts: LookupCounts) -> Shown:
        """By name the gradients (b, ...) float32 of this rank's samples as candidates of all ranks' samples,
        from `totals` (B, ...), the sums of this rank. Collective.
        """
        own, takers = len(self.positions), sum(map(bool, self.sent))
        # From each rank come the sums for all of this rank's samples, in their order.
        targets = torch.arange(own, dtype=torch.int64, device=self.places.device).repeat(takers)
        outs = [sums.zeros(own, each.values) for each in self.trained]
        parts = [
            Sent(totals[each.name].view(-1, each.values), self.places, self.came, out, targets, self.sent)
            for each, out in zip(self.trained, outs, strict=True)
        ]
        sums.send_to_owners(counts, over, parts, NAME)
        means = zip(self.trained, (sums.divide(out, 1) for out in outs), strict=True)
        return {each.name: mean.view(-1, *each.shape) for each, mean in means}


def gather(parts: list[Represented], over: Communicator, counts: LookupCounts | None = None) -> Gathered:
    """What the samples of all ranks show, on each rank that has any. Collective.

    Raises ValueError for a sample id that is there twice, and where samples show other tensors.
    """
    filled = [part for part in parts if len(part.values)] or parts[:1]
    columns = filled[0].columns
    same = "give every sample the same names, shapes and types, in the same order"
    for part in filled:
        if part.columns != columns:
            raise ValueError(f"micro-batches show {filled[0].words} and {part.words}: {same}")
    own = torch.cat([part.values for part in filled])
    kind = zlib.crc32(repr(columns).encode())
    mine = torch.tensor([[len(own), kind]], dtype=torch.int64, device=own.device)
    # The same row for every rank: an all-gather of two numbers.
    every = to_host(over.all_to_all_equal(mine.repeat(over.world_size, 1))).tolist()
    for rank, (size, other) in enumerate(every):
        if size and len(own) and other != kind:
            raise ValueError(
                f"rank {rank} shows other tensors than rank {over.rank}, which has {filled[0].words}: {same}"
            )
    # Samples are gathered by the ranks that have some: only those compute losses. One without any takes part
    # in the exchange, sends nothing and is sent nothing.
    sent = [len(own) * (size > 0) for size, _ in every]
    came = [size * (len(own) > 0) for size, _ in every]
    values = counted_all_to_all(counts, over, own.repeat(sum(map(bool, sent)), 1), sent, came)
    parts_of = zip(columns, values.split([each.bytes for each in columns], 1), strict=True)
    # Clones are contiguous, so their bytes can be viewed as another type.
    clones = {each: part.clone(memory_format=torch.contiguous_format) for each, part in parts_of}
    shown = {each.name: part.view(each.dtype).view(-1, *each.shape) for each, part in clones.items()}
    ids, order = shown.pop(ID).sort()
    twice = ids[1:][ids[1:] == ids[:-1]]
    if len(twice):
        raise ValueError(f"sample {int(twice[0])} is twice in a global batch, which is in the order of ids")
    # The inverse of the sort: from "as it came" to "in the order of ids".
    places = order.argsort()
    shown = {name: each[order] for name, each in shown.items()}
    trained = [column for column in columns if column.trained]
    return Gathered(shown, trained, ids, places.split(came)[over.rank], places, sent, came)


@dataclass(frozen=True)
class BatchLoss:
    """`window_loss` of a global batch, for any of its samples: `seed` and `settings` as of a call."""

    model: torch.nn.Module
    gathered: Gathered
    seed: Seed
    settings: CallerSettings
    scale_exponent: int

    def of(
        self, batch: Batch, positions: torch.Tensor, accumulator: GradientAccumulator, sums: Shown,
        see: See = lambda _: None,
    ) -> tuple[torch.Tensor, Shown]:  # fmt: skip
        """Losses (b,) of the samples of `batch`, and by name the gradients (b, ...) of their own rows.

        The gradients of what all samples show are added to `sums`, those of parameters to the accumulator.
        Both are of the losses' sum; `see` gets the losses.

        Raises TypeError for a gradient of what is shown without an exact sum, where sums are exact,
        ValueError where `window_loss` reads or records what it cannot.
        """
        window, scale_exponent = self.gathered.shown, self.scale_exponent
        # A sample stands in the loss twice: as itself (`leaves`, whose gradient is of this rank alone) and
        # among the candidates of every sample (`candidates`, whose gradients are sums over all ranks).
        own = ByName({name: each[positions] for name, each in window.items()})
        leaves = {name: own[name].requires_grad_() for name in sums}
        candidates = {name: window[name].detach().requires_grad_() for name in sums}
        exact = accumulator.fraction_bits is not None
        summed = accumulator.rows([*candidates.values()], [*sums.values()], NAME) if exact else nullcontext()
        with (
            summed, accumulator.active(), self.settings.applied(),
            samples_of(self.model, batch, self.seed) as now, recording() as recorded,
        ):  # fmt: skip
            losses = self.model.window_loss(own, ByName({**window, **candidates}), positions)  # type: ignore[operator]
            if recorded:
                raise ValueError(
                    f"window_loss records {', '.join(recorded)}: nn.record takes outputs of forward"
                )
            backward_of(losses, batch, now, self.settings, scale_exponent, see=see)
        rest = {name: each.grad for name, each in candidates.items() if each.grad is not None}
        if rest and exact:
            raise TypeError(
                f"window_loss uses window[{min(rest)!r}] so that its gradient is a float32 sum over samples, "
                "which depends on the cut: read it by ops.linear, or take consistency='window'"
            )
        for name, gradient in rest.items():
            sums[name] += unscaled(gradient, scale_exponent)
        return losses.detach(), {
            name: unscaled(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, scale_exponent)
            for name, leaf in leaves.items()
        }
