"""NestPipe's Fig. 10 in the lab: other dimensions, layers and tokens, over links that stay the same.

The first shape has the paper's shares of lookup and communication in a synchronous step, from which the
seconds of emulated stages follow. Of another shape the computation takes as many times that as it has
operations (tokens x layers x dim^2, as it grows in the paper), the lookup as many times as it has tokens.
Transfers are real.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console

from ...nn import HSTUConfig
from ..job import Job
from ..lab.rounds import LabConfig, run_lab
from ..lab.settings import PAPER

MICRO_BATCHES = 8
DIM, LAYERS, TOKENS = 32, 2, 48
SHAPES = {
    "first": (1, 1, 1),
    "dimension x 2": (2, 1, 1),
    "layers / 2": (1, 0.5, 1), "layers x 2": (1, 2, 1),
    "tokens / 2": (1, 1, 0.5), "tokens x 2": (1, 1, 2),
}  # fmt: skip
"""Name -> dimension, layers and tokens over the first shape's, as the paper changes its own."""


def shapes() -> dict[str, Any]:
    """Per step and rank of each shape: milliseconds, and the exposed part of the communication."""
    rows: list[dict[str, Any]] = []
    seconds: dict[str, float] = {}
    for name, (dim, layers, tokens) in SHAPES.items():
        length = int(TOKENS * tokens)
        sizes = HSTUConfig(dim=DIM * dim, layers=int(LAYERS * layers), max_seq_len=length, dropout=0.0)
        data = "zipf:users=8000,items=40000,median_length=160,seed=1"  # most histories fill every length
        job = Job(data, batch_size=256, max_seq_len=length, num_negatives=2, sizes=sizes)
        plan = LabConfig(
            job, rate=30.0, modes=("nestpipe",), micro_batches=(MICRO_BATCHES,), steps=6, rounds=1
        )
        work = {stage: tokens * (layers * dim**2 if stage == "compute" else 1) for stage in seconds}
        scaled = {stage: seconds[stage] * times for stage, times in work.items()}
        plan = replace(plan, seconds=scaled) if scaled else replace(plan, proportions=PAPER)
        result = run_lab(plan, Console(quiet=True))
        seconds = seconds or result.seconds
        found = result.rows[-1]
        rows.append({
            "shape": name,
            "step_ms": 1e3 * found.figures.step,
            "compute_ms": 1e3 * found.figures.compute,
            "communication_ms": 1e3 * found.figures.communication,
            "exposed_ratio": found.figures.exposed_ratio,
            "speedup": found.ratios[0],
            "losses": found.losses,
        })  # fmt: skip
    return {"rows": rows}
