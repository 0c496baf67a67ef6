"""Softmax attention: torch's weights by sequence, and a sequence keeps its bits in any batch."""

from functools import lru_cache
from importlib import import_module

import numpy as np
import pytest
import torch
from float_error import assert_error_at_most_twice
from impls import GPU, IMPLS, TRITON, on
from speeds import slow_on_triton

from tritonrec.kernels.softmax_attention.op import (
    SOFTMAX_ATTENTION,
    SOFTMAX_ATTENTION_BACKWARD,
    Call,
    softmax_attention,
)

RESULTS = ("out", "dq", "dk", "dv")

# name: lengths of queries, of keys (None: the same), heads, D, E, causal, bias, dropout. Triton's blocks have
# 32 rows.
CASES = {
    "empty": ([], None, 2, 3, 4, True, "", 0.0),
    "all_empty": ([0, 0, 0], None, 2, 3, 4, False, "", 0.0),
    "one_row": ([1], None, 1, 1, 1, True, "", 0.0),
    "skewed": ([33, 1, 0, 3, 2], None, 2, 8, 8, True, "", 0.0),
    "every_key": ([5, 0, 18], None, 2, 4, 6, False, "", 0.0),
    "block_plus_one": ([65], None, 1, 8, 4, True, "", 0.0),
    "odd_dim": ([21, 6], None, 3, 13, 9, True, "", 0.25),
    "dropped": ([35, 2], None, 2, 4, 4, False, "", 0.4),
    "other_keys": ([5, 0, 7, 2], [3, 4, 0, 37], 2, 5, 5, False, "", 0.0),
    "other_keys_causal": ([9, 3], [4, 20], 1, 4, 4, True, "", 0.0),
    "padded_left": ([6, 6, 6], None, 2, 4, 4, True, "left", 0.0),
    "padded_right": ([6, 6, 6], None, 2, 4, 4, False, "right", 0.2),
    "biased": ([7, 34], None, 2, 4, 4, True, "any", 0.1),
    "non_contiguous": ([5, 18], None, 2, 3, 3, True, "", 0.0),
}
LONG = {"block_plus_one", "skewed", "other_keys", "every_key", "dropped"}  # slow under Triton


def bias_of(kind, lengths, heads, generator):
    count, longest = len(lengths), max(lengths, default=0)
    if kind == "any":
        return torch.randn(count, heads, longest, longest + 2, generator=generator) * 2
    padded = torch.zeros(count, 1, 1, longest)
    for b in range(count):
        hidden = 2 * b
        padded[b, ..., :hidden] = -torch.inf
    padded = padded if kind == "left" else padded.flip(3)
    return padded.expand(-1, heads, longest, -1)


@lru_cache
def case(name):
    """do, q, k, v, and the call."""
    lengths, keys, heads, dim, dim_v, causal, kind, p = CASES[name]
    keys = lengths if keys is None else keys
    generator = torch.Generator().manual_seed(11)
    q, k, v, do = (
        (torch.randn(sum(n), heads, 2 * d, generator=generator) * 1.8 + 0.1)[..., :d]
        for n, d in ((lengths, dim), (keys, dim), (keys, dim_v), (lengths, dim_v))
    )
    tensors = (do, q, k, v)
    if name != "non_contiguous":
        tensors = tuple(tensor.contiguous() for tensor in tensors)
    bias = bias_of(kind, lengths, heads, generator) if kind else None
    q_offsets, k_offsets = (torch.tensor([0, *np.cumsum(n)], dtype=torch.int64) for n in (lengths, keys))
    k_offsets = None if keys is lengths else k_offsets
    longest, samples = max([*lengths, *keys], default=0), torch.arange(len(lengths)) * 2**33 - 3
    return tensors, Call(q_offsets, k_offsets, longest, 0.7, causal, bias, p, 2**40 + 5, samples)


def run(impl, tensors, call):
    """out, dq, dk, dv."""
    do, *qkv = (on(impl, tensor) for tensor in tensors)
    rest = [on(impl, value) for value in call]
    out, most, total = SOFTMAX_ATTENTION(*qkv, *rest, impl=impl)
    gradients = SOFTMAX_ATTENTION_BACKWARD(do, out, most, total, *qkv, *rest, impl=impl)
    return [tensor.cpu() for tensor in (out, *gradients)]


