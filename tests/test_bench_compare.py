"""`tritonrec bench --compare` fails where a ratio leaves the baseline's band, and names it."""

import copy
import json
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tritonrec import optional
from tritonrec.harness import bench
from tritonrec.harness.cli import app

pytestmark = pytest.mark.every_case

ROOT = Path(__file__).resolve().parent.parent


def row(group, param, median, **extra):
    stats = {"median": median, "iqr": median / 10}
    return {"group": group, "name": f"test[{param}]", "param": param, "extra_info": extra, "stats": stats}


def report(ours=0.1, peer=0.2, over=1.25):
    return {
        "machine_info": {"python_version": "3.11.7", "cpu": {"brand_raw": "A CPU", "count": 2}},
        "commit_info": {"id": "0123456789abcdef", "dirty": False},
        "datetime": "2026-01-02T03:04:05",
        "benchmarks": [
            row("unique zipf", "zipf-ours", ours, ours=True, threads=1, versions={"numpy": "2.0"}),
            row("unique zipf", "zipf-pandas", peer, ours=False, threads=1),
            row("unique zipf", "zipf-torch_all_threads", 0.05, ours=False, threads=2),
            row("cost", "N=4", 1.0, workload="movies", batch_over_window=over),
        ],
    }


def run(tmp_path, *reports, **options):
    """Exit status and printed text of a run whose suites report these."""
    made = chain(reports, repeat(reports[-1]))
    console = Console(width=200, record=True, file=(tmp_path / "printed").open("w"))
    code = bench.bench(console=console, run=lambda root, only, timer: next(made), **options)
    return code, console.export_text()


@pytest.fixture
def baseline(tmp_path):
    path = tmp_path / "baseline.json"
    run(tmp_path, report(), report(0.1, 0.3), report(0.1, 0.25), repeat=3, json_file=path)
    return path


def test_a_baseline_holds_ratios_their_band_and_provenance(baseline):
    saved = json.loads(baseline.read_text())
    assert saved["repeats"] == 3 and "least 1.25" in saved["how"]
    pandas = saved["rows"]["unique zipf / pandas"]
    assert (pandas["ratio"], pandas["ratios"], pandas["band"]) == (2.5, [2.0, 3.0, 2.5], 1.5)
    alternating = saved["rows"]["test movies / window (alternating)"]
    assert (alternating["ratio"], alternating["band"]) == (0.8, 1.25)
    made = saved["provenance"]
    assert made["commit"] == "0123456789ab" and made["versions"]["numpy"] == "2.0" and made["timer"] == "wall"
    assert {"machine", "load", "date", "seed", "gpu"} <= made.keys()


def test_two_rows_of_ours_in_a_group_are_an_error():
    both = report()
    both["benchmarks"][1]["extra_info"]["ours"] = True
    with pytest.raises(ValueError, match="group 'unique zipf' has 2 rows of ours"):
        bench.rows_of(both)


def test_cpu_seconds_of_several_threads_and_alternating_calls_are_left_out():
    assert len(bench.rows_of(report())) == 3
    assert list(bench.rows_of(report(), "cpu")) == ["unique zipf / pandas"]


def test_a_group_without_a_row_of_ours_compares_nothing():
    none = report()
    none["benchmarks"][0]["extra_info"]["ours"] = False
    assert list(bench.rows_of(none)) == ["test movies / window (alternating)"]


def test_a_report_of_pytest_benchmark_is_printed_with_the_share_of_a_copy(tmp_path, capsys):
    made, path = report(), tmp_path / "bench.json"
    made["benchmarks"][0]["extra_info"]["of_a_copy"] = 0.5
    path.write_text(json.dumps(made))
    bench.main([str(path)])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "zipf / pandas" in line)
    assert [cell.strip() for cell in line.split("│")[1:-1]][1:] == ["100 ms", "200 ms", "0.5", "2.00"]


def test_a_loss_is_printed_as_one(tmp_path):
    _, text = run(tmp_path, report())
    lines = [line for line in text.splitlines() if "zipf" in line]
    assert "0.50 loss" in lines[0]
    assert "2.00" in lines[1] and "loss" not in lines[1]
    assert "1 of 3 ratios are wins, 2 are losses" in text


@pytest.mark.parametrize(("ours", "code"), [(0.1, 0), (0.119, 0), (0.121, 1), (0.3, 1), (0.01, 0)])
def test_only_a_ratio_outside_the_band_fails(tmp_path, baseline, ours, code):
    # 2.5 in the baseline with a band of 1.5: down to 1.667, that is 0.12 s beside the peer's 0.2
    got, text = run(tmp_path, slowed(ours), compare=baseline)
    assert got == code
    line = (
        "slower: unique zipf / pandas: "
        + f"{0.2 / ours:.2f} times as fast as the peer now, 2.50 in the baseline"
    )
    assert (line in text) == bool(code)


def test_the_median_of_three_runs_decides(tmp_path, baseline):
    got, text = run(tmp_path, slowed(0.3), report(), report(), compare=baseline)
    assert got == 0 and "run again, 2 of 3 are done" in text
    assert run(tmp_path, report(), slowed(0.3), compare=baseline)[0] == 0
    assert run(tmp_path, slowed(0.3), slowed(0.3), report(), compare=baseline)[0] == 1


def slowed(ours):
    """Only the row of pandas changes: the peer with two threads keeps its ratio. A noisy run is no excuse."""
    new = report(ours)
    new["benchmarks"][1]["stats"]["iqr"] = 9.0
    new["benchmarks"][2]["stats"]["median"] *= ours / 0.1
    return new


