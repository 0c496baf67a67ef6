"""Promise: `train --spill` whose memory ends goes on by itself with rows on disk, and with the same bits."""

import json
import subprocess
import sys
import weakref
from dataclasses import replace

import commands
import pytest

from tritonrec.capacity import MemoryWatch
from tritonrec.distributed import Communicators
from tritonrec.embedding import Placement
from tritonrec.harness.cli.job import ready
from tritonrec.harness.job import Job
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import WindowConfig

SIZES = HSTUConfig(dim=8, heads=2, max_seq_len=8)
JOB = Job("zipf:users=60,items=300,seed=1", batch_size=8, max_seq_len=8, sizes=SIZES)
RUN = ready(Run(JOB, window=WindowConfig(2), steps=30, memory_limit="99GiB"))
TRAIN = ["--data", JOB.data, "--dim", "8", "--max-seq-len", "8", "--batch-size", "8", "--steps", "30"]


@pytest.fixture
def memory_ends(monkeypatch):
    """Of the last rank alone, after step 9 of tables in memory; what went before a disk is freed: collections
    of ranks as threads pass each other over.
    """
    gone = []

    def look(watch, step):
        group, here = watch._trainer.tables.groups[0], watch._trainer.communicators
        if group.table.placement.path:
            assert gone and (here.world_size > 1 or not gone[0]())
        elif step == 9:
            gone.append(weakref.ref(group.table))
            if here.rank == here.world_size - 1:
                watch.ended = "no memory"
                here.stop.set()

    monkeypatch.setattr(MemoryWatch, "on_step_end", look)


def test_memory_goes_back_before_rows_go_to_a_file(memory_ends, tmp_path, monkeypatch):
    """What tables in memory had would be kept for them otherwise, beside those on disk."""
    returned = []
    monkeypatch.setattr(sys.modules[train.__module__], "return_freed_memory", returned.append)
    run = replace(RUN, checkpoint=tmp_path / "run", spill=f"64KiB:{tmp_path}")
    assert train(Communicators.local(), run, True)["step"] == 30 and returned == [1 << 30]


def test_a_run_that_a_user_stops_stays_stopped(monkeypatch, tmp_path):
    def look(watch, step):
        if step == 9:
            watch._trainer.communicators.stop.set()

    monkeypatch.setattr(MemoryWatch, "on_step_end", look)
    run = replace(RUN, checkpoint=tmp_path / "run", spill=f"64KiB:{tmp_path}")
    found = train(Communicators.local(), run, True)
    assert found["stopped"] and not found["out_of_memory"] and found["step"] < 30
    assert not found["tables"]["disk"]


@pytest.mark.parametrize(("storage", "then"), [("auto", "disk"), ("host", "disk"), ("cached", "cached")])
def test_what_goes_on_has_the_settings_of_the_run_but_for_its_rows(storage, then, tmp_path):
    """A log that new data was added to, and settings that were changed, are those of its first half."""
    job = replace(JOB, placement=Placement(storage))
    run = replace(
        RUN, job=job, checkpoint=tmp_path, spill="3MiB:a:b", resume=True, new_data=True, changed=("job.lr",),
        plan=tmp_path / "plan.json",
    )  # fmt: skip
    on_disk = Placement(then, path="a:b", memory="3MiB")
    assert run.spilled() == replace(
        run,
        job=replace(job, placement=on_disk),
        resume="auto",
        new_data=False,
        changed=(),
        plan=None,
        spill="",
    )


def test_rows_on_a_device_do_not_spill(tmp_path):
    with pytest.raises(ValueError, match="spill goes with rows in host memory and a limit"):
        replace(RUN, job=replace(JOB, placement=Placement("device")), checkpoint=tmp_path, spill="3MiB:/data")


