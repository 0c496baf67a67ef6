"""Early stopping and throughput measurement: plain objects that a training loop calls."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

from .settings import check_number, counts_of, typed

if TYPE_CHECKING:
    from .distributed import Communicators

__all__ = ["EarlyStopping", "Throughput"]

Direction = Literal["max", "min"]
MORE_IS_BETTER = (
    "HR@", "NDCG@", "recall@", "MRR@", "coverage@", "novelty@", "AUC", "GAUC", "window_auc", "window_gauc",
    "accuracy",
)  # fmt: skip
"""How names of this library's metrics begin that are better where they are larger."""


@typed
class EarlyStopping:
    """Ends a training whose metric has stopped improving, by Lightning's rules.

    Args:
        metric: its name among those that `on_evaluation_end` gets, such as ``"NDCG@10"``.
        patience: evaluations without improvement after which training should stop, at least 1.
        mode: ``"max"`` where more is better, ``"min"`` where less is; by default ``"min"``, as in Lightning,
            and ``"max"`` for this library's own ranks, areas and accuracy (`MORE_IS_BETTER`).
        min_delta: an improvement is larger than this.
        check_finite: also end where the metric is NaN or infinite.
        communicators: of all ranks, which go by the value of rank 0 and so stop at the same step; None for
            one rank.

    Attributes:
        best, best_step: of the best evaluation so far; None before the first. NaN is never better.
        finite: whether the last evaluation's metric was.
        waited: evaluations since. step: of the last evaluation; None before the first.

    Raises ValueError for a patience below 1, another mode, or a negative min_delta.
    """

    def __init__(
        self,
        metric: str,
        patience: int = 3,
        mode: Direction | None = None,
        min_delta: float = 0.0,
        check_finite: bool = True,
        communicators: Communicators | None = None,
    ):
        if patience < 1:
            raise ValueError(f"patience must be at least 1, got {patience}")
        mode = direction_of(metric) if mode is None else mode
        if mode not in ("max", "min"):
            raise ValueError(f"mode must be max or min, got {mode!r}")
        check_number("min_delta", min_delta)
        self.metric, self.patience, self.mode, self.min_delta = metric, patience, mode, min_delta
        self.check_finite, self.finite = check_finite, True
        self._communicators = communicators
        self.best: float | None = None
        self.best_step: int | None = None
        self.step: int | None = None
        self.waited = 0

    @property
    def should_stop(self) -> bool:
        """Whether `patience` evaluations have passed without improvement, or the last one was not finite."""
        return self.waited >= self.patience or (self.check_finite and not self.finite)

    def on_evaluation_end(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Take the metrics after `step` steps; returns `should_stop`. Collective with communicators.

        Raises ValueError where the metric is not among them.
        """
        if self.metric not in metrics:
            raise ValueError(unknown_metric(self.metric, metrics))
        value = self._of_rank_0(float(metrics[self.metric]))
        self.step, self.finite = step, math.isfinite(value)
        if self._is_better(value):
            self.best, self.best_step, self.waited = value, step, 0
        else:
            self.waited += 1
        return self.should_stop

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        names = ("metric", "mode", "best", "best_step", "step", "waited", "finite")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`; patience, min_delta and check_finite may be others.

        Raises ValueError for the state of another metric or mode; nothing is loaded then.
        """
        metric, mode = state.get("metric"), state.get("mode")
        if (metric, mode) != (self.metric, self.mode):
            raise ValueError(
                f"early stopping was by {metric} ({mode}) before, and is by {self.metric} "
                f"({self.mode}) now: use the same metric, or train without early stopping first"
            )
        found = [state[name] for name in ("best", "best_step", "step", "waited") if name in state]
        finite = state.get("finite", True)  # an earlier version did not stop for it
        improved = state.get("best") is not None
        seen = [name for name in ("best_step", "step") if improved or state.get(name) is not None]
        counts_of(state, "waited", *seen)
        if len(found) < 4 or type(found[0]) not in (float, int, type(None)) or not isinstance(finite, bool):
            raise ValueError(f"it is no state of EarlyStopping, whose best is a number: {dict(state)}")
        self.best, self.best_step, self.step, self.waited = found
        self.finite = finite

    def _is_better(self, value: float) -> bool:
        if math.isnan(value) or self.best is None:
            return not math.isnan(value)
        gain = value - self.best if self.mode == "max" else self.best - value
        return gain > self.min_delta

    def _of_rank_0(self, value: float) -> float:
        if self._communicators is None:
            return value
        import torch

        control = self._communicators.control
        return float(control.all_gather(torch.tensor([value], dtype=torch.float64, device="cpu"))[0])


@typed
class Throughput:
    """Samples and tokens per second over the last steps.

    Args:
        window: steps, at least 1.
    """

    def __init__(self, window: int = 100):
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self._steps: deque[tuple[float, int, int]] = deque(maxlen=window)

    def on_step_end(self, seconds: float, samples: int, tokens: int) -> None:
        """Count a step; leave out those that compile kernels."""
        self._steps.append((seconds, samples, tokens))

    def compute(self) -> dict[str, float]:
        """``samples_per_second`` and ``tokens_per_second``; empty before the first step."""
        if not self._steps:
            return {}
        seconds, samples, tokens = (sum(each) for each in zip(*self._steps, strict=True))
        return {"samples_per_second": samples / seconds, "tokens_per_second": tokens / seconds}


def direction_of(metric: str) -> Direction:
    """What is better of a metric, by its name: less, unless it is one of ours of which more is."""
    return "max" if metric.startswith(MORE_IS_BETTER) else "min"


def unknown_metric(name: str, known: Collection[str]) -> str:
    """A message with all names, and the nearest one."""
    near = get_close_matches(name, known, 1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"no evaluation has the metric {name!r}, which are {', '.join(known)}{meant}"
