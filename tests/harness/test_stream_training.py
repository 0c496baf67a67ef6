"""Promise: training from shards goes on with the same bits at another world size, also after kill -9."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from commands import invoke

from tritonrec import checkpoint
from tritonrec.checkpoint.lock import WriterLock
from tritonrec.data.convert_sequences import write_sequences
from tritonrec.data.sources import load_interactions
from tritonrec.distributed import Communicators
from tritonrec.harness import streams
from tritonrec.harness.job import Job
from tritonrec.harness.train.config import read_config
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run
from tritonrec.pipeline import WindowConfig
from tritonrec.trace import read

STEPS = 14
pytestmark = pytest.mark.multi_rank


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job on a folder of sequences."""
    folder = tmp_path_factory.mktemp("data") / "sequences"
    folder.mkdir()
    log = load_interactions("zipf:users=150,items=200,median_length=6,seed=3")
    write_sequences([log], folder, rows_per_file=40, rows_per_group=10)
    return Job(f"parquet:{folder}", batch_size=16, max_seq_len=10, num_negatives=2)


@pytest.fixture(scope="module")
def digest(job):
    """Of the reference, which nobody stops."""
    run = Run(job, "reference", WindowConfig(1), steps=STEPS)
    return train(Communicators.local(), run, quiet=True)["digest"]


@pytest.mark.if_changed
def test_a_run_goes_on_at_another_world_size(job, digest, pool, tmp_path):
    run = Run(job, "nestpipe", WindowConfig(2), steps=9, checkpoint=str(tmp_path), save_every=4)
    trace = tmp_path / "run.pftrace"
    assert pool.run(train, 2, replace(run, trace=trace), True)[0]["step"] == 9
    ended = train(Communicators.local(), replace(run, steps=STEPS, resume=True), quiet=True)
    assert ended["digest"] == digest
    slices = {span.name for span in read(trace).spans if span.lane == "prefetch"}
    assert slices == {"load", "read", "decode", "negatives", "collate", "prefetch"}


def test_a_run_on_other_shards_is_not_gone_on_with(job, tmp_path):
    run = Run(job, "sequential", WindowConfig(1), steps=2, checkpoint=str(tmp_path / "saved"))
    train(Communicators.local(), run, quiet=True)
    folder = job.data.removeprefix("parquet:")
    away = os.path.join(folder, "_away.parquet")
    shard = os.path.join(folder, "part-00002.parquet")
    os.rename(shard, away)
    streams._sequences.cache_clear()
    try:
        with pytest.raises(
            ValueError, match=r"the position is one of a stream with data .*, samples 150, and"
        ):
            train(Communicators.local(), replace(run, steps=4, resume=True), quiet=True)
    finally:
        os.rename(away, shard)
        streams._sequences.cache_clear()


def test_a_stream_refuses_what_it_cannot_do(job):
    with pytest.raises(ValueError, match="a rank streams its own part only: choose dynamic"):
        replace(job, balance=True).loader()
    with pytest.raises(ValueError, match="sequences, which models of the next item stream"):
        replace(job, model="grm").loader()


def test_verify_refuses_shards_by_name(job):
    code, output, _error = invoke("verify", "--quick", "--data", job.data)
    assert code == 2 and "has rows of sequences" in output


def test_batches_cut_by_tokens_train(job, tmp_path):
    run = Run(replace(job, dynamic=True), "nestpipe", WindowConfig(2), steps=4, checkpoint=str(tmp_path))
    train(Communicators.local(), run, quiet=True)
    ended = train(Communicators.local(), replace(run, steps=8, resume=True), quiet=True)
    whole = train(Communicators.local(), replace(run, steps=8, checkpoint=None), quiet=True)
    assert ended["digest"] == whole["digest"]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_a_run_killed_at_once_goes_on_at_another_world_size(job, pool, tmp_path, before, after):
    options = {"steps": 10_000, "batch-size": 16, "max-seq-len": 10, "negatives": 2, "save-every": 2}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [
        sys.executable, "-m", "tritonrec", "train", "--data", job.data, "--checkpoint", str(tmp_path),
        "--lr", "0.001", "--micro-batches", "2", "--world-size", str(before), *words,
    ]  # fmt: skip
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 200
    while not (saved := [step for step in checkpoint.steps(tmp_path) if step >= 4]):
        assert running.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    running.kill()
    running.wait()
    lock = WriterLock(tmp_path)
    while True:  # its ranks end when they notice
        try:
            lock.acquire()
            break
        except checkpoint.CheckpointError:
            assert time.monotonic() < until
    lock.release()
    steps = checkpoint.steps(tmp_path)[-1] + 7
    assert steps > saved[0]
    run = replace(read_config(tmp_path, Run(Job())), steps=steps, checkpoint=str(tmp_path), resume=True)
    ended = pool.run(train, after, run, True)[0]
    reference = replace(
        run, mode="reference", window=WindowConfig(1), checkpoint=None, resume=False, save_every=0
    )
    assert ended["digest"] == train(Communicators.local(), reference, quiet=True)["digest"]
    assert ended["steps_run"] == 7 and ended["world_size"] == after
