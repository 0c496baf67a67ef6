"""Promise: the planner tries first_use and skip_fetch, and says what each saves and what that rests on."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tritonrec.harness.cli import app
from tritonrec.harness.simulator import Link, Plan, StageCosts, search
from tritonrec.harness.simulator.cost_files import as_json
from tritonrec.harness.simulator.measured import predict_costs
from tritonrec.harness.simulator.stage_costs import STAGES, Measured
from tritonrec.pipeline.schedule import Task

SECONDS = {
    "prefetch": 0.03, "h2d": 0.01, "route": 0.02, "retrieve": 0.06, "copy_kept_rows": 0.001, "exchange": 0.04,
    "compute": 0.2, "gradient_exchange": 0.08, "dense_reduce": 0.005, "sparse_update": 0.002,
    "dense_update": 0.003, "write_back": 0.05,
}  # fmt: skip
SENT = {"exchange": 4e5, "gradient_exchange": 8e5}
COSTS = StageCosts(4, [Measured(1, SECONDS, SENT)], Link(bytes_per_second=1e7), kept=0.8)
MANY = replace(COSTS, sent_at={8: {name: 2 * sent for name, sent in SENT.items()}})
"""Micro-batches ask for the same keys again: at N = 8 twice the bytes."""


def seconds(costs, **switches):
    cost = costs.costs(Plan("nestpipe", 2, **switches))
    return {
        name: cost(Task(name, 5)).seconds for name in ("retrieve", "write_back", "route", "copy_kept_rows")
    }


def test_kept_rows_are_neither_fetched_nor_written():
    plain, spared = seconds(COSTS), seconds(COSTS, skip_fetch=True)
    assert plain == {name: SECONDS[name] for name in plain}
    assert spared["write_back"] == pytest.approx(0.2 * 0.05)
    assert spared["retrieve"] == pytest.approx(0.06 - 0.8 * 0.05)  # reading lasts as long as writing
    assert (spared["route"], spared["copy_kept_rows"]) == (0.02, 0.001)
    quick = replace(COSTS, measured=[Measured(1, {**SECONDS, "retrieve": 0.03}, SENT)])
    assert seconds(quick, skip_fetch=True)["retrieve"] == 0  # never less than nothing


@pytest.fixture(scope="module")
def repeated():
    return search(MANY)


def test_first_use_is_chosen_where_bytes_repeat(repeated):
    best = repeated.candidates[0]
    assert best.plan.first_use and best.plan.micro_batches > 1
    assert best.outcome.sent == pytest.approx(sum(SENT.values()))
    assert best.outcome.step <= predict_costs(MANY, replace(best.plan, first_use=False)).step
    saving = repeated.savings[0]
    assert saving.chosen and saving.having.sent < saving.without.sent


def test_skip_fetch_is_chosen_where_moving_rows_is_the_bottleneck(repeated):
    slow = {**SECONDS, "retrieve": 0.6, "write_back": 0.5}
    bound = replace(COSTS, measured=[Measured(1, slow, SENT)])
    found = search(bound)
    best, saving = found.candidates[0], found.savings[1]
    assert best.plan.skip_fetch and best.plan.depth > 1 and not best.plan.first_use  # no byte repeats
    assert saving.chosen and saving.having.step < saving.without.step
    assert saving.without.step == predict_costs(bound, replace(best.plan, skip_fetch=False)).step
    hidden = repeated.savings[1]
    assert not hidden.chosen and hidden.step < 0.01 and hidden.having.lookup < hidden.without.lookup


def test_the_best_plan_is_the_fastest_of_all_switches(repeated):
    best = repeated.candidates[0]
    for once in (False, True):
        for keeps in (False, True):
            plan = replace(best.plan, depth=4, first_use=once, skip_fetch=keeps)
            assert best.outcome.step <= predict_costs(MANY, plan).step * 1.002
    assert [each.switch for each in repeated.savings] == ["first_use", "skip_fetch"]


def report(kept=0.8, emulated=()):
    """A report of the lab with every kind of row that tells what is kept, and some that do not."""

    def row(mode, count, switches, kept, approximate=False):
        stages = {
            name: {"lane": "any", "tasks": tasks, "seconds": SECONDS[name] / tasks,
                   "bytes": SENT[name] / tasks if name in SENT else None}
            for name in STAGES
            for tasks in [count if name in ("exchange", "compute", "gradient_exchange") else 1]
        }  # fmt: skip
        found = {
            "mode": mode, "micro_batches": count, "switches": switches, "step": 0.5, "exposed": 0.1,
            "stages": stages, "approximate": approximate,
        }  # fmt: skip
        return found if kept is None else {**found, "kept": kept}

    drifting = {"replicas": 2, "average_every": 2}
    return {
        "environment": {"world_size": 4, "link_mbit_per_second": 80},
        "emulated": {"seconds_per_step": dict.fromkeys(emulated, 0.01)},
        "rows": [
            row("sequential", 1, {}, None if kept is None else 0.0),
            row("nestpipe", 4, drifting, None if kept is None else 0.3, approximate=True),
            row("nestpipe", 4, {"skip_fetch": True, "taper": 0.5}, None if kept is None else 0.5),
            row("nestpipe", 4, {}, kept),
            row("nestpipe", 4, {"replicas": 2}, kept),
            row("nestpipe", 4, {"skip_fetch": True, "depth": 2}, kept),
        ],
    }


@pytest.mark.if_changed
def test_the_command_says_what_each_switch_saves(tmp_path):
    costs, plans = tmp_path / "costs.json", tmp_path / "plans.json"
    slow = {**SECONDS, "retrieve": 0.6, "write_back": 0.5}
    runs = [Measured(count, slow, {name: sent * count for name, sent in SENT.items()}) for count in (1, 4)]
    costs.write_text(json.dumps(as_json(replace(COSTS, measured=runs))))
    result = CliRunner().invoke(app, ["plan", "--costs", str(costs), "--json", str(plans)])
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "skip_fetch: chosen; with it the best plan's step is " in text and "first_use: " in text
    told = {each["switch"]: each for each in json.loads(plans.read_text())["switches"]}
    assert told.keys() == {"first_use", "skip_fetch"} and told["skip_fetch"]["chosen"]
    saved = 1 - told["skip_fetch"]["with"]["step"] / told["skip_fetch"]["without"]["step"]
    assert told["skip_fetch"]["saves"] == pytest.approx(saved) and saved > 0.1
    assert json.loads(plans.read_text())["plans"][0]["skip_fetch"]
