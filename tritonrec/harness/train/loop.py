"""`tritonrec train`: train in any mode, evaluate by full ranking, save, resume."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import TextColumn, TimeRemainingColumn
from rich.table import Table

from ... import checkpoint
from ...distributed import Communicator, Communicators, check_ranks_agree
from ...embedding import DenseOptimizer, HashTableCollection, OptimizerName
from ...pipeline import Mode, Trainer, WindowConfig
from ...settings import MOST, setting
from ...trace import NullRecorder, Recorder, save_joined
from ..job import Job
from ..progress import CommandProgress, announce_compilation, steady_seconds
from .evaluate import baseline, evaluate_model
from .saver import RunSaver, restore

LAYOUT = {"job", "slots", "chunk_rows", "merge", "balance"}
"""Settings that change no bit, so a run may go on with others."""

NESTED = ("sizes", "policy")
"""Settings that are made of others."""

SHOWN = {
    "grm": ("group AUC of the last impressions", "item's rate"),
    "dlrm": ("clicks held out", "one rate for all"),
}
"""By model the metrics and the baseline in words; next-item models are alike."""


@dataclass(frozen=True)
class Run:
    """One training run.

    Args:
        job: data, model, optimizer settings. mode, window: see `Trainer`. optimizer: of rows and dense.
        steps: train up to this step, counted from the run's beginning.
        checkpoint: directory to save to. save_every: steps between saves; the last step is saved always.
        full_every: every n-th save is whole, those between hold the changes.
        resume: go on from the checkpoint there. evaluate_every: steps between evaluations; 0: at the end.
        trace: write a Perfetto trace of all ranks to this file.
    """

    job: Job
    mode: Mode = setting("nestpipe", "How the steps are scheduled.")
    window: WindowConfig = field(default_factory=WindowConfig)
    optimizer: OptimizerName = setting("adam", "Update rule of rows and dense parameters.")
    steps: int = 100
    checkpoint: Path | None = setting(None, "Directory to save to.")
    save_every: int = setting(0, "Steps between saves; 0: at the end only.", 0, MOST)
    full_every: int = setting(1, "Whole checkpoints among the saves; the others hold changes.", 1, MOST)
    resume: bool = setting(False, "Go on from the newest checkpoint.")
    evaluate_every: int = setting(0, "Steps between evaluations; 0: at the end only.", 0, MOST)
    trace: Path | None = setting(None, "Write a Perfetto trace to this file.")


def train(communicators: Communicators, run: Run, quiet: bool = False) -> dict[str, Any]:
    """Train on this rank. Rank 0 prints, evaluates and saves; every rank returns the same summary.

    Asked to stop (`Communicators.stop`), all ranks end after the same update, and save to `run.checkpoint`.

    The summary has ``step``, ``stopped`` (before `run.steps`), ``loss`` (mean per term of the last update),
    ``metrics`` and ``baseline`` (`evaluate_model`; empty where stopped), ``seconds_per_step`` (None where too
    few steps were run to time them), ``tables`` (rows, bytes and counts of all ranks),
    ``lookups`` (keys and bytes, see `LookupCounts`), and ``digest``, the SHA-256 of all parameters, rows and
    states.
    """
    if run.checkpoint and not run.resume and checkpoint.steps(run.checkpoint):
        raise ValueError(
            f"{run.checkpoint} holds checkpoints of another run: resume it, or choose another place"
        )
    check_ranks_agree(communicators.control, settings_of(run))
    console = Console(quiet=quiet or communicators.rank != 0)
    if not console.quiet:
        announce_compilation()
    model, tables, dense = run.job.build(run.optimizer)
    loader, held_out = run.job.loader(communicators.rank, communicators.world_size), run.job.epochs()
    recorder = Recorder(communicators.rank, communicators.world_size) if run.trace else NullRecorder()
    loss, seconds, metrics = float("nan"), [], {}
    with ExitStack() as stack:
        saver = None
        if run.checkpoint:  # before it is read: another run that saves there would remove files meanwhile
            saver = RunSaver(communicators, run.checkpoint, tables, dense, _meta(run), run.full_every)
            stack.enter_context(saver)
        start = _resume(communicators, run, tables, dense) if run.resume else 0
        if start >= run.steps:
            raise ValueError(
                f"the checkpoint is at step {start}; ask for more steps than that, not {run.steps}"
            )
        step = saved = start
        trainer = stack.enter_context(
            Trainer(model, tables, dense, communicators, run.mode, run.window, recorder)
        )
        progress = stack.enter_context(progress_bar(console))
        bar = progress.add_task("training", total=run.steps, completed=start, loss="")
        for first, last in _stretches(start, run.steps, run.save_every, run.evaluate_every):
            clock = time.perf_counter()
            steps = takewhile(lambda _: not trainer.stopping, range(first, last))
            for result in trainer.run(loader.batch(step) for step in steps):
                seconds.append(time.perf_counter() - clock)
                clock = time.perf_counter()
                loss, step = result.loss, result.step + 1
                progress.update(bar, completed=step, loss=f"loss {loss:.4f}")
            stopped = trainer.stopping and step < run.steps
            if run.window.average_every:
                trainer.sync()
            due = run.save_every and step % run.save_every == 0
            if saver and step > saved and (stopped or step == run.steps or due):
                saver.save(step)
                saved = step
            if stopped:
                break
            if last == run.steps or (run.evaluate_every and last % run.evaluate_every == 0):
                with communicators.watch.doing(f"evaluation({last})"):
                    metrics = evaluate_model(model, gathered(communicators, tables, run.job), held_out)
                console.print(f"step {last}: loss {loss:.4f}, {_format(metrics)}")
    if run.trace:
        save_trace(communicators, recorder, run.trace)
    summary = {
        "step": step,
        "stopped": stopped,
        "steps_run": len(seconds),
        "world_size": communicators.world_size,
        "loss": loss,
        "metrics": metrics,
        "baseline": {} if stopped else baseline(held_out),
        "seconds_per_step": steady_seconds(seconds, run.window.accumulate),
        "tables": _table_totals(communicators, tables),
        "lookups": totals(communicators.control, vars(trainer.counts)),
        "digest": state_digest(communicators, tables, dense.rows),
    }
    if stopped:
        console.print(_stopped_line(run, step), highlight=False, soft_wrap=True)
        return summary
    console.print(_summary_table(run, summary))
    console.print(_tables_line(summary), highlight=False)
    return summary


def settings_of(run: Run) -> dict[str, Any]:
    """Of the run, its window and its job, by name."""
    settings = {**vars(run.window), **vars(run.job), **vars(run)}
    return {name: value for name, value in settings.items() if name not in ("job", "window")}


def _stretches(start: int, steps: int, *intervals: int) -> Iterator[tuple[int, int]]:
    """(first, last) of the stretches between saves and evaluations; the pipeline drains between them."""
    stops = {steps, *(stop for every in intervals if every for stop in range(every, steps, every))}
    for stop in sorted(stop for stop in stops if stop > start):
        yield start, stop
        start = stop


def _stopped_line(run: Run, step: int) -> str:
    at = f"stopped at step {step} of {run.steps}"
    if not run.checkpoint:
        return f"{at}; nothing was saved, which takes --checkpoint DIRECTORY"
    if not step:
        return f"{at}; there was nothing to save"
    return f"{at}; saved to {run.checkpoint}; go on with --resume"


def _whole_tables(
    communicators: Communicators, tables: HashTableCollection
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Every rank's ids, ascending, and rows of each logical table."""
    whole = {}
    for name, part in tables.export().items():
        ids, rows = (torch.cat(communicators.shard_control.all_gather(values)) for values in part)
        ids, order = torch.sort(ids)
        whole[name] = ids, rows[order]
    return whole