def by_torch(tensors, call, dtype):
    """The same by torch's softmax and autograd, pair by pair; a row without keys is 0."""
    do, q, k, v = (tensor.detach().to(dtype).clone() for tensor in tensors)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    rows = []
    for b, queries, keys in call.sequences():
        for h in range(q.shape[1]):
            s = (q[queries, h] @ k[keys, h].t()) * call.scale
            if call.bias is not None:
                s = s + call.bias[b, h, : s.shape[0], : s.shape[1]].to(dtype)
            if call.causal:
                s = s.masked_fill(torch.ones_like(s).triu(1) > 0, -torch.inf)
            some = (s > -torch.inf).any(1, keepdim=True)
            p = torch.where(some, torch.softmax(torch.where(some, s, 0.0), 1), 0.0)
            rows.append((p * call.kept(s.detach().float(), b, h).to(dtype)) @ v[keys, h])
    heads = q.shape[1]
    out = [torch.stack(rows[b * heads : (b + 1) * heads], 1) for b in range(len(rows) // heads)]
    out = torch.cat(out) if out else (q.sum() + k.sum() + v.sum()).expand(0, heads, v.shape[2])
    return out.detach(), *torch.autograd.grad(out, leaves, do)


@lru_cache
def expected_of(name):
    return by_torch(*case(name), torch.float32), by_torch(*case(name), torch.float64)


@pytest.mark.parametrize(("impl", "name"), slow_on_triton(IMPLS, CASES, CASES.keys() - LONG))
def test_error_is_that_of_plain_float32(impl, name):
    (do, q, k, v), call = case(name)
    results = run(impl, *case(name))
    plain, exact = expected_of(name)
    largest = dict.fromkeys(RESULTS, 0.0)
    if do.numel():
        # slopes are differences to <do, out>, in which plain errors cancel more or less, by the processor's
        # order of adding; Triton's kernels take <do, out> from memory
        along = max((float(t.detach().abs().max()) for t in (q, k) if t.numel()), default=0.0)
        along *= float((do * results[0]).abs().sum(2).max()) * call.scale
        # a probability is off by as many units as the score that it is the exponential of
        score = float(torch.einsum("qhd,khd->qkh", q, k).abs().max()) * call.scale
        of_weights = by_torch((do.abs(), q, k, v), call, torch.float64)[3]
        largest |= {"dq": along, "dk": along, "dv": score * float(of_weights.max())}
    for what, *values in zip(RESULTS, results, plain, exact, strict=True):
        assert_error_at_most_twice(*values, what, largest[what])


@pytest.mark.smoke
@pytest.mark.parametrize("impl", IMPLS)
def test_weights_are_written_out(impl):
    """One feature of 0: every seen key has the same weight, and a query that sees none gives 0."""
    q, v = torch.zeros(5, 1, 1), torch.tensor([8.0, 4.0, 2.0, 1.0, 16.0]).view(5, 1, 1)
    offsets = torch.tensor([0, 4, 5])
    options = {"seq_offsets": offsets, "max_seq_len": 4, "impl": impl}
    q, v, options["seq_offsets"] = on(impl, q), on(impl, v), on(impl, offsets)
    out = softmax_attention(q, q, v, causal=True, **options)
    torch.testing.assert_close(out.flatten().cpu(), torch.tensor([8, 6, 14 / 3, 3.75, 16]))
    assert softmax_attention(q, q, v, **options).flatten().tolist() == [3.75] * 4 + [16]
    hidden = torch.zeros(2, 1, 4, 4)
    hidden[0, 0, :, 0] = -torch.inf
    out = softmax_attention(q, q, v, causal=True, bias=on(impl, hidden), **options)
    torch.testing.assert_close(out.flatten().cpu(), torch.tensor([0, 4, 3, 7 / 3, 16]))


@pytest.mark.parametrize("impl", IMPLS)
def test_dropout_keeps_the_same_weights_everywhere(impl):
    """q = 0 and v one-hot: the output is the row of weights, and its zeros are those of the reference."""
    q, v = torch.zeros(9, 2, 4), torch.eye(9)[:, None].expand(-1, 2, -1)
    offsets, samples = torch.tensor([0, 9]), torch.tensor([2**40])
    call = Call(offsets, offsets, 9, 1.0, False, None, 0.5, -3, samples)
    outs = [run(one, (v, q, q, v.contiguous()), call)[0] for one in ("reference", impl)]
    torch.testing.assert_close(*outs)
    assert torch.equal(*(out == 0 for out in outs))
    assert not torch.equal(outs[0][:, 0] == 0, outs[0][:, 1] == 0)  # heads draw apart
    assert 20 < (outs[0] > 0).sum() < 142 and outs[0].max() == pytest.approx(2 / 9)


@pytest.mark.parametrize("impl", ["cpu", TRITON])
def test_large_scores_neither_overflow_nor_vanish(impl):
    q = torch.tensor([300.0, -300.0, 1.0]).view(3, 1, 1)
    v = torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1)
    offsets = torch.tensor([0, 3])
    call = Call(offsets, offsets, 3, 1.0, False, None, 0.0, 0, None)
    out = run(impl, (v, q, q, v), call)[0].flatten()
    torch.testing.assert_close(out, torch.tensor([1.0, 2.0, 1.0]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.ones(4, 2, 3), "v": torch.ones(4, 2, 3)}, "q has 5 rows and k 4: give key_offsets"),
        ({"bias": torch.ones(2, 2, 2, 3)}, "sequence 0 has 3 tokens, more than max_seq_len=2"),
        ({"bias": torch.ones(2, 2, 3, 3, requires_grad=True)}, "bias gets no gradient"),
    ],
)
@pytest.mark.parametrize("impl", IMPLS[:2])
def test_what_does_not_fit_is_refused(impl, change, message):
    fits = {name: torch.ones(5, 2, 3) for name in ("q", "k", "v")}
    fits |= {"seq_offsets": torch.tensor([0, 3, 5]), "max_seq_len": 3, "impl": impl}
    softmax_attention(**fits)
    with pytest.raises(ValueError, match=message):
        softmax_attention(**{**fits, **change})