def test_a_worse_ratio_of_alternating_calls_fails(tmp_path, baseline):
    got, text = run(tmp_path, report(over=1.6), compare=baseline)
    assert got == 1 and "movies / window (alternating): 0.62 times" in text


def test_a_row_that_is_gone_fails_unless_only_some_were_asked_for(tmp_path, baseline):
    fewer = report()
    del fewer["benchmarks"][1]
    got, text = run(tmp_path, copy.deepcopy(fewer), compare=baseline)
    assert got == 1 and "unique zipf / pandas: in the baseline (2.50), not measured now" in text
    assert run(tmp_path, fewer, compare=baseline, only="unique")[0] == 0


def test_different_clocks_are_not_compared(tmp_path, baseline):
    def never(root, only, timer):
        raise AssertionError("ran before it was refused")

    with pytest.raises(ValueError, match="baseline holds wall seconds, this run cpu: add --timer wall"):
        bench.bench(compare=baseline, timer="cpu", run=never)
    of_cpu = tmp_path / "cpu.json"
    run(tmp_path, report(), json_file=of_cpu, timer="cpu")
    with pytest.raises(ValueError, match="baseline holds cpu seconds, this run wall: add --timer cpu"):
        bench.bench(compare=of_cpu, run=never)


def test_the_band_is_at_least_what_the_quartiles_leave_open():
    def runs(*ratios, spread):
        return [{"x": {"ratio": ratio, "spread": spread}} for ratio in ratios]

    for ratios, spread, band in (((2.0, 2.1), 0.1, 1.25), ((2.0,), 0.9, 1.9), ((2.0, 3.0), 0.2, 1.5)):
        row = bench.summary(runs(*ratios, spread=spread), {})["rows"]["x"]
        assert row["band"] == pytest.approx(band)
    assert bench.summary(runs(5.0, 1.0, 2.0, spread=0), {})["rows"]["x"]["ratio"] == 2.0


def test_suites_that_fail_have_no_ratios_though_they_leave_a_report(monkeypatch):
    def run(command, **_):
        file = next(word.partition("=")[2] for word in command if word.startswith("--benchmark-json="))
        Path(file).write_text("{}")
        return SimpleNamespace(returncode=1, stdout="", stderr="")

    monkeypatch.setattr(bench.subprocess, "run", run)
    with pytest.raises(RuntimeError, match="suites failed"):
        bench.run_suites(ROOT, "murmur")


def test_what_the_suites_need_is_looked_for_before_they_run(monkeypatch):
    monkeypatch.setattr(optional, "find_spec", lambda name: None if name == "pytest_benchmark" else name)
    with pytest.raises(ValueError, match=r"package pytest-benchmark: .*'tritonrec\[bench\]'"):
        bench.checkout()


def test_an_installed_package_finds_the_checkout_that_it_is_called_in(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "tritonrec" / "harness" / "bench.py"))
    monkeypatch.chdir(ROOT / "docs")
    assert bench.checkout() == ROOT


def test_without_a_checkout_the_command_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(
        bench, "__file__", str(tmp_path / "site-packages" / "tritonrec" / "harness" / "bench.py")
    )
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench"])
    assert done.exit_code == 2
    assert "needs a checkout" in done.output and "Clone the repository" in " ".join(done.output.split())


def test_the_suites_run_as_outside_of_a_test(monkeypatch):
    seen = {}

    def run(command, env, **_):
        seen.update(env)
        return SimpleNamespace(returncode=1, stdout="", stderr="")

    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    monkeypatch.setattr(bench.subprocess, "run", run)
    with pytest.raises(RuntimeError, match="suites failed"):
        bench.run_suites(ROOT, "murmur")
    assert "PATH" in seen and not any(name.startswith("PYTEST_") for name in seen)


@pytest.mark.slow
def test_a_real_suite_runs(tmp_path):
    path = tmp_path / "rows.json"
    assert CliRunner().invoke(app, ["bench", "--only", "murmur", "--json", str(path)]).exit_code == 0
    rows = json.loads(path.read_text())["rows"]
    assert list(rows) == ["murmur / torch"] and rows["murmur / torch"]["ratio"] > 0


def test_the_committed_baseline_covers_every_kernel():
    saved = bench.load(ROOT / "ci" / "baselines" / "bench.json")
    kernels = {name.split()[0].partition(":")[0] for name in saved["rows"]}
    assert {
        "unique",
        "intersect",
        "hash_find",
        "hash_insert",
        "segment_sum_window",
        "segment_sum_batch",
        "hstu_attention",
        "linear",
    } <= kernels
    assert {"bucketize", "gather_rows", "to_fixed_point", "silu", "initial_rows", "sparse_adam"} <= kernels
    assert all(row["band"] >= bench.LEAST_BAND for row in saved["rows"].values())


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made.pop("provenance"),
        lambda made: made.update(provenance=[]),
        lambda made: made.update(rows=[]),
        lambda made: made.update(rows={}),
        lambda made: made["rows"]["unique zipf / pandas"].pop("band"),
        lambda made: made["rows"]["unique zipf / pandas"].update(band=float("nan")),
        lambda made: made["rows"]["unique zipf / pandas"].update(band=0),
        lambda made: made["rows"]["unique zipf / pandas"].update(ratio="2"),
        lambda made: made["rows"]["unique zipf / pandas"].update(ratio=-1.0),
    ],
)
def test_a_baseline_that_compares_nothing_is_refused(baseline, change):
    made = json.loads(baseline.read_text())
    change(made)
    baseline.write_text(json.dumps(made))
    with pytest.raises(ValueError, match="is no baseline: write one with"):
        bench.load(baseline)
