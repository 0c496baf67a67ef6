"""`tritonrec train`: train in any mode, evaluate by full ranking, save, resume."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import takewhile
from typing import Any

from rich.console import Console

from ... import checkpoint
from ...callbacks import EarlyStopping, unknown_metric
from ...capacity import MemoryWatch
from ...data import DynamicStream, Split, Stream
from ...data.splits import Part
from ...distributed import Communicators, check_ranks_agree
from ...embedding.row_file import RowFile
from ...files.places import place_of
from ...host_memory import return_freed_memory
from ...loggers import require_no_log
from ...pipeline import Trainer
from ...resilience import Replay
from ...settings import bytes_of
from ...trace import NullRecorder, Recorder
from ..devices import kernels_of
from ..plan.beside import BesidePlan, beside_plan_line, read_plan
from ..shown import say
from .elastic import Memory, lacks_evaluation
from .evaluate import baseline, check_held_out, evaluate_model, metric_names
from .gather import save_trace, state_digest, table_totals, totals
from .reports import Reports, log_files
from .resume import EARLY_STOPPING, metadata, resume, with_saved_words
from .run import Run, settings_of, with_validation
from .stopping import Begun
from .streaming import STREAMING, StreamingMetrics
from .summary import (
    ended_line,
    going_on_line,
    spilled_line,
    stopped_early_line,
    stopped_line,
    summary_table,
    tables_line,
)  # fmt: skip


def train(
    communicators: Communicators,
    run: Run,
    quiet: bool = False,
    memory: Memory | None = None,
    begun: Begun | None = None,
) -> dict[str, Any]:
    """Train on this rank. Rank 0 prints, evaluates and saves; every rank returns the same summary.

    Asked to stop (`Communicators.stop`), all ranks end after the same update, and save to `run.checkpoint`.

    With resume ``"auto"`` a run begins where there is no checkpoint, goes on from the newest one, and where
    that is of its last step evaluates it: a job that is started again and again has one command.

    With `run.early_stopping` they end after the evaluation that says so, also where the run was interrupted
    and went on in between: its state is in every checkpoint.

    An elastic run has a `memory` on each rank; called again with it (`run_elastic`), the ranks go on from the
    newest state that all of them have.

    `begun` is set once there is a step that a stop would lose.

    A run with `run.spill` whose memory ends goes on with its rows on disk, on the same ranks.

    The summary has ``step``, ``stopped`` (asked to, before `run.steps`), ``out_of_memory`` (stopped by
    the `MemoryWatch` of a rank), ``early_stopping`` (metric, best
    value with its step, and whether it ended the run; None without), ``loss`` (mean of the last update; None
    where no step was left), ``metrics`` of the test part and ``baseline`` (`evaluate_model`; empty where
    stopped), ``validation`` (the last metrics of that part, where the split has one),
    ``seconds_per_step`` (None where too few steps were run to time them), ``tables`` (rows, bytes and counts
    of all ranks), ``lookups`` (keys and bytes, see `LookupCounts`), ``nodes``, ``beside_plan``
    (`BesidePlan.outcome`; None without a plan), and ``digest``, the SHA-256 of all parameters, rows and
    states.
    """
    summary = _train(communicators, run, quiet, memory, begun)
    if run.spill and summary["out_of_memory"]:
        gc.collect()
        return_freed_memory(1 << 30)
        communicators.stop.clear()  # all ranks have left their steps
        summary = _train(communicators, run.spilled(), quiet, memory, begun)
    return summary


def _train(
    communicators: Communicators, run: Run, quiet: bool, memory: Memory | None, begun: Begun | None
) -> dict[str, Any]:
    """`train` up to where memory ends; nothing of it is held when it returns."""
    called_again = memory is not None and memory.called
    if not called_again:
        _check_outputs(run)
    check_ranks_agree(communicators.control, settings_of(run))
    if called_again:
        run = replace(run, resume=True)
    writes = communicators.rank == 0
    console = Console(quiet=quiet or not writes, stderr=str(run.json_lines) == "-")
    run = with_validation(run)
    split = Split.parse(run.job.split)
    if run.early_stopping and not called_again:
        say(console, f"early stopping goes by validation, which training leaves out too: --split {split}")
    if not called_again:
        run = with_saved_words(run)
    model, tables, optimizer = run.job.build(run.optimizer)
    loader, held_out = run.job.loader(communicators.rank, communicators.world_size), run.job.epochs()
    check_held_out(held_out, split)
    if held_out.label_rule and not called_again:
        say(console, f"labels: {held_out.label_rule}")
    recorder = Recorder(communicators.rank, communicators.world_size) if run.trace else NullRecorder()
    loss, stopped = float("nan"), False
    part: Part = "validation" if split.has_validation else "test"
    metrics: dict[str, float] = {}
    stopping = _early_stopping(run, communicators, metric_names(held_out))
    with ExitStack() as stack:
        stack.enter_context(kernels_of(run.job.target))
        trainer = stack.enter_context(
            Trainer(
                model, tables, optimizer, communicators, run.mode, run.window, recorder,
                trust_model=run.trust_model, **run.job.recipe(model, optimizer), **vars(run.job.target),
            )
        )  # fmt: skip
        for group in tables.groups if run.job.target.device != "cpu" and not called_again else ():
            say(console, f"{group.layout}: {group.table.placement}")
        if communicators.world_size > 1 and run.mode != "reference" and not called_again:
            say(console, f"exchanges: {trainer.program.exchanges}")
        if run.replay:
            replay = stack.enter_context(Replay(run.replay))
            replay.attach(trainer)
        saver, position, whole = None, None, None
        meta: dict[str, Any] = {}  # of a checkpoint, as it is when it is written
        if isinstance(loader, (Stream, DynamicStream)):
            position = loader
        else:
            whole = loader
        trainer.vocabularies = run.job.vocabularies()
        if run.checkpoint:  # before it is read: another run that saves there would remove files meanwhile
            meta |= metadata(run, whole)
            saver = stack.enter_context(trainer.saver(run.checkpoint, meta, run.full_every, position))
        start, states = 0, dict[str, Any]()
        if memory or _goes_on(run, communicators):
            copies = memory.copies if memory else None
            start, states = resume(trainer, run, position, copies, None if called_again else whole, saver)
        publisher = None
        if run.warm_start and not start:
            console.print(str(trainer.warm_start(run.warm_start)), highlight=False, markup=False)
        if run.publish:
            from ...serving.live import Publisher  # a run that publishes nothing loads no serving

            publisher = stack.enter_context(Publisher(trainer, run.publish, every=run.publish_every))
        streaming = StreamingMetrics(held_out, communicators)
        streaming.load_state_dict(states.get(STREAMING, {}))
        if stopping and EARLY_STOPPING in states:
            stopping.load_state_dict(states[EARLY_STOPPING])
        has_ended = run.resume == "auto" and start == run.steps
        if has_ended:
            say(console, ended_line(run))
        elif start >= run.steps and not called_again:
            raise ValueError(
                f"the checkpoint is at step {start}; ask for more steps than that, not {run.steps}"
            )
        if called_again:
            say(console, going_on_line(communicators.world_size, start))
        elif memory:
            memory.called, memory.evaluated = True, start
        known = memory.evaluated_by_all(communicators) if memory else 0
        step = saved = start
        reports = stack.enter_context(Reports(run, console, start, loader, writes))
        watch, beside = _memory_watch(run, trainer, console), None
        if run.plan:
            planned = read_plan(run.plan, run, communicators.world_size)
            beside = BesidePlan(planned, communicators.rank, reports.pace, _say(communicators, console, True))

        def evaluate() -> None:
            nonlocal metrics
            with communicators.watch.doing(f"evaluation({step})"):
                evaluated, rows = trainer.dense.evaluated, trainer.rows_of_ranks()
                metrics = evaluate_model(evaluated, rows, held_out, run.window.precision, part)
            judged = stopping is not None and stopping.step == step  # a run that had ended, which is resumed
            logged = judged or has_ended or (called_again and step == start <= known)
            reports.on_evaluation_end(step, loss if reports.steps_run else None, metrics, logged, part)
            if stopping and step % run.evaluate_every == 0 and not judged:
                stopping.on_evaluation_end(step, metrics)
            if memory:
                memory.evaluated = step

        def states_now() -> dict[str, Any]:
            own = {STREAMING: streaming.state_dict()} if streaming.by_task else {}
            return {**own, **({EARLY_STOPPING: stopping.state_dict()} if stopping else {})}

        def save() -> None:
            nonlocal saved
            if saver and step > saved:
                saver.save(step, states_now())
                saved = step

        saves: dict[str, Any] = {}
        if saver and run.save_every:
            saves = {"saver": saver, "save_every": run.save_every}
        if (has_ended or (memory and lacks_evaluation(run, start, known))) or (
            stopping and start and (stopping.should_stop or _was_not_evaluated(stopping, run, start))
        ):
            evaluate()
        for first, last in _stretches(
            start, run.steps, run.evaluate_every, run.peer_copies, run.publish_every
        ):
            if stopping and stopping.should_stop:
                save()
                break
            clock = time.perf_counter()
            steps = takewhile(lambda _: not trainer.stopping, range(first, last))
            for result in (watch or trainer).run((loader.batch(step) for step in steps), **saves):
                before, clock = clock, time.perf_counter()
                loss, step = result.loss, result.step + 1
                if begun and not begun.is_set():
                    begun.set()
                reports.on_step_end(result, clock - before, streaming.on_step_end(result))
                if saves and step % run.save_every == 0:
                    meta |= states_now()
                    saved = step
                if beside:
                    beside.on_step_end(reports.steps_run)
            stopped = trainer.stopping and step < run.steps
            if run.window.average_every:
                trainer.sync()
            if publisher and publisher.step < step:
                at_the_end = stopped or step == run.steps
                if at_the_end or step % run.publish_every == 0:
                    publisher.publish()
            if stopped or step == run.steps:
                save()
            if stopped:
                break
            if memory and run.peer_copies and step % run.peer_copies == 0:
                memory.copies.keep(trainer, {**metadata(run, whole), **states_now()}, position)
            if last == run.steps or (run.evaluate_every and last % run.evaluate_every == 0):
                evaluate()
        validation = metrics
        if split.has_validation and not stopped:
            with communicators.watch.doing(f"test({step})"):
                evaluated, rows = trainer.dense.evaluated, trainer.rows_of_ranks()
                metrics = evaluate_model(evaluated, rows, held_out, run.window.precision, "test")
            known_already = not reports.steps_run and stopping is not None and stopping.step == step
            reports.on_evaluation_end(step, None, metrics, known_already, "test")
    if run.trace:
        save_trace(communicators, recorder, run.trace)
    table_rows = table_totals(communicators, tables)
    summary: dict[str, Any] = {
        "step": step,
        "stopped": stopped,
        "out_of_memory": stopped
        and any(communicators.control.all_gather_texts("" if watch is None else watch.ended)),
        "early_stopping": stopping and _outcome(stopping, step < run.steps),
        "steps_run": reports.steps_run,
        "world_size": communicators.world_size,
        "loss": loss if reports.steps_run else None,
        "metrics": metrics,
        **({"validation": validation} if split.has_validation else {}),
        "baseline": {} if stopped else baseline(held_out),
        "seconds_per_step": reports.pace.seconds_per_step,
        "tables": table_rows,
        "lookups": totals(communicators.control, vars(trainer.counts)),
        "nodes": communicators.nodes,
        "beside_plan": None if beside is None else beside.outcome(communicators, table_rows["rows"]),
        "digest": state_digest(communicators, tables, trainer.dense.tensors()),
    }
    if stopped:
        spills = run.spill and summary["out_of_memory"]
        say(console, spilled_line(run, step) if spills else stopped_line(run, step))
        return summary
    if stopping and stopping.should_stop and step < run.steps:
        say(console, stopped_early_line(stopping, step))
    console.print(summary_table(run, summary))
    say(console, tables_line(summary))
    if summary["beside_plan"]:
        say(console, beside_plan_line(summary["beside_plan"]))
    return summary


def _check_outputs(run: Run) -> None:
    """Raise where the outputs of another run are there, or no checkpoint to go on from."""
    saved = checkpoint.steps(run.checkpoint) if run.checkpoint else []
    if saved and not run.resume:
        raise ValueError(
            f"{run.checkpoint} holds checkpoints of another run: resume it, or choose another place"
        )
    if bool(run.publish) != bool(run.publish_every):
        raise ValueError("--publish PLACE and --publish-every STEPS go together")
    if run.publish_every % run.window.accumulate:
        raise ValueError(
            f"--publish-every {run.publish_every} is inside an update of {run.window.accumulate} batches"
        )
    if run.warm_start and not checkpoint.steps(run.warm_start):
        raise ValueError(f"{run.warm_start} holds no checkpoint to begin with")
    if run.resume and not run.checkpoint:
        raise ValueError("resuming needs the directory of a checkpoint")
    if run.spill:  # before hours of training
        RowFile(run.spilled().job.placement.folder(), 4).close()
    # No folder is left where a name was wrong; in one that is there another run may be at work.
    absent = run.checkpoint is not None and not place_of(run.checkpoint).exists()
    if run.resume is True and not saved and (run.elastic or absent):
        raise ValueError(f"{run.checkpoint} holds no checkpoint to resume")
    if not run.resume:
        for log in log_files(run):
            require_no_log(log)


def _goes_on(run: Run, communicators: Communicators) -> bool:
    """Whether a checkpoint is loaded; rank 0 looks for those of an ``"auto"`` run. Collective."""
    if run.resume != "auto":
        return bool(run.resume)
    found = str(checkpoint.steps(run.checkpoint) or "") if run.checkpoint else ""
    return bool(communicators.control.all_gather_texts(found)[0])


def _memory_watch(run: Run, trainer: Trainer, console: Console) -> MemoryWatch | None:
    """Of this rank; rank 0 prints what all see, and each rank what it sees of its own limit."""
    if run.memory_limit == "none":
        return None
    own = run.memory_limit != "auto"
    tell = _say(trainer.communicators, console, own)
    try:
        return MemoryWatch(trainer, bytes_of(run.memory_limit) if own else None, say=tell)
    except OSError as error:
        if own:
            raise
        tell(f"memory is not watched: {error}")
        return None


def _say(here: Communicators, console: Console, own: bool) -> Callable[[str], None]:
    """Prints a line of rank 0, and those of the other ranks where each has its `own`."""

    def tell(line: str) -> None:
        if here.rank == 0:
            say(console, line)
        elif own:
            print(f"rank {here.rank}: {line}", file=sys.stderr)

    return tell


def _stretches(start: int, steps: int, *intervals: int) -> Iterator[tuple[int, int]]:
    """(first, last) of the stretches between evaluations, say; the pipeline drains between them."""
    stops = {steps, *(stop for every in intervals if every for stop in range(every, steps, every))}
    for stop in sorted(stop for stop in stops if stop > start):
        yield start, stop
        start = stop


def _early_stopping(run: Run, communicators: Communicators, known: list[str]) -> EarlyStopping | None:
    rule = run.early_stopping
    if rule is None:
        return None
    if not run.evaluate_every:
        raise ValueError("early stopping goes by evaluations between: set evaluate_every")
    if rule.metric not in known:
        raise ValueError(unknown_metric(rule.metric, known))
    return EarlyStopping(
        rule.metric, rule.patience, rule.mode, check_finite=False, communicators=communicators
    )


def _outcome(stopping: EarlyStopping, before_the_end: bool) -> dict[str, Any]:
    return {**stopping.state_dict(), "stopped": stopping.should_stop and before_the_end}


def _was_not_evaluated(stopping: EarlyStopping, run: Run, step: int) -> bool:
    """Whether an evaluation was due after `step`, and the run ended before or in it."""
    return step % run.evaluate_every == 0 and (stopping.step or 0) < step
