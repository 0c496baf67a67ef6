"""Promise: asked to stop, all ranks save after one update and say so; resumed, a run has the same bits."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest
from speeds import slow_except

from tritonrec import checkpoint
from tritonrec.distributed import Communicators
from tritonrec.harness.progress import CommandProgress
from tritonrec.harness.train import loop, stopping
from tritonrec.harness.train.launch import Launch
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run
from tritonrec.harness.train.stopping import BegunHere, graceful_stop
from tritonrec.pipeline import WindowConfig

pytestmark = pytest.mark.multi_rank
STEPS = 12


@pytest.fixture(scope="module")
def reference(job):
    """The digest of the run that nobody stops."""
    return train(Communicators.local(), Run(job, "reference", WindowConfig(1), steps=STEPS), quiet=True)[
        "digest"
    ]


def train_until_asked(communicators, run, rank, result):
    """`train`; `rank` is asked to stop when it has seen so many results."""
    update = CommandProgress.update
    seen = []

    def ask(self, *args, **fields):
        seen.append(None)
        if communicators.rank == rank and len(seen) == result:
            communicators.stop.set()
        return update(self, *args, **fields)

    CommandProgress.update = ask
    try:
        return train(communicators, run, quiet=True)
    finally:
        CommandProgress.update = update
        communicators.stop.clear()


@pytest.mark.parametrize(("mode", "micro_batches"), [("reference", 1), ("sequential", 2), ("nestpipe", 2)])
def test_one_rank_stops_saves_and_goes_on_with_the_same_bits(job, reference, tmp_path, mode, micro_batches):
    run = Run(job, mode, WindowConfig(micro_batches), steps=STEPS, checkpoint=str(tmp_path))
    stopped = train_until_asked(Communicators.local(), run, 0, 3)
    assert stopped["stopped"] and 3 <= stopped["step"] < STEPS
    assert checkpoint.steps(tmp_path) == [stopped["step"]]
    resumed = train(Communicators.local(), replace(run, resume=True), quiet=True)
    assert (resumed["step"], resumed["digest"], resumed["stopped"]) == (STEPS, reference, False)


@pytest.mark.parametrize("replicas", [1, 2], ids=["3 ranks", "2 ranks, 2 copies"])
@pytest.mark.parametrize("asked", [0, 1])
def test_ranks_of_which_one_is_asked_stop_after_the_same_step(
    pool, job, reference, tmp_path, asked, replicas
):
    world = 3 if replicas == 1 else 2
    run = Run(job, "nestpipe", WindowConfig(2), steps=STEPS, checkpoint=str(tmp_path))
    summaries = pool.run(train_until_asked, world, run, asked, 2, replicas=replicas)
    (step,) = {summary["step"] for summary in summaries}
    assert all(summary["stopped"] for summary in summaries) and 2 <= step < STEPS
    assert checkpoint.steps(tmp_path) == [step]
    assert train(Communicators.local(), replace(run, resume=True), quiet=True)["digest"] == reference


def test_an_update_of_several_batches_is_completed(job, tmp_path):
    run = Run(job, "nestpipe", WindowConfig(2, accumulate=3), steps=48, checkpoint=str(tmp_path))
    step = train_until_asked(Communicators.local(), run, 0, 1)["step"]
    assert step % 3 == 0 and step < 48  # of 16 updates at most 8 may be in flight or read by then
    whole = train(Communicators.local(), replace(run, checkpoint=None), quiet=True)
    assert train(Communicators.local(), replace(run, resume=True), quiet=True)["digest"] == whole["digest"]


@pytest.mark.parametrize("every", [{"save_every": 4}, {"evaluate_every": 4}], ids=str)
def test_a_stop_at_a_save_or_an_evaluation_saves_once(job, tmp_path, every):
    run = Run(job, "reference", WindowConfig(1), steps=STEPS, checkpoint=str(tmp_path), **every)
    assert train_until_asked(Communicators.local(), run, 0, 3)["step"] == 4
    assert checkpoint.steps(tmp_path) == [4]


def test_a_stop_during_an_evaluation_saves_the_step_before_it(job, tmp_path, monkeypatch):
    communicators, evaluate = Communicators.local(), loop.evaluate_model

    def ask(*args):
        communicators.stop.set()
        return evaluate(*args)

    monkeypatch.setattr(loop, "evaluate_model", ask)
    run = Run(job, "reference", WindowConfig(1), steps=STEPS, checkpoint=str(tmp_path), evaluate_every=4)
    step = train(communicators, run, quiet=True)["step"]
    assert 4 <= step < STEPS and checkpoint.steps(tmp_path) == [step]


def test_a_stop_in_the_last_step_is_the_end(job, reference):
    run = Run(job, "reference", WindowConfig(1), steps=STEPS)
    summary = train_until_asked(Communicators.local(), run, 0, STEPS)
    assert not summary["stopped"] and summary["digest"] == reference and summary["metrics"]


def test_it_is_said_where_nothing_was_saved(job, capsys):
    communicators = Communicators.local()
    communicators.stop.set()
    train(communicators, Run(job, "reference", WindowConfig(1), steps=STEPS))
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"stopped at step 1 of {STEPS}; nothing was saved, which takes --checkpoint DIRECTORY"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_the_first_signal_asks_and_the_second_ends(name, capfd):
    number, asked = getattr(signal, name), threading.Event()
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, graceful_stop(asked.set) as stop:
        os.kill(os.getpid(), number)
        assert asked.wait(10) and stop.exit_code == 128 + number
        os.kill(os.getpid(), number)
        time.sleep(10)
    assert ended.value.code == 128 + number and signal.getsignal(number) is before
    assert "stopping after this step" in capfd.readouterr().err


@pytest.mark.parametrize("pool", [False, True])
def test_before_the_first_step_there_is_nothing_to_wait_for(job, capfd, tmp_path, pool):
    begun = BegunHere(tmp_path / "begun") if pool else threading.Event()
    with pytest.raises(SystemExit) as ended, graceful_stop(lambda: None, begun=begun):
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM and not capfd.readouterr().err
    train(Communicators.local(), Run(job, "reference", WindowConfig(1), steps=1), quiet=True, begun=begun)
    with graceful_stop(lambda: None, begun=begun):
        signal.raise_signal(signal.SIGTERM)
    assert "stopping after this step" in capfd.readouterr().err


@dataclass
class Asked:
    """Of a run: the process that rank 0 signals, and whether a step has begun."""

    launcher: int
    begins: bool
    min_ranks: int = 1


def until_stopped(communicators, run, *elastic, begun=None):
    """A rank whose first step does not begin in the next minute, or has where `run` says so."""
    if run.begins:
        (begun or elastic[-1]).set()
    if communicators.rank == 0:
        os.kill(run.launcher, signal.SIGTERM)
    return {"stopped": communicators.stop.wait(60)}


@pytest.mark.if_changed
@pytest.mark.parametrize("elastic", [False, True])
def test_ranks_of_a_pool_are_ended_at_once_before_their_first_step(monkeypatch, elastic):
    monkeypatch.setattr(loop, "train", until_stopped)
    launch = Launch(2, 1, timedelta(seconds=60))
    train = launch.train_elastically if elastic else launch.train
    began = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        train(Asked(os.getpid(), False))
    assert ended.value.code == 128 + signal.SIGTERM and time.monotonic() - began < 50
    assert train(Asked(os.getpid(), True))[0] == {"stopped": True}


def test_a_wish_that_the_ranks_could_not_hear_yet_is_repeated():
    wishes = threading.Semaphore(0)
    with graceful_stop(wishes.release):
        os.kill(os.getpid(), signal.SIGTERM)
        assert all(wishes.acquire(timeout=10) for _ in range(2))


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with graceful_stop(lambda: None):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("third", [False, True])
def test_what_holds_up_the_end_after_a_second_signal_is_cut_off(third, monkeypatch):
    """As a lane does that compiles a kernel; later nothing is left of it."""
    ended = []

    def end(code):
        ended.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(stopping, "END_SECONDS", 100 if third else 0.2)
    for waits in (False, True):
        with pytest.raises(SystemExit), graceful_stop(lambda: None):
            signal.raise_signal(signal.SIGINT)
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                if waits and third:
                    signal.raise_signal(signal.SIGINT)
                deadline = time.monotonic() + 10
                while waits and not ended and time.monotonic() < deadline:
                    time.sleep(0.01)
        time.sleep(0 if third else 0.4)
        assert ended == [130] * waits


ENDED = """
import atexit, os, signal, sys, threading, time
from tritonrec import __main__
from tritonrec.harness import cli
number = getattr(signal, sys.argv[1])
threading.Thread(target=time.sleep, args=(1000,)).start()  # a lane that compiles
atexit.register(print, "closed")
def command():
    os.kill(os.getpid(), number)
    time.sleep(1000)
