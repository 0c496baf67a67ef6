"""The printed ratios are the peers' medians over ours, and a loss is called one."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "ci" / "benchmarks" / "ratios.py"
RATIOS = runpy.run_path(str(SCRIPT))


def row(group, param, median, **extra):
    stats = {"median": median, "mean": 77.0, "min": 77.0, "iqr": median / 10}
    return {"group": group, "name": f"test[{param}]", "param": param, "extra_info": extra, "stats": stats}


def report(*rows):
    return {
        "machine_info": {"python_version": "3.11.7", "cpu": {"brand_raw": "A CPU", "count": 2}},
        "commit_info": {"id": "0123456789", "dirty": False},
        "datetime": "2026-01-02T03:04:05",
        "benchmarks": list(rows),
    }


WHOLE = report(
    row("unique zipf", "zipf-slow", 0.5, threads=4, versions={"pandas": "2.1"}),
    row("unique zipf", "zipf-tritonrec", 0.2, ours=True, threads=1, workload="9 keys", of_a_copy=0.5),
    row("unique zipf", "zipf-fast", 0.1, ours=False, threads=1, versions={"numpy": "2.0"}),
    row("alone", "only", 1.0),
    row("steps", "ours", 2e-6, ours=True),
)


def test_prints_ratios_of_medians_and_calls_a_loss_a_loss():
    text = RATIOS["markdown"]([WHOLE])
    assert "A CPU, 2 logical cores; Python 3.11.7, pandas 2.1, numpy 2.0; commit 0123456; 2026-01-02" in text
    assert "### unique zipf\n\n9 keys\n" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[2:5] == [
        "| **tritonrec** | 1 | 200 ms | 20 ms | 0.5 |  |",
        "| fast | 1 | 100 ms | 10 ms |  | 0.50 (loss) |",
        "| slow | 4 | 500 ms | 50 ms |  | 2.50 |",
    ]
    assert "alone" not in text and "| **ours** |  | 2 us | 200 ns |  |  |\nNo peer was timed." in text


def test_local_changes_and_unknown_commits_are_said():
    changed = {**WHOLE, "commit_info": {"id": None, "dirty": True}}
    assert "commit unknown with local changes" in RATIOS["markdown"]([changed])


def test_two_rows_of_ours_in_a_group_are_an_error():
    both = report(row("g", "one", 1.0, ours=True), row("g", "two", 1.0, ours=True))
    with pytest.raises(ValueError, match="group 'g' has 2 rows of ours"):
        RATIOS["markdown"]([both])


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.34, "12.3 s"), (0.9996, "1000 ms"), (0.0456, "45.6 ms"), (3e-9, "3 ns")]
)
def test_times(seconds, text):
    assert RATIOS["_time"](seconds) == text


def test_reads_files(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(WHOLE))
    done = subprocess.run([sys.executable, SCRIPT, path, path], capture_output=True, text=True, check=True)
    assert done.stdout.count("### unique zipf") == 2
    assert subprocess.run([sys.executable, SCRIPT], capture_output=True).returncode == 1


def test_ratios_of_alternating_calls_are_listed():
    measured = row("cost", "N=4", 1.0, batch_over_window=1.074, workload="movies, N=4", direction="forward")
    text = RATIOS["markdown"]([report(measured)])
    assert "| test[N=4]" not in text
    assert "| , movies, N=4, forward | batch over window | 1.07 |" in text.replace(
        "| test, movies", "| , movies"
    )
    assert "alternating" not in RATIOS["markdown"]([WHOLE])
