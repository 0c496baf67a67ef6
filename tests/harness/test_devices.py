"""Promise: `verify` and `train` compute on the kernels and the device that they are given."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from commands import invoke

from tritonrec.distributed import Communicators, RankPool
from tritonrec.harness import devices
from tritonrec.harness.cli import verify
from tritonrec.harness.devices import Target, take_gpu_here, take_own_gpu, validate_device
from tritonrec.harness.job import Job
from tritonrec.harness.train import evaluate as evaluation
from tritonrec.harness.train import launch, loop
from tritonrec.harness.train.run import Run
from tritonrec.harness.verify.cases import small_table
from tritonrec.harness.verify.variants import CPU_BITS
from tritonrec.kernels import dispatch
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import PIPELINED, RowsOfRanks, next_item_scores

ROOT = Path(__file__).parents[2]


def run(*arguments):
    """The command `tritonrec` in a process whose Triton kernels are compiled; its output."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tritonrec", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.slow
def test_verify_proves_every_mode_on_emulated_kernels(tmp_path):
    file = tmp_path / "report.json"
    code, text = run("verify", "--impl", "triton", "--json", file)
    assert code == 0 and "38 of 38 cases identical" in text and "impl triton, emulated sm_90" in text, text
    report = json.loads(file.read_text())
    assert report["environment"]["emulated"] == "sm_90"
    assert report["environment"]["job"]["target"] == {"impl": "triton", "device": "cpu"}
    rows = [*product(PIPELINED, (1, 2), (4,), ("host", "device", "cached"))]
    for variant in ("", CPU_BITS):
        cases = [case for case in report["cases"] if case["variant"] == variant]
        what = "mode", "world_size", "micro_batches", "storage"
        assert [tuple(case[name] for name in what) for case in cases] == rows
    assert all(case["identical"] and case["bytes_compared"] for case in report["cases"])


@pytest.mark.parametrize(("device", "loses"), [("cpu", True), ("cuda", False)])
def test_ranks_are_lost_on_the_cpu_alone(monkeypatch, device, loses):
    """Elastic training communicates over gloo."""
    given = []

    def verify_contract(job, cases, faults, *rest):
        given.extend([*cases, *(fault.case for fault in faults)])
        raise ValueError("enough")

    monkeypatch.setattr(verify, "validate_device", lambda *arguments: None)
    monkeypatch.setattr(verify, "verify_contract", verify_contract)
    code, output, _ = invoke(
        "verify", "--device", device, "--inject-faults", "--data", "zipf:users=40,items=60"
    )
    assert code == 2 and "enough" in output
    assert any(bool(case.changes.on_ranks) for case in given) == loses and len(given) > 50
    assert ("lost-rank is left out" in output) != loses


@pytest.mark.slow
def test_train_takes_an_implementation():
    small = [
        "--data",
        "zipf:users=40,items=60",
        "--batch-size",
        8,
        "--negatives",
        1,
        "--dim",
        8,
        "--layers",
        1,
    ]
    code, text = run("train", "--impl", "triton", "--steps", 2, *small)
    assert code == 0 and "step 2: loss" in text, text


def chosen(monkeypatch, *options):
    """The job and the cases that `verify` would run."""
    seen = []

    def verify_contract(job, cases, *rest):
        seen[:] = [job, cases]
        raise ValueError("stop here")

    monkeypatch.setattr(verify, "verify_contract", verify_contract)
    code, text, _ = invoke("verify", *options)
    return seen if seen else (code, text)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_what_is_slow_gets_a_small_job_and_a_small_table(monkeypatch, impl):
    job, cases = chosen(monkeypatch, "--impl", impl)
    assert job.target == Target(impl) and job.batch_size == 8 and job.sizes.dim == 8
    assert cases == small_table(PIPELINED, [1, 2], [4])
    job, cases = chosen(
        monkeypatch, "--impl", impl, "--world-size", "3", "--micro-batches", "2,5", "--steps", 7
    )
    assert {(c.world_size, c.micro_batches, c.steps) for c in cases} == {(3, 2, 7), (3, 5, 7)}
    job, cases = chosen(monkeypatch, "--impl", impl, "--quick")
    assert job.batch_size == 8 and {case.variant for case in cases} > {"lru", "dlrm-criteo"}


