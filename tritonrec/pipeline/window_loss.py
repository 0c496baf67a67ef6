"""Losses in which the samples of a batch see each other, as in-batch softmax does, exact for any cut.

A model that has a `window_loss` is computed in two passes (GradCache, Gao et al. 2021, arXiv 2101.06983)::

    represent     forward of each micro-batch, whose graph is dropped: what its samples show to the others
    window_loss   what all ranks' samples show, in the order of their ids; from it the losses of this
                  rank's samples, a micro-batch's at a time, and the gradients of what was shown
    compute       forward of each micro-batch again, and backward from these gradients

Rows and parameters are frozen meanwhile, so the second forward gives the same. No bit depends on the cut or
on the ranks: the order is that of ids; a sample's loss is computed row by row against the whole batch; what a
sample gets as a candidate of others is a sum over their rows, made of terms in fixed point like the gradient
of a parameter, and sent to the rank that has the sample.

Dimensions: b samples of a micro-batch or rank, B samples of the global batch.
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
from .model_call import CallerSettings, Column, Represented, Shown, check_losses, samples_of
from .precision import unscaled
from .streams import to_host
from .sums import Sent, Sums, counted_all_to_all
from .window import LookupCounts

NAME = "what the samples show each other"


class WindowLossModel(Protocol):
    """A model whose losses are of the whole global batch: a module with these two methods."""

    def __call__(self, batch: Batch, rows: dict[str, torch.Tensor], seed: int) -> Shown:
        """What each sample shows to the others, by name: tensors (b, ...), each row of its sample alone.

        Those with a gradient are float32, as embeddings of users and items; others may be of any type, as
        ids and log probabilities.
        """

    def window_loss(self, own: Shown, window: Shown, positions: torch.Tensor) -> torch.Tensor:
        """Losses (b,) float32 of some samples, each of its own row and the whole `window` alone.

        Args:
            own: what these samples show, (b, ...). window: what all samples of the global batch do, (B, ...),
                in the order of their ids. positions: (b,) int64, where `own` are in it.

        At consistency ``"batch"`` the gradient of a tensor of `window` goes through an op with exact sums:
        ``ops.linear(own["user"], window["item"])``.
        """


@dataclass(frozen=True)
class WindowLoss:
    """Of a micro-batch: what was shown, the losses (b,) float32, and the gradients (b, ...) by name."""

    represented: Represented
    losses: torch.Tensor
    gradients: Shown

    def again(self, represented: Represented) -> Shown:
        """The gradients, for the second forward. Raises ValueError where it shows something else."""
        if not torch.equal(represented.values, self.represented.values):
            raise ValueError(
                "the model's second forward of a micro-batch differs from its first: does it keep something "
                "between calls, or draw from torch's generator (take tritonrec.nn.Dropout)?"
            )
        return self.gradients


class Gathered(NamedTuple):
    """What all samples of a global batch show.

    Args:
        shown: (B, ...) by name, in the order of sample ids; {} on a rank without samples.
        columns: of it. rank: of this process.
        places: (B,) int64, where the samples of each rank are, one rank after the other.
        sizes: samples of each rank. dim: values with a gradient, of each sample.
    """

    shown: Shown
    columns: tuple[Column, ...]
    rank: int
    places: torch.Tensor
    sizes: list[int]
    dim: int

    @property
    def positions(self) -> torch.Tensor:
        """(b,) int64 of this rank's samples."""
        start = sum(self.sizes[: self.rank])
        return self.places[start : start + self.sizes[self.rank]]

    def zeros(self, sums: Sums) -> Shown:
        """(B, ...) by name, for sums of the gradients of `shown`."""
        trained = [column for column in self.columns if column.trained]
        flat = {each.name: sums.zeros(len(self.places), each.values) for each in trained}
        return {each.name: flat[each.name].view(-1, *each.shape) for each in trained}


def gather(parts: list[Represented], over: Communicator, counts: LookupCounts | None = None) -> Gathered:
    """What the samples of all ranks show, on each rank that has any. Collective.

    Raises ValueError for a sample id that is there twice, and where samples show other tensors.
    """
    filled = [part for part in parts if part.columns] or parts[:1]
    columns = filled[0].columns
    same = "give every sample the same names, shapes and types, in the same order"
    for part in filled:
        if part.columns != columns:
            raise ValueError(f"micro-batches show {_words(columns)} and {_words(part.columns)}: {same}")
    own = torch.cat([part.values for part in filled])
    dim = sum(column.values for column in columns if column.trained)
    kind = zlib.crc32(repr(columns).encode())
    mine = torch.tensor([[len(own), own.shape[1], dim, kind]], dtype=torch.int64, device=own.device)
    # The same row for every rank: an all-gather of four numbers.
    every = over.all_to_all_equal(mine.repeat(over.world_size, 1))
    sizes, widths, dims, kinds = (
        [int(value) for value in each] for each in zip(*to_host(every).tolist(), strict=True)
    )
    for rank, (size, other) in enumerate(zip(sizes, kinds, strict=True)):
        if size and len(own) and other != kind:
            raise ValueError(
                f"rank {rank} shows other tensors than rank {over.rank}, which has {_words(columns)}: {same}"
            )
    # A rank without samples knows no columns. It takes part
    # in the exchange, sends nothing and is sent nothing.
    if not len(own):
        nothing = torch.zeros(0, dtype=torch.int64, device=own.device)
        counted_all_to_all(counts, over, own.new_empty(0, max(widths)), [0] * len(sizes), [0] * len(sizes))
        return Gathered({}, (), over.rank, nothing, sizes, max(dims))
    # Samples are gathered by the ranks that have some: only those compute losses.
    takers = [size > 0 for size in sizes]
    send = [len(own) * taker for taker in takers]
    values = counted_all_to_all(counts, over, own.repeat(sum(takers), 1), send, sizes)
    # The order of ids is the same for any cut and any ranks. The
    # clone is contiguous, so its bytes can be viewed as int64.
    ids, order = values[:, :8].clone(memory_format=torch.contiguous_format).view(torch.int64).view(-1).sort()
    if bool((ids[1:] == ids[:-1]).any()):
        twice = int(ids[1:][ids[1:] == ids[:-1]][0])
        raise ValueError(f"sample {twice} is twice in a global batch, whose order is that of sample ids")
    places = torch.empty_like(order)
    # The inverse of the sort: from "as it came" to "in the order of ids".
    places[order] = torch.arange(len(order), dtype=torch.int64, device=order.device)
    return Gathered(_unpack(values[order], columns), columns, over.rank, places, sizes, dim)


