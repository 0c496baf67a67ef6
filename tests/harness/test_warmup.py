"""Promise: after `tritonrec warmup` a run compiles nothing; the shell completes commands and options."""

import os
import subprocess
import sys

import pytest
from speeds import slow_except
from typer.testing import CliRunner

from tritonrec.embedding import TablePolicy
from tritonrec.harness import warmup
from tritonrec.harness.cli import app
from tritonrec.harness.job import Job
from tritonrec.harness.train.run import Run
from tritonrec.kernels import compilation, dispatch
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import WindowConfig

COUNTED = """
import sys
from numba.core import event
class Counter(event.Listener):
    count = 0
    def on_start(self, _): Counter.count += 1
    def on_end(self, _): pass
event.register("numba:compile", Counter())
from tritonrec.harness.cli import app
try:
    if sys.argv[1] == "retrieve":
        import torch
        from tritonrec.serving.retrieval import best_items
        seen, offsets = torch.tensor([1, 3, 3]), torch.tensor([0, 2, 2, 3])
        best_items(torch.randn(3, 8), torch.randn(70, 8), 5, seen, offsets)
        from tritonrec.nn import HSTU, SASRec, HSTUConfig, SASRecConfig
        from tritonrec.serving.whole import Whole
        given = torch.randn(3, 64), torch.tensor([0, 3]), torch.arange(3)
        for model in (HSTU(HSTUConfig()), SASRec(SASRecConfig())):
            Whole(model).vectors(None, *given)
        from tritonrec.nn import DLRM, DLRMConfig
        from tritonrec.serving import ExportedTable
        from tritonrec.serving.whole import WholeClicks
        clicks = WholeClicks(DLRM(DLRMConfig(("a", "b"))))
        clicks.logits(None, torch.randn(3, 13), torch.randn(3, 2, 16))
        ExportedTable(torch.arange(70), torch.randn(70, 8), 0, 0, 1.0, "initial").rows(seen)
    else:
        app(sys.argv[1:])
finally:
    print("compiled", Counter.count)
"""
TRAIN = "train --data zipf:users=50,items=70,ratings=1,seed=2 --model dlrm --optimizer sgd --dim 24 --steps 4"


def test_every_model_is_run_with_one_rule_and_one_model_with_every_rule(monkeypatch):
    runs, lines = [], []

    def train(model, rule, target, policy):
        runs.append((model, rule) if policy == TablePolicy() else (model, rule, "policies"))
        compilation.note_compilation()

    monkeypatch.setattr(warmup, "_train", train)
    for rest in ("_number_words", "_retrieve"):
        monkeypatch.setattr(warmup, rest, lambda: compilation.note_compilation())
    before = list(compilation.compiling)
    found = warmup.warm_up(["hstu", "dlrm"], ["adam", "sgd"], report=lines.append)
    assert runs == [("hstu", "adam"), ("dlrm", "adam"), ("hstu", "sgd"), ("hstu", "adam", "policies")]
    assert lines[1] == "dlrm with adam" and len(lines) == 6
    assert found.compiled == 6 and compilation.compiling == before


def test_for_a_gpu_the_run_of_a_config_is_compiled(monkeypatch, tmp_path):
    asked = []

    def warm_up_gpu(arch, runs, report):
        asked.append((arch, [(run.job.model, run.optimizer, run.job.sizes.dim) for run in runs]))
        return warmup.Warmed(3, 1.0)

    monkeypatch.setattr(warmup, "warm_up_gpu", warm_up_gpu)
    file = tmp_path / "run.toml"
    file.write_text('optimizer = "sgd"\n[job]\nmodel = "fuxi"\n[job.sizes]\ndim = 40\n')
    run = CliRunner().invoke
    done = run(app, ["warmup", "--target", "sm_80", "--config", str(file)])
    assert done.exit_code == 0 and "compiled 3 programs for sm_80 in 1 s" in done.output, done.output
    default = HSTUConfig().dim
    words = "warmup --target sm_90 --models grm,dlrm --optimizers adam,sgd"
    assert run(app, words.split()).exit_code == 0
    assert asked == [
        ("sm_80", [("fuxi", "sgd", 40)]),
        ("sm_90", [("grm", "adam", default), ("dlrm", "adam", default), ("grm", "sgd", default)]),
    ]
    done = run(app, ["warmup", "--config", str(file)])
    assert done.exit_code == 2 and "--target too" in " ".join(done.output.replace("│", "").split())
    for words in ("--target sm_90 --impl cpu", f"--target sm_90 --config {file} --models hstu"):
        done = run(app, ["warmup", *words.split()])
        assert done.exit_code == 2 and "leave" in done.output and len(asked) == 2, done.output
    done = run(app, ["warmup", "--target", "sm_90", "--config", str(tmp_path / "none.toml")])
    assert done.exit_code == 2 and "none.toml" in done.output


def test_the_run_of_a_gpu_is_short_and_emulated_with_its_own_sizes_and_window(monkeypatch):
    runs, lines = [], []
    monkeypatch.setattr(warmup.loop, "train", lambda ranks, run, quiet: runs.append((run, dispatch.emulated)))
    job = Job("ml-100k", "hstu", batch_size=999, sizes=HSTUConfig(dim=40), stream=True)
    given = Run(job, "fwp", WindowConfig(5), "adagrad", steps=70, log_every=3)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    warmup.warm_up_gpu("sm_80", [given], lines.append)
    assert [run.job.placement.storage for run, _ in runs] == ["device", "cached"] and len(lines) == 2
    for run, emulated in runs:
        assert emulated == (8, 0) and dispatch.emulated is None
        assert (run.mode, run.window, run.optimizer, run.steps) == ("fwp", WindowConfig(5), "adagrad", 3)
        assert run.job.sizes.dim == 40 and run.job.batch_size == 16 and run.job.target.emulated


@pytest.mark.slow
@pytest.mark.timeout(1800)  # all kernels are compiled: two minutes of an idle machine
def test_a_run_after_the_warmup_compiles_nothing(tmp_path):
    def run(words):
        done = subprocess.run(
            [sys.executable, "-c", COUNTED, *words.split()], capture_output=True, text=True, timeout=900,
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        )  # fmt: skip
        assert done.stdout.splitlines()[-1].startswith("compiled"), done.stderr[-2000:]
        return done

    first = run("warmup --models dlrm --optimizers sgd")
    assert int(first.stdout.split()[-1]) > 20
    said = first.stdout.splitlines()[-2]
    assert said.startswith("compiled ") and said.split()[1] == first.stdout.split()[-1]
    for words in (TRAIN, "retrieve"):
        again = run(words)
        assert again.stdout.split()[-1] == "0" and "compiling" not in again.stderr


@pytest.mark.parametrize(
    ("words", "wanted"),
    slow_except([("bis", "bisect")], [("", "export"), ("bis", "bisect"), ("export --comp", "--compiled")]),
)
def test_the_shell_completes_commands_and_options(words, wanted):
    asked = {"_TRITONREC_COMPLETE": "complete_bash", "COMP_WORDS": f"tritonrec {words}"}
    asked["COMP_CWORD"] = str(max(1, len(words.split())))
    program = "from tritonrec.harness.cli import app; app(prog_name='tritonrec')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **asked}
    )
    assert wanted in done.stdout.split(), done.stderr