def test_the_cpus_kernels_get_the_whole_table(monkeypatch):
    job, cases = chosen(monkeypatch, "--impl", "cpu")
    assert job.target == Target("cpu") and len(cases) > 80


def test_the_small_table_has_every_optimizer_with_and_without_clustering():
    cases = small_table(PIPELINED, [1, 2], [4])
    assert len(cases) == 38 and len({case.optimizer for case in cases}) == 3
    for variant in ("", CPU_BITS):
        chosen = [case for case in cases if case.variant == variant]
        assert [(c.mode, c.world_size, c.micro_batches, c.storage) for c in chosen] == [
            *product(PIPELINED, (1, 2), (4,), ("host", "device", "cached"))
        ]
        references = {c.reference(replace(Job(), target=Target("triton"))).job.target.impl for c in chosen}
        assert references == {"cpu" if variant else "triton"}
    assert {case.clustering for case in cases} == {False, True}
    assert {case.storage for case in cases if case.variant == "policies"} == {"device", "cached"}


def test_gpus_that_are_not_there_are_missed_at_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    validate_device("cuda", 1)
    validate_device("cpu", 9)
    code, text = chosen(monkeypatch, "--device", "cuda", "--world-size", "1,2")
    assert code == 2 and "2 ranks need a GPU each, and torch finds 1 here" in text


