"""`tritonrec train`: train in any mode, evaluate by full ranking, save, resume."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import takewhile
from typing import Any

from rich.console import Console
from rich.progress import TextColumn, TimeRemainingColumn

from ... import checkpoint
from ...distributed import Communicators, check_ranks_agree
from ...pipeline import Trainer
from ...trace import NullRecorder, Recorder
from ..devices import kernels_of
from ..progress import CommandProgress, announce_compilation, steady_seconds
from .evaluate import baseline, evaluate_model
from .gather import save_trace, state_digest, table_totals, totals
from .resume import metadata, resume
from .run import Run, settings_of
from .summary import in_words, stopped_line, summary_table, tables_line


def train(communicators: Communicators, run: Run, quiet: bool = False) -> dict[str, Any]:
    """Train on this rank. Rank 0 prints, evaluates and saves; every rank returns the same summary.

    Asked to stop (`Communicators.stop`), all ranks end after the same update, and save to `run.checkpoint`.

    The summary has ``step``, ``stopped`` (before `run.steps`), ``loss`` (mean of the last update),
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
    model, tables, optimizer = run.job.build(run.optimizer)
    loader, held_out = run.job.loader(communicators.rank, communicators.world_size), run.job.epochs()
    recorder = Recorder(communicators.rank, communicators.world_size) if run.trace else NullRecorder()
    loss, seconds, metrics = float("nan"), [], {}
    with ExitStack() as stack:
        stack.enter_context(kernels_of(run.job.target))
        trainer = stack.enter_context(
            Trainer(
                model, tables, optimizer, communicators, run.mode, run.window, recorder,
                **run.job.recipe(model, optimizer), **vars(run.job.target),
            )
        )  # fmt: skip
        saver = None
        if run.checkpoint:  # before it is read: another run that saves there would remove files meanwhile
            saver = stack.enter_context(trainer.saver(run.checkpoint, metadata(run), run.full_every))
        start = resume(trainer, run) if run.resume else 0
        if start >= run.steps:
            raise ValueError(
                f"the checkpoint is at step {start}; ask for more steps than that, not {run.steps}"
            )
        step = saved = start
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
                    metrics = evaluate_model(trainer.dense.evaluated, trainer.whole_tables(), held_out)
                console.print(f"step {last}: loss {loss:.4f}, {in_words(metrics)}")
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
        "tables": table_totals(communicators, tables),
        "lookups": totals(communicators.control, vars(trainer.counts)),
        "digest": state_digest(communicators, tables, trainer.dense.tensors()),
    }
    if stopped:
        console.print(stopped_line(run, step), highlight=False, soft_wrap=True)
        return summary
    console.print(summary_table(run, summary))
    console.print(tables_line(summary), highlight=False)
    return summary


def _stretches(start: int, steps: int, *intervals: int) -> Iterator[tuple[int, int]]:
    """(first, last) of the stretches between saves and evaluations; the pipeline drains between them."""
    stops = {steps, *(stop for every in intervals if every for stop in range(every, steps, every))}
    for stop in sorted(stop for stop in stops if stop > start):
        yield start, stop
        start = stop


def progress_bar(console: Console) -> CommandProgress:
    """With the loss of the last step."""
    loss = TextColumn("{task.fields[loss]}")
    return CommandProgress(console, loss, TimeRemainingColumn())
