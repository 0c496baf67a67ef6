"""Promise: measured costs predict plans that were not measured, and the planner picks the fastest."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tritonrec.harness.cli import app
from tritonrec.harness.simulator import Link, Plan, StageCosts, cost_files, from_trace, load, search
from tritonrec.harness.simulator import measured as of_traces
from tritonrec.harness.simulator.cost_files import as_json
from tritonrec.harness.simulator.measured import predict_costs, replay_lab, replay_traces
from tritonrec.harness.simulator.stage_costs import STAGES, Measured
from tritonrec.pipeline.schedule import Task
from tritonrec.trace import read
from tritonrec.trace.analysis import summarise

TRACES = Path(__file__).resolve().parents[2] / "traces"
SECONDS = {
    "prefetch": 0.03, "h2d": 0.01, "route": 0.02, "retrieve": 0.06, "copy_kept_rows": 0.001, "exchange": 0.04,
    "compute": 0.2, "gradient_exchange": 0.08, "dense_reduce": 0.005, "sparse_update": 0.002,
    "dense_update": 0.003, "write_back": 0.01,
}  # fmt: skip
SENT = {"exchange": 4e5, "gradient_exchange": 8e5}
TOTAL = sum(SECONDS.values()) - SECONDS["copy_kept_rows"]  # one buffer, no copy
COSTS = StageCosts(4, [Measured(1, SECONDS, SENT)], Link(bytes_per_second=1e7))


def test_a_synchronous_step_is_the_sum_of_what_was_measured():
    assert predict_costs(COSTS, Plan("sequential")).step == pytest.approx(TOTAL)


def test_a_window_exposes_the_ends():
    found = predict_costs(COSTS, Plan("nestpipe", 4))
    # The last gradient exchange, then the update and the copy, then the reduction that waited for the link
    # (it ends before the copy does), then the first exchange; the dense update hides beside it.
    link = SECONDS["gradient_exchange"] / 4 + SECONDS["dense_reduce"] + SECONDS["exchange"] / 4
    assert found.step == pytest.approx(SECONDS["compute"] + link, rel=1e-6)
    assert found.exposed_lookup == 0


def test_replicas_meet_at_the_end_or_with_first_use_as_rows_leave():
    link = Link(1e7, node_size=2, node_bytes_per_second=1e9)
    sent_at = {4: {"exchange": 6e5, "gradient_exchange": 9e5}}
    busy = {**SECONDS, "gradient_exchange": SECONDS["gradient_exchange"] + 0.02}
    costs = replace(COSTS, measured=[Measured(1, busy, SENT)], link=link, sent_at=sent_at)
    late = costs.costs(Plan("nestpipe", 4, replicas=2))
    early = costs.costs(Plan("nestpipe", 4, replicas=2, first_use=True))
    tasks = [Task("replica_reduce", 0, i) for i in range(4)]
    assert [late(task).sent for task in tasks[:3]] == [0, 0, 0] and late(tasks[0]).seconds == 0
    whole = late(tasks[3])
    assert sum(early(task).sent for task in tasks) == pytest.approx(whole.sent)
    assert sum(early(task).transfer for task in tasks) == pytest.approx(whole.transfer)
    assert sum(early(task).seconds for task in tasks) == pytest.approx(whole.seconds) and whole.seconds > 0
    leaving = [early(Task("gradient_exchange", 0, i)).sent for i in range(4)]
    for task, gone in zip(tasks, leaving, strict=True):
        assert early(task).sent / whole.sent == pytest.approx(gone / sum(leaving))


@pytest.mark.slow
def test_a_crowded_network_is_planned_in_groups():
    link = Link(1e7, contention=1.0, node_size=8, node_bytes_per_second=1e11)
    crowded = replace(COSTS, link=link)
    assert search(crowded, 32).candidates[0].plan.replicas > 1
    assert search(COSTS, 4).candidates[0].plan.replicas == 1


@pytest.mark.if_changed
def test_the_plan_is_the_fastest_of_those_simulated():
    advice = search(COSTS)
    best = advice.candidates[0]
    assert best.gain == pytest.approx(advice.sequential.step / best.outcome.step)
    for plan in (Plan("nestpipe"), Plan("nestpipe", 4), Plan("nestpipe", 8, depth=2), Plan("nestpipe", 16)):
        assert best.outcome.step <= predict_costs(COSTS, plan).step * 1.002
    assert len({found.plan for found in advice.candidates}) == len(advice.candidates) == 5
    # Tasks that cost something by themselves: few micro-batches.
    dear = [
        Measured(n, {name: value + (0.05 * n if name == "compute" else 0) for name, value in SECONDS.items()},
                 SENT)
        for n in (1, 4)
    ]  # fmt: skip
    assert search(replace(COSTS, measured=dear)).candidates[0].plan.micro_batches < best.plan.micro_batches


def test_costs_of_a_trace_predict_its_own_step():
    costs = from_trace(TRACES / "sequential.pftrace")
    assert costs.world_size == 2 and costs.measured[0].micro_batches == 4
    trace = read(TRACES / "sequential.pftrace")
    moved = [span.args["bytes"] for span in trace.spans if span.name == "exchange" and span.batch >= 2]
    assert costs.measured[0].sent["exchange"] == pytest.approx(sum(moved) / 6 / 2)
    assert costs.measured[0].seconds["copy_kept_rows"] == 0
    measured = summarise(trace.spans, 2)[0].step_ns / 1e9
    (row,) = replay_traces([TRACES / "sequential.pftrace"])
    assert row.fitted and row.step == pytest.approx(measured, rel=0.05)
    assert abs(row.error) < 0.15


def test_a_trace_is_replayed_with_its_own_taper(monkeypatch):
    whole, exposed = read(TRACES / "nestpipe.pftrace"), []
    for taper in (1.0, 0.3):
        named = replace(whole, metadata={**whole.metadata, "taper": taper})
        monkeypatch.setattr(of_traces, "read", lambda _, named=named: named)
        (_, row) = replay_traces([TRACES / "sequential.pftrace", TRACES / "nestpipe.pftrace"])
        exposed.append(row.predicted_exposed)
    assert exposed[0] != exposed[1]


def test_a_trace_of_some_ranks_gives_no_costs(monkeypatch):
    whole = read(TRACES / "sequential.pftrace")
    monkeypatch.setattr(
        cost_files, "read", lambda _: replace(whole, metadata={**whole.metadata, "world_size": 3})
    )
    with pytest.raises(ValueError, match=r"has ranks 0, 1 of 3, .* give the trace of the whole run"):
        from_trace(TRACES / "sequential.pftrace")


def lab_report():
    """A report of the lab whose rows are what the model says, plus one that it does not know."""

    def stages(count, inflated):
        return {
            name: {
                "lane": "any",
                "tasks": count if name in ("exchange", "compute", "gradient_exchange") else 1,
                "seconds": SECONDS[name] / count
                if name in ("exchange", "compute", "gradient_exchange")
                else SECONDS[name],
                "bytes": SENT[name] * inflated / count if name in SENT else None,
            }
            for name in STAGES
        }

    def row(mode, count, switches, inflated=1.0, step=0.5):
        return {
            "mode": mode, "micro_batches": count, "switches": switches, "step": step, "exposed": 0.1,
            "stages": stages(count, inflated),
        }  # fmt: skip

    return {
        "environment": {"world_size": 4, "link_mbit_per_second": 80},
        "rows": [
            row("sequential", 1, {}, step=TOTAL),
            row("nestpipe", 4, {}, 1.5),
            row("nestpipe", 4, {"clustering": True}, 1.2),
            row("nestpipe", 4, {"first_use": True, "taper": 0.5}, 1.0),
            row("nestpipe", 4, {"dedup": "none"}, 3.0),
        ],
    }


def test_a_report_of_the_lab_is_replayed(tmp_path):
    file = tmp_path / "lab.json"
    file.write_text(json.dumps(lab_report()))
    rows, unknown = replay_lab(file)
    report = lab_report()
    report["rows"][1]["taper"] = 0.5  # by itself
    (tmp_path / "own.json").write_text(json.dumps(report))
    assert replay_lab(tmp_path / "own.json")[0][1].predicted_exposed < rows[1].predicted_exposed
    assert unknown == ["nestpipe dedup=none, N = 4"]
    assert [row.fitted for row in rows] == [True, False, False, False]
    assert rows[0].error == pytest.approx(0)
    plain, clustered, first = (row.predicted_exposed for row in rows[1:])
    assert plain > clustered > first
    assert load(file).rate() == 1e7
    result = CliRunner().invoke(
        app, ["simulate", "--measured", str(file), "--json", str(tmp_path / "m.json")]
    )
    assert result.exit_code == 0, result.output
    assert "not modelled: nestpipe dedup=none" in result.output
    assert len(json.loads((tmp_path / "m.json").read_text())["measured"]) == 4


def test_plan_prints_and_writes_the_best_five(tmp_path):
    file, costs = tmp_path / "plans.json", tmp_path / "costs.json"
    costs.write_text(json.dumps(as_json(COSTS)))
    result = CliRunner().invoke(
        app, ["plan", "--costs", str(costs), "--world-size", "8", "--json", str(file), "--save-costs",
              str(tmp_path / "again.json")],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "nestpipe, 5" in result.output and "measured on 4 ranks" in result.output
    document = json.loads(file.read_text())
    assert len(document["plans"]) == 5 and document["world_size"] == 8
    assert {"micro_batches", "taper", "depth", "replicas", "step", "exposed", "gain"} <= set(
        document["plans"][0]
    )
    assert json.loads((tmp_path / "again.json").read_text()) == as_json(COSTS)


def without(document, *path):
    *above, last = path
    place = document
    for name in above:
        place = place[name]
    del place[last]
    return document


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: without(d, "measured", 0, "stages", "compute"), "lack compute"),
        (lambda d: without(d, "world_size"), "world_size"),
        (lambda d: d | {"link": {"speed": 3}}, "unknown speed"),
        (lambda d: d | {"link": {"bytes_per_second": 0}}, "must be positive"),
        (lambda d: d | {"measured": []}, "at least one measured run"),
        (lambda d: d | {"rows": [], "environment": {}}, "no sequential row"),
        (lambda d: d | {"rows": [], "environment": {"world_size": 4, "machines": 2}}, "share the links of 2"),
        (lambda d: [d], "holds a list"),
    ],
)
def test_bad_cost_files_are_named(change, message, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(change(as_json(COSTS))))
    result = CliRunner().invoke(app, ["plan", "--costs", str(file)])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


NAN = float("nan")


@pytest.mark.parametrize(
    "change",
    [
        *({"world_size": value} for value in (NAN, 0, 2.7, "4", True, 2**21)),
        *({"jitter": value} for value in (NAN, -1.0, float("inf"), "0.1")),
        {"kept": NAN},
        {"jiter": 0.3},
        *({"link": {"contention": value}} for value in (NAN, -1.0, True)),
        *({"link": {"node_size": value}} for value in (0, 1.5)),
    ],
)
def test_a_cost_file_of_numbers_that_nobody_measured_is_refused(tmp_path, change):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**as_json(COSTS), **change}))
    with pytest.raises(ValueError, match="|".join(change) + "|Link|world size"):
        load(path)


@pytest.mark.parametrize("count", [NAN, -1, 0, 2.5, "4"])
def test_a_cost_file_says_of_how_many_micro_batches_it_is(tmp_path, count):
    document = as_json(COSTS)
    document["measured"][0]["micro_batches"] = count
    (tmp_path / "costs.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"micro_batches|micro-batches"):
        load(tmp_path / "costs.json")
