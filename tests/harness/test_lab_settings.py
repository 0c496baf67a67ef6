"""Promise: what a lab is asked for is read word by word or refused, and emulated stages do their work."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from tritonrec.harness.cli import app
from tritonrec.harness.lab import rounds
from tritonrec.harness.lab import settings as lab_settings
from tritonrec.harness.lab.figures import Figures
from tritonrec.harness.lab.rounds import LabConfig
from tritonrec.harness.lab.settings import (
    Emulation,
)
from tritonrec.harness.network import LabError
from tritonrec.pipeline import NESTPIPE, Window, WindowPlaces
from tritonrec.pipeline.places import Dense, Samples
from tritonrec.pipeline.schedule import with_early_dense

# What is asked for.
"""All but those of the loss scale, which are fields of their own."""


# Emulated stages do their work.


class _Program:
    def __init__(self):
        self.done = []
        self.actions = {"compute": self._act, "retrieve": self._act, "exchange": self._act}
        self.schedule, self.completed = with_early_dense(NESTPIPE), []
        self.early = SimpleNamespace(
            shares=[0.4, 0.1], completed=lambda: self.completed.append(len(self.done))
        )
        self.run_places = {Dense: SimpleNamespace(flight=SimpleNamespace(early=self.early))}

    def _act(self, places, micro_batch=None):
        self.done.append((places, micro_batch))
        if micro_batch == 1:
            self.early.completed()
            self.early.completed()


def window_of(job, micro_batches):
    batch = job.loader().batch(0)
    places = WindowPlaces(Window(0, [batch], 0))
    parts = torch.arange(batch.num_samples).split(-(-batch.num_samples // micro_batches))
    places[Samples] = [batch.select(each) for each in parts]
    return places


def test_an_emulated_stage_works_then_waits_for_the_rest(job, monkeypatch):
    slept = []
    clock = SimpleNamespace(perf_counter=lambda: 5.0 + len(program.done) * 0.01, sleep=slept.append)
    monkeypatch.setattr(lab_settings, "time", clock)  # every action takes 10 ms
    program, emulation = _Program(), Emulation({"compute": 0.13, "retrieve": 0.05})
    untouched = program.actions["exchange"]
    emulation.install(program)
    assert program.actions["exchange"] is untouched
    places = window_of(job, 3)  # 13 samples: 5, 5, 3
    for i in range(3):
        program.actions["compute"](places, i)
    program.actions["retrieve"](places)
    assert program.done == [(places, 0), (places, 1), (places, 2), (places, None)]
    # gradients of 0.6 of the model are complete when 0.6 of a backward is over, which has 2/3 of the task
    parts = [0.05 * (1 / 3 + each * 2 / 3) - 0.01 for each in (0.6, 0.9)]
    assert slept == pytest.approx([0.04, *parts, 0.04, 0.02, 0.04])
    assert program.completed == [2, 2]
    assert (emulation.tasks, emulation.overruns) == (4, 0)


# Of a probe and of the command.


def test_proportions_follow_from_the_probe(job):
    seen = Figures(1.0, 0.1, 0.1, 0.2, 0.2, 0.65, 0.0, 1, 0, 1, 1, 1, 1.0, 0, 0, 0, 0, 0)
    costs = {"compute": rounds.StageCost("compute", 1.0, 0.6, None)}
    probe = rounds.Measurement(seen, costs, "identical", 0, 0)
    plan = LabConfig(job, proportions={"lookup": 0.5, "communication": 0.2})
    seconds = rounds._proportional(probe, plan)
    compute = seconds.pop("compute")
    assert sum(seconds.values()) == pytest.approx(0.5)  # of a step of 0.2 / 0.2
    assert compute == pytest.approx(0.3 - (1.0 - 0.1 - 0.2 - 0.6))  # updates and write-back have their part
    fast = replace(probe, figures=replace(seen, communication=0.01, exposed=0.01, step=0.9))
    with pytest.raises(LabError, match="Lower --rate"):
        rounds._proportional(fast, plan)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--switch", "magic"], "unknown; the switches are"),
        (["--emulate", "sleep=3"], "no such stage"),
        (["--emulate", "compute=3", "--proportions", "paper"], "give one of them"),
        (["--proportions", "90,20"], "takes paper"),
        (["--proportions", "75,25"], "takes paper"),
        (["--rate", "0"], "'--rate'"),
        (["--switch", "accumulate=2"], "one update of one batch: leave out accumulate"),
        (["--switch", "replicas=2", "--switch", "average_every=4"], "all but 2, hold no whole number"),
        (["--modes", "reference"], "takes some of"),
        (["--steps", "2"], "at least 4 steps"),
        (["--data", "movies"], "unknown data"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_clear_error(monkeypatch, arguments, message):
    from tritonrec.harness import network

    monkeypatch.setattr(network.os, "geteuid", lambda: 0)
    monkeypatch.setattr(network.shutil, "which", lambda name: name)
    monkeypatch.setattr(rounds, "built", lambda *_: pytest.fail("a network was built"))
    result = CliRunner().invoke(app, ["lab", *arguments])
    assert result.exit_code == 2
    text = " ".join(result.output.replace("│", " ").split())
    assert message in text and "Traceback" not in text
