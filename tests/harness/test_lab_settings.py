"""Promise: what a lab is asked for is read word by word or refused, and emulated stages do their work."""

import re
from dataclasses import MISSING, fields, replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from tritonrec.harness.cli import app
from tritonrec.harness.lab import rounds
from tritonrec.harness.lab import settings as lab_settings
from tritonrec.harness.lab.figures import Figures
from tritonrec.harness.lab.network import LabError
from tritonrec.harness.lab.rounds import LabConfig
from tritonrec.harness.lab.settings import (
    PAPER,
    Emulation,
    parse_emulation,
    parse_proportions,
    parse_switches,
    settings,
    share,
)
from tritonrec.pipeline import Window, WindowConfig, WindowPlaces
from tritonrec.pipeline.places import Samples

# What is asked for.


def test_the_baseline_comes_first_and_nothing_twice():
    chosen = settings(["sequential", "dbp", "nestpipe"], [1, 4], {"clustering": True})
    assert [str(setting) for setting in chosen] == [
        "sequential N=1", "sequential N=4", "dbp N=1", "nestpipe N=1", "nestpipe N=4",
        "nestpipe N=1 clustering", "nestpipe N=4 clustering",
    ]  # fmt: skip


def test_copies_that_are_averaged_have_the_exact_ones_beside_them():
    chosen = settings(["nestpipe"], [4], {"replicas": 2, "average_every": 3, "first_use": True})
    assert [setting.label for setting in chosen] == [
        "sequential", "nestpipe", "nestpipe replicas=2 first_use",
        "nestpipe replicas=2 average_every=3 first_use APPROXIMATE",
    ]  # fmt: skip
    assert [setting.approximate for setting in chosen] == [False, False, False, True]


PLAIN = [each for each in fields(WindowConfig) if each.default is not MISSING]
"""All but those of the loss scale, which are fields of their own."""


def test_switches_are_the_fields_of_the_window():
    assert parse_switches(["clustering", "dedup=none", "fraction-bits=30", "replicas=2"]) == {
        "clustering": True, "dedup": "none", "fraction_bits": 30, "replicas": 2
    }  # fmt: skip
    for field in PLAIN:
        if field.name not in ("micro_batches", "seed"):
            text = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
            assert parse_switches([f"{field.name}={text}"]) == {field.name: field.default}


def test_an_unknown_switch_lists_those_there_are():
    record = {"dedup", "first_use", "taper", "skip_fetch", "exchanges", "exchange_sums", "exchange_precision"}
    names = {each.name for each in PLAIN} - {"micro_batches", "seed"} | {"replicas", "nodes"} | record
    known = re.escape(", ".join(sorted(names)))
    with pytest.raises(LabError, match=f"--switch 'clusterin': unknown; the switches are {known}$"):
        parse_switches(["clusterin"])
    with pytest.raises(LabError, match="unknown"):
        parse_switches(["micro_batches=3"])
    with pytest.raises(LabError, match="takes true or false"):
        parse_switches(["clustering=often"])
    with pytest.raises(LabError, match="takes a whole number"):
        parse_switches(["accumulate=1.5"])


def test_emulated_stages():
    assert parse_emulation("") == {}
    seconds = parse_emulation("lookup=60ms, compute=25")
    assert seconds.pop("compute") == 0.025
    assert seconds.keys() == {"prefetch", "h2d", "route", "retrieve"}
    assert sum(seconds.values()) == pytest.approx(0.06)
    for text in ("sleep=3", "compute", "compute=fast", "compute=-1", "compute=0", "compute=nan"):
        with pytest.raises(LabError, match="--emulate"):
            parse_emulation(text)


def test_proportions():
    assert parse_proportions("paper") == PAPER
    assert parse_proportions("40, 25.5") == {"lookup": 0.4, "communication": 0.255}
    for text in ("", "40", "60,40", "0,20", "-3,20", "a,b", "1,2,3"):
        with pytest.raises(LabError, match="--proportions takes"):
            parse_proportions(text)


def test_a_wrong_window_is_an_error_before_anything_is_made(job):
    with pytest.raises(LabError, match="nestpipe N=2 dedup=twice: dedup must be"):
        LabConfig(job, micro_batches=[2], switches={"dedup": "twice"})
    with pytest.raises(LabError, match="nestpipe N=2 replicas=3: 3 replicas do not divide 4 ranks"):
        LabConfig(job, 4, micro_batches=[2], switches={"replicas": 3})
    assert LabConfig(job, 4, micro_batches=[2], switches={"replicas": 2}).settings[-1].replicas == 2
    with pytest.raises(LabError, match="average_every=2: there is one copy of the tables"):
        LabConfig(job, 4, switches={"average_every": 2})
    with pytest.raises(LabError, match="replicas=2: replicas need dedup before the lookup"):
        LabConfig(job, 4, switches={"dedup": "exchange", "replicas": 2})
    # Measured are all steps but two: seven, which hold no whole number of threes.
    with pytest.raises(LabError, match=r"hold no whole number of averages: --steps 11$"):
        LabConfig(job, 4, switches={"replicas": 2, "average_every": 3}, steps=9)
    assert LabConfig(job, 4, switches={"replicas": 2, "average_every": 3}, steps=11).settings[-1].approximate
    with pytest.raises(LabError, match="give one of them"):
        LabConfig(job, seconds={"compute": 1.0}, proportions=PAPER)
    with pytest.raises(LabError, match="at least 4 steps"):
        LabConfig(job, steps=3)


# Emulated stages do their work.


class _Program:
    def __init__(self):
        self.done = []
        self.actions = {"compute": self._act, "retrieve": self._act, "exchange": self._act}

    def _act(self, places, micro_batch=None):
        self.done.append((places, micro_batch))


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
    assert slept == pytest.approx([0.04, 0.04, 0.02, 0.04])
    assert (emulation.tasks, emulation.overruns) == (4, 0)


def test_work_longer_than_its_time_is_counted(job):
    program, emulation = _Program(), Emulation({"compute": 1e-9})
    emulation.install(program)
    program.actions["compute"](window_of(job, 1), 0)
    assert (emulation.tasks, emulation.overruns) == (1, 1)


def test_micro_batches_share_by_samples(job):
    places = window_of(job, 3)  # 13 samples: 5, 5, 3
    assert [share(places, i) for i in range(3)] == [5 / 13, 5 / 13, 3 / 13]
    assert share(places, None) == 1
    places[Samples] = [places[Samples][0].select(torch.arange(0))] * 4
    assert share(places, 2) == 0.25


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
        (["--rate", "0"], "'--rate'"),
        (["--modes", "reference"], "takes some of"),
        (["--steps", "2"], "at least 4 steps"),
        (["--data", "movies"], "unknown data"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_clear_error(monkeypatch, arguments, message):
    from tritonrec.harness.lab import network

    monkeypatch.setattr(network.os, "geteuid", lambda: 0)
    monkeypatch.setattr(network.shutil, "which", lambda name: name)
    monkeypatch.setattr(rounds, "built", lambda *_: pytest.fail("a network was built"))
    result = CliRunner().invoke(app, ["lab", *arguments])
    assert result.exit_code == 2
    text = " ".join(result.output.replace("│", " ").split())
    assert message in text and "Traceback" not in text