@pytest.mark.parametrize(
    ("visible", "own"), [(None, "1"), ("4,6", "6"), ("GPU-a,GPU-b", "GPU-b"), ("5", "5")]
)
def test_each_rank_takes_a_gpu_of_its_own(monkeypatch, visible, own):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    take_own_gpu(1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own


def test_a_rank_that_a_launcher_started_takes_the_gpu_of_its_number_on_the_machine(monkeypatch):
    for name in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    take_gpu_here("cpu")
    with pytest.raises(ValueError, match="set LOCAL_RANK"):
        take_gpu_here("cuda")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    with pytest.raises(ValueError, match="names 2 GPUs, and rank 2"):
        take_gpu_here("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    take_gpu_here("cuda")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"


SMALL = ["--data", "zipf:users=40,items=60", "--steps", "2"]


def test_train_starts_a_rank_for_each_gpu(monkeypatch):
    made = []

    def rank_pool(*given):
        made.append(given)
        raise ValueError("stop here")

    monkeypatch.setattr(launch, "rank_pool", rank_pool)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    code, text, _ = invoke("train", *SMALL, "--device", "cuda", "--world-size", "2")
    assert code == 2 and "stop here" in text and made == [("cuda", [(2, 1, 1)], timedelta(seconds=60))]
    code, text, _ = invoke("train", *SMALL, "--device", "cuda", "--world-size", "3")
    assert code == 2 and "3 ranks need a GPU each, and torch finds 2 here" in text
    for other in (
        ["--elastic", "--peer-copies", "2"],
        ["--slipstream", "--model", "dlrm", "--data", "criteo"],
    ):
        code, text, _ = invoke("train", *SMALL, "--device", "cuda", *other)
        assert code == 2 and "does not go with" in text and "device" in text, text


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("device", "memory", "said"),
    [("cuda", None, 1), ("cpu", None, 0), ("cuda", SimpleNamespace(called=True, copies=None), 0)],
)
def test_where_tables_are_is_said_once_beside_an_accelerator(monkeypatch, capsys, device, memory, said):
    class Entered(Exception):
        """The training begins."""

    class Begins(ExitStack):
        def __init__(self, *given, **options):
            super().__init__()

        def __getattr__(self, name):
            raise Entered

    def resume(*given):
        raise Entered

    made = Job(SMALL[1]).build("adam")
    monkeypatch.setattr(Job, "build", lambda *_: made)
    monkeypatch.setattr(loop, "Trainer", Begins)
    monkeypatch.setattr(loop, "resume", resume)
    run = Run(Job(SMALL[1], target=Target("auto", device)), steps=2)
    with pytest.raises(Entered):
        loop.train(Communicators.local(), run, memory=memory)
    line = "item: keys and rows in host memory, looked up by the host"
    assert capsys.readouterr().out.count(line) == said


class Elsewhere:
    """Tables that give rows where they are asked from."""

    def peek(self, lookups, over):
        self.devices = {lookup.ids.device.type for lookup in lookups.values()}
        return {
            name: torch.zeros(len(lookup.ids), 8, dtype=torch.float32, device=lookup.ids.device)
            for name, lookup in lookups.items()
        }


@pytest.mark.parametrize(
    ("model", "data", "judge"),
    [
        ("hstu", SMALL[1], "rank_held_out"),
        ("fuxi", SMALL[1], "rank_held_out"),
        ("dlrm", "criteo:samples=90", "evaluate_clicks"),
    ],
)
def test_an_evaluation_computes_on_the_models_device(monkeypatch, model, data, judge):
    """A device without memory stands for a GPU: what is left on the host is refused beside it."""
    job = Job(data, model, sizes=HSTUConfig(8, 1, 2, 4, 4))
    computed = []

    def judged(score, loader, part="test", scored=None):
        computed.append(score(next(iter(loader.evaluation_batches(part=part)))))

    def ranked(model, rows, loader, *rest):
        judged(lambda batch: next_item_scores(model.eval(), rows, loader.catalogue)(batch.history), loader)

    monkeypatch.setattr(evaluation, judge, ranked if judge == "rank_held_out" else judged)
    tables = Elsewhere()
    evaluation.evaluate_model(job.build("adam")[0].to("meta"), RowsOfRanks(tables), job.loader())
    assert computed[0].device.type == "meta" and tables.devices == {"meta"}


def test_ranks_on_gpus_exchange_by_nccl(monkeypatch):
    made = []
    monkeypatch.setattr(devices, "RankPool", lambda *args, **options: made.append(options))
    devices.rank_pool("cuda", [(2, 1)], timedelta(1))
    devices.rank_pool("cpu", [(2, 1)], timedelta(1))
    assert made == [
        {"enter": take_own_gpu, "backend": "cpu:gloo,cuda:nccl"}, {"enter": None, "backend": "gloo"}
    ]  # fmt: skip


def backend_of(communicators):
    return str(dist.get_backend_config(communicators.communication.group))


@pytest.mark.slow
@pytest.mark.multi_rank
def test_a_pools_groups_have_its_backend():
    with RankPool((2,), backend="cpu:gloo") as pool:
        assert pool.run(backend_of, 2) == ["cpu:gloo"] * 2


def test_a_process_that_emulates_already_goes_on(monkeypatch):
    monkeypatch.setattr(dispatch, "emulated", (8, 0))
    with devices.kernels_of(Target("triton")):
        assert dispatch.emulated == (8, 0)


def test_the_interpreter_is_no_emulator(monkeypatch):
    if dispatch.emulated is not None:
        pytest.skip("an emulation is under way")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1 is set"), devices.kernels_of(Target("triton")):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(("model", "data"), [("hstu", SMALL[1]), ("dlrm", "criteo:samples=90")])
def test_a_run_on_a_pretended_gpu_trains_evaluates_saves_and_goes_on(monkeypatch, tmp_path, model, data):
    """Its counterpart in every run is the evaluation above."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    program = f"""
import sys
sys.path.insert(0, "ci/emulator")
from pretended import pretended
from tritonrec.distributed import Communicators
from tritonrec.harness.devices import Target
from tritonrec.harness.emulator import Emulation, emulated
from tritonrec.harness.job import Job
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import WindowConfig

job = Job({data!r}, {model!r}, batch_size=12, max_seq_len=16, num_negatives=3, bottom=(8,), top=(8,),
          sizes=HSTUConfig(8, 1, 2, 4, 4, max_seq_len=16), target=Target("auto", "cuda"))
with emulated(Emulation("sm_90", races=False, uninitialised=False)), pretended():
    for steps in (2, 3):
        run = Run(job, "sequential", WindowConfig(2), steps=steps, checkpoint={str(tmp_path)!r},
                  resume=steps == 3, evaluate_every=1, trust_model=True)
        found = train(Communicators.local(), run, True)
        assert found["step"] == steps and found["metrics"], found
"""
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
