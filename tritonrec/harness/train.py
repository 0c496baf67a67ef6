"""`tritonrec train`: train in any mode, evaluate by full ranking, save, resume."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .. import checkpoint, ops
from ..data import NextItemLoader, evaluate, popularity_scores
from ..distributed import Communicator, Communicators
from ..embedding import DynamicTable, OptimizerName
from ..nn import HSTU
from ..pipeline import Mode, Trainer, WindowConfig
from ..trace import NullRecorder, Recorder, save_joined
from .setup import Job

KS = (10, 50)


@dataclass(frozen=True)
class Run:
    """One training run.

    Args:
        job: data, model, optimizer settings. mode, window: see `Trainer`. optimizer: of rows and dense.
        steps: train up to this step, counted from the run's beginning.
        checkpoint: directory to save to. save_every: steps between saves; the last step is saved always.
        resume: go on from the checkpoint there. evaluate_every: steps between evaluations; 0: at the end.
        trace: write a Perfetto trace of all ranks to this file.
    """

    job: Job
    mode: Mode = "nestpipe"
    window: WindowConfig = field(default_factory=WindowConfig)
    optimizer: OptimizerName = "adam"
    steps: int = 100
    checkpoint: str | None = None
    save_every: int = 0
    resume: bool = False
    evaluate_every: int = 0
    trace: str | None = None


def train(communicators: Communicators, run: Run, quiet: bool = False) -> dict[str, Any]:
    """Train on this rank. Rank 0 prints, evaluates and saves; every rank returns the same summary.

    The summary has ``step``, ``loss`` (mean per token of the last step), ``metrics`` and ``popularity``
    (HR@K, NDCG@K), ``seconds_per_step``, and ``digest``, the SHA-256 of all parameters, rows and states.
    """
    if run.checkpoint and not run.resume and checkpoint.steps(run.checkpoint):
        raise ValueError(
            f"{run.checkpoint} holds checkpoints of another run: resume it, or choose another place"
        )
    console = Console(quiet=quiet or communicators.rank != 0)
    model, table, rule, dense = run.job.build(run.optimizer)
    loader = run.job.loader(communicators.rank, communicators.world_size)
    recorder = Recorder(communicators.rank, communicators.world_size) if run.trace else NullRecorder()
    start = _resume(communicators, run, table, dense) if run.resume else 0
    if start >= run.steps:
        raise ValueError(f"the checkpoint is at step {start}; ask for more steps than that, not {run.steps}")

    loss, seconds, metrics = float("nan"), [], {}
    with (
        Trainer(
            model, table, rule, dense, communicators, run.mode, run.window, recorder
        ) as trainer,
        _progress(console) as progress,
    ):  # fmt: skip
        bar = progress.add_task("training", total=run.steps, completed=start, loss="")
        for first, last in _stretches(start, run.steps, run.save_every, run.evaluate_every):
            clock = time.perf_counter()
            for result in trainer.run(loader.batch(step) for step in range(first, last)):
                seconds.append(time.perf_counter() - clock)
                clock = time.perf_counter()
                loss = _mean_loss(communicators, result.losses, result.tokens)
                progress.update(bar, completed=result.step + 1, loss=f"loss {loss:.4f}")
            if run.checkpoint and (last == run.steps or (run.save_every and last % run.save_every == 0)):
                _save(communicators, run, last, table, dense)
            if last == run.steps or (run.evaluate_every and last % run.evaluate_every == 0):
                metrics = _evaluate(communicators, model, table, loader)
                console.print(f"step {last}: loss {loss:.4f}, {_format(metrics)}")
    if run.trace:
        _save_trace(communicators, recorder, run.trace)
    summary = {
        "step": run.steps,
        "loss": loss,
        "metrics": metrics,
        "popularity": evaluate(popularity_scores(loader), loader, KS),
        "seconds_per_step": sorted(seconds)[len(seconds) // 2],
        "digest": _digest(communicators, table, dense.rows),
    }
    console.print(_summary_table(run, summary))
    return summary


def _stretches(start: int, steps: int, *intervals: int) -> Iterator[tuple[int, int]]:
    """(first, last) of the stretches between saves and evaluations; the pipeline drains between them."""
    stops = {steps, *(stop for every in intervals if every for stop in range(every, steps, every))}
    for stop in sorted(stop for stop in stops if stop > start):
        yield start, stop
        start = stop


def _mean_loss(communicators: Communicators, losses: torch.Tensor, tokens: int) -> float:
    """Mean loss per token over all ranks; summed on the grid, so every mode and world size shows the same."""
    total = ops.to_grid(losses.reshape(-1), name="losses").sum().reshape(1)
    total = communicators.control.all_reduce(total, "losses")
    return float(ops.from_grid(total, float(max(tokens, 1)))[0])


def _gather(communicator: Communicator, values: torch.Tensor) -> torch.Tensor:
    """Rows of all ranks, in rank order, on every rank."""
    world = communicator.world_size
    counts = communicator.all_to_all_equal(torch.full((world, 1), len(values))).flatten().tolist()
    repeated = values.repeat(world, *(1 for _ in values.shape[1:]))
    return communicator.all_to_all(repeated, [len(values)] * world, counts)


def _whole_table(communicators: Communicators, table: DynamicTable) -> tuple[torch.Tensor, torch.Tensor]:
    keys, rows = table.export()
    keys, rows = (_gather(communicators.control, part) for part in (keys, rows))
    keys, order = torch.sort(keys)
    return keys, rows[order]


def _evaluate(
    communicators: Communicators, model: torch.nn.Module, table: DynamicTable, loader: NextItemLoader
) -> dict[str, float]:
    """Full-ranking leave-one-out metrics; every rank computes them from the gathered table."""
    keys, rows = _whole_table(communicators, table)
    whole = DynamicTable(table.dim, seed=table.seed, table_id=table.table_id, scale=table.scale)
    whole.load(keys, rows[:, : table.dim].contiguous())
    items = whole.read(whole.rows_of(loader.catalogue))
    assert isinstance(model, HSTU)
    model.eval()

    def scores(batch) -> torch.Tensor:
        keys, inverse, _ = ops.unique(batch.ids)
        rows = ops.gather_rows(whole.read(whole.rows_of(keys)), inverse)
        with torch.no_grad():
            hidden = model.encode(batch, rows)
        # The last token of each sequence stands for the user; the linear op keeps a user's scores his own.
        return ops.linear(hidden[batch.offsets[1:] - 1], items, None)

    metrics = evaluate(scores, loader, KS)
    model.train()
    return metrics


def _save(communicators: Communicators, run: Run, step: int, table: DynamicTable, dense) -> None:
    assert run.checkpoint is not None
    keys, rows = _whole_table(communicators, table)
    if communicators.rank == 0:
        checkpoint.save(
            run.checkpoint, step, dense.rows, {"items": (keys, rows)},
            {"optimizer": run.optimizer, "job": run.job.as_json()},
        )  # fmt: skip
    _barrier(communicators)


def _resume(communicators: Communicators, run: Run, table: DynamicTable, dense) -> int:
    """Load the newest checkpoint; each rank keeps the keys it owns, whatever world size saved them."""
    if not run.checkpoint:
        raise ValueError("resuming needs the directory of a checkpoint")
    step, dense_rows, tables, meta = checkpoint.load(run.checkpoint)
    job = json.loads(json.dumps(run.job.as_json()))
    different = sorted(name for name in job if meta["job"].get(name) != job[name])
    if different or meta["optimizer"] != run.optimizer:
        names = ", ".join(different or ["optimizer"])
        raise ValueError(f"the checkpoint in {run.checkpoint} was made with another {names}; use the same")
    dense.load(dense_rows)
    keys, rows = tables["items"]
    mine = ops.owner_of(keys, communicators.world_size) == communicators.rank
    table.load(keys[mine], rows[mine])
    return step


def _barrier(communicators: Communicators) -> None:
    communicators.control.all_reduce(torch.zeros(1), "barrier")


def _save_trace(communicators: Communicators, recorder, path: str) -> None:
    parts = [f"{path}.rank{rank}" for rank in range(communicators.world_size)]
    recorder.save(parts[communicators.rank])
    _barrier(communicators)
    if communicators.rank == 0:
        save_joined(parts, path)
        for part in parts:
            Path(part).unlink()


def _digest(communicators: Communicators, table: DynamicTable, dense: dict[str, torch.Tensor]) -> str:
    """SHA-256 over dense parameters, keys and rows with their states, independent of the sharding."""
    digest = hashlib.sha256()
    for name in sorted(dense):
        digest.update(name.encode())
        digest.update(dense[name].contiguous().numpy().tobytes())
    for part in _whole_table(communicators, table):
        digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _progress(console: Console) -> Progress:
    loss = TextColumn("{task.fields[loss]}")
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), loss, TimeRemainingColumn(),
        console=console, transient=True, disable=console.quiet,
    )  # fmt: skip


def _format(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.6f}" for name, value in metrics.items())


def _summary_table(run: Run, summary: dict[str, Any]) -> Table:
    table = Table(title=f"{run.mode} on {run.job.data}, {run.steps} steps: full ranking, leave one out")
    table.add_column("ranking")
    for name in summary["metrics"]:
        table.add_column(name, justify="right")
    table.add_row("model", *(f"{value:.6f}" for value in summary["metrics"].values()))
    table.add_row("popularity", *(f"{value:.6f}" for value in summary["popularity"].values()))
    table.caption = (
        f"loss {summary['loss']:.6f}, {summary['seconds_per_step'] * 1e3:.1f} ms per step, "
        f"SHA-256 of all parameters, rows and states: {summary['digest'][:16]}"
    )
    return table
