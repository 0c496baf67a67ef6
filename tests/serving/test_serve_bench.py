"""Promise: the figures of `tritonrec serve-bench` are what they say, and its predictions were compared."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tritonrec.harness.cli import app
from tritonrec.harness.serve import report
from tritonrec.harness.serve import rounds as bench
from tritonrec.harness.serve import run as on_ranks
from tritonrec.harness.serve import served as served_module
from tritonrec.harness.serve.served import Served, export_checkpoint, served_batches, served_dlrm
from tritonrec.serving import Predictor, infer
from tritonrec.serving.bounded_lag import BoundedLagAllToAll

SERVED = Served(2000, 16)
DELAYS = np.random.default_rng(5).uniform(0, 0.01, (4, 50))


def test_without_a_bound_everybody_pays_for_the_longest_delay_and_with_a_large_one_for_the_own():
    by_bound = [bench.delays_alone(DELAYS, bound) for bound in (0, 1, 2, 4, 8, 49, 100)]
    assert by_bound[0] == pytest.approx(DELAYS.max(0).mean())
    assert by_bound[-1] == by_bound[-2] == pytest.approx(DELAYS.mean(1).max())
    assert by_bound == sorted(by_bound, reverse=True) and by_bound[0] > by_bound[2] > by_bound[-1]


def test_emulated_computation_is_slept_by_every_rank_beside_the_delays_of_a_scenario():
    plain, computing = (bench.ServeConfig(2, steps=3, compute=ms) for ms in (0.0, 40.0))
    for scenario in ("delays", "balanced", "straggler"):
        delays = bench.draw_delays(plain, scenario, 0)
        assert bench.draw_delays(computing, scenario, 0) == pytest.approx(delays + 0.04)
    assert bench.draw_delays(plain, "straggler", 0).tolist() == [[0.0] * 3, [0.005] * 3]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"world_size": 1}, "world_size must be in .* got 1"),
        ({"bounds": (0, -1)}, r"bounds must be in .* got \(0, -1\)"),
        ({"rounds": 1}, "rounds must be in .* got 1"),
        ({"batch_size": 3}, "4 ranks need as many samples, got 3"),
        ({"delay": -0.1}, "between 0 and 1000 ms, got -100"),
    ],
)
def test_plans_are_checked(wrong, message):
    with pytest.raises(ValueError, match=message):
        bench.ServeConfig(**wrong)


def test_messages_are_as_large_as_both_sides_say():
    models = [on_ranks.RaggedModel(SERVED, rank, 3, 7, 4, 1) for rank in range(3)]
    batches = served_batches(SERVED, 7, 4, 1)
    for batch in batches:
        sent = [model.lookup(batch)[1] for model in models]
        assert [model.receive(batch.step) for model in models] == [
            list(column) for column in zip(*sent, strict=True)
        ]
        assert max(map(max, sent)) * 16 * 4 <= models[0].capacity(7)


@pytest.mark.slow
def test_a_checkpoint_is_served_with_its_own_rows_and_weights(tmp_path):
    data = "criteo:samples=200,scale=0.0001,seed=2"
    words = [
        "train", "--model", "dlrm", "--data", data, "--dim", "4", "--bottom", "8", "--top", "8",
        "--steps", "4", "--batch-size", "32", "--world-size", "1", "--checkpoint", str(tmp_path / "run"),
    ]  # fmt: skip
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    served = export_checkpoint(tmp_path / "run", tmp_path)
    assert served.dim == 4 and served.data == data and served.rows > 100
    assert CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "out")]).exit_code == 0
    predictor = Predictor.load(tmp_path / "out")
    batches = served_batches(served, 16, 3, 0)
    model = served_dlrm(served, 0, 1, 16, 0)
    for batch, got in zip(batches, infer(model, batches, BoundedLagAllToAll(None, 1)), strict=True):
        assert torch.equal(got, predictor.predict(batch))


def test_a_checkpoint_of_another_model_is_refused(tmp_path, monkeypatch):
    class Stream:
        step, meta = 1, {"config": '[job]\nmodel = "hstu"\n'}

        def __init__(self, path, step):
            pass

    monkeypatch.setattr(served_module, "CheckpointStream", Stream)
    with pytest.raises(ValueError, match="holds a model hstu, and serve-bench serves dlrm"):
        export_checkpoint(tmp_path, tmp_path)
    Stream.meta = {}
    with pytest.raises(ValueError, match="was not saved by tritonrec train"):
        export_checkpoint(tmp_path, tmp_path)


@pytest.mark.slow
@pytest.mark.multi_rank
def test_a_small_run_prints_and_saves(tmp_path):
    words = [
        "serve-bench", "--scenarios", "delays,sizes",
        "--world-size", "2", "--bounds", "2", "--steps", "6", "--rounds", "2",
        "--batch-size", "8",
        "--largest", "64", "--repetitions", "10", "--no-mpi", "--delay", "1",
        "--json", str(tmp_path / "out" / "a.json"),
        "--trace", str(tmp_path / "traces"),
    ]  # fmt: skip
    result = CliRunner().invoke(app, words, env={"COLUMNS": "130"})
    assert result.exit_code == 0, result.output
    for scenario in ("delays", "sizes"):
        assert report.TITLES[scenario] in result.output
    assert "MPI is left out" in result.output and "paper: latency 17 -> 12 ms" in result.output
    found = json.loads((tmp_path / "out" / "a.json").read_text())
    assert len(found["settings"]) == 2 * 2 * 2 and all(
        len(each["latency"]) == 2 for each in found["settings"]
    )
    assert all(each["largest_lag"] <= each["bound"] for each in found["settings"])
    assert list(found["collectives"]) == ["1", "4", "16", "64"]
    assert [list(found["repetitions"][count]) for count in ("1", "10")] == [["gloo", "bls"]] * 2
    shown = " ".join(result.output.split())  # titles are cut to the width of their tables
    assert "All-to-alls in a row, 32 KiB from each rank, ms together" in shown
    assert "26 tables with 26,768 rows of 16, the largest 7,802; clicks: synthetic; batches of 8" in shown
    from tritonrec.trace import read

    trace = read(tmp_path / "traces" / "delays-k2-rank1.pftrace")
    assert {"lag over rank 0"} <= {sample.name for sample in trace.counters}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bounds", "1,x"], "--bounds takes whole numbers from 0"),
        (["--bounds", "-1"], "--bounds takes whole numbers from 0"),
        (["--scenarios", "delay"], "--scenarios takes some of delays, balanced"),
        (["--batch-size", "2"], "4 ranks need as many samples, got 2"),
    ],
)
def test_bad_options_are_named(words, message):
    result = CliRunner().invoke(app, ["serve-bench", *words], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and message in result.output


def test_other_predictions_end_the_run():
    class Pool:
        def run(self, function, world_size, run):
            answer = {"seconds": 1.0, "response": 1.0, "digest": f"{run.bound}", "largest_lag": 0}
            return [answer] * world_size

    plan, digests = bench.ServeConfig(), {}
    first, second = (bench.Series("delays", "bls", bound) for bound in (0, 1))
    bench._measure(plan, Pool(), first, 0, digests, SERVED)
    with pytest.raises(RuntimeError, match="delays, bls, k = 1: predictions are not those"):
        bench._measure(plan, Pool(), second, 0, digests, SERVED)


@pytest.mark.parametrize(
    ("possible", "said"),
    [
        (0.004, "all of it is masked"),
        (0.0049, "the interval allows all of it"),
        (0.0054, "the interval allows all of it"),
        (0.008, "part of it is masked"),
    ],
)
def test_the_verdict_says_how_much_of_the_delays_is_masked(possible, said):
    """A saving of 5 ms a batch, and an interval of just under half a millisecond on both sides."""
    saved = [0.0048, 0.0050, 0.0052]
    settings = [
        bench.Series("delays", "bls", 0, [0.010] * 3, [1.0] * 3, [0.010] * 3, [possible] * 3),
        bench.Series("delays", "bls", 4, [0.010 - each for each in saved], [1.0] * 3, [0.01] * 3, [0.0] * 3),
    ]
    plan = bench.ServeConfig(bounds=(0, 4), scenarios=("delays",), sizes=())
    text = report.verdict(bench.Result(plan, settings, {}), "delays", "bls")
    assert f"; the others' delays cost {possible * 1e3:.2f} ms, {said} (" in text


@pytest.mark.parametrize("rank", [0, 1])
def test_predictions_of_every_rank_and_setting_are_those_of_the_first_one(rank):
    given = [{"digest": each, "seconds": 1.0, "response": 1.0, "largest_lag": 0} for each in ("a", "b")]
    plan, digests = bench.ServeConfig(world_size=2, steps=2), {}

    def measure(ranks):
        pool = SimpleNamespace(run=lambda *_: ranks)
        bench._measure(plan, pool, bench.Series("delays", "bls", 1), 0, digests, Served(4, 2, ""))

    measure(given)
    measure(given)
    other = [{**each, "digest": "c"} if place == rank else each for place, each in enumerate(given)]
    with pytest.raises(RuntimeError, match="predictions are not those of the other settings"):
        measure(other)
