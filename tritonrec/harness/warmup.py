"""Compiling the kernels of training and serving beforehand, as in the build of an image.

The CPU's kernels are compiled for types, not for sizes: a small run of each model and update rule compiles
what a large one needs. A GPU's are compiled for the dimensions of the model too, so the run is that of a
config file, with little data: it goes through the emulator, which has each of its programs compiled for the
GPU itself.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch

from ..data import LogFormat, Vocabulary, hashed_ids, load
from ..distributed import Communicators
from ..embedding import Eviction, OptimizerName, Placement, PrecisionTiers, Storage, TablePolicy
from ..kernels.compilation import compiling
from ..nn import DLRM, HSTU, DLRMConfig, HSTUConfig, SASRec, SASRecConfig
from ..pipeline import WindowConfig
from .devices import Target
from .emulator import Emulation, emulated
from .emulator.settings import Architecture
from .job import Job, ModelName
from .train import loop
from .train.run import Run

MODELS: tuple[ModelName, ...] = get_args(ModelName)
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
DATA = "zipf:users=40,items=60,ratings=1,seed=5"
STORAGES: tuple[Storage, ...] = ("device", "cached")
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
    try:
        for model, rule in pairs(models, optimizers):
            report(f"{model} with {rule}")
            _train(model, rule, target, TablePolicy())
        report(f"{models[0]} with policies of tables")
        _train(models[0], optimizers[0], target, POLICY)
        report("words as ids, numbers of text")
        _number_words()
        report("retrieval")
        _retrieve()
    finally:
        compiling.remove(compiled)
    return Warmed(count, time.perf_counter() - began)


def pairs(
    models: Sequence[ModelName], optimizers: Sequence[OptimizerName]
) -> list[tuple[ModelName, OptimizerName]]:
    """Each model with the first rule, and the first model with each other rule."""
    return [(model, optimizers[0]) for model in models] + [(models[0], rule) for rule in optimizers[1:]]


def warm_up_gpu(
    arch: Architecture, runs: Sequence[Run], report: Callable[[str], None] = lambda line: None
) -> Warmed:
    """Compile into Triton's cache what steps of these runs launch on a GPU, on a machine without one.

    Each run makes three steps on few samples, its kernels emulated, with tables on the device and cached
    there. A GPU finds the programs where the same wheel of Triton runs under the same variables of Triton's.

    Args:
        arch: of the GPU. report: gets the name of each run.

    Raises ValueError where ``TRITON_INTERPRET=1`` is set.
    """
    began = time.perf_counter()
    emulation = Emulation(arch, races=False, uninitialised=False, assemble=True)
    with warnings.catch_warnings(), emulated(emulation) as session:
        # set here, as other emulations do, it would be in the keys and on the GPU it would not
        warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION is unset")
        for run in runs:
            for storage in STORAGES:
                report(f"{run.job.model} with {run.optimizer}, tables {storage}")
                job = replace(
                    run.job, data=DATA, format=LogFormat(), words="", split=Job().split, batch_size=16,
                    stream=False, target=Target("triton"), placement=Placement(storage, cache_rows=1024),
                )  # fmt: skip
                short = replace(Run(job), mode=run.mode, window=run.window, optimizer=run.optimizer, steps=3)
                loop.train(Communicators.local(), short, quiet=True)
    return Warmed(session.assembled, time.perf_counter() - began)


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
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.csv"
        log.write_text("user,item,timestamp\n1,2,3\n")
        load(log)
    categories = LogFormat(label=("label",), categories=("c",), hexadecimal=("c",))
    load({"label": [0, 1], "c": ["1f", "2"]}, categories)


def _retrieve() -> None:
    from ..kernels.linear.numba_linear import laid_out
    from ..serving.exported_table import ExportedTable  # a training loads no serving
    from ..serving.programs import scorer_of
    from ..serving.retrieval import best_items
    from ..serving.whole import Whole, WholeClicks

    items, nothing = torch.ones(5, 4, dtype=torch.float32), torch.zeros(2, dtype=torch.int64)
    best_items(items[:1], items, 2, nothing[:0], nothing)
    sasrec = SASRecConfig(SIZES.dim, 1, SIZES.heads, SIZES.qk_dim, SIZES.v_dim, SIZES.max_seq_len)
    for model in (HSTU(SIZES), SASRec(sasrec)):
        scorer = scorer_of(model, SIZES.dim)
        Whole(model).vectors(scorer.program(), *scorer.examples[0])
    laid_out(torch.ones(65, 2, dtype=torch.float32, device="cpu").t())  # so wide that it is transposed
    clicks = DLRM(DLRMConfig(("a",), 1, 4, (2,), ()))
    scorer = scorer_of(clicks, 4)
    WholeClicks(clicks).logits(scorer.program(), *scorer.examples[0])
    table = ExportedTable(torch.arange(5, device="cpu"), items, 0, 0, 1.0, "zeros")
    table.rows(nothing)