def _words(columns: tuple[Column, ...]) -> str:
    return ", ".join(
        f"{each.name} (b{''.join(f', {size}' for size in each.shape)}) {each.dtype}" for each in columns
    )


class _ByName(Shown):
    """What `window_loss` gets; ValueError for a name that the model does not show."""

    def __missing__(self, name: str) -> torch.Tensor:
        raise ValueError(f"window_loss reads {name!r}, but the model's forward shows {', '.join(self)}")


def _unpack(values: torch.Tensor, columns: tuple[Column, ...]) -> Shown:
    shown, at = {}, 8
    for column in columns:
        stop = at + column.values * column.dtype.itemsize
        part = values[:, at:stop].clone(memory_format=torch.contiguous_format)
        shown[column.name] = part.view(column.dtype).view(-1, *column.shape)
        at = stop
    return shown


def losses_of(
    model: torch.nn.Module,
    batch: Batch,
    window: Shown,
    positions: torch.Tensor,
    seed: Seed,
    settings: CallerSettings,
    scale_exponent: int,
    accumulator: GradientAccumulator,
    sums: Shown,
) -> tuple[torch.Tensor, Shown]:
    """Losses (b,) of the samples of `batch`, and by name the gradients (b, ...) of their own rows.

    The gradients of `window` are added to `sums`, those of parameters to the accumulator. Both are of the
    losses' sum.

    Raises TypeError for a gradient of `window` without an exact sum, where sums are exact, ValueError where
    `window_loss` reads or records what it cannot.
    """
    # A sample stands in the loss twice: as itself (`leaves`, whose gradient is of this rank alone) and among
    # the candidates of every sample (`candidates`, whose gradients are sums over all ranks).
    own = _ByName({name: each[positions] for name, each in window.items()})
    leaves = {name: own[name].requires_grad_() for name in sums}
    candidates = {name: window[name].detach().requires_grad_() for name in sums}
    exact = accumulator.fraction_bits is not None
    summed = accumulator.rows([*candidates.values()], [*sums.values()], NAME) if exact else nullcontext()
    with (
        summed, accumulator.active(), settings.applied(),
        samples_of(model, batch, seed) as now, recording() as recorded,
    ):  # fmt: skip
        losses = model.window_loss(own, _ByName({**window, **candidates}), positions)  # type: ignore[operator]
        if recorded:
            raise ValueError(f"window_loss records {', '.join(recorded)}: nn.record takes outputs of forward")
        check_losses(losses, batch)
        now.backward = True
        with settings.backward():
            losses.backward(torch.full_like(losses, 2.0**scale_exponent))
    for name, each in candidates.items():
        if each.grad is None:
            continue
        if exact:
            raise TypeError(
                f"window_loss uses window[{name!r}] so that its gradient is a float32 sum over samples, "
                "which depends on the cut: read it by ops.linear, or take consistency='window'"
            )
        sums[name] += unscaled(each.grad, scale_exponent)
    gradients = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()
    }
    return losses.detach(), {name: unscaled(each, scale_exponent) for name, each in gradients.items()}


def of_candidates(
    gathered: Gathered, totals: Shown, sums: Sums, over: Communicator, counts: LookupCounts | None = None
) -> Shown:
    """By name the gradients (b, ...) float32 of this rank's samples as candidates of all ranks' samples.

    Args:
        totals: (B, ...) sums of this rank. Collective.
    """
    own, takers = gathered.sizes[gathered.rank], [size > 0 for size in gathered.sizes]
    flat = [each.flatten(1) for each in totals.values()]
    values = torch.cat(flat, 1) if flat else sums.zeros(0, gathered.dim)
    out = sums.zeros(own, gathered.dim)
    # From each rank come the sums for all of this rank's samples, in their order.
    targets = torch.arange(own, dtype=torch.int64, device=out.device).repeat(sum(takers))
    send, receive = gathered.sizes if own else [0] * len(takers), [own * taker for taker in takers]
    sums.send_to_owners(counts, over, [Sent(values, gathered.places, send, out, targets, receive)], NAME)
    parts = sums.divide(out, 1).split([each.shape[1] for each in flat], 1) if flat else ()
    return {
        name: part.reshape(own, *total.shape[1:])
        for part, (name, total) in zip(parts, totals.items(), strict=True)
    }
