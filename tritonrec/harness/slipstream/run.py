"""`tritonrec train --slipstream`: train with and without the inputs that Slipstream drops, side by side.

The steps up to the classification are the same, bit for bit, so they are trained once. Then the state is
copied: one run goes on with all inputs, and one for each share to drop with those that are kept. They
alternate, so that a busy machine slows all of them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console

from ...data import ClickLoader
from ...distributed import Communicators, check_ranks_agree
from ...embedding import HashTableCollection
from ...pipeline import Trainer
from ...settings import setting, typed
from ...slipstream import Classification, RemainingLoader, Slipstream, SlipstreamConfig
from ..job import Job
from ..train.evaluate import evaluate_model
from ..train.gather import state_digest, totals
from ..train.reports import progress_bar
from ..train.run import Run, settings_of
from .report import print_slipstream

TURNS = 10
"""Parts of the remaining steps; the runs alternate after each."""
CONTROL_EPOCH = 2**40
"""An epoch that nobody trains: its order is the one in which the control drops inputs."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@typed
@dataclass(frozen=True)
class SlipstreamRun:
    """The runs to compare.

    Args:
        config: of Slipstream. drops: shares of the hot inputs to drop, one run for each.
        control: for each also a run that drops as many inputs at random.
        online: share of the inputs, the latest, that come after the classification (section IV.D): one epoch
            of the others is trained first, then these once. 0: the epochs of all inputs go on.
    """

    config: SlipstreamConfig = field(default_factory=SlipstreamConfig)
    drops: tuple[float, ...] = setting(
        (0.5,), "Shares of hot inputs to drop; a run for each.", 0, 1, option="drop"
    )
    control: bool = setting(False, "Also drop as many inputs at random, beside.")
    online: float = setting(0.0, "Share of the inputs, the last, trained online.", 0, 1)

    def __post_init__(self) -> None:
        if self.online == 1:
            raise ValueError("online must be below 1: the classification comes from the inputs before")


@dataclass
class _Branch:
    """One run after the classification."""

    drop: float | None  # None: all inputs
    classification: Classification | None
    left: RemainingLoader
    at_random: bool
    model: torch.nn.Module
    tables: HashTableCollection
    trainer: Trainer
    cpu: float = 0.0
    wall: float = 0.0
    loss: float = float("nan")
    counts: dict[str, int] = field(default_factory=dict)


def train_slipstream(
    communicators: Communicators, run: Run, slipstream: SlipstreamRun, quiet: bool = False
) -> dict[str, Any]:
    """Train on this rank; rank 0 prints. Every rank returns the same summary.

    ``classify_at`` and ``snapshots`` (hot rows, bytes on the largest rank, quantiles of the changes at each)
    tell of what was common; ``runs`` holds for all inputs and for each share to drop ``classification``,
    ``inputs``, ``steps``, ``cpu_seconds`` and ``wall_seconds`` after the classification, ``counts`` of keys,
    rows and bytes, ``metrics``, and ``digest``.
    """
    check_ranks_agree(communicators.control, {**settings_of(run), **vars(slipstream)})
    _validate(run)
    console = Console(quiet=quiet or communicators.rank != 0)
    model, tables, optimizer = run.job.build(run.optimizer)
    before, after, start, stop = _loaders(communicators, run, slipstream)
    config = slipstream.config
    if config.classify_at > before.steps_per_epoch and slipstream.online:
        raise ValueError(
            f"warm-up and snapshots take {config.classify_at} steps, the first segment has "
            f"{before.steps_per_epoch}: choose fewer"
        )
    first = before.steps_per_epoch if slipstream.online else config.classify_at
    if first >= run.steps and not slipstream.online:
        raise ValueError(f"inputs are classified after {first} steps: ask for more steps than that")
    if slipstream.online:
        config = _late(config, first)
    watch = Slipstream(config, before, tables, communicators)
    with (
        Trainer(
            model, tables, optimizer, communicators, run.mode, run.window, **run.job.recipe(model, optimizer)
        ) as trainer,
        progress_bar(console) as bar,
    ):
        watch.attach(trainer)
        task = bar.add_task("until the classification", total=first, loss="")
        for result in trainer.run(before.batch(step) for step in range(first)):
            loss = result.loss
            bar.update(task, completed=result.step + 1, loss=f"loss {loss:.4f}")
    started = time.process_time()
    judgement = watch.judge()
    classified = [watch.classify(judgement, after, drop) for drop in slipstream.drops]
    overhead = watch.seconds + (time.process_time() - started) / len(slipstream.drops)

    def branch(drop: float | None, found: Classification | None, kept: torch.Tensor, at_random: bool = False):
        left = RemainingLoader(after, kept, start, stop, first)
        copied = _copy(communicators, run, trainer)
        branches.append(_Branch(drop, found, left, at_random, *copied))

    branches: list[_Branch] = []
    branch(None, None, torch.ones(after.num_samples, dtype=torch.bool))
    for drop, found in zip(slipstream.drops, classified, strict=True):
        branch(drop, found, found.kept)
        if slipstream.control:
            order = after.epoch_order(CONTROL_EPOCH)
            kept = torch.ones_like(found.kept).index_fill(0, order[: found.dropped], False)
            branch(drop, found, kept, at_random=True)
    try:
        _take_turns(communicators, branches, console)
    finally:
        for each in branches:
            each.trainer.close()
    summary = {
        "job": run.job.as_json(),
        "mode": run.mode,
        "world_size": communicators.world_size,
        "config": asdict(config),
        "online": slipstream.online,
        "classify_at": first,
        "snapshots": {
            **watch.as_json(),
            "rows_judged": judgement.judged,
            "bytes_of_largest_rank": max(_each_rank(communicators, watch.nbytes)),
            "changes": [_quantiles(changes) for changes in watch.history()],
        },
        "overhead_cpu_seconds": sum(_each_rank(communicators, int(overhead * 1e6))) / 1e6,
        "runs": [_outcome(communicators, run.job, each, after) for each in branches],
    }
    print_slipstream(summary, console)
    return summary


