"""Checkpoints of a run: their metadata, and the settings in which a run that goes on may differ."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ... import checkpoint
from ...data import DynamicStream
from ...pipeline import SupportsState, Trainer, TrainingSaver
from ...resilience import PeerCopies
from ...settings import values_by_option
from ..job import Job
from .config import CONFIG, tables_of, to_toml
from .run import Run
from .streaming import STREAMING

LAYOUT = {CONFIG, "job", "slots", "chunk_rows", "merge", "balance", "placement"}
"""Settings that change no bit, so a run may go on with others."""

EARLY_STOPPING = "early_stopping"
"""The key of its state among a checkpoint's metadata."""

LOG = "log"
"""The key of a loader's `state_dict` there."""

NESTED = ("sizes", "policy", "target")
"""Settings that are made of others."""

PRECISIONS = ("precision", "exchange_precision")
"""Settings of windows that change bits from the first step on."""

WIDTHS, HEAD_WIDTHS = {"sizes.dim", "sizes.heads"}, {"sizes.qk_dim", "sizes.v_dim"}
"""Where one of the first differs, those of the second follow, and are not named."""


CHANGED_BY = {
    "lr": "lr", "optimizer": "rule", "eps": "rule", "weight_decay": "rule", "lazy_weight_decay": "rule",
    "policy": "policy", "lr_schedule": "scheduler", "lr_warmup": "scheduler", "lr_steps": "scheduler",
    "accumulate": "accumulate", "ema": "average", **dict.fromkeys(PRECISIONS, "precision"),
}  # fmt: skip
"""By setting the word of ``--changed`` that lets it differ."""


def with_saved_words(run: Run) -> Run:
    """The run with the vocabularies of its checkpoint, which its log extends, where it goes on from one."""
    saved = run.resume and run.checkpoint and checkpoint.steps(run.checkpoint)
    return replace(run, job=replace(run.job, words=str(run.checkpoint))) if saved else run


def metadata(run: Run, loader: Any = None) -> dict[str, Any]:
    """Settings saved with every checkpoint, and what the batches of a `loader` depend on."""
    compared = {"optimizer": run.optimizer, "job": run.job.as_json(), "accumulate": run.window.accumulate}
    window = values_by_option(run.window)
    compared |= {name: window[name] for name in PRECISIONS}
    log = {} if loader is None else {LOG: loader.state_dict()}
    return {**compared, **log, CONFIG: to_toml(tables_of(run))}


def resume(
    trainer: Trainer,
    run: Run,
    loader: SupportsState | None = None,
    copies: PeerCopies | None = None,
    whole: SupportsState | None = None,
    saver: TrainingSaver | None = None,
) -> tuple[int, dict[str, Any]]:
    """Load the newest checkpoint; returns its step, and the states that were saved with it: those of early
    stopping and of streaming metrics, where there were any.

    Each rank reads the slices it owns, whatever world size saved them; `loader` goes on at its position, and
    `whole`, a loader without one, must have the batches of the run that saved. `saver`
    goes on with changes. With `copies` they are loaded where they are newer; and step 0 is returned where
    there is no state at all.
    """
    usual = _settings(
        {"job": Job().as_json(), **dict.fromkeys(PRECISIONS, "float32")}
    )  # for settings that an older version did not save
    states: dict[str, Any] = {}
    position = None if run.new_data else loader
    here = _settings(json.loads(json.dumps(metadata(run))))

    def accept(meta: dict[str, Any]) -> None:
        if not isinstance(meta.get("job"), dict):
            raise ValueError(f"the checkpoint in {run.checkpoint} was not saved by tritonrec train")
        states.update({key: meta.pop(key) for key in (EARLY_STOPPING, STREAMING) if key in meta})
        log = meta.pop(LOG, None)
        saved = {**usual, **_settings(meta)}
        names = {name for name in {*saved, *here} if saved.get(name) != here.get(name)}
        if names & WIDTHS:
            names -= HEAD_WIDTHS
        if run.new_data:
            names -= {"data", "format"}
        names = {name for name in names if CHANGED_BY.get(name.partition(".")[0]) not in run.changed}
        different = [
            f"{name} {saved.get(name)} in the checkpoint, {here.get(name)} now" for name in sorted(names)
        ]
        if different:
            raise ValueError(
                f"the checkpoint in {run.checkpoint} was made with other settings: {'; '.join(different)}; "
                "use the same, or another directory"
                f"{', or --new-data for another log' if names & {'data', 'format'} else ''}"
                f"{_may_change(names)}"
            )
        if log is not None and whole is not None and not run.new_data:
            whole.load_state_dict(log)

    if copies is not None:
        step = copies.restore(trainer, run.checkpoint, accept, position, run.changed)
    else:
        assert run.checkpoint is not None
        step = trainer.load(saver or run.checkpoint, accept, position, run.changed)
    if run.new_data and isinstance(loader, DynamicStream):
        loader.begin_at(step)
    if step % run.window.accumulate:
        raise ValueError(
            f"the checkpoint is at step {step}, inside an update of {run.window.accumulate} batches"
        )
    return step, states


def _may_change(names: Collection[str]) -> str:
    """What lets all these settings differ, for an error."""
    words = {CHANGED_BY.get(name.partition(".")[0], "") for name in names}
    return "" if "" in words else f", or --changed {','.join(sorted(words))} to go on with today's"


def _settings(meta: dict[str, Any]) -> dict[str, Any]:
    """By name the settings that change a bit, those of the model's sizes and of policies one by one."""
    flat: dict[str, Any] = {}
    values = {**meta, **meta["job"]}
    for name in values.keys() - LAYOUT:
        value = values[name]
        parts = value if name in NESTED and isinstance(value, dict) else {}
        flat |= {f"{name}.{part}": each for part, each in parts.items()} or {name: value}
    return {name: value for name, value in flat.items() if name != "sizes.recompute"}