def gathered(communicators: Communicators, tables: HashTableCollection, job: Job) -> HashTableCollection:
    """Every rank's weights in tables of one process."""
    whole = job.tables("sgd")
    for name, (ids, rows) in _whole_tables(communicators, tables).items():
        dim = whole.initial_rows(name, ids[:0]).shape[1]
        whole.load(name, ids, rows[:, :dim].contiguous())
    return whole


def totals(communicator: Communicator, counts: dict[str, int]) -> dict[str, int]:
    """The counts of all its ranks together."""
    values = communicator.all_reduce(torch.tensor([*counts.values()], dtype=torch.int64), "counts")
    return dict(zip(counts, values.tolist(), strict=True))


def _table_totals(communicators: Communicators, tables: HashTableCollection) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for group in tables.groups:
        table = group.table
        sums.update({"rows": len(table), **vars(table.counters), **table.memory()})
        sums["value_bytes"] += 4 * table.row_width * len(table) - table.memory()["saved_by_fp16"]
    return totals(communicators.shard_control, sums)


def _meta(run: Run) -> dict[str, Any]:
    return {"optimizer": run.optimizer, "job": run.job.as_json(), "accumulate": run.window.accumulate}


def _resume(
    communicators: Communicators, run: Run, tables: HashTableCollection, dense: DenseOptimizer
) -> int:
    """Load the newest checkpoint; each rank reads the slices it owns, whatever world size saved them."""
    if not run.checkpoint:
        raise ValueError("resuming needs the directory of a checkpoint")
    usual = _settings({"job": Job().as_json()})  # of what an older version did not know
    here = _settings(json.loads(json.dumps(_meta(run))))

    def accept(meta: dict[str, Any]) -> None:
        if not isinstance(meta.get("job"), dict):
            raise ValueError(f"the checkpoint in {run.checkpoint} was not saved by tritonrec train")
        saved = {**usual, **_settings(meta)}
        different = [
            f"{name} {saved.get(name)} in the checkpoint, {here.get(name)} now"
            for name in sorted({*saved, *here})
            if saved.get(name) != here.get(name)
        ]
        if different:
            raise ValueError(
                f"the checkpoint in {run.checkpoint} was made with other settings: {'; '.join(different)}; "
                "use the same, or another directory"
            )

    step = restore(communicators, run.checkpoint, tables, dense, accept)
    if step % run.window.accumulate:
        raise ValueError(
            f"the checkpoint is at step {step}, inside an update of {run.window.accumulate} batches"
        )
    return step


