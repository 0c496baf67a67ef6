"""Promise: with ``impl=`` every op of a step runs on that implementation, on every lane and outside."""

import threading

import pytest
import torch
from trainer_parts import EVERY_MODE, batches, parts, state

from tritonrec import ops
from tritonrec.distributed import Communicators
from tritonrec.kernels.op import Op
from tritonrec.pipeline import DenseModel, ReferenceTrainer, Trainer, WindowConfig


@pytest.fixture
def ran(monkeypatch):
    """(op, implementation, thread) of every op that ran."""
    seen, run = [], Op._run

    def noted(self, arguments, impl):
        chosen = ops.implementation(impl, arguments[self._first])
        seen.append((self.name, chosen, threading.current_thread().name))
        return run(self, arguments, impl)

    monkeypatch.setattr(Op, "_run", noted)
    return seen


def train(mode, **options):
    made, count = parts(), 1 if mode == "reference" else 3
    config = WindowConfig(count, seed=4)
    with Trainer(*made, Communicators.local(), mode, config, **options) as trainer:
        list(trainer.run(batches(2, 3)))
    return state(made)


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_every_op_runs_on_it(ran, mode):
    batches(2, 3)  # their ops are the loader's
    ran.clear()
    on_cpu = train(mode)
    assert {impl for _, impl, _ in ran} == {"cpu"}
    names = sorted(name for name, _, _ in ran)
    ran.clear()
    plain = train(mode, impl="reference")
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(plain, on_cpu, strict=True))
    assert {impl for _, impl, _ in ran} == {"reference"}
    # the CPU adds the terms of a bias without the op, in one call
    terms = "segment_sum_into"
    assert sorted(name for name, _, _ in ran if name != terms) == [name for name in names if name != terms]
    if mode == "nestpipe":
        assert len({thread for _, _, thread in ran}) >= 3


@pytest.mark.parametrize("mode", ["reference", "nestpipe"])
def test_auto_is_that_of_the_thread_that_makes_the_trainer(ran, mode):
    made, given = parts(), batches(2, 3)
    config = WindowConfig(1 if mode == "reference" else 3, seed=4)
    with ops.use_impl("reference"):
        trainer = Trainer(*made, Communicators.local(), mode, config)
    ran.clear()
    with trainer:
        list(trainer.run(given))
    assert {impl for _, impl, _ in ran} == {"reference"}


def test_a_reference_trainer_takes_it_too(ran):
    given = batches(2, 3)
    ran.clear()
    model, tables, optimizer = parts()
    trainer = ReferenceTrainer(tables, DenseModel(model, optimizer), impl="reference")
    trainer.step(given[:1])
    assert {impl for _, impl, _ in ran} == {"reference"}


@pytest.mark.parametrize(
    ("impl", "match"), [("triton", "impl='triton' on a CPU tensor"), ("cuda", "impl must be one of auto")]
)
def test_what_cannot_run_is_refused_at_once(monkeypatch, impl, match):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("tritonrec.kernels.dispatch.emulated", None)
    with pytest.raises(ValueError, match=match):
        train("nestpipe", impl=impl)


def test_it_cannot_be_set_between_results():
    """Lanes have begun with it, and a mode without lanes would go on with another."""
    with (
        Trainer(*parts(), Communicators.local(), "sequential", WindowConfig(1, seed=4)) as trainer,
        pytest.raises(AttributeError),
    ):
        trainer.impl = "reference"
