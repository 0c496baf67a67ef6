"""Promise: a run logs each step once, from rank 0, with the values of that step, also across a restart."""

import csv
import io
import json
import math
from contextlib import redirect_stdout
from dataclasses import replace

import commands
import pytest

from tritonrec import checkpoint
from tritonrec.distributed import Communicators
from tritonrec.harness.train import reports
from tritonrec.harness.train.evaluate import metric_names
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run, StoppingRule
from tritonrec.pipeline import WindowConfig

pytestmark = pytest.mark.multi_rank


@pytest.fixture
def run(job, tmp_path):
    job = replace(job, lr=0.01, lr_schedule="linear", lr_warmup=2, lr_steps=10)
    window = WindowConfig(2, max_grad_norm=math.inf)
    return Run(
        job, "nestpipe", window, steps=7, evaluate_every=3, log_dir=tmp_path / "logs",
        json_lines=tmp_path / "log.jsonl",
    )  # fmt: skip


def objects(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_speed(rows):
    return [{name: value for name, value in row.items() if "per_second" not in name} for row in rows]


def test_every_step_and_evaluation_is_logged(run, tmp_path):
    summary = train(Communicators.local(), run, quiet=True)
    rows = objects(run.json_lines)
    assert [row["step"] for row in rows] == [1, 2, 3, 3, 4, 5, 6, 6, 7, 7]
    assert rows[-1] == {"step": 7, **summary["metrics"]} and rows[-2]["loss"] == summary["loss"]
    steps = [row for row in rows if "loss" in row]
    rate = run.job.learning_rate
    assert [row["lr"] for row in steps] == pytest.approx([rate(step) for step in range(1, 8)])
    assert all(row["grad_norm"] > 0 for row in steps)
    assert steps[-1]["samples_per_second"] > 0 and steps[-1]["tokens_per_second"] > 0
    assert "samples_per_second" not in steps[0]  # the pipeline was filled in it
    with (run.log_dir / "metrics.csv").open(newline="") as file:
        table = [{n: float(v) for n, v in row.items() if v} for row in csv.DictReader(file)]
    assert table == rows


def test_ranks_log_once_and_the_same_values(pool, run, tmp_path):
    train(Communicators.local(), run, quiet=True)
    many = replace(run, json_lines=tmp_path / "many.jsonl", log_dir=None)
    pool.run(train, 2, many, True)
    assert without_speed(objects(many.json_lines)) == without_speed(objects(run.json_lines))


def test_a_run_that_goes_on_logs_what_one_run_logs(run, tmp_path):
    train(Communicators.local(), run, quiet=True)
    again = replace(
        run, json_lines=tmp_path / "again.jsonl", log_dir=tmp_path / "again", checkpoint=tmp_path / "saved",
        save_every=2,
    )  # fmt: skip
    train(Communicators.local(), replace(again, steps=6), quiet=True)
    for file in (tmp_path / "saved").glob("*6*"):  # the last checkpoint is lost: go on from step 4
        file.unlink() if file.is_file() else None
    assert checkpoint.steps(again.checkpoint)[-1] == 4
    train(Communicators.local(), replace(again, resume=True), quiet=True)
    assert without_speed(objects(again.json_lines)) == without_speed(objects(run.json_lines))


@pytest.mark.parametrize("there", ["json_lines", "log_dir"])
def test_the_log_of_another_run_is_kept(run, there):
    path = run.json_lines if there == "json_lines" else run.log_dir / "metrics.csv"
    path.parent.mkdir(exist_ok=True)
    path.write_text("theirs")
    with pytest.raises(FileExistsError, match=f"{path.name} is there already"):
        train(Communicators.local(), run, quiet=True)
    assert path.read_text() == "theirs"


def test_tensorboard_is_used_where_it_is_installed(run, monkeypatch):
    made = []

    class Logger:
        def __init__(self, *arguments):
            made.append(arguments)

    monkeypatch.setattr(reports, "TensorBoardLogger", Logger)
    for found in (None, object()):
        monkeypatch.setattr(reports, "find_spec", lambda name, found=found: found)
        for logger in reports.loggers_of(replace(run, resume=True), 4)[:2]:
            logger.close()
    assert made == [(run.log_dir, 5)]


@pytest.mark.parametrize("every", [2, 5])
def test_a_line_every_so_many_steps(run, capsys, monkeypatch, every):
    add = reports.Throughput.on_step_end
    counted = []
    monkeypatch.setattr(
        reports.Throughput, "on_step_end", lambda self, *step: (counted.append(step), add(self, *step))
    )
    train(Communicators.local(), replace(run, log_every=every, log_dir=None, json_lines=None))
    assert len(counted) >= 3  # also of steps that print no line
    lines = [line for line in capsys.readouterr().out.splitlines() if " of 7: " in line]
    assert [line.split(":")[0] for line in lines] == [
        f"step {step} of 7" for step in range(1, 8) if step % every == 0 or step == 7
    ]
    assert "loss " in lines[0] and ", gradient norm " in lines[0] and ", lr 0.0" in lines[0]
    assert "samples/s" in lines[-1]


def test_standard_output_has_nothing_but_objects(run):
    out = io.StringIO()
    with redirect_stdout(out):
        train(Communicators.local(), replace(run, json_lines="-", log_dir=None, log_every=2))
    assert [json.loads(line)["step"] for line in out.getvalue().splitlines()][-1] == 7


def test_the_steps_of_one_update_share_its_values(run):
    window = replace(run.window, accumulate=2)
    train(Communicators.local(), replace(run, window=window, evaluate_every=0, log_dir=None), quiet=True)
    steps = [row for row in objects(run.json_lines) if "loss" in row]
    assert [row["step"] for row in steps] == [*range(1, 8)]
    assert steps[0]["lr"] == steps[1]["lr"] < steps[2]["lr"] and steps[0]["loss"] == steps[1]["loss"]


@pytest.mark.if_changed
@pytest.mark.parametrize("model", ["hstu", "grm", "dlrm"])
def test_the_metrics_that_stop_a_run_are_those_of_its_model(job, model, tmp_path):
    log = tmp_path / "ratings.csv"
    rows = [
        f"{user},{(user * 7 + time) % 19},{time},{1 + (user + time) % 5}"
        for user in range(20)
        for time in range(9)
    ]
    log.write_text("\n".join(["user,item,timestamp,rating", *rows]))
    data = "criteo:samples=300,scale=0.001" if model == "dlrm" else f"csv:{log}"
    job = replace(job, data=data, model=model, max_exposed=3)
    run = Run(job, "reference", WindowConfig(1), steps=1)
    summary = train(Communicators.local(), run, quiet=True)
    assert metric_names(job.epochs()) == [*summary["metrics"]]
    wrong = replace(run, evaluate_every=1, early_stopping=StoppingRule("HR10", 1))
    with pytest.raises(ValueError, match="no evaluation has the metric 'HR10', which are"):
        train(Communicators.local(), wrong, quiet=True)


def test_the_command_refuses_the_log_of_another_run_in_one_line(tmp_path):
    (tmp_path / "metrics.csv").write_text("theirs")
    code, output, error = commands.invoke("train", "--log-dir", tmp_path, "--world-size", 2)
    assert code == 2 and isinstance(error, SystemExit) and output.count("metrics.csv is there already") == 1


@pytest.mark.parametrize("option", [["--log-every", "2"], ["--early-stopping", "AUC:1"], ["--log-dir", "x"]])
def test_slipstream_refuses_what_it_would_ignore(option):
    more = ["--evaluate-every", 2] if option[0] == "--early-stopping" else []
    code, output, _ = commands.invoke(
        "train", "--slipstream", "--model", "dlrm", "--data", "criteo:samples=300,scale=0.001", *option, *more
    )
    assert code == 2 and "does not go with" in output
