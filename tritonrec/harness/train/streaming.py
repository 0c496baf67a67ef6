"""Metrics of the samples that a click model trains on, taken before it learns from them."""

from __future__ import annotations

from typing import Any

import torch

from ...data.ctr import ClickSamples
from ...data.impressions import ImpressionSamples
from ...distributed import Communicators
from ...metrics import ClickMetrics
from ...pipeline import StepResult
from ..job import Epochs

STREAMING = "streaming_metrics"
"""The key of their state among a checkpoint's metadata."""
EVERY = 100
"""Steps between two computations, and of a window."""


class StreamingMetrics:
    """By task what `ClickMetrics` has of the last `EVERY` steps and of all; none of a next-item model.

    Args:
        loader: of the run; it knows the tasks.
    """

    def __init__(self, loader: Epochs, communicators: Communicators):
        tasks: tuple[str, ...] = ()
        if isinstance(loader, ClickSamples):
            tasks = ("",)
        elif isinstance(loader, ImpressionSamples):
            tasks = tuple(loader.tasks)
        self.by_task = {task: ClickMetrics(EVERY, True, communicators) for task in tasks}

    def on_step_end(self, result: StepResult) -> dict[str, float]:
        """Take a step; the values by name after every `EVERY` of them, else {}. Collective then."""
        if not self.by_task:
            return {}
        none = torch.empty(0, len(self.by_task), dtype=torch.float32)
        logits, labels = (result.outputs.get(name, none) for name in ("logits", "labels"))
        groups = result.outputs.get("groups", none[:, 0].long())
        for number, metrics in enumerate(self.by_task.values()):
            if "" in self.by_task:
                metrics.update(logits.flatten(), labels.flatten())
            else:
                metrics.update(logits[:, number], labels[:, number], groups=groups)
        return {} if (result.step + 1) % EVERY else self.compute()

    def compute(self) -> dict[str, float]:
        """``window_ne``, or ``window_ne/click`` and so on where there are several tasks. Collective."""
        return {
            f"{name}/{task}".rstrip("/"): value
            for task, metrics in self.by_task.items()
            for name, value in metrics.compute().items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain values. Collective."""
        return {task: metrics.state_dict() for task, metrics in self.by_task.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; a task that it does not have begins anew."""
        for task, of_task in state.items():
            if task in self.by_task:
                self.by_task[task].load_state_dict(of_task)
