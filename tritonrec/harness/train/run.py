"""The settings of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ...callbacks import Direction, EarlyStopping
from ...data import Split
from ...embedding import OptimizerName, Storage
from ...pipeline import Mode, WindowConfig
from ...resilience import Replay
from ...settings import MOST, bytes_of, setting
from ..job import Job

Resume = bool | Literal["auto"]


@dataclass(frozen=True)
class StoppingRule:
    """See `EarlyStopping`; `mode` is that of the metric, if it is None."""

    metric: str
    patience: int
    mode: Direction | None = None

    def __post_init__(self) -> None:
        EarlyStopping(self.metric, self.patience, self.mode)


@dataclass(frozen=True)
class Run:
    """One training run.

    Args:
        job: data, model, optimizer settings. mode, window: see `Trainer`. optimizer: of rows and dense.
        steps: train up to this step, counted from the run's beginning.
        checkpoint: directory to save to. save_every: steps between saves; the last step is saved always.
        full_every: every n-th save is whole, those between hold the changes; 0: see `checkpoint.Saver`.
        warm_start: directory of another training's checkpoint, whose weights are taken where a run begins.
        resume: go on from the newest checkpoint there; ``"auto"``: begin where there is none, and where the
            run has ended evaluate what it left. new_data: go on with another log, from the same step on.
            changed: with `resume`, settings that may differ from the checkpoint's; see `Trainer.load`.
        evaluate_every: steps between evaluations; 0: at the end.
        early_stopping: end where the evaluations between no longer improve; these are of validation, which it
            turns on (`Job.split`).
        trace: write a Perfetto trace of all ranks to this file.
        trust_model: see `Trainer`.
        replay: share of the work that other ranks compute again, to find bits that flip (`Replay`); 0: none.
        elastic: go on without ranks that are lost (`run_elastic`), from the newest of the checkpoints and
            of the copies in the memory of other ranks. peer_copies: steps between such copies
            (`PeerCopies`); 0: none. min_ranks: with fewer nobody goes on.
        log_dir: log to ``metrics.csv`` in this folder, and for TensorBoard where it is installed.
        json_lines: log an object per step to this file; ``-`` is standard output.
        log_every: steps between printed lines; 0: a bar on a terminal, and a line now and then elsewhere.
        memory_limit: of each rank's process, such as ``"20GiB"``; ``"auto"``: what the machine or the
            container leaves; ``"none"``: nobody looks (`MemoryWatch`).
        spill: ``MEMORY:DIRECTORY``; where memory ends, go on with rows on disk there and with so much memory
            for each table's, from the checkpoint that is saved then. Tables are in host memory before.
        plan: file of `tritonrec plan CONFIG --json FILE`, beside which the run is set, with a warning where
            it takes more.
    """

    job: Job
    mode: Mode = setting("nestpipe", "How the steps are scheduled.")
    window: WindowConfig = field(default_factory=WindowConfig)
    optimizer: OptimizerName = setting(
        "adam", "Update rule of rows; dense parameters have torch's nearest, as AdamW for lamb."
    )
    steps: int = setting(100, "Steps in all; 0: those of 20 epochs.", 0, MOST)
    checkpoint: Path | None = setting(None, "Directory to save to.")
    save_every: int = setting(0, "Steps between saves; 0: at the end only.", 0, MOST)
    full_every: int = setting(
        1,
        "Whole checkpoints among the saves; the others hold changes. 0: once changes outweigh them.",
        0,
        MOST,
    )
    warm_start: str = setting("", "Begin with the tables and parameters that fit of this checkpoint.")
    resume: Resume = setting(
        False, "Go on from the newest checkpoint; =auto: or begin without one, and end where all is done."
    )
    new_data: bool = setting(
        False, "With --resume: another log than the checkpoint's, whose words it extends."
    )
    changed: tuple[str, ...] = setting(
        (), "With --resume: settings that are others than the checkpoint's, as lr,policy."
    )
    evaluate_every: int = setting(0, "Steps between evaluations; 0: at the end only.", 0, MOST)
    early_stopping: StoppingRule | None = setting(
        None,
        "METRIC:PATIENCE, such as NDCG@10:3: end after so many evaluations of validation without a better "
        "one; :min where less is better.",
    )
    trace: Path | None = setting(None, "Write a Perfetto trace to this file.")
    trust_model: bool = setting(False, "Do not check that samples of the model do not see each other.")
    replay: float = setting(
        0.0, "Share of the work that other ranks compute again, to find flipped bits.", 0, 1
    )
    elastic: bool = setting(False, "Go on without ranks that are lost, with the same bits.")
    peer_copies: int = setting(
        0, "Steps between copies of the state in other ranks' memory, for --elastic; 0: none.", 0, MOST
    )
    min_ranks: int = setting(1, "With fewer ranks than this an elastic run ends.", 1, MOST)
    log_dir: Path | None = setting(None, "Log every step to metrics.csv here, and for TensorBoard.")
    json_lines: Path | None = setting(None, "Log an object per step to this file; -: standard output.")
    log_every: int = setting(0, "Steps between printed lines; 0: a bar, or a line now and then.", 0, MOST)
    memory_limit: str = setting(
        "auto", "Save and stop before a rank takes so much, as 20GiB; auto: what there is; none: never."
    )
    spill: str = setting(
        "", "MEMORY:DIRECTORY, as 2GiB:/data: where memory ends, save and go on with rows on disk there."
    )
    publish: str = setting("", "Publish live deltas to this folder or URL, redis:// too, for replicas.")
    publish_every: int = setting(0, "Steps between publications; with --publish.", 0, MOST)
    plan: Path | None = setting(None, "Compare with this file of tritonrec plan; warn where more is taken.")

    def __post_init__(self) -> None:
        if self.memory_limit not in ("auto", "none"):
            bytes_of(self.memory_limit, "memory_limit")
        if self.replay:
            Replay(self.replay)
        if self.spill:
            self.spilled()

    def spilled(self) -> Run:
        """What goes on from the checkpoint of this run whose memory has ended, with its rows on disk."""
        memory, _, path = self.spill.partition(":")
        before = self.job.placement
        if before.storage == "device" or before.path or self.memory_limit == "none":
            raise ValueError(
                f"spill goes with rows in host memory and a limit, and here are {before}; memory_limit="
                f"{self.memory_limit!r}"
            )
        if not path or not self.checkpoint:
            raise ValueError(
                f"spill takes MEMORY:DIRECTORY, such as 2GiB:/data, and goes on from a checkpoint: got "
                f"spill={self.spill!r} with checkpoint={str(self.checkpoint or '')!r}"
            )
        storage: Storage = "cached" if before.chosen().storage == "cached" else "disk"
        job = replace(self.job, placement=replace(before, storage=storage, path=path, memory=memory))
        return replace(self, job=job, resume="auto", new_data=False, changed=(), plan=None, spill="")


def settings_of(run: Run) -> dict[str, Any]:
    """Of the run, its window and its job, by name."""
    settings = {**vars(run.window), **vars(run.job), **vars(run)}
    return {name: value for name, value in settings.items() if name not in ("job", "window")}


def with_validation(run: Run) -> Run:
    """The run with validation in its split, where early stopping goes by it."""
    split = Split.parse(run.job.split)
    if run.early_stopping is None or split.has_validation:
        return run
    return replace(run, job=replace(run.job, split=str(split.with_validation())))
