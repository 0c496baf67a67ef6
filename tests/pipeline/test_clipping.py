"""Promise: gradients are clipped by the norm of all of them, whose bits are the same in every layout."""

import math
from dataclasses import replace

import pytest
import torch
from speeds import slow_except
from trainer_parts import EVERY, JOB, assert_part_of, batches, of_rank, parts, same, trained, trainer

from tritonrec import ops
from tritonrec.distributed import Communicators
from tritonrec.embedding import TablePolicy
from tritonrec.pipeline import NESTPIPE, Trainer, WindowConfig
from tritonrec.pipeline.clipping import clamp, norm_of, scale_of, squares

LIMITS = [{"max_grad_norm": 0.02}, {"max_grad_norm": 0.01, "max_grad_value": 0.002}]


def run(mode, consistency="batch", count=3, policy=None, **window):
    made = parts(optimizer="sgd", lr=0.5, policy=policy)
    got, results = trained(made, mode, consistency, batches(count), **window)
    return got, [result.grad_norm for result in results]


@pytest.mark.parametrize(("mode", "consistency"), EVERY)
@pytest.mark.parametrize("limits", slow_except(LIMITS[:1], LIMITS), ids=["norm", "norm and value"])
def test_every_mode_clips_alike(mode, consistency, limits):
    expected, norms = (
        run("reference", **limits) if consistency == "batch" else run("sequential", "window", **limits)
    )
    got, found = run(mode, consistency, **limits)
    assert same(got, expected) and found == norms
    assert all(norm > limits["max_grad_norm"] for norm in norms)
    assert not same(got, run(mode, consistency)[0])


@pytest.mark.parametrize("mode", ["reference", "nestpipe"])
def test_infinity_measures_and_changes_no_bit(mode):
    plain, none = run(mode)
    got, norms = run(mode, max_grad_norm=math.inf)
    assert same(got, plain) and none == [None] * 3 and all(0 < norm < 1 for norm in norms)


@pytest.mark.parametrize("mode", ["reference", "nestpipe"])
def test_rows_that_are_not_admitted_have_no_part_in_the_norm(mode):
    never = TablePolicy(admission=100)
    _, few = run(mode, policy=never, max_grad_norm=math.inf)
    made = parts(optimizer="sgd", lr=0.5, policy=never)
    with trainer(made, mode, max_grad_norm=math.inf) as training:
        before = [each.detach().clone() for each in made[0].parameters()]
        norm = training.step(batches(1)[0]).grad_norm
    moved = [
        (was - now.detach()).double() / 0.5 for was, now in zip(before, made[0].parameters(), strict=True)
    ]
    assert norm == few[0] and norm == pytest.approx(
        float(sum((each**2).sum() for each in moved)) ** 0.5, rel=1e-4
    )
    assert run(mode, max_grad_norm=math.inf)[1][0] > norm


@pytest.mark.multi_rank
@pytest.mark.parametrize(
    ("ranks", "replicas"), slow_except([(2, 1), (2, 2)], [(2, 1), (2, 2), (4, 2), (3, 1)])
)
def test_the_norm_has_the_same_bits_on_any_number_of_ranks(pool, ranks, replicas):
    window = WindowConfig(3, max_grad_norm=0.02, seed=4)
    whole = of_rank(Communicators.local(), replace(window, micro_batches=1), "reference", optimizer="sgd")
    for found in pool.run(of_rank, ranks, window, "nestpipe", 3, JOB, "sgd", replicas=replicas):
        assert_part_of(found, whole)


def test_the_norm_is_that_of_torch():
    random = torch.Generator().manual_seed(1)
    gradients = [
        torch.randn(size, generator=random) * 10.0**-power for power, size in enumerate((7, 900, 40, 1))
    ]
    parameters = [torch.nn.Parameter(torch.zeros(len(each))) for each in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = norm_of(squares(gradients, torch.device("cpu")))
    expected = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    assert float(norm) == pytest.approx(float(expected), rel=1e-6)
    tiny = torch.tensor(1e-6, dtype=torch.float64)  # as large as torch's epsilon beside it
    assert float(scale_of(tiny, WindowConfig(max_grad_norm=1e-6))) == 0.5
    together = squares([torch.cat(gradients)], torch.device("cpu"))
    assert torch.equal(together, sum(ops.sum_of_squares(each) for each in reversed(gradients)))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 2.0**25])
def test_a_norm_that_is_none_is_refused(value):
    with pytest.raises(FloatingPointError, match="norm of the gradients is not finite, or above"):
        norm_of(squares([torch.tensor([1.0, value])], torch.device("cpu")))


def test_values_are_clamped_and_zero_means_no_limit():
    values = torch.tensor([-3.0, -0.5, 0.0, 2.0])
    assert clamp(values, WindowConfig(max_grad_value=1.0)).tolist() == [-1.0, -0.5, 0.0, 1.0]
    assert clamp(values, WindowConfig()) is values


def test_a_schedule_without_the_norm_is_refused():
    with pytest.raises(ValueError, match="clips: False"):
        Trainer(
            *parts(), Communicators.local(), "nestpipe", WindowConfig(2, max_grad_norm=1.0), schedule=NESTPIPE
        )