def _settings(meta: dict[str, Any]) -> dict[str, Any]:
    """By name the settings that change a bit, those of the model's sizes and of policies one by one."""
    flat: dict[str, Any] = {}
    values = {**meta, **meta["job"]}
    for name in values.keys() - LAYOUT:
        value = values[name]
        parts = value if name in NESTED and isinstance(value, dict) else {}
        flat |= {f"{name}.{part}": each for part, each in parts.items()} or {name: value}
    return {name: value for name, value in flat.items() if name != "sizes.recompute"}


def _barrier(communicators: Communicators) -> None:
    communicators.control.all_reduce(torch.zeros(1, dtype=torch.float32), "barrier")


def save_trace(communicators: Communicators, recorder, path: str | Path) -> None:
    """Write what the recorders of all ranks hold to one file; collective."""
    parts = [f"{path}.rank{rank}" for rank in range(communicators.world_size)]
    recorder.save(parts[communicators.rank])
    _barrier(communicators)
    if communicators.rank == 0:
        save_joined(parts, path)
        for part in parts:
            Path(part).unlink()


def state_digest(
    communicators: Communicators, tables: HashTableCollection, dense: dict[str, torch.Tensor]
) -> str:
    """SHA-256 over dense parameters, keys and rows with their states, independent of the sharding."""
    digest = hashlib.sha256()
    for name in sorted(dense):
        digest.update(name.encode())
        digest.update(dense[name].contiguous().numpy().tobytes())
    for name, parts in sorted(_whole_tables(communicators, tables).items()):
        digest.update(name.encode())
        for part in parts:
            digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()


def progress_bar(console: Console) -> CommandProgress:
    """With the loss of the last step."""
    loss = TextColumn("{task.fields[loss]}")
    return CommandProgress(console, loss, TimeRemainingColumn())


def _format(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.6f}" for name, value in metrics.items())


def _summary_table(run: Run, summary: dict[str, Any]) -> Table:
    ranking, simple = SHOWN.get(run.job.model, ("full ranking, leave one out", "popularity"))
    table = Table(title=f"{run.job.model}, {run.mode} on {run.job.data}, {run.steps} steps: {ranking}")
    table.add_column("")
    for name in summary["metrics"]:
        table.add_column(name, justify="right")
    table.add_row("model", *(f"{value:.6f}" for value in summary["metrics"].values()))
    table.add_row(simple, *(f"{value:.6f}" for value in summary["baseline"].values()))
    seconds = summary["seconds_per_step"]
    pace = "too few steps to time" if seconds is None else f"{seconds * 1e3:.1f} ms per step"
    table.caption = (
        f"loss {summary['loss']:.6f}, {pace}, "
        f"SHA-256 of all parameters, rows and states: {summary['digest'][:16]}"
    )
    return table


def _tables_line(summary: dict[str, Any]) -> str:
    """Counts of tables and lookups, in a few lines."""
    tables, lookups, steps = summary["tables"], summary["lookups"], max(summary["steps_run"], 1)
    done = ", ".join(
        f"{tables[name]:,} {name}"
        for name in ("inserted", "evicted", "rejected", "promoted", "demoted")
        if tables[name]
    )
    keys = (tables["key_structure"] + tables["metadata"]) / max(tables["rows"], 1)
    lines = [f"tables: {tables['rows']:,} rows; {done}; {keys:.1f} bytes of keys and metadata a row"]
    if tables["saved_by_fp16"]:
        saved = tables["saved_by_fp16"]
        share = saved / (saved + tables["value_bytes"])
        lines.append(f"half precision saves {saved / 1e6:.2f} MB of row values ({share:.0%})")
    if lookups["occurrences"]:
        sent, read = lookups["exchanged"] / lookups["occurrences"], lookups["read"] / lookups["occurrences"]
        lines.append(
            f"lookups: {lookups['lookups'] / steps / summary['world_size']:.0f} per step and rank; of "
            f"{lookups['occurrences'] / steps:,.0f} ids a step {sent:.1%} are exchanged, {read:.1%} read"
        )
    return "\n".join(lines)
