"""What a step says of itself, from the places of its window."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from .dense import DenseModel
from .places import DenseMeans, DeviceSamples, GradientNorm, Losses, Outputs, Routes, WindowPlaces
from .sums import Sums

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Results(Iterator[Result]):
    """Results of a generator, which does nothing before they are taken: a warning where nobody takes one."""

    def __init__(self, results: Any, name: str):
        self._results, self._name, self._taken = results, name, False
        self.close = results.close

    def __next__(self) -> Result:
        self._taken = True
        return next(self._results)

    def __del__(self) -> None:
        if not getattr(self, "_taken", True):
            warnings.warn(
                f"nothing was done: {self._name} works while its results are taken, and nobody took one. "
                f"Write `for result in {self._name}(...)`, or list({self._name}(...))",
                RuntimeWarning,
                stacklevel=2,
            )


def to_be_taken(generator: Callable[Given, Iterator[Result]]) -> Callable[Given, Iterator[Result]]:
    """A generator function whose calls say so where nobody takes their results."""

    @wraps(generator)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Iterator[Result]:
        return Results(generator(*args, **kwargs), generator.__qualname__.lower())

    return called


@dataclass(frozen=True)
class StepResult:
    """Losses of one step.

    Args:
        step: of the batch.
        sample_ids, losses: (B,) int64 and (B,) float32, the sum of the terms of each sample on this rank.
        loss_terms: terms of the loss (tokens, impressions) in the whole update, over all ranks and over the
            batches it accumulates.
        loss: the mean of all of these terms, the same on every rank. With consistency ``"batch"`` it has the
            same bits in every mode and at every world size.
        grad_norm: of the update's gradients before they are scaled down, with the same bits on every rank;
            None unless ``max_grad_norm``, ``max_grad_value`` or ``skip_nonfinite`` is set, or the precision
            is ``"fp16"``.
        skipped: whether the update was left out (``skip_nonfinite``, precision ``"fp16"``); then `grad_norm`
            is infinite and `loss` is not a number.
        learning_rates: of the optimizers' groups, those that the update used; nan for a group without one.
        loss_scale: that the update used; None unless the precision is ``"fp16"``.
        exchanges: how many a window has, which micro-batches share them, and why, in words; empty in mode
            ``"reference"``, which has none.
        outputs: what the model recorded of the samples (`nn.record`), by name: (B, ...), or other rows that
            are in the order of `sample_ids`. On the device; {} on a rank without samples.
    """

    step: int
    sample_ids: torch.Tensor
    losses: torch.Tensor
    loss_terms: int
    loss: float
    grad_norm: float | None = None
    skipped: bool = False
    learning_rates: tuple[float, ...] = ()
    loss_scale: float | None = None
    exchanges: str = ""
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def values(self) -> dict[str, float]:
        """What the step says of itself, the same on all ranks, by the names of loggers' columns.

        ``loss``, ``grad_norm`` and ``loss_scale`` where there are such, ``lr``, or ``lr/0``, ``lr/1``, ...
        """
        values = {"loss": self.loss}
        if self.grad_norm is not None:
            values["grad_norm"] = self.grad_norm
        if self.loss_scale is not None:
            values["loss_scale"] = self.loss_scale
        one = len(self.learning_rates) == 1
        for number, rate in enumerate(self.learning_rates):
            values["lr" if one else f"lr/{number}"] = rate
        return values


def results_of(places: WindowPlaces, sums: Sums, dense: DenseModel, exchanges: str) -> list[StepResult]:
    """Of the batches of a window that is done, in order; copies, before the lanes use the places again."""
    window, routes, config = places.window, places[Routes], sums.config
    samples, losses, count = places[DeviceSamples], places[Losses], config.micro_batches
    copied = []
    for number in range(len(window.batches)):
        part = range(number * count, (number + 1) * count)
        ids = torch.cat([samples[i].sample_ids for i in part])
        outputs = joined([places[Outputs][i] for i in part if i in places[Outputs]])
        copied.append((ids, torch.cat([losses[i] for i in part]), outputs))
    loss = sums.mean_loss(places[DenseMeans].loss)  # last: the host waits for it, and so for the copies
    norm = float(places[GradientNorm].norm) if config.clips else None
    skipped = config.skips and norm == math.inf
    if skipped:
        loss = math.nan
    rates, scale = tuple(map(float, dense.rates.popleft())), dense.scales.popleft()
    said = routes.loss_normalizer, loss, norm, skipped, rates, scale, exchanges
    return [
        StepResult(batch.step, ids, of_batch, *said, outputs)
        for batch, (ids, of_batch, outputs) in zip(window.batches, copied, strict=True)
    ]


def note_outputs(outputs: Outputs, micro_batch: int, recorded: dict[str, torch.Tensor], count: int) -> None:
    """Keep what the model recorded of a micro-batch with samples, of `count` of a batch.

    Raises ValueError where another one of the batch has other names, shapes of a row or types.
    """
    first = micro_batch - micro_batch % count
    # Those before are like each other: one of them is enough.
    other = next((outputs[i] for i in range(first, first + count) if i in outputs), recorded)
    outputs[micro_batch] = recorded
    found, now = (
        {name: (tuple(each.shape[1:]), each.dtype) for name, each in of.items()} for of in (other, recorded)
    )
    for name in found | now:
        if found.get(name) != now.get(name):
            raise ValueError(
                f"the model records {name} of some micro-batches with {found.get(name)} and of "
                f"others with {now.get(name)}: give the same names, row shapes and types for any samples"
            )


def joined(parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Outputs of a batch from those of its micro-batches that have samples."""
    return {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}