cli.app = command
if sys.argv[2:]:
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
__main__.main()
"""


@pytest.mark.parametrize("again", [[], ["again"]])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_command_that_a_signal_ends_waits_for_no_lane_and_says_nothing(name, again):
    command = [sys.executable, "-c", ENDED, name, *again]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    code = 128 + (signal.SIGINT if again else getattr(signal, name))
    assert (done.returncode, done.stderr, done.stdout) == (code, "", "" if again else "closed\n")


IMPORTING = """
import os, signal, sys, time
from tritonrec import __main__
from tritonrec.harness import cli
sys.path.insert(0, sys.argv[1])
def command():
    cli._begun[:] = sys.argv[3:]
    try:
        import sends
    except BaseException:  # as torch does, which goes on with half of numpy
        print("swallowed")
    print(sends.whole, flush=True)
    time.sleep(1000)
cli.app = command
__main__.main()
"""


@pytest.mark.parametrize(("begun", "said"), [([], ""), (["train"], "True\n")])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_is_not_lost_in_an_import_that_swallows_it(tmp_path, name, begun, said):
    """The module is whole before the command ends, which does not wait for it where nothing has begun."""
    (tmp_path / "sends.py").write_text(
        f"import os, signal, time\nos.kill(os.getpid(), signal.{name})\ntime.sleep(0.2)\nwhole = True\n"
    )
    command = [sys.executable, "-c", IMPORTING, str(tmp_path), name, *begun]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, done.stdout) == (128 + getattr(signal, name), "", said)


PYTHON = [sys.executable, "-m"]
TORCHRUN = [*PYTHON, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


WITH_STATE = [
    "--lr-schedule", "cosine", "--ema", "0.9", "--evaluate-every", "7", "--early-stopping", "HR@10:99999",
]  # fmt: skip
LAUNCHES = {
    "one rank": (PYTHON, WITH_STATE, signal.SIGTERM, {128 + signal.SIGTERM}),
    "ranks of a pool": (PYTHON, ["--world-size", "2"], signal.SIGINT, {128 + signal.SIGINT}),
    "torchrun": (TORCHRUN, [], signal.SIGTERM, {-signal.SIGTERM, 1, 128 + signal.SIGTERM}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(["one rank"], LAUNCHES))
def test_the_command_saves_on_a_signal_and_goes_on(tmp_path, name):
    """Ctrl-C reaches every process of the terminal; SIGTERM the one that was started."""
    launch, options, number, codes = LAUNCHES[name]
    saved, summary = tmp_path / "saved", tmp_path / "summary.json"
    command = [
        "tritonrec", "train", "--data", "zipf:users=60,items=80,seed=3", "--batch-size", "16", "--dim", "8",
        "--max-seq-len", "10", "--negatives", "4", "--checkpoint", str(saved), "--json", str(summary),
        *options, "--steps", "1000000",
    ]  # fmt: skip
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([*launch, *command], start_new_session=True, **output)
    said = []
    for line in process.stdout:
        said.append(line)
        if "training: " in line and number is not None:  # the first line of progress
            (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
            number = None
    assert process.wait(60) in codes, "".join(said)
    (step,) = checkpoint.steps(saved)
    assert f"stopped at step {step} of 1000000; saved to {saved}; go on with --resume" in "".join(said)
    assert json.loads(summary.read_text())["step"] == step
    state = checkpoint.load(saved).meta.get("early_stopping")
    assert state is None if options is not WITH_STATE else (state["step"] or 0) in range(step - 8, step)
