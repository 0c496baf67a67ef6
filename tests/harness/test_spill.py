"""Promise: `train --spill` whose memory ends goes on by itself with rows on disk, and with the same bits."""

import json
import subprocess
import sys
import weakref
from dataclasses import replace

import commands
import pytest

from tritonrec.capacity import MemoryWatch
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


SPILLS = """
from tritonrec.capacity import MemoryWatch
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
        (["--spill", "1MiB:nowhere", "--checkpoint", "run"], "'nowhere' cannot be made"),
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