SPILLS = """
from tritonrec.capacity import MemoryWatch
from tritonrec.distributed import Communicators
from tritonrec.embedding import Placement
from tritonrec.__main__ import main

def look(watch, step):
    here, path = watch._trainer.communicators, watch._trainer.tables.groups[0].table.placement.path
    if step == 9 and here.rank == 1 and not path:
        watch.ended = "no memory"
        here.stop.set()

MemoryWatch.on_step_end = look
main()
"""


@pytest.mark.if_changed
def test_ranks_of_a_launcher_go_on_with_the_same_bits(tmp_path):
    whole, spilled, script = (tmp_path / name for name in ("whole.json", "spilled.json", "spills.py"))
    code, output, _ = commands.invoke("train", *TRAIN, "--memory-limit", "none", "--json", whole)
    assert code == 0, output
    script.write_text(SPILLS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    words = ["--checkpoint", tmp_path / "run", "--spill", f"1MiB:{tmp_path}", "--json", spilled]
    done = subprocess.run([*launch, "train", *TRAIN, *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("going on with rows on disk") == 1
    found = json.loads(spilled.read_text())
    assert found["digest"] == json.loads(whole.read_text())["digest"]
    assert found["tables"]["disk"] > 0 and found["step"] == 30


@pytest.mark.if_changed
def test_the_command_goes_on_with_the_same_bits(memory_ends, tmp_path):
    whole, spilled = tmp_path / "whole.json", tmp_path / "spilled.json"
    code, output, _ = commands.invoke("train", *TRAIN, "--memory-limit", "none", "--json", whole)
    assert code == 0, output
    words = ["--checkpoint", tmp_path / "run", "--spill", f"1MiB:{tmp_path}", "--log-dir", tmp_path / "log",
             "--memory-limit", "99GiB"]  # fmt: skip
    code, output, _ = commands.invoke("train", *TRAIN, *words, "--json", spilled)
    assert code == 0 and f"going on with rows on disk: 1MiB:{tmp_path}" in output, output
    assert "--resume" not in output
    found = json.loads(spilled.read_text())
    assert found["digest"] == json.loads(whole.read_text())["digest"]
    assert 0 < found["steps_run"] < 22 and found["tables"]["disk"] > 0 and found["step"] == 30
    logged = [line.split(",")[0] for line in (tmp_path / "log/metrics.csv").read_text().splitlines()[1:]]
    assert [int(step) for step in logged if step][:30] == [*range(1, 31)]


@pytest.mark.if_changed
@pytest.mark.parametrize("spill", ["", "64KiB:"])
def test_one_rank_without_memory_ends_all_or_takes_all_to_disk(memory_ends, spill, tmp_path):
    run = replace(RUN, checkpoint=tmp_path / "run", spill=spill and f"{spill}{tmp_path}")
    whole = run_ranks(2, lambda communicators: train(communicators, replace(RUN, memory_limit="none"), True))
    found = run_ranks(2, lambda communicators: train(communicators, run, True))
    assert [each["out_of_memory"] for each in found] == [not spill] * 2
    assert [each["digest"] == whole[0]["digest"] for each in found] == [bool(spill)] * 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--spill", "1MiB:."], "spill takes MEMORY:DIRECTORY, such as 2GiB:/data, and goes on from a"),
        (["--spill", "1MiB", "--checkpoint", "run"], "spill takes MEMORY:DIRECTORY"),
        (["--spill", "lots:.", "--checkpoint", "run"], "disk_memory"),
        (["--spill", "1MiB:nowhere", "--checkpoint", "run"], "nowhere' cannot be made"),
        (["--spill", "1MiB:.", "--checkpoint", "run", "--memory-limit", "none"], "goes with rows in host"),
        (["--spill", "1MiB:.", "--checkpoint", "run", "--storage", "disk", "--disk-path", "."], "goes with"),
        (["--spill", "1MiB:.", "--checkpoint", "run", "--slipstream"], "--replay and --spill do not go with"),
        (["--spill", "1MiB:.", "--checkpoint", "run", "--elastic"], "--elastic does not go with --spill"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, output, _ = commands.invoke("train", *TRAIN, *words)
    assert code == 2 and says in output, output
