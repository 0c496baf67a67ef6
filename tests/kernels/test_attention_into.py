"""Attention's gradients written into views of one buffer: the bits of the op that allocates, and no more."""

from itertools import product

import pytest
import torch
from impls import GPU, IMPLS
from speeds import slow_on_triton

from tritonrec.kernels.hstu_attention.call import Call
from tritonrec.kernels.hstu_attention.register import HSTU_ATTENTION_BACKWARD

HEADS, DIM_QK, DIM_V = 2, 5, 7
GUARD = 3  # columns of the buffer between the heads of gradients
CASES = {
    "ragged": [5, 0, 1, 17, 3],
    "block_plus_one": [65],
    "all_empty": [0, 0],
    "empty": [],
}
into_op = torch.ops.tritonrec.hstu_attention_backward_into


def make(lengths, impl, biased=True):
    """do, q, k, v and a call with targets, and with both tables where asked for."""
    generator = torch.Generator().manual_seed(1)
    tokens = sum(lengths)
    sizes = (DIM_V, DIM_QK, DIM_QK, DIM_V)
    tensors = [torch.randn(tokens, HEADS, size, generator=generator) + 0.1 for size in sizes]
    longest = max(lengths, default=0)
    tables = {}
    if biased:
        tables = {
            "pos_weights": torch.randn(max(longest, 1), generator=generator),
            "ts_weights": torch.randn(9, generator=generator),
            "timestamps": torch.randint(-50, 50, (tokens,), generator=generator),
        }
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    targets = torch.tensor(lengths, dtype=torch.int64) // 3
    call = Call(offsets, max(longest, 1), 0.7, 9, num_targets=targets, **tables)
    if impl == "triton" and GPU:
        tensors = [tensor.cuda() for tensor in tensors]
        call = Call(*(value.cuda() if isinstance(value, torch.Tensor) else value for value in call))
    return tensors, call


def views(like):
    """A poisoned buffer, and a view for each tensor, no two with one stride, guards around their heads."""
    heads = [tensor.shape[2] + GUARD + n for n, tensor in enumerate(like)]
    sizes = [tensor.shape[1] * head for tensor, head in zip(like, heads, strict=True)]
    buffer = torch.full((len(like[0]), sum(sizes)), float("nan"), device=like[0].device)
    parts = buffer.split(sizes, 1)
    return buffer, [
        part.unflatten(1, (-1, head))[..., 1 : 1 + tensor.shape[2]]
        for part, head, tensor in zip(parts, heads, like, strict=True)
    ]


@pytest.mark.parametrize(
    ("impl", "case"),
    slow_on_triton(
        IMPLS, product(CASES, [False, True]), [("ragged", True), ("all_empty", True), ("empty", True)]
    ),
)
def test_views_get_the_same_bits_and_the_rest_is_left_alone(impl, case):
    name, biased = case
    (do, q, k, v), call = make(CASES[name], impl, biased)
    expected = HSTU_ATTENTION_BACKWARD(do, q, k, v, *call, impl=impl)
    buffer, parts = views((q, k, v))
    tables = into_op(*parts, do, q, k, v, *call, impl)
    for what, got, want in zip(("dq", "dk", "dv", "dpos", "dts"), (*parts, *tables), expected, strict=True):
        assert torch.equal(got, want), what
    assert int(buffer.isnan().sum()) == buffer.numel() - sum(part.numel() for part in parts)
    if name == "ragged" and biased:
        assert all(want.any() for want in expected)


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLS)
def test_views_with_one_feature_a_head(impl):
    """The stride of a dimension of one element says nothing: here it is 2."""
    tensors, call = make(CASES["ragged"], impl)
    do, q, k, v = (tensor[..., :1].contiguous() for tensor in tensors)
    expected = HSTU_ATTENTION_BACKWARD(do, q, k, v, *call, impl=impl)
    buffer = torch.full((len(q), 3 * HEADS, 4), float("nan"), device=q.device)
    parts = buffer[..., 1::2][..., :1].split(HEADS, 1)
    assert {part.stride(2) for part in parts} == {2} and not any(part.is_contiguous() for part in parts)
    tables = into_op(*parts, do, q, k, v, *call, impl)
    for what, got, want in zip(("dq", "dk", "dv", "dpos", "dts"), (*parts, *tables), expected, strict=True):
        assert want.any() and torch.equal(got, want), what
    assert int(buffer.isnan().sum()) == 3 * buffer.numel() // 4
