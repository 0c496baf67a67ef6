"""Promise: `train --elastic` goes on without ranks that are lost, with the same bits and the same log."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import commands
import pytest
from speeds import slow_except

from tritonrec import checkpoint
from tritonrec.distributed import Communicators, RankDiedError
from tritonrec.harness.train import launch, loop
from tritonrec.harness.train.elastic import Memory
from tritonrec.harness.train.run import Run, StoppingRule
from tritonrec.pipeline import Window, WindowConfig
from tritonrec.resilience import ElasticPool, PeerCopies

pytestmark = pytest.mark.multi_rank
STEPS = 12
COMMAND = [
    sys.executable, "-m", "tritonrec", "train", "--data", "zipf:users=60,items=200,seed=1",
    "--batch-size", "8", "--max-seq-len", "9", "--negatives", "1", "--dim", "8", "--layers", "1",
    "--heads", "2", "--steps", "400",
]  # fmt: skip


def dying(communicators, run, memory, victims):
    """`train`; each of `victims` (by rank) dies at "STAGE STEP", "evaluation STEP" or "end"."""
    name, _, at = victims.get(communicators.rank, "").partition(" ")
    if not memory.called and name:
        _plant(name, int(at or STEPS))
    return loop.train(communicators, run, True, memory)


def test_the_rank_that_is_first_at_the_end_writes(job, monkeypatch):
    """It was the second of two, and the first of those that are left."""

    def run_elastic(train, timeout, replicas, min_ranks):
        here = Communicators.local()
        train(replace(here, control=SimpleNamespace(rank=1, world_size=2)))
        return train(here)

    monkeypatch.setattr(launch.resilience, "run_elastic", run_elastic)
    monkeypatch.setattr(launch.loop, "train", lambda communicators, run, memory: communicators.rank)
    summary, writes, _ = launch.Launch(1, 1, timedelta(seconds=9)).train_elastically(Run(job, steps=STEPS))
    assert (summary, writes) == (0, True)


def _plant(name, at):
    def die(step):
        if step == at:
            os.kill(os.getpid(), signal.SIGKILL)

    if name == "end":
        digest = loop.state_digest
        loop.state_digest = lambda *arguments: die(at) or digest(*arguments)
    elif name == "evaluation":

        class Dying(loop.Trainer):
            def rows_of_ranks(self):
                die(self.next_step)
                return super().rows_of_ranks()

        loop.Trainer = Dying
    else:

        class Dying(loop.Trainer):
            def __init__(self, *arguments, **options):
                super().__init__(*arguments, **options)
                self.program.before(name, dying_in)

        def dying_in(window: Window) -> None:
            die(window.step)

        loop.Trainer = Dying


def lose(run, world_size, victims, replicas=1):
    """The summary of the ranks that are left, after `victims` have died."""
    with ElasticPool(world_size, replicas=replicas) as pool:
        summaries = pool.run(dying, run, Memory(), victims)
        assert len({summary["digest"] for summary in summaries}) == 1
        assert summaries[0]["world_size"] == len(summaries) == world_size - len(victims)
    killed = {rank for rank, process in enumerate(pool.processes) if process.exitcode == -signal.SIGKILL}
    assert killed == {*victims}
    assert not any(process.is_alive() for process in pool.processes)
    return summaries[0]


def plain(run):
    return loop.train(Communicators.local(), replace(run, elastic=False, peer_copies=0), True)


def rows(folder):
    """Of the log: step, loss and metrics, without rates."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [
            {name: value for name, value in row.items() if not name.endswith("per_second")}
            for row in csv.DictReader(file)
        ]


COPIES = {"elastic": True, "peer_copies": 4}


