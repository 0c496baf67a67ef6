"""Promise: keys as the generator draws them, constants from TorchRec's rows alone."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tritonrec.data.zipf import _zipf_rank
from tritonrec.harness.cli import app
from tritonrec.harness.simulator import Cluster, KeyModel, Plan, Workload, predict
from tritonrec.harness.simulator.cluster import costs
from tritonrec.harness.simulator.curves import scaling
from tritonrec.harness.simulator.engine import simulate
from tritonrec.harness.simulator.fit import fit
from tritonrec.harness.simulator.paper import CELLS, WORKERS
from tritonrec.harness.simulator.picture import FIG_7, _draw_parts
from tritonrec.harness.simulator.replay import AIM, Replay, summarise
from tritonrec.optional import pyplot
from tritonrec.pipeline.schedule import Task

SMALL = Workload(samples=32, tokens=64, dim=16, items=50_000, communities=8)
CLUSTER = Cluster(64, compute_seconds=0.2, lookup_seconds=0.01, bandwidth=2e7, contention=0.5)


@pytest.fixture(scope="module")
def model():
    return fit()


@pytest.mark.parametrize(("exponent", "affinity"), [(1.05, 0.8), (1.0, 0.0), (0.6, 1.0), (1.4, 0.5)])
def test_distinct_keys_are_those_that_the_generator_draws(exponent, affinity):
    items, communities, draws = 4001, 5, 9000
    keys = KeyModel(draws, items, exponent, communities, affinity)
    random = np.random.default_rng(7)
    found = []
    for _ in range(8):
        community = np.arange(draws) % communities
        sizes = (items - 1 - community) // communities + 1
        pick = random.random(draws)
        own = _zipf_rank(pick, sizes, exponent) * communities + community
        anyone = _zipf_rank(pick, np.full(draws, items), exponent)
        found.append(len(np.unique(np.where(random.random(draws) < affinity, own, anyone))))
    assert keys.batch() == pytest.approx(np.mean(found), rel=0.02)


def test_clustered_micro_batches_share_fewer_keys_between_them():
    keys = SMALL.keys
    for count in (2, 4, 8):
        even = (1 / count,) * count
        plain, clustered = (sum(keys.payload(even, which)) for which in (False, True))
        assert keys.batch() < clustered < plain
    alone = KeyModel(2048, 50_000, communities=1)
    assert alone.payload((0.5, 0.5), True) == pytest.approx(alone.payload((0.5, 0.5), False))


@settings(max_examples=30)
@given(
    st.lists(st.floats(0.1, 5), min_size=1, max_size=8), st.booleans(), st.sampled_from([0.5, 1.0, 1.2, 2.0])
)
def test_first_use_sends_the_batch_once_whatever_the_cut(sizes, clustered, exponent):
    keys = replace(SMALL, exponent=exponent).keys
    once, each = keys.first_use(tuple(sizes), clustered), keys.payload(tuple(sizes), clustered)
    assert sum(once) == pytest.approx(keys.batch())
    assert all(0 <= first <= whole * (1 + 1e-9) for first, whole in zip(once, each, strict=True))
    assert once[0] == pytest.approx(each[0])


def test_every_byte_is_counted_once():
    plan = Plan("nestpipe", 4, clustered=True)
    timeline = simulate(plan.schedule(), costs(CLUSTER, SMALL, plan), 4, 3)
    away = 63 / 64
    payload = sum(SMALL.keys.payload(plan.fractions, True)) * SMALL.row_bytes * away
    assert timeline.sent[2] == pytest.approx(2 * payload)
    once = replace(plan, first_use=True, taper=0.3)
    sent = simulate(once.schedule(), costs(CLUSTER, SMALL, once), 4, 3).sent[2]
    assert sent == pytest.approx(2 * SMALL.keys.batch() * SMALL.row_bytes * away)


def test_each_switch_does_what_it_says():
    base = Plan("nestpipe", 4)
    plain = predict(CLUSTER, SMALL, base)
    assert predict(CLUSTER, SMALL, replace(base, first_use=True)).communication < plain.communication
    assert predict(CLUSTER, SMALL, replace(base, clustered=True)).communication < plain.communication
    assert predict(CLUSTER, SMALL, replace(base, skip_fetch=True)).lookup < plain.lookup
    assert predict(CLUSTER, SMALL, replace(base, replicas=8)).communication < plain.communication
    copies = replace(base, replicas=8)
    reductions = [
        [costs(CLUSTER, SMALL, each)(Task("replica_reduce", 0, i)).sent for i in range(4)]
        for each in (copies, replace(copies, first_use=True))
    ]
    assert reductions[0][:3] == [0, 0, 0] and 0 < reductions[1][0] < reductions[1][3]
    assert sum(reductions[1]) == pytest.approx(reductions[0][3])
    roomy = replace(CLUSTER, bandwidth=CLUSTER.bandwidth * 20)
    narrow = replace(base, taper=0.25)
    assert predict(roomy, SMALL, narrow).exposed < predict(roomy, SMALL, base).exposed


def test_alpha_and_beta_of_the_links():
    assert CLUSTER.all_to_all(1e6, 1) == 0
    two = replace(CLUSTER, message_seconds=0.5, contention=1.0, bandwidth=1e6)
    assert two.all_to_all(4e6, 4) == pytest.approx(3 * 0.5 + 3e6 * 4 / 1e6)
    assert two.all_reduce(4e6, 4) == pytest.approx(1.5 * 4e6 / two.node_bandwidth)
    assert two.all_reduce(4e6, 16) == pytest.approx(2 * 15 / 16 * 4e6 * 16 / 1e6)


@pytest.mark.slow
def test_only_torchrecs_rows_are_fitted(model):
    fitted = [cell for cell in CELLS if cell.fitted]
    assert {cell.row for cell in fitted} == {"TorchRec"}
    assert {cell.table for cell in fitted} == {"Table II", "Table III"}
    # Whatever else the paper had printed, the model would be the same.
    other = [cell if cell.fitted else replace(cell, text=f"{cell.value * 1.7:.2f}") for cell in CELLS]
    assert fit(other) == model
    slower = [
        replace(cell, text="6793.83") if cell.text == "5793.83" else cell for cell in CELLS if cell.fitted
    ]
    assert fit(slower).clusters["npu"] != model.clusters["npu"]
    assert fit(slower).clusters["gpu"].compute_seconds == pytest.approx(
        model.clusters["gpu"].compute_seconds, rel=1e-3
    )


@pytest.mark.if_changed
def test_unseen_steps_are_within_the_aim(model):
    replay = Replay(model)
    unseen = replay.unseen()
    steps = [cell for cell in unseen if cell.column in ("step ms", "QPS 1e5")]
    assert len(steps) == 22 and all(cell.within for cell in steps)
    assert summarise(unseen).median < AIM
    for cell in replay.cells:
        assert cell.error == pytest.approx(cell.model / cell.paper - 1)


def test_the_parts_of_a_step_are_drawn_to_its_length(model):
    points, plt = scaling(model), pyplot()
    figure, axes = plt.subplots()
    _draw_parts(axes, points)
    tops = {}
    for bar in axes.patches:
        place = round(bar.get_x() + bar.get_width() / 2)
        assert bar.get_y() == pytest.approx(tops.get(place, 0.0))
        tops[place] = bar.get_y() + bar.get_height()
    plt.close(figure)
    of_paper = {(p.workers, p.method): p.outcome.step for p in points}
    steps = [of_paper[size, method] * 1e3 for size in WORKERS for method in FIG_7]
    assert list(tops.values()) == pytest.approx(steps)


@pytest.mark.slow
def test_simulate_writes_cells_and_a_picture(tmp_path):
    file, png = tmp_path / "cells.json", tmp_path / "deep" / "curves.png"
    result = CliRunner().invoke(
        app,
        ["simulate", "--table", "iv", "--workers", "10000", "--json", str(file), "--png", str(png)],
    )
    assert result.exit_code == 0, result.output
    assert "452.34" in result.output and "10,000 workers one by one" in result.output
    assert png.read_bytes().startswith(b"\x89PNG")
    document = json.loads(file.read_text())
    assert len(document["cells"]) == len(CELLS)
    assert {"table", "row", "column", "paper", "model", "error", "fitted"} <= set(document["cells"][0])
    assert document["summary"]["unseen"]["cells"] + document["summary"]["fitted"]["cells"] == len(CELLS)
    assert document["scaling"][-1]["workers"] == 16_384
    assert document["sweep"] and document["improvements"] and document["constants"]["npu"]["contention"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "--table", "XII"], "no table's name contains"),
        (["simulate", "--measured", "/nowhere.json"], "/nowhere.json"),
        (["simulate", "--measured", "/nowhere.json", "--workers", "4"], "--measured goes with --json only"),
    ],
)
def test_bad_input_is_one_clear_error(arguments, message):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
