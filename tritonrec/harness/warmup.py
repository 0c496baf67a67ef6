"""Compiling the kernels of training and serving beforehand, as in the build of an image.

Kernels are compiled for types, not for sizes: a small run of each model and update rule compiles what a large
one needs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from ..data import Vocabulary, hashed_ids
from ..distributed import Communicators
from ..embedding import Eviction, OptimizerName, PrecisionTiers, TablePolicy
from ..kernels.compilation import compiling
from ..nn import HSTUConfig
from ..pipeline import WindowConfig
from .devices import Target
from .job import Job, ModelName
from .train import loop
from .train.run import Run

MODELS: tuple[ModelName, ...] = get_args(ModelName)
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
DATA = "zipf:users=40,items=60,ratings=1,seed=5"
POLICY = TablePolicy(Eviction("lru", capacity=20), admission=2, precision=PrecisionTiers(2, every=2))
SIZES = HSTUConfig(dim=8, layers=1, heads=2, qk_dim=4, v_dim=4, max_seq_len=8, relative_bias=True)


@dataclass(frozen=True)
class Warmed:
    """How many functions were compiled, and the seconds that it all took."""

    compiled: int
    seconds: float


def warm_up(
    models: Sequence[ModelName] = MODELS,
    optimizers: Sequence[OptimizerName] = OPTIMIZERS,
    target: Target | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Warmed:
    """Train each model on a small log with the first rule, then the first one with each other rule and with
    all policies of tables.

    Args:
        target: what to compile for. report: gets the name of each run.
    """
    began, count = time.perf_counter(), 0

    def compiled() -> None:
        nonlocal count
        count += 1
        compiling.append(compiled)

    compiling.append(compiled)
    target = target or Target()
    runs = [(model, optimizers[0]) for model in models] + [(models[0], rule) for rule in optimizers[1:]]
    try:
        for model, rule in runs:
            report(f"{model} with {rule}")
            _train(model, rule, target, TablePolicy())
        report(f"{models[0]} with policies of tables")
        _train(models[0], optimizers[0], target, POLICY)
        report("words as ids")
        _number_words()
    finally:
        compiling.remove(compiled)
    return Warmed(count, time.perf_counter() - began)


def _train(model: ModelName, rule: OptimizerName, target: Target, policy: TablePolicy) -> None:
    job = Job(
        DATA, model, batch_size=8, max_seq_len=8, num_negatives=2, max_exposed=3, sizes=SIZES, context_dim=8,
        bottom=(8,), top=(8,), target=target, policy=policy, slots=8,
    )  # fmt: skip
    clip = WindowConfig(2, max_grad_norm=1.0, clustering=True)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(job, "nestpipe", clip, rule, steps=3, checkpoint=Path(folder))
        loop.train(Communicators.local(), run, quiet=True)


def _number_words() -> None:
    hashed_ids(Vocabulary(map(str, range(200))).words)  # so many that it grows
