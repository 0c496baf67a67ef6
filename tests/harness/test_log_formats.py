"""Promise: a log is described alike by options, a config file and its source, read whole or streamed."""

from dataclasses import replace

import numpy as np
import pytest
from commands import invoke

from tritonrec.data import ClickStream, LogFormat
from tritonrec.distributed import Communicators
from tritonrec.harness import streams
from tritonrec.harness.job import Job
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run

HEADER = "when;who;what;stars"
OPTIONS = ["--user-column", "who", "--item-column", "what", "--time-column", "when", "--time-unit", "ms"]
SETTINGS = "user=who&item=what&timestamp=when&time_unit=ms"
FORMAT = LogFormat(user="who", item="what", timestamp="when", time_unit="ms")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITONREC_CACHE", str(tmp_path / "cache"))
    yield
    for cached in (streams._grouped, streams._windows, streams._clicks, streams._source, streams._sequences):
        cached.cache_clear()


@pytest.fixture
def log(tmp_path):
    random = np.random.default_rng(3)
    rows = [
        f"{1_600_000_000_000 + n};{random.integers(9)};{random.integers(30)};{n % 5 + 1}" for n in range(200)
    ]
    (tmp_path / "log.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    return tmp_path / "log.csv"


def samples(job):
    batch = job.loader().batch(0)
    return batch.features.values.tolist(), batch.timestamps.tolist()


def test_a_job_reads_what_its_format_says_whole_and_streamed(log):
    job = Job(f"csv:{log}", batch_size=9, max_seq_len=10, num_negatives=2, format=FORMAT)
    behind = replace(job, data=f"csv:{log}?{SETTINGS}", format=LogFormat(user="stars"))
    whole = replace(job, stream=False)
    assert sorted(samples(job)[0]) == sorted(samples(behind)[0]) == sorted(samples(whole)[0])
    assert min(samples(job)[1]) >= 1_600_000_000_000 and not job.is_streamed
    with pytest.raises(ValueError, match=r"no header that names the columns.*when;who;what;stars"):
        Job(f"csv:{log}").loader()
    assert job.as_json()["format"] == {"user": "who", "item": "what", "timestamp": "when", "time_unit": "ms"}
    assert Job().as_json()["format"] == {}


def test_labels_are_described_too(log):
    grm = Job(f"csv:{log}?{SETTINGS}&rating=stars&label_threshold=3", "grm", batch_size=4, max_exposed=2)
    assert grm.has_labels and grm.loader().tasks == replace(grm, stream=False).loader().tasks == ("click",)
    clicks = Job(f"csv:{log}?label=stars&label_threshold=4&categories=who,what", "dlrm", batch_size=8)
    stream, loader = clicks.loader(), replace(clicks, stream=False).loader()
    assert isinstance(stream, ClickStream) and stream.features == loader.features == ("who", "what")
    assert stream.click_rate == loader.click_rate == 0.4


@pytest.mark.if_changed
def test_the_command_takes_options_and_a_config_file(log, tmp_path):
    words = ["--data", f"csv:{log}", "--batch-size", "8", "--steps", "1", "--print-config"]
    code, output, _error = invoke("train", *words, *OPTIONS)
    assert code == 0 and 'user = "who"' in output and 'time_unit = "ms"' in output
    (tmp_path / "run.toml").write_text('[job.format]\nuser = "who"\nitem = "what"\ntimestamp = "when"\n')
    code, again, _error = invoke("train", "--config", str(tmp_path / "run.toml"), *words)
    assert code == 0 and 'user = "who"' in again
    code, output, _error = invoke("train", *words)
    assert code != 0 and "columns by their names (user=, item=, timestamp=)" in " ".join(output.split())
    code, output, _error = invoke("train", "--data", "zipf", "--user-column", "who", "--print-config")
    assert code != 0 and "has a format of its own" in " ".join(output.split())


@pytest.mark.if_changed
def test_a_log_without_a_header_is_described_by_options(tmp_path):
    rows = [f"{n % 7}::{n % 5 + 1}::{n * 3 % 11}::{n % 2}::0{n % 9 + 1}.05.2024" for n in range(60)]
    (tmp_path / "log.dat").write_text("\n".join(rows) + "\n")
    words = ["--columns", "user,stars,item,like,day", "--delimiter", "::", "--time-column", "day"]
    words += ["--time-format", "%d.%m.%Y", "--rating-column", "stars", "--label-columns", "like"]
    more = ["--model", "grm", "--max-exposed", "2", "--steps", "1", "--print-config"]
    code, output, _error = invoke("train", "--data", f"csv:{tmp_path}/log.dat", *more, *words)
    assert code == 0 and 'label = ["like"]' in output and 'delimiter = "::"' in output
    for option, value, message in (
        ("--columns", "user,item", "5 columns, but 2 are named"),
        ("--delimiter", "tab", "1 columns, but 5 are named"),
        ("--time-format", "%Y", "expected a time of the format %Y"),
        ("--rating-column", "who", "no column 'who'"),
        ("--label-columns", "stars", "expected 0 or 1"),
    ):
        code, output, _error = invoke(
            "train", "--data", f"csv:{tmp_path}/log.dat", *more, *words, option, value
        )
        assert code == 2 and message in output


@pytest.mark.parametrize(
    "model, stream, said",
    [
        ("grm", True, "a rating of at least 4 is a click, of 5 a conversion"),
        ("grm", False, "a rating of at least 4 is a click, of 5 a conversion"),
        ("dlrm", False, "a rating of at least 4 is a click;"),
    ],
)
def test_a_threshold_that_nobody_has_chosen_is_printed(log, capsys, model, stream, said):
    chosen = replace(FORMAT, rating="stars")
    job = Job(f"csv:{log}", model, batch_size=8, max_seq_len=8, max_exposed=2, format=chosen, stream=stream)
    train(Communicators.local(), Run(job, steps=1))
    assert f"labels: {said}" in capsys.readouterr().out
    train(Communicators.local(), Run(replace(job, format=replace(chosen, label_threshold=3)), steps=1))
    assert "labels:" not in capsys.readouterr().out


@pytest.mark.if_changed
@pytest.mark.parametrize("model, stream", [("grm", True), ("grm", False), ("dlrm", False)])
def test_ratings_on_a_larger_scale_need_a_threshold(tmp_path, model, stream):
    rows = [f"{n % 9},{n % 30},{1_600_000_000 + n},{n % 10 + 1}" for n in range(200)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,timestamp,rating", *rows]) + "\n")
    job = Job(f"csv:{tmp_path}/log.csv", model, batch_size=8, max_exposed=2, stream=stream)
    with pytest.raises(ValueError, match=r"ratings go up to 10.*set label_threshold"):
        job.loader()
    assert replace(job, format=LogFormat(label_threshold=7)).loader().batch(0).num_samples == 8


@pytest.mark.parametrize("model", ["hstu", "grm"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_split_that_holds_nothing_out_is_refused_before_training(log, model, stream):
    job = Job(f"csv:{log}?{SETTINGS}&rating=stars", model, batch_size=8, max_exposed=2, stream=stream)
    late = replace(job, split="time:1700000000000")
    with pytest.raises(ValueError, match=r"held out for test: .*\(--split time:1700000000000\)"):
        train(Communicators.local(), Run(late, steps=99), quiet=True)
    if stream:
        with pytest.raises(ValueError, match=r"goes by all events of the log.*--no-stream"):
            replace(job, split="time:0.8,0.1,0.1").loader()
