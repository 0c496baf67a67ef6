"""Figures of a simulated run, with the definitions of `tritonrec.trace.analysis`, per step and worker.

Communication counts as a rank's trace shows it: from the start of the slice, waiting for others included, to
its end; exposed is what no computation hides. Lookup also counts the dual-buffer copy and the write-back, as
all three move rows between the table and the buffer; exposed is what neither hides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tritonrec.trace.analysis import COMMUNICATION_LANES, LOOKUP_LANES

from .engine import Timeline

KINDS = {
    "compute": ("compute",),
    "communication": COMMUNICATION_LANES,
    "lookup": (*LOOKUP_LANES, "copy", "write_back"),
}


@dataclass(frozen=True)
class Outcome:
    """Means over the workers observed and the steps of a full pipeline; seconds and bytes of one step.

    `bubble` is the part of the step in which nothing was at work.
    """

    step: float
    compute: float
    communication: float
    exposed: float
    lookup: float
    exposed_lookup: float
    bubble: float
    sent: float

    @property
    def exposed_ratio(self) -> float:
        """Exposed over physical communication; 0 where nothing is sent."""
        return self.exposed / self.communication if self.communication else 0.0


def measure(timeline: Timeline, warmup: int | None = None) -> Outcome:
    """Measure from the end of the computation of batch ``warmup - 1`` to that of the last batch.

    Args:
        timeline: as `simulate` returns it.
        warmup: batches left out; by default one more than may be in flight, at most half of them.

    Raises:
        ValueError: no batch is left to measure.
    """
    if warmup is None:
        warmup = min(timeline.schedule.batches_in_flight + 1, timeline.batches // 2)
    steps = timeline.batches - warmup
    if warmup < 1 or steps < 1:
        raise ValueError(
            f"{timeline.batches} batches, {warmup} of them warm-up, leave none to measure: run more"
        )
    begin, finish = (_computed(timeline, batch) for batch in (warmup - 1, timeline.batches - 1))
    busy = _sweep(timeline, begin, finish)
    per_step = {name: float(seconds.mean()) / steps for name, seconds in busy.items()}
    sent = sum(timeline.sent[batch] for batch in range(warmup, timeline.batches)) / steps
    return Outcome(step=float((finish - begin).mean()) / steps, sent=sent, **per_step)


def _computed(timeline: Timeline, batch: int) -> np.ndarray:
    """(observed,) when the batch's last task on the compute lane ended."""
    return np.max(
        [
            end
            for task, end in timeline.end.items()
            if task.batch == batch and timeline.schedule[task.stage].lane == "compute"
        ],
        axis=0,
    )


def _sweep(timeline: Timeline, begin: np.ndarray, finish: np.ndarray) -> dict[str, np.ndarray]:
    """(observed,) seconds of each kind between `begin` and `finish`, by one pass over all boundaries."""
    kinds = {
        stage.name: [stage.lane in lanes for lanes in KINDS.values()] for stage in timeline.schedule.stages
    }
    of = np.array([kinds[task.stage] for task in timeline.start], dtype=np.int64)  # (tasks, kinds)
    changes = np.concatenate([of, -of, np.zeros((2, len(KINDS)), np.int64)])
    times = np.stack([*timeline.start.values(), *timeline.end.values(), begin, finish])
    at = np.clip(times, begin, finish)  # (events, observed)
    order = np.argsort(at, axis=0, kind="stable")
    gaps = np.diff(np.take_along_axis(at, order, axis=0), axis=0)
    compute, communication, lookup = (np.cumsum(changes[:, k][order], axis=0)[:-1] > 0 for k in range(3))

    def total(when: np.ndarray) -> np.ndarray:
        return np.where(when, gaps, 0.0).sum(axis=0)

    return {
        "compute": total(compute),
        "communication": total(communication),
        "exposed": total(communication & ~compute),
        "lookup": total(lookup),
        "exposed_lookup": total(lookup & ~compute & ~communication),
        "bubble": total(~lookup & ~compute & ~communication),
    }
