"""The command `train`."""

from __future__ import annotations

import signal
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ...distributed.environment import rank_here
from ...distributed.groups import validate_division
from ...embedding.learning_rate import rate_at
from ...files import save_json
from ...loggers import require_no_log
from ...pipeline import WindowConfig, schedule_of
from ...pipeline.recipe import SETTINGS
from ..devices import validate_device
from ..job import Job
from ..plan.beside import read_plan
from ..slipstream import run as slipstream_run
from ..slipstream.run import SlipstreamRun
from ..train.config import tables_of, to_toml
from ..train.launch import Launch
from ..train.reports import log_files
from ..train.resume import with_saved_words
from ..train.run import Run, with_validation
from .job import ready
from .options import MOST_RANKS, PANELS, TimeoutOption, with_options
from .outputs import checked, log_of, require_writable

RUN = Run(Job(batch_size=128, num_negatives=32, lr=3e-3), window=WindowConfig(4), steps=0)
COMPARISON = SlipstreamRun()
SLIPSTREAM = PANELS["SlipstreamRun"]


def _with_seed(comparison: SlipstreamRun, seed: int) -> SlipstreamRun:
    """The run's seed, which may come from a config file."""
    return replace(comparison, config=replace(comparison.config, seed=seed))


def _check_elastic(run: Run, slipstream: bool, world_size: int) -> None:
    """BadParameter for options that do not go with an elastic run, or only with one."""
    if not run.elastic:
        if run.peer_copies or run.min_ranks > 1:
            raise typer.BadParameter("--peer-copies and --min-ranks go with --elastic")
        return
    refused = {"--slipstream": slipstream, "--trace": run.trace, "--spill": run.spill}
    refused |= {"--device": run.job.target.device != "cpu"}
    for option, given in refused.items():
        if given:  # ranks that go on without others communicate over gloo
            raise typer.BadParameter(f"--elastic does not go with {option}")
    if not run.peer_copies and not run.save_every:
        raise typer.BadParameter(
            "--elastic needs a state to go back to: --peer-copies STEPS, or --checkpoint DIRECTORY with "
            "--save-every STEPS"
        )
    if run.min_ranks > world_size:
        raise typer.BadParameter(f"--min-ranks {run.min_ranks} is more than the {world_size} ranks")
    for option, every in {"--peer-copies": run.peer_copies, "--save-every": run.save_every}.items():
        if every % run.window.accumulate:
            raise typer.BadParameter(
                f"{option} {every} is inside an update of {run.window.accumulate} batches: an elastic run "
                "goes back to whole updates"
            )


FIRST = (
    "data", "model", "steps", "batch_size", "lr", "mode", "world_size", "checkpoint", "resume", "config",
)  # fmt: skip
"""Options that most runs need."""


