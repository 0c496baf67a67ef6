"""Consistency "batch" needs a `window_loss` whose samples see the window alone: `LossGuard` compares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from .. import ops
from ..data import Batch
from ..kernels.checksums import same_bits
from ..nn import GradientAccumulator
from .attributes import without_traces
from .diagnosis import Diagnosis, NotBatchInvariantError
from .guard import EARLY, EVERY, FEW_SAMPLES, MOST_PATHS, MOST_SAMPLES, STREAM, Guard
from .looks import path_of
from .model_call import Shown
from .window_loss import BatchLoss


class LossGuard:
    """Compares calls of a `window_loss` where `guard` is active, whose settings and sizes it shares."""

    def __init__(self, guard: Guard):
        self._guard = guard
        self._calls = 0
        self._paths: set[frozenset[tuple[str, str]]] = set()
        self._ways: set[frozenset[tuple[str, str]]] = set()  # of the call under way

    def see(self, losses: torch.Tensor) -> None:
        """What a `window_loss` returns, before its backward."""
        if self._guard.active and len(self._paths) < MOST_PATHS:
            self._ways.add(path_of(losses))

    @contextmanager
    def around(self, parts: list[Batch], loss: BatchLoss, sums: Shown) -> Iterator[None]:
        """Around the losses of a batch's micro-batches: losses and gradients of all its samples are compared
        with those of its parts, where that is due or a loss goes another way (`see`).

        Args: as `loss.of` takes them, for all `parts` one after the other.

        Raises `NotBatchInvariantError`.
        """
        guard, positions = self._guard, loss.gathered.positions
        if not guard.active or not len(positions) or len(loss.gathered.ids) < 2:
            yield
            return
        filled = [part for part in parts if part.num_samples]
        size = -1, len(positions).bit_length()
        self._calls += 1
        number = self._calls
        again = number >= EARLY and not number & (number - 1)
        again |= ops.derive_seed(guard.config.seed, STREAM + 2, number) % EVERY == 0
        most = FEW_SAMPLES if size in guard.sizes else MOST_SAMPLES
        if again or most == MOST_SAMPLES:
            self._compare(filled, loss, sums, most)
            guard.sizes.add(size)
        self._ways.clear()
        with guard.unchanged_buffers("window_loss"):
            yield
        new = self._ways - self._paths
        self._paths |= new
        if new and not again and most == FEW_SAMPLES:
            self._compare(filled, loss, sums, most)

    def _compare(self, parts: list[Batch], loss: BatchLoss, sums: Shown, most: int) -> None:
        batch, positions, found = type(parts[0]).concat(parts), loss.gathered.positions, []
        if len(positions) == 1:  # beside samples of other ranks, of which only what they show is here
            others = torch.arange(len(loss.gathered.ids), dtype=torch.int64, device=positions.device)
            positions = torch.cat([positions, others[others != positions][: FEW_SAMPLES - 1]])
            same = batch.select(torch.zeros(len(positions), dtype=torch.int64, device="cpu"))
            batch = replace(same, sample_ids=loss.gathered.ids[positions])
        # A generator of its own: a comparison draws nothing
        # from torch's, whose state belongs to the training.
        random = torch.Generator().manual_seed(batch.step)
        order = torch.randperm(len(positions), generator=random, dtype=torch.int64, device="cpu")[:most]
        # All together, then one sample, as many as training computes, and the rest: any dependence on company
        # differs between the two.
        trained = min(parts[0].num_samples, len(order) - 1)
        model, bits = self._guard.model, self._guard.config.fraction_bits
        with without_traces(model), self._guard.unchanged_buffers("window_loss"):
            for cut in ([len(order)], [1, trained, len(order) - 1 - trained]):
                accumulator = GradientAccumulator(model, bits)
                totals, calls = {name: torch.zeros_like(each) for name, each in sums.items()}, []
                with accumulator.empty_gradients():
                    accumulator.scale_exponent = loss.scale_exponent
                    for part in order.split(cut):
                        if len(part):
                            at = positions[part.to(positions.device)]
                            losses, own = loss.of(batch.select(part), at, accumulator, totals)
                            calls.append([losses, *own.values()])
                    by_sample = [torch.cat(each) for each in zip(*calls, strict=True)]
                    found.append([*by_sample, *totals.values(), accumulator.take_flat()])
        if not all(map(same_bits, *found)):
            raise NotBatchInvariantError(
                "whose window_loss of a sample depends on which others are computed with it, and not on the "
                "window alone",
                Diagnosis(None, None, ""),
            )
