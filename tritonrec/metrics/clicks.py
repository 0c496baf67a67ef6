"""Metrics of a training as it goes: the same bits for any number of ranks and micro-batches, in any order.

A term of a sample is computed from that sample alone, rounded once to a grid of 2**-60 and added as an
integer; areas under curves are counted in integers over the samples of a window. Names and formulas are those
of TorchRec's RecMetrics (``torchrec.metrics``), of a sample's weight w, label y, prediction p, in [0, 1]::

    cross entropy   sum of -w (y log2 p + (1 - y) log2 (1 - p))          p is clamped to [1e-12, 1 - 1e-12]
    ctr             sum of w y / sum of w
    ne              cross entropy / that of a model that always predicts ctr   normalized entropy; < 1 is good
    logloss         cross entropy / sum of w, in bits
    calibration     sum of w p / sum of w y                              0 without a positive
    auc             `tritonrec.data.auc`, or `weighted_auc`: ties count half
    gauc            `tritonrec.data.gauc`, of samples without weights

``lifetime_ne`` is over all steps, ``window_ne`` over the last ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..data import auc, gauc, weighted_auc
from ..distributed import Communicators
from ..nn import sigmoid
from ..settings import counts_of, typed
from .sums import BITS, exact_sums, merged

ETA = 1e-12
PENDING = 64
"""Steps whose samples are kept before their terms are added up: one pass over many samples costs less."""


@typed
class ClickMetrics:
    """NE, log loss, calibration and CTR of all steps and of a window; AUC, and GAUC of groups, of the window.

    Call `update` after each step on every rank, with the samples of this rank, and `compute` when the values
    are wanted. Samples of the window stay in memory: 12 bytes each, 24 with weights and groups.

    Args:
        window: steps; 0: all, and their samples stay.
        logits: predictions are logits, of which `nn.sigmoid` is taken.
        communicators: of the ranks whose samples are joined; None: this rank alone.

    Values of a window are there from the first step on. After `load_state_dict` those of AUC and GAUC are
    left out until the window has new samples alone.
    """

    def __init__(self, window: int = 100, logits: bool = False, communicators: Communicators | None = None):
        if window < 0:
            raise ValueError(f"window counts steps, 0 for all, got {window}")
        self.window, self.logits = window, logits
        self._control = (communicators or Communicators.local()).control
        self.steps = 0
        self._lifetime = [0, 0, 0, 0]
        self._sums: deque[list[int]] = deque(maxlen=window or None)  # of the steps of the window
        self._samples: deque[list[Tensor | None]] = deque(maxlen=window or None)
        self._pending: list[list[Tensor | None]] = []

    @typed
    def update(
        self, predictions: Tensor, labels: Tensor, weights: Tensor | None = None, groups: Tensor | None = None
    ) -> None:
        """Take this rank's samples of a step, any number of them.

        Args:
            predictions, labels: (n,) probabilities or logits, and 0 or 1. weights: (n,), 1 by default.
            groups: (n,) int64, such as users; given in every step or in none.

        Raises ValueError for other shapes. Values are looked at by the next `compute` or a later step.
        """
        given = [predictions, labels, weights, groups]
        if predictions.dim() != 1 or any(each is not None and each.shape != labels.shape for each in given):
            shapes = [tuple(each.shape) for each in given if each is not None]
            raise ValueError(f"predictions, labels, weights and groups must be (n,), got {shapes}")
        if self._samples and any(
            (a is None) != (b is None) for a, b in zip(self._samples[0], given, strict=True)
        ):
            raise ValueError("weights and groups of metrics are given in every step or in none")
        given = [
            None if each is None else each.detach().clone() for each in given
        ]  # its buffer may be reused
        self.steps += 1
        self._samples.append(given)
        self._pending.append(given)
        if len(self._pending) >= PENDING:
            self._add_up()

    def compute(self) -> dict[str, float]:
        """The values by name, on every rank; {} before the first step. Collective.

        Raises RuntimeError where ranks have seen different numbers of steps, or have other settings.
        """
        self._add_up()
        sums = [self._lifetime, [sum(each) for each in zip(*self._sums, strict=True)]]
        lifetime, window = merged(self._control, self._updates(), sums)
        if not self.steps:
            return {}
        found = {**_of_sums("lifetime", lifetime), **_of_sums("window", window)}
        if len(self._samples) < len(self._sums):
            return found
        scores, labels, weights, groups = map(self._gathered, range(4))
        assert scores is not None and labels is not None
        found["window_auc"] = (
            auc(scores, labels) if weights is None else weighted_auc(scores, labels, weights)
        )
        if groups is not None:
            found["window_gauc"] = gauc(groups, scores, labels).value
        return found

    def state_dict(self) -> dict[str, Any]:
        """The sums of all ranks, as plain values for a checkpoint's metadata. Collective."""
        self._add_up()
        lifetime, *window = merged(self._control, self._updates(), [self._lifetime, *self._sums])
        return {"steps": self.steps, "lifetime": lifetime, "window": window}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict` at any number of ranks, each of which gives the same state.

        Raises ValueError for something else, or for the state of another window; nothing is loaded then.
        """
        try:
            (steps,), sums = counts_of(state, "steps"), [state["lifetime"], *state["window"]]
            whole = all(len(each) == 4 and {*map(type, each)} == {int} for each in sums)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"it is no state of ClickMetrics: {error!r}") from None
        most = min(steps, self.window or steps)
        if not whole or len(sums) - 1 != most:
            raise ValueError(
                f"it is no state of ClickMetrics with a window of {self.window}: after {steps} steps that "
                f"has 4 sums of each of {most}, and this one of {len(sums) - 1}"
            )
        first = self._control.rank == 0  # which has the sums of all
        self.steps, self._lifetime = steps, [value * first for value in state["lifetime"]]
        self._samples.clear()
        self._pending.clear()
        self._sums.clear()
        self._sums.extend([value * first for value in step] for step in state["window"])

    def _updates(self) -> str:
        """What must be the same on all ranks."""
        *_, weights, groups = self._samples[-1] if self._samples else [None] * 4
        given = " with weights" * (weights is not None) + " with groups" * (groups is not None)
        return f"{self.steps} times{given} (window={self.window}, logits={self.logits})"

    def _add_up(self) -> None:
        if not self._pending:
            return
        pending = self._pending
        given, sizes = list(zip(*pending, strict=True)), [len(each[0]) for each in pending]  # type: ignore[arg-type]
        p, y, w = (torch.cat([*each]).double() if each[0] is not None else None for each in given[:3])
        assert p is not None and y is not None
        if self.logits:
            p = sigmoid(torch.cat([*given[0]])).double()
        for name, values, wrong in (
            ("predictions", p, ~((p >= 0) & (p <= 1))),
            ("labels", y, (y != 0) & (y != 1)),
        ):
            if bool(wrong.any()):
                which = "0 or 1" if name == "labels" else "in [0, 1], or logits with logits=True"
                raise ValueError(f"{name} must be {which}, got {float(values[wrong][0]):g}")
        w = torch.ones_like(p) if w is None else w
        sure = p.clamp(ETA, 1 - ETA)
        entropy = -w * (y * sure.log2() + (1 - y) * (1 - sure).log2())
        steps = exact_sums(torch.stack([entropy, w, w * y, w * p]), sizes)
        self._pending = []
        self._sums.extend(steps)
        self._lifetime = [sum(each) for each in zip(self._lifetime, *steps, strict=True)]

    def _gathered(self, column: int) -> Tensor | None:
        """Of all ranks, in host memory; None where nobody gives it."""
        own = [given for step in self._samples if (given := step[column]) is not None]
        return torch.cat(self._control.all_gather(torch.cat(own).cpu())) if own else None


def _of_sums(prefix: str, sums: Sequence[int]) -> dict[str, float]:
    entropy, weight, positive, predicted = (value / 2**BITS for value in sums)
    ctr = positive / max(weight, ETA)
    mean = min(max(ctr, ETA), 1 - ETA)
    own = -positive * math.log2(mean) - (weight - positive) * math.log2(1 - mean)
    values = {
        "ne": entropy / own if own else math.nan,
        "logloss": entropy / max(weight, ETA),
        "calibration": predicted / positive if positive > 0 else 0.0,
        "ctr": ctr,
    }
    return {f"{prefix}_{name}": value for name, value in values.items()}
