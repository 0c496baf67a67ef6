"""The ends of a next-item model in a trainer: losses by sample and cut rows have the bits of single steps."""

import pytest
import torch

from tritonrec.kernels.sampled_softmax import cpu_by_sample
from tritonrec.nn import GradientAccumulator
from tritonrec.nn.next_item_losses import losses_by_sample, split

DIM, TEMPERATURE = 7, 0.3
CASES = {
    "ragged": ([3, 0, 1, 9, 0], 5), "no_negatives": ([4, 2], 0), "one_token": ([1], 1),
    "all_empty": ([0, 0], 3), "one_sample": ([20], 2),
}  # fmt: skip


@pytest.fixture
def calls(monkeypatch):
    """The calls of the kernel that adds by sample."""
    made = []
    forward = cpu_by_sample.Bound.forward

    def counted(self, *arguments):
        made.append(self)
        return forward(self, *arguments)

    monkeypatch.setattr(cpu_by_sample.Bound, "forward", counted)
    return made


def inputs(lengths, negatives):
    generator = torch.Generator().manual_seed(3)
    tokens = sum(lengths)
    rows = 4 * torch.randn(tokens * (2 + negatives), DIM, generator=generator)
    valid = torch.rand(tokens, negatives, generator=generator) < 0.8
    return rows, valid, torch.tensor([0, *lengths]).cumsum(0)


def run(case, trainer, detach=False):
    """Losses, and the gradient of the rows."""
    rows, valid, offsets = inputs(*case)
    rows.requires_grad_()
    accumulator = GradientAccumulator(torch.nn.Module(), None)
    with accumulator.active() if trainer else torch.enable_grad():
        items, others = split(rows, len(valid))
        hidden = torch.sin(items.detach() if detach else items)
        losses = losses_by_sample(hidden, others, valid, offsets, TEMPERATURE)
        losses.backward(torch.linspace(0.5, 2, len(losses)), retain_graph=True)
        first = rows.grad.clone()
        losses.backward(torch.linspace(0.5, 2, len(losses)))
    assert torch.equal(rows.grad, 2 * first)
    return losses.detach(), first


@pytest.mark.parametrize("ranges", [1, 2])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bits_are_those_of_the_single_steps(case, ranges, calls, monkeypatch):
    if ranges == 2:
        monkeypatch.setattr(cpu_by_sample, "over_ranges", lambda run, count, cost: [run(0, 1), run(1, count)])
    want = run(case, trainer=False)
    assert not calls
    for cast in (False, True):  # which the op does to nothing that is float32
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            assert all(map(torch.equal, run(case, trainer=True), want))
    assert len(calls) == 2 * bool(sum(case[0]))


def test_no_gradient_is_lost_where_the_first_rows_have_none(calls):
    want = run(CASES["ragged"], trainer=False, detach=True)
    assert all(map(torch.equal, run(CASES["ragged"], trainer=True, detach=True), want))
    tokens = sum(CASES["ragged"][0])
    assert calls and not want[1][:tokens].any() and want[1][tokens:].any()


def test_rows_of_one_part_alone():
    rows, _, _ = inputs([3, 2], 1)
    rows.requires_grad_()
    with GradientAccumulator(torch.nn.Module(), None).active():
        items, _ = split(rows, 5)
        (2 * items).sum().backward()
        assert torch.equal(rows.grad, torch.cat([torch.full((5, DIM), 2.0), torch.zeros(10, DIM)]))
        split(rows, 5)[1].square().sum().backward()
    assert torch.equal(rows.grad[5:], 2 * rows[5:].detach())


@pytest.mark.parametrize("count", [15, 40])
def test_a_gradient_that_is_a_part_of_another_tensor_is_copied(count):
    """Also where as many rows lie before it as would be ours."""
    rows, given = torch.zeros(15, DIM, requires_grad=True), torch.randn(count, DIM)
    before = given.clone()
    with GradientAccumulator(torch.nn.Module(), None).active():
        split(rows, 5)[1].backward(given[5:15])
    assert torch.equal(given, before) and not rows.grad[:5].any() and torch.equal(rows.grad[5:], given[5:15])


def test_every_element_of_the_gradient_is_written(monkeypatch):
    want = run(CASES["ragged"], trainer=False)

    def poisoned(like, *shape):
        return torch.full(shape, float("nan"), dtype=like.dtype)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    monkeypatch.setattr(cpu_by_sample.torch, "empty_like", lambda like: torch.full_like(like, float("nan")))
    assert all(map(torch.equal, run(CASES["ragged"], trainer=True), want))


def test_other_arguments_take_the_ops_with_their_errors(calls):
    rows, valid, offsets = inputs([3, 0, 2], 4)
    hidden, others = rows[:5].clone().requires_grad_(), rows[5:]
    with GradientAccumulator(torch.nn.Module(), None).active():
        want = losses_by_sample(hidden, others, valid, offsets, TEMPERATURE)
        strided = torch.cat([hidden, hidden], 1)[:, :DIM]
        assert torch.equal(losses_by_sample(strided, others, valid, offsets, TEMPERATURE), want)
        assert len(calls) == 1
        with pytest.raises(ValueError, match="must be float32"):
            losses_by_sample(hidden.double(), others, valid, offsets, TEMPERATURE)
        with pytest.raises(ValueError, match=r"temperature must lie in \(0, inf\)"):
            losses_by_sample(hidden, others, valid, offsets, 0.0)
        with pytest.raises(ValueError, match="must end at the 5 tokens"):
            losses_by_sample(hidden, others, valid, offsets[:-1] * 1, TEMPERATURE)
        with pytest.raises(RuntimeError, match="split_with_sizes"):
            losses_by_sample(hidden, others[:-1], valid, offsets, TEMPERATURE)
        (slope,) = torch.autograd.grad(want.sum(), hidden, retain_graph=True)
        (again,) = torch.autograd.grad(want.sum(), hidden, create_graph=True)
        assert torch.equal(again, slope)
        with pytest.raises(NotImplementedError, match="sampled_softmax_backward has no derivative"):
            again.sum().backward()
