"""Promise: a log is described alike by options, a config file and its source, read whole or streamed."""

from dataclasses import replace

import numpy as np
import pytest
from commands import invoke

from tritonrec.data import ClickStream, LogFormat
from tritonrec.harness import streams
from tritonrec.harness.job import Job

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
