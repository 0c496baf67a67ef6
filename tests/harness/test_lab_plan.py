"""Promise: the lab runs what the planner chose, and puts what it expected beside what was measured."""

import json
from dataclasses import replace

from tritonrec.harness.job import Job
from tritonrec.harness.lab import report
from tritonrec.harness.lab.figures import Figures
from tritonrec.harness.lab.rounds import LabConfig, Result, Row
from tritonrec.harness.lab.settings import BASELINE, Planned, Setting, read_plan
from tritonrec.pipeline import schedule_of

BEST = {
    "pipeline": "nestpipe", "micro_batches": 6, "depth": 3, "replicas": 2, "clustered": False, "taper": 0.65,
    "first_use": True, "skip_fetch": False, "step": 0.5, "gain": 2.0, "exposed": 0.1, "sent": 5e5,
}  # fmt: skip
FIGURES = Figures(0.4, 0.2, 0.0, 0.3, 0.12, 0.3, 0.001, 12, 11, 1e6, 1e3, 50, 0.4, 0, 0, 0, 0, 0)


def written(tmp_path, **changes):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"plans": [{**BEST, **changes}, BEST]}))
    return path


def test_the_best_plan_becomes_a_setting(tmp_path):
    planned = read_plan(written(tmp_path))
    switches = {"taper": 0.65, "depth": 3, "replicas": 2, "first_use": True}
    assert planned == Planned(Setting("nestpipe", 6, switches), 0.5, 2.0, 0.1, 5e5)
    plain = read_plan(written(tmp_path, depth=None, replicas=1, taper=1.0, first_use=False))
    assert plain.setting == Setting("nestpipe", 6)
    window = planned.setting.window(seed=0)
    assert (window.exchange.taper, window.depth, planned.setting.replicas) == (0.65, 3, 2)
    assert schedule_of("nestpipe", window).batches_in_flight == 3


def test_expected_stands_beside_measured(tmp_path):
    planned = read_plan(written(tmp_path))
    plan = LabConfig(Job("zipf"), modes=[], planned=planned)
    found = [
        Row(setting, FIGURES, ratios, "identical", {}, 0, 0)
        for setting, ratios in ((BASELINE, [1.0, 1.0, 1.0]), (planned.setting, [2.5, 1.6, 2.6]))
    ]
    result = Result(plan, found, {})
    checked = report.as_json(result)["plan"]
    assert checked["gain"] == {"expected": 2.0, "measured": 2.5, "error": 2.0 / 2.5 - 1}
    assert checked["step"] == {"expected": 0.5, "measured": 0.4}
    line = next(line for line in report.notes(result) if line.startswith("the plan"))
    assert checked["sent"] == {"expected": 5e5, "measured": 1e6} and line.endswith("sent 0.50 MB, 1.00 MB")
    assert "expected 2.00x sequential, measured 2.50x (-20.0%); step 500 ms, 400 ms" in line
    assert report.as_json(Result(replace(plan, planned=None), found, {}))["plan"] is None