def test_a_query_without_dimensions_is_refused_by_name():
    with pytest.raises(ValueError, match=r"q must be \(M, H, D\)"):
        softmax_attention(
            torch.tensor(1.0), torch.zeros(1, 1, 1), torch.zeros(1, 1, 1), torch.tensor([0, 1]), 1
        )


@pytest.mark.parametrize("name", ["scale", "dropout"])
@pytest.mark.parametrize("number", ["cpu", "0.5", [0.5]])
def test_an_argument_that_is_no_number_is_refused_by_name(name, number):
    q = torch.zeros(1, 1, 1)
    with pytest.raises(TypeError, match=f"{name} must be a number, got"):
        softmax_attention(q, q, q, torch.tensor([0, 1]), 1, **{name: number})


@pytest.mark.parametrize("impl", ["cpu", TRITON])
def test_last_queries_have_the_bits_of_all(impl):
    """Whatever part of a block they begin in, beside other sequences with more of them or none before."""
    module = "triton_softmax_attention" if impl == "triton" else "numba_softmax_attention"
    attend = import_module(f"tritonrec.kernels.softmax_attention.{module}").softmax_attention
    lengths, last = [71, 9, 1, 130, 66, 0], [3, 9, 1, 70, 2, 0]
    if impl == "triton" and not GPU:
        lengths, last = [71, 9, 0, 1, 33], [8, 9, 0, 1, 2]  # 8 of two blocks
    count = len(lengths)
    draw = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(sum(lengths), 2, size, generator=draw) * 3 for size in (5, 5, 7))
    offsets, fresh = (torch.tensor([0, *np.cumsum(each)]) for each in (lengths, last))
    own = torch.cat([torch.arange(end - n, end) for end, n in zip(offsets[1:].tolist(), last, strict=True)])
    q, k, v, offsets, fresh, own, ids = (
        on(impl, each) for each in (q, k, v, offsets, fresh, own, torch.arange(count))
    )
    rest = 0.8, True, None, 0.0 if impl == "triton" else 0.3, 5, ids
    want = attend(q, k, v, offsets, None, 130, *rest)
    got = attend(q[own], k, v, fresh, offsets, 130, *rest, last=True)
    assert all(torch.equal(a, b[own]) for a, b in zip(got, want, strict=True))
