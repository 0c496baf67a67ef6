"""Promise: `tritonrec train` in 16 bits ends alike on any ranks and after a restart, and logs its scale."""

import json
from dataclasses import replace

import pytest
import torch
from speeds import slow_except

from tritonrec.distributed import Communicators
from tritonrec.harness.train.config import from_tables
from tritonrec.harness.train.evaluate import evaluate_model
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.reports import line_of
from tritonrec.harness.train.run import Run
from tritonrec.pipeline import LossScaling, RowsOfRanks, WindowConfig
from tritonrec.settings import with_values

FP16 = {
    "precision": "fp16",
    "exchange_precision": "bf16",
    "loss_scaling": LossScaling(2.0**19, growth_interval=2),
}
WINDOWS = {"fp16": FP16, "bf16": {"precision": "bf16", "exchange_precision": "fp16"}}


def same(one, other):
    return all(one[name] == other[name] for name in ("step", "loss", "metrics", "digest"))


@pytest.mark.if_changed
@pytest.mark.multi_rank
@pytest.mark.parametrize("precision", slow_except(["fp16"], WINDOWS))
def test_ranks_and_a_restart_change_nothing(pool, job, tmp_path, precision):
    shared = WINDOWS[precision]
    alone = Run(job, "reference", with_values(WindowConfig(), shared), steps=7)
    reference = train(Communicators.local(), alone, quiet=True)
    run = Run(job, "nestpipe", with_values(WindowConfig(3), shared), steps=4, checkpoint=str(tmp_path))
    pool.run(train, 2, run, True)
    log = tmp_path / "log.jsonl"
    resumed = replace(run, mode="dbp", steps=7, resume=True, json_lines=log)
    assert same(train(Communicators.local(), resumed, quiet=True), reference)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(("loss_scale" in line) == (precision == "fp16") for line in lines[:3])
    plain = train(Communicators.local(), replace(alone, window=WindowConfig()), quiet=True)
    assert plain["digest"] != reference["digest"]
    other = replace(resumed, window=WindowConfig(3), steps=8, json_lines=None)
    said = f"exchange_precision .* in the checkpoint, float32 now; precision {precision} in the checkpoint"
    with pytest.raises(ValueError, match=said):
        train(Communicators.local(), other, quiet=True)


def test_an_evaluation_computes_as_training_does(job):
    model, tables, _ = job.build("adam")
    found = {}
    for precision in ("float32", "bf16"):
        seen = []
        handle = model.layers[0].register_forward_hook(
            lambda *_, seen=seen: seen.append(torch.is_autocast_enabled("cpu"))
        )
        found[precision] = evaluate_model(model, RowsOfRanks(tables), job.epochs(), precision)
        handle.remove()
        assert {*seen} == {precision == "bf16"} and model.training
    assert found["float32"] == pytest.approx(found["bf16"], abs=0.2)


def test_a_config_file_sets_it():
    tables = {"window": {"precision": "fp16", "loss_scaling": {"init_scale": 1024}}}
    window = from_tables(Run(None, window=WindowConfig(2)), tables, "run.toml").window
    assert window == WindowConfig(2, precision="fp16", loss_scaling=LossScaling(1024.0))
    with pytest.raises(ValueError, match=r"run.toml: init_scale must be a power of two, got 1000"):
        from_tables(Run(None), {"window": {"loss_scaling": {"init_scale": 1000}}}, "run.toml")


def test_a_line_says_the_scale():
    values = {"loss": 1.0, "grad_norm": 2.0, "loss_scale": 65536.0, "lr": 0.1}
    assert line_of(1, 2, values) == "step 1 of 2: loss 1.0000, gradient norm 2, loss scale 65536, lr 0.1"
