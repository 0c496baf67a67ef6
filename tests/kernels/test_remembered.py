"""What ops find out about a batch's offsets is found once in a step, and never kept too long."""

import pytest
import torch
from impls import GPU, TRITON

from tritonrec import ops
from tritonrec.kernels.gradients import remembered
from tritonrec.kernels.offsets import check_lengths, check_offsets


def active():
    return ops.GradientAccumulator(torch.nn.Module()).active()


@pytest.fixture
def found():
    """A function that counts its calls, and gives the sum of a tensor."""
    calls = []

    def find(tensor, key=""):
        return remembered(tensor, key, lambda: calls.append(key) or int(tensor.sum()))

    return calls, find


def test_once_while_an_accumulator_is_active(found):
    calls, find = found
    one, other = torch.tensor([1, 2]), torch.tensor([1, 2])
    with active():
        assert [find(one), find(one), find(one, "other"), find(other), find(one)] == [3] * 5
        assert len(calls) == 3
        with active():
            find(one)
        find(one)
        assert len(calls) == 4
    with active():
        find(one)
    find(one), find(one)
    assert len(calls) == 7


def test_a_changed_tensor_is_looked_at_again(found):
    calls, find = found
    offsets = torch.tensor([1, 2])
    view = offsets[1:]
    with active():
        assert find(offsets) == 3
        view.fill_(5)
        assert find(offsets) == 6 and len(calls) == 2
        with torch.inference_mode():
            counted = torch.tensor([1, 2])
            find(counted), find(counted)
    assert len(calls) == 4


def test_a_tensor_that_is_gone_is_not_taken_for_another(found):
    _, find = found
    with active():
        for number in range(50):
            assert find(torch.tensor([number])) == number


def test_what_was_refused_is_refused_again():
    offsets = torch.tensor([0, 3, 5])
    with active():
        for _ in range(2):
            check_offsets("offsets", offsets, 5)
            check_lengths(offsets, 3)
            with pytest.raises(ValueError, match="must end at the 6 tokens"):
                check_offsets("offsets", offsets, 6)
            with pytest.raises(ValueError, match="sequence 0 has 3 tokens"):
                check_lengths(offsets, 2)
        offsets[1] = 7
        with pytest.raises(ValueError, match="offsets never decrease"):
            check_offsets("offsets", offsets, 5)


@pytest.mark.slow
@pytest.mark.parametrize("impl", [TRITON])
def test_attention_has_the_same_bits(impl):
    """Several widths, other lengths at the same place, fewer queries: no list of tiles is mixed up."""

    def run():
        results = []
        offsets = torch.tensor([0, 5, 5, 40])
        for cuts, dim in (([0, 5, 5, 40], 4), ([0, 5, 5, 40], 160), ([0, 33, 34, 40], 4)):
            offsets.copy_(torch.tensor(cuts))
            where = offsets.cuda() if GPU else offsets
            q, k, v = (
                torch.randn(40, 1, dim, generator=torch.Generator().manual_seed(s)).to(where.device)
                for s in range(3)
            )
            last = torch.tensor([0, 1, 1, 3], device=where.device)
            options = {"alpha": 0.3, "scaling_seqlen": 35, "impl": impl}
            results.append(ops.hstu_attention(q, k, v, where, 35, **options))
            results.append(ops.hstu_attention(q[:3], k, v, where, 35, delta_offsets=last, **options))
            leaves = [each.requires_grad_() for each in (q, k, v)]
            results += torch.autograd.grad(ops.hstu_attention(*leaves, where, 36, **options).sum(), leaves)
        return results

    plain = run()
    with active():
        shared = run()
    assert all(map(torch.equal, plain, shared))


def test_sequences_as_long_as_the_longest_fit():
    offsets = torch.tensor([0, 3, 3, 5])
    check_lengths(offsets, 3)
    with pytest.raises(ValueError, match="sequence 0 has 3 tokens, more than max_seq_len=2"):
        check_lengths(offsets, 2)


@pytest.mark.parametrize(
    ("offsets", "fit"), [([0, 3, 5], True), ([1, 3, 5], False), ([0, 3, 4], False), ([0, 6, 5], False)]
)
def test_offsets_on_a_device_are_checked_there(offsets, fit, monkeypatch):
    class There(torch.Tensor):
        device = torch.device("cuda")

    seen = []
    monkeypatch.setattr(torch, "_assert_async", lambda fits, message: seen.append((bool(fits), message)))
    check_offsets("seq_offsets", torch.tensor(offsets).as_subclass(There), 5)
    assert seen == [(fit, "seq_offsets does not cut [0, 5) into sequences")]


def test_the_first_sequence_that_is_too_long_is_named():
    with pytest.raises(ValueError, match="sequence 1 has 5 tokens, more than max_seq_len=4"):
        check_lengths(torch.tensor([0, 4, 9, 15]), 4)