@pytest.mark.if_changed
@pytest.mark.parametrize(
    ("world_size", "victims", "options", "replicas"),
    slow_except(
        [(2, {1: "compute 5"}, COPIES, 1)],
        [
            (2, {1: "compute 5"}, COPIES, 1),
            (3, {0: "exchange 6"}, COPIES, 1),
            (3, {2: "evaluation 8"}, {**COPIES, "evaluate_every": 8}, 1),
            (3, {1: "evaluation 12"}, COPIES, 1),
            (2, {0: "end"}, COPIES, 1),
            (4, {1: "dense_update 9", 3: "compute 9"}, COPIES, 2),
            (3, {1: "compute 2"}, COPIES, 1),
        ],
    ),
)
def test_the_bits_are_those_of_a_run_without_a_loss(job, world_size, victims, options, replicas):
    run = Run(job, "nestpipe", WindowConfig(2), steps=STEPS, **options)
    found, expected = lose(run, world_size, victims, replicas), plain(run)
    assert found["digest"] == expected["digest"] and found["step"] == STEPS and not found["stopped"]
    assert found["metrics"] == expected["metrics"] and found["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["compute 7", "evaluation 8", "route 10"])
def test_checkpoints_logs_and_early_stopping_are_those_of_a_run_without_a_loss(job, tmp_path, place):
    run = Run(
        job, "nestpipe", WindowConfig(2), steps=STEPS, save_every=4, evaluate_every=2, elastic=True,
        early_stopping=StoppingRule("NDCG@10", 4),
    )  # fmt: skip
    summaries, logs = [], []
    for name, train in {"lost": lambda run: lose(run, 3, {0: place}), "whole": plain}.items():
        folder = tmp_path / name
        summaries.append(train(replace(run, checkpoint=folder / "saved", log_dir=folder)))
        logs.append(rows(folder))
        assert checkpoint.steps(folder / "saved")[-1] == summaries[-1]["step"]
    for key in ("digest", "metrics", "early_stopping", "step"):
        assert summaries[0][key] == summaries[1][key]
    assert logs[0] == logs[1] and len(logs[0]) > STEPS


@pytest.mark.slow
def test_a_stream_goes_on_at_its_position(job):
    run = Run(replace(job, data=f"shards:{job.data}"), "nestpipe", WindowConfig(2), steps=STEPS, **COPIES)
    assert lose(run, 3, {1: "compute 6"})["digest"] == plain(run)["digest"]


def test_called_again_a_rank_goes_on_from_its_copies(job, tmp_path):
    """The calls of `run_elastic`, on one rank and without its processes."""
    run = Run(
        job, "nestpipe", WindowConfig(2), steps=STEPS, log_dir=tmp_path / "log", evaluate_every=4, **COPIES
    )
    memory = Memory()

    class Stopped(Exception):
        pass

    def keep(self, trainer, *arguments):
        if trainer.next_step == 12:
            raise Stopped
        return PeerCopies.keep(self, trainer, *arguments)

    memory.copies.keep = keep.__get__(memory.copies)
    with pytest.raises(Stopped):
        loop.train(Communicators.local(), run, True, memory)
    del memory.copies.keep
    memory.evaluated = 4  # as if the rank that was lost had died in the evaluation after step 8
    found, expected = loop.train(Communicators.local(), run, True, memory), plain(replace(run, log_dir=None))
    assert found["steps_run"] == 4 and found["digest"] == expected["digest"]
    assert found["metrics"] == expected["metrics"]
    steps = [int(row["step"]) for row in rows(tmp_path / "log")]
    assert sorted(set(steps)) == [*range(1, STEPS + 1)] and steps.count(8) == 3  # evaluated twice


def test_resuming_needs_a_checkpoint(job, tmp_path):
    run = Run(job, checkpoint=tmp_path, resume=True, save_every=2, steps=4, elastic=True)
    with pytest.raises(ValueError, match="holds no checkpoint to resume"):
        loop.train(Communicators.local(), run, True, Memory())


@pytest.mark.slow
def test_too_few_ranks_do_not_go_on(job):
    run = Run(job, "nestpipe", WindowConfig(2), steps=STEPS, elastic=True, peer_copies=4, min_ranks=2)
    with (
        ElasticPool(2, min_ranks=2) as pool,
        pytest.raises(RankDiedError, match="since 2 are needed") as lost,
    ):
        pool.run(dying, run, Memory(), {0: "compute 5"})
    assert "rank 0: died (SIGKILL)" in str(lost.value)


@pytest.mark.if_changed
def test_replay_of_an_elastic_run_changes_no_bit(job):
    run = Run(job, "nestpipe", WindowConfig(2), steps=STEPS, replay=1.0, **COPIES)
    assert lose(run, 3, {1: "compute 5"})["digest"] == plain(replace(run, replay=0.0))["digest"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--peer-copies", 5], "--peer-copies and --min-ranks go with --elastic"),
        (["--min-ranks", 2], "--peer-copies and --min-ranks go with --elastic"),
        (["--elastic"], "--elastic needs a state to go back to"),
        (["--elastic", "--peer-copies", 5, "--slipstream"], "--elastic does not go with --slipstream"),
        (["--elastic", "--peer-copies", 5, "--trace", "t"], "--elastic does not go with --trace"),
        (["--elastic", "--peer-copies", 5, "--min-ranks", 3], "--min-ranks 3 is more than the 2 ranks"),
        (["--elastic", "--peer-copies", 5, "--accumulate", 2], "--peer-copies 5 is inside an update of 2"),
        (["--elastic", "--save-every", 5], "--save-every and --full-every go with --checkpoint"),
    ],
)
def test_options_that_do_not_go_together(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, output, _ = commands.invoke("train", "--world-size", 2, *words)
    assert code == 2 and says in output, output


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for ranks in /proc")
def test_the_command_goes_on_when_a_rank_is_killed(tmp_path):
    words = [*COMMAND, "--log-dir", tmp_path, "--json", tmp_path / "lost.json"]
    elastic = ["--world-size", "3", "--elastic", "--peer-copies", "10"]
    with subprocess.Popen(
        [*words, *elastic], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as command:
        ranks, deadline = [], time.monotonic() + 120
        while len(ranks) < 3 or _lines(tmp_path / "metrics.csv") < 15:
            assert time.monotonic() < deadline and command.poll() is None
            ranks = [rank for server in _children(command.pid) for rank in _children(server)]
            time.sleep(0.01)
        os.kill(ranks[1], signal.SIGKILL)
        output, _ = command.communicate(timeout=120)
    assert command.returncode == 0, output
    assert "RuntimeWarning: lost rank 1: " in output and "ranks 0, 2 go on" in output, output
    assert re.search(r"^going on with 2 ranks after step \d*0$", output, re.MULTILINE), output
    subprocess.run([*COMMAND, "--json", tmp_path / "whole.json"], check=True, capture_output=True)
    lost, whole = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("lost", "whole"))
    assert lost["digest"] == whole["digest"] and lost["world_size"] == 2


def _lines(path):
    return len(path.read_text().splitlines()) if path.exists() else 0


def _children(parent):
    """Ids of the processes of a parent, in the order of their starts."""
    return list(map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()))