def _validate(run: Run) -> None:
    """Raise ValueError for what does not go with Slipstream here."""
    if run.job.model != "dlrm":
        raise ValueError(f"Slipstream drops inputs of click models: use the model dlrm, not {run.job.model}")
    for name, used in (
        ("checkpoint", run.checkpoint), ("resume", run.resume), ("trace", run.trace),
        ("evaluate_every", run.evaluate_every), ("early_stopping", run.early_stopping),
        ("log_dir", run.log_dir), ("json_lines", run.json_lines), ("log_every", run.log_every),
        ("dynamic", run.job.dynamic), ("balance", run.job.balance),
        ("impl", run.job.target.impl != "auto"), ("device", run.job.target.device != "cpu"),
    ):  # fmt: skip
        if used:
            raise ValueError(f"slipstream compares runs side by side and does not go with {name}")


def _loaders(
    communicators: Communicators, run: Run, slipstream: SlipstreamRun
) -> tuple[ClickLoader, ClickLoader, int, int]:
    """The loaders before and after the classification, and the steps of the second to train."""
    whole = run.job.epochs(communicators.rank, communicators.world_size)
    assert isinstance(whole, ClickLoader)
    if not slipstream.online:
        return whole, whole, slipstream.config.classify_at, run.steps
    end = whole.log.trained
    border = end - max(1, round(end * slipstream.online))
    if border < 1:
        raise ValueError(f"online={slipstream.online} leaves nothing for the first segment of {end} inputs")
    shard = (whole.seed, whole.rank, whole.world_size)
    first, second = (
        ClickLoader(whole.log, whole.batch_size, *shard, rows=rows) for rows in ((0, border), (border, end))
    )
    return first, second, 0, second.steps_per_epoch


def _late(config: SlipstreamConfig, last: int) -> SlipstreamConfig:
    """The same settings with the last snapshot after step `last`: the warm-up is longer."""
    return SlipstreamConfig(**{**asdict(config), "warmup": last - config.snapshots * config.every})


def _copy(
    communicators: Communicators, run: Run, trainer: Trainer
) -> tuple[torch.nn.Module, HashTableCollection, Trainer]:
    """Model, tables and trainer that go on from the same state."""
    model, tables, optimizer = run.job.build(run.optimizer)
    recipe = run.job.recipe(model, optimizer)
    copied = Trainer(model, tables, optimizer, communicators, run.mode, run.window, **recipe)
    tables.load_state(trainer.tables.state())
    copied.dense.load_state_dict(copy.deepcopy(trainer.dense.state_dict()))
    return model, tables, copied


def _take_turns(communicators: Communicators, branches: Sequence[_Branch], console: Console) -> None:
    with progress_bar(console) as bar:
        task = bar.add_task("turn by turn", total=sum(branch.left.num_steps for branch in branches), loss="")
        for turn in range(TURNS):
            for branch in branches:
                steps = _turn(branch.left, turn, branch.trainer.config.accumulate)
                cpu, wall = time.process_time(), time.perf_counter()
                results = list(branch.trainer.run(branch.left.batch(step) for step in steps))
                branch.cpu += time.process_time() - cpu
                branch.wall += time.perf_counter() - wall
                if results:
                    branch.loss = results[-1].loss
                bar.update(task, advance=len(results), loss=f"loss {branch.loss:.4f}")
    for branch in branches:
        branch.counts = totals(communicators.control, vars(branch.trainer.counts))


def _turn(left: RemainingLoader, turn: int, accumulate: int) -> range:
    """Steps of one turn; whole updates, but for the last one of all."""
    first, last = (
        left.num_steps * at // TURNS // accumulate * accumulate if at < TURNS else left.num_steps
        for at in (turn, turn + 1)
    )
    return range(left.first_step + first, left.first_step + last)


def _outcome(communicators: Communicators, job: Job, branch: _Branch, loader: ClickLoader) -> dict[str, Any]:
    trainer = branch.trainer
    metrics = evaluate_model(
        trainer.dense.evaluated, trainer.rows_of_ranks(), loader, trainer.config.precision
    )
    seconds = _each_rank(communicators, int(branch.cpu * 1e6))
    return {
        "drop": branch.drop,
        "at_random": branch.at_random,
        "classification": None if branch.classification is None else branch.classification.as_json(),
        "inputs": branch.left.num_inputs,
        "steps": branch.left.num_steps,
        "cpu_seconds": sum(seconds) / 1e6,
        "wall_seconds": branch.wall,
        "loss": branch.loss,
        "counts": branch.counts,
        "metrics": metrics,
        "digest": state_digest(communicators, branch.tables, branch.trainer.dense.tensors()),
    }


def _each_rank(communicators: Communicators, value: int) -> list[int]:
    return torch.cat(communicators.control.all_gather(torch.tensor([value], dtype=torch.int64))).tolist()


def _quantiles(changes: torch.Tensor) -> Mapping[str, float]:
    known = changes[changes.isfinite()].double()
    if not len(known):
        return {}
    return {f"{q:.2f}": float(torch.quantile(known, q)) for q in QUANTILES}