@with_options(config="run", first=FIRST)
def train(
    run: Run = RUN,
    world_size: Annotated[
        int, typer.Option(min=1, max=MOST_RANKS, help="Ranks to start here; under torchrun leave it out.")
    ] = 1,
    replicas: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_RANKS,
            help="Copies of the tables; they divide the ranks (2D sparse parallelism).",
            rich_help_panel=PANELS["WindowConfig"],
        ),
    ] = 1,
    nodes: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_RANKS,
            help="Machines of as many consecutive ranks each: a row crosses to each once; 1: to each rank.",
            rich_help_panel=PANELS["WindowConfig"],
        ),
    ] = 1,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the summary to this file.", rich_help_panel=PANELS["Run"]),
    ] = None,
    timeout: TimeoutOption = 60,
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config",
            help="Print the settings as a config file, and end.",
            rich_help_panel=PANELS["Run"],
        ),
    ] = False,
    slipstream: Annotated[
        bool,
        typer.Option(
            "--slipstream",
            help="APPROXIMATE: go on without inputs whose rows stand still, beside a run with all.",
            rich_help_panel=SLIPSTREAM,
        ),
    ] = False,
    comparison: SlipstreamRun = COMPARISON,
) -> None:
    """Train a model in any mode; print loss and metrics beside those of a ranking without training.

    Next-item models are ranked by HR@K and NDCG@K, grm by group AUC, dlrm by AUC, accuracy and cross entropy.
    Counts of the tables and lookups are printed below.
    """
    to_file = run.json_lines if str(run.json_lines) != "-" else None
    require_writable(
        {"--json": json_file, "--json-lines": to_file, "--trace": run.trace},
        {"--checkpoint": run.checkpoint, "--log-dir": run.log_dir},
        at_urls=("--checkpoint", "--log-dir"),
        inputs={"--data": log_of(run.job.data), "--plan": run.plan},
    )
    if not run.checkpoint and (run.save_every or run.full_every != 1):
        raise typer.BadParameter("--save-every and --full-every go with --checkpoint")
    if run.job.lr_warmup and run.job.lr_schedule not in ("linear", "cosine"):
        raise typer.BadParameter("--lr-warmup goes with --lr-schedule linear or cosine")
    comparison, default = (_with_seed(each, run.job.seed) for each in (comparison, COMPARISON))
    if comparison != default and not slipstream:
        raise typer.BadParameter(f"options of {SLIPSTREAM.partition(',')[0]} go with --slipstream")
    if run.early_stopping and not run.evaluate_every:
        raise typer.BadParameter("--early-stopping goes with --evaluate-every")
    if run.new_data and not run.resume:
        raise typer.BadParameter("--new-data goes with --resume")
    if unknown := [name for name in run.changed if name not in SETTINGS]:
        raise typer.BadParameter(f"--changed takes {', '.join(SETTINGS)}, got {unknown[0]!r}")
    if run.changed and not run.resume:
        raise typer.BadParameter("--changed goes with --resume")
    if slipstream and (run.replay or run.spill):
        raise typer.BadParameter("--replay and --spill do not go with --slipstream")
    here = checked(rank_here)
    ranks_of_all = here.world_size if here.world_size > 1 else world_size
    if nodes > 1 and run.elastic:
        raise typer.BadParameter(
            "--nodes does not go with --elastic: ranks that are left make no equal nodes"
        )
    _check_elastic(run, slipstream, ranks_of_all)
    if here.world_size == 1:  # a launcher's ranks look when they take theirs
        checked(lambda: validate_device(run.job.target.device, world_size))
    if run.plan and (slipstream or run.elastic):
        raise typer.BadParameter(
            "--plan does not go with --slipstream, nor with --elastic, whose ranks change"
        )
    checked(lambda: validate_division(ranks_of_all, replicas, nodes))
    if run.mode != "reference":
        checked(lambda: schedule_of(run.mode, run.window, replicas, nodes))
    if not run.resume:
        for log in log_files(run):
            checked(lambda log=log: require_no_log(log))
    if slipstream:  # it judges the inputs of a log that is in memory
        run = replace(run, job=replace(run.job, stream=False))
    run = checked(lambda: ready(with_saved_words(with_validation(run))))
    run = replace(run, steps=run.steps or 20 * run.job.loader().steps_per_epoch)
    last = max(1, run.steps // run.window.accumulate)
    if run.optimizer == "ftrl" and checked(lambda: rate_at(run.job.learning_rate, last)) == 0:
        raise typer.BadParameter(
            f"--optimizer ftrl divides by lr, which is 0 in update {last}: give more --lr-steps"
        )
    if run.plan:
        checked(lambda: read_plan(run.plan, run, ranks_of_all))
    if print_config:
        print(to_toml(tables_of(run)), end="")
        return
    ranks = Launch(world_size, replicas, timedelta(seconds=timeout), nodes, run.job.target.device)
    if slipstream:
        work = partial(ranks.run, slipstream_run.train_slipstream, run, comparison)
    else:
        work = partial(ranks.train_elastically if run.elastic else ranks.train, run)
    summary, first, stop = checked(work)
    if json_file and first:
        checked(lambda: save_json(summary, json_file))
    if summary.get("out_of_memory"):
        raise typer.Exit(1)
    if summary.get("stopped"):
        raise typer.Exit(stop.exit_code or 128 + signal.SIGTERM)  # another rank may have got the signal
