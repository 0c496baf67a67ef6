"""Promise: a run ends where its metric stops improving: on all ranks, and also where it was interrupted."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
from speeds import slow_except

from tritonrec import checkpoint
from tritonrec.distributed import Communicators
from tritonrec.harness.progress import CommandProgress
from tritonrec.harness.train import loop
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run, StoppingRule
from tritonrec.pipeline import WindowConfig

pytestmark = [pytest.mark.multi_rank, pytest.mark.if_changed]
STEPS, EVERY = 40, 2


def metric(model):
    """Some number that goes up and down with the state of the model, the same in every mode."""
    return float(next(model.parameters()).detach().double().sum()) * 1e3 % 1


@contextmanager
def evaluated_by(measure):
    before, loop.evaluate_model = loop.evaluate_model, lambda model, *_: {"HR@10": measure(model)}
    try:
        yield
    finally:
        loop.evaluate_model = before


@pytest.fixture(scope="module")
def run(job):
    """With a schedule of the learning rate, and an averaged model, which is evaluated."""
    job = replace(job, lr=0.02, lr_schedule="cosine", lr_warmup=3, lr_steps=STEPS, ema=0.5)
    return Run(
        job, "nestpipe", WindowConfig(2), steps=STEPS, evaluate_every=EVERY,
        early_stopping=StoppingRule("HR@10", 2),
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(run):
    """The run that nobody interrupts."""
    with evaluated_by(metric):
        return train(Communicators.local(), replace(run, mode="reference", window=WindowConfig(1)), True)


def same(a, b):
    names = ("step", "digest", "metrics", "baseline", "early_stopping", "stopped")
    return [a[name] for name in names] == [b[name] for name in names]


def test_it_ends_after_so_many_evaluations_without_a_better_one(run, whole, capsys):
    seen = []
    with evaluated_by(lambda model: seen.append(metric(model)) or seen[-1]):
        assert same(train(Communicators.local(), run), whole)
    assert len(seen) > 1
    seen.pop()  # of the test part
    best = max(seen)
    assert len(seen) * EVERY == whole["step"] < STEPS and seen.index(best) == len(seen) - 3
    state = whole["early_stopping"]
    assert state["stopped"] and (state["best"], state["best_step"]) == (best, whole["step"] - 2 * EVERY)
    assert f"stopped early at step {whole['step']}: 2 evaluations without a better HR@10, " in " ".join(
        capsys.readouterr().out.split()
    )


def interrupted(communicators, run, after, spread=0.0):
    """`train`, which is asked to stop after so many results; `spread`: of the ranks' metrics."""
    update, seen = CommandProgress.update, []

    def ask(self, *args, **fields):
        seen.append(None)
        if len(seen) == after:
            communicators.stop.set()
        return update(self, *args, **fields)

    CommandProgress.update = ask
    try:
        with evaluated_by(lambda model: metric(model) + spread * communicators.rank * len(seen)):
            return train(communicators, run, quiet=True)
    finally:
        CommandProgress.update = update
        communicators.stop.clear()


CUTS = [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("after", slow_except([1, 4, 6], CUTS))
def test_a_run_that_was_interrupted_ends_at_the_same_step(run, whole, tmp_path, after):
    saved = replace(run, checkpoint=str(tmp_path))
    first = interrupted(Communicators.local(), saved, after)
    assert first["stopped"] and after <= first["step"] < whole["step"]
    assert same(interrupted(Communicators.local(), replace(saved, resume=True), None), whole)


def test_it_is_interrupted_again_and_again(run, whole, tmp_path):
    saved, steps = replace(run, mode="reference", window=WindowConfig(1), checkpoint=str(tmp_path)), []
    while not steps or steps[-1]["stopped"]:
        steps.append(interrupted(Communicators.local(), replace(saved, resume=bool(steps)), 1))
    assert same(steps[-1], whole) and len(steps) > 3


def test_one_that_has_ended_stays_at_its_end_until_it_gets_more_patience(run, whole, tmp_path):
    saved = replace(
        run, checkpoint=str(tmp_path), mode="reference", window=WindowConfig(1), json_lines=tmp_path / "log"
    )
    with evaluated_by(metric):
        train(Communicators.local(), saved, quiet=True)
        assert checkpoint.steps(tmp_path)[-1] == whole["step"]
        again = replace(saved, resume=True)
        log = (tmp_path / "log").read_text()
        assert same(train(Communicators.local(), again), whole) and log == (tmp_path / "log").read_text()
        patient = replace(again, early_stopping=StoppingRule("HR@10", 3))
        more = train(Communicators.local(), patient, quiet=True)
        assert more["step"] > whole["step"] or more["early_stopping"]["best_step"] > whole["step"]


def test_all_ranks_end_together_though_their_metrics_differ(pool, run, whole, tmp_path):
    saved = replace(run, checkpoint=str(tmp_path))
    for each in pool.run(interrupted, 3, saved, 3, 1.0):
        assert each["stopped"] and each["step"] < whole["step"]
    ended = pool.run(interrupted, 2, replace(saved, resume=True), None, 1.0)
    assert [each["step"] for each in ended] == [whole["step"]] * 2
    assert same(ended[0], whole)


def test_the_last_evaluation_of_a_shorter_run_does_not_count(run, whole, tmp_path):
    """It is at no multiple of `evaluate_every`, and a longer run has none there."""
    saved = replace(run, checkpoint=str(tmp_path), steps=5)
    with evaluated_by(metric):
        assert not train(Communicators.local(), saved, quiet=True)["early_stopping"]["stopped"]
        assert same(train(Communicators.local(), replace(saved, steps=STEPS, resume=True), True), whole)


def test_what_cannot_work_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match="set evaluate_every"):
        train(Communicators.local(), replace(run, evaluate_every=0), quiet=True)
    saved = replace(run, checkpoint=str(tmp_path))
    with evaluated_by(metric):
        interrupted(Communicators.local(), saved, 1)
        other = replace(saved, resume=True, early_stopping=StoppingRule("NDCG@10", 2))
        with pytest.raises(ValueError, match=r"by HR@10 \(max\) before, and is by NDCG@10 \(max\) now"):
            train(Communicators.local(), other, quiet=True)


def test_an_ordinary_checkpoint_may_go_on_with_early_stopping(run, tmp_path):
    """If it has a validation part: without one it has trained on what early stopping would go by."""
    saved = replace(run, checkpoint=str(tmp_path / "all"), early_stopping=None, steps=4)
    with evaluated_by(metric):
        train(Communicators.local(), saved, quiet=True)
        more = replace(saved, resume=True, early_stopping=StoppingRule("HR@10", 1), steps=6)
        with pytest.raises(
            ValueError, match="split leave-one-out in the checkpoint, leave-one-out:validation"
        ):
            train(Communicators.local(), more, quiet=True)
        saved = replace(saved, checkpoint=str(tmp_path / "parts"))
        saved = replace(saved, job=replace(run.job, split="leave-one-out:validation"))
        train(Communicators.local(), saved, quiet=True)
        more = replace(saved, resume=True, early_stopping=StoppingRule("HR@10", 1), steps=6)
        assert train(Communicators.local(), more, quiet=True)["early_stopping"]["step"] == 6
