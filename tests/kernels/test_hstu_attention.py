"""HSTU attention: SiLU weights under a ragged mask, and a sequence keeps its bits in any batch."""

from functools import lru_cache

import numpy as np
import pytest
import torch
from float_error import assert_error_at_most_twice
from impls import GPU, IMPLS, TRITON, on
from speeds import slow_on_triton

from tritonrec.kernels.hstu_attention.call import HSTUBias, HSTUMask
from tritonrec.kernels.hstu_attention.op import hstu_attention

GRADIENTS = ("out", "dq", "dk", "dv")
N = 11  # the normaliser: no power of two, and no length of a case

# name: lengths, targets, heads, Dqk, Dv. Triton's blocks have 64 rows and walk 16, the CPU takes 4 rows.
CASES = {
    "empty": ([], None, 2, 4, 3),
    "all_empty": ([0, 0, 0], None, 2, 4, 3),
    "one_row": ([1], None, 1, 1, 1),
    "skewed": ([35, 1, 0, 3, 2, 0, 1], None, 2, 8, 8),
    "step_minus_one": ([15, 3], None, 1, 8, 4),
    "step_plus_one": ([17, 5], None, 1, 8, 4),
    "block_minus_one": ([63, 31], None, 1, 8, 8),
    "block": ([64, 32], None, 1, 8, 8),
    "block_plus_one": ([65, 33], None, 1, 8, 8),
    "two_blocks_plus_one": ([129], None, 1, 4, 4),
    "odd_dim": ([21, 6], None, 3, 13, 13),
    "wider_values": ([20, 9], None, 2, 5, 37),
    "wider_keys": ([20, 9], None, 2, 37, 5),
    "targets": ([35, 5, 0, 9, 1, 4], [3, 5, 0, 0, 1, 1], 2, 8, 6),
    "blocks_of_targets": ([140], [75], 1, 4, 4),
    "targets_only": ([67], [67], 1, 4, 4),
    "non_contiguous": ([5, 18], [2, 0], 2, 6, 5),
}
QUICK = (
    "empty", "all_empty", "one_row", "step_minus_one", "step_plus_one", "block_plus_one", "wider_values",
    "wider_keys", "targets", "non_contiguous",
)  # fmt: skip


@lru_cache
def case(name, dtype=torch.float32):
    """do, q, k, v, then seq_offsets, max_seq_len, alpha, N, num_targets; max |alpha q k| is 8."""
    lengths, targets, heads, dim_qk, dim_v = CASES[name]
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    generator = torch.Generator().manual_seed(7)
    sizes = [heads * dim for dim in (dim_v, dim_v, dim_qk, dim_qk)]
    uvqk = torch.randn(sum(lengths), sum(sizes), generator=generator) * 1.5 + 0.2
    u, v, q, k = (part.unflatten(1, (heads, -1)) for part in uvqk.to(dtype).split(sizes, 1))
    if name != "non_contiguous":
        u, v, q, k = (part.contiguous() for part in (u, v, q, k))
    scores = [
        torch.einsum("ihd,jhd->hij", a.double(), b.double()).abs().max()
        for a, b in zip(q.split(lengths), k.split(lengths), strict=True)
        if len(a)
    ]
    alpha = float(8 / max(scores)) if scores else 1.0
    num_targets = None if targets is None else torch.tensor(targets)
    return (u, q, k, v), (offsets, max(lengths, default=0), alpha, N, num_targets)


def plain(q, k, v, offsets, max_seq_len, alpha, normaliser, targets):
    """In q's dtype, one padded sequence after another, as torch computes it."""
    row, column = torch.arange(max_seq_len)[:, None], torch.arange(max_seq_len)
    outs = [v[:0]]
    for b, length in enumerate(offsets.diff().tolist()):
        history = length - (0 if targets is None else int(targets[b]))
        mask = (row == column) | ((column < row) & (column < history))
        padding = (0, 0, 0, 0, 0, max_seq_len - length)
        a, c, e = (
            torch.nn.functional.pad(t[offsets[b] : offsets[b + 1]], padding).transpose(0, 1)
            for t in (q, k, v)
        )
        p = torch.nn.functional.silu(alpha * (a @ c.mT)) * mask / normaliser
        outs.append((p @ e).transpose(0, 1)[:length])
    return torch.cat(outs)


def attend(impl, *arguments):
    q, k, v, offsets, max_seq_len, alpha, normaliser, targets = arguments
    return hstu_attention(
        q, k, v, on(impl, offsets), max_seq_len, alpha=alpha, scaling_seqlen=normaliser,
        mask=HSTUMask(on(impl, targets)), impl=impl,
    )  # fmt: skip


def gradients(call, tensors, *rest, impl="cpu"):
    do, *leaves = (on(impl, tensor.detach()) for tensor in tensors)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = call(*leaves, *rest)
    grads = torch.autograd.grad(out, leaves, do, materialize_grads=True)
    return [tensor.detach().cpu() for tensor in (out, *grads)]


@lru_cache
def exact(name, dtype=torch.float32):
    """out, dq, dk, dv in float64."""
    tensors, rest = case(name, dtype)
    return gradients(plain, [tensor.double() for tensor in tensors], *rest)


def run(impl, tensors, rest):
    return gradients(lambda *arguments: attend(impl, *arguments), tensors, *rest, impl=impl)


@pytest.mark.parametrize(("impl", "name"), slow_on_triton(IMPLS, CASES, QUICK))
def test_error_is_that_of_plain_float32(impl, name):
    tensors, rest = case(name)
    got, other = run(impl, tensors, rest), gradients(plain, tensors, *rest)
    for what, one, two, three in zip(GRADIENTS, got, other, exact(name), strict=True):
        assert_error_at_most_twice(one, two, three, what)


@pytest.mark.parametrize(
    ("impl", "name"), slow_on_triton([TRITON], ["odd_dim", "targets", "non_contiguous"], ["non_contiguous"])
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_that_of_plain_half_precision(impl, dtype, name):
    tensors, rest = case(name, dtype)
    got, other = run(impl, tensors, rest), gradients(plain, tensors, *rest)
    for what, one, two, three in zip(GRADIENTS, got, other, exact(name, dtype), strict=True):
        assert one.dtype == dtype
        if dtype == torch.bfloat16 and not GPU:  # where a GPU rounds to bfloat16, the interpreter truncates
            two = three + 2 * (two.double() - three)
        assert_error_at_most_twice(one, two, three, what)


@pytest.mark.smoke
@pytest.mark.parametrize("impl", IMPLS)
def test_one_term_is_written_out(impl):
    """silu(2 * 3 * 0.5) * 7 / 4 for a sequence of one token; its neighbours are empty."""
    q, k, v = (torch.full((1, 1, 1), value) for value in (2.0, 3.0, 7.0))
    out = attend(impl, *(on(impl, t) for t in (q, k, v)), torch.tensor([0, 0, 1, 1]), 1, 0.5, 4, None)
    assert out.item() == pytest.approx(3 / (1 + np.exp(-3)) * 7 / 4, rel=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_targets_are_targets_of_zero(impl):
    tensors, rest = case("skewed")
    zero = (*rest[:4], torch.zeros(len(rest[0]) - 1, dtype=torch.int64))
    assert all(map(torch.equal, run(impl, tensors, rest), run(impl, tensors, zero)))


@pytest.mark.parametrize(
    ("impl", "dtype"), [("cpu", torch.float64), pytest.param(*TRITON.values, torch.float64)]
)
def test_a_dtype_an_implementation_lacks_is_refused(impl, dtype):
    tensors, rest = case("odd_dim", dtype)
    with pytest.raises(ValueError, match=str(dtype)):
        run(impl, tensors, rest)


def test_attention_of_no_features_is_its_bias():
    """One token sees itself, with a bias of 2: silu(2) times its value."""
    q, v = torch.zeros(1, 1, 0), torch.tensor([[[3.0, -1.0]]])
    options = {"alpha": 0.5, "scaling_seqlen": 1, "bias": HSTUBias(torch.tensor([2.0])), "impl": "cpu"}
    out = hstu_attention(q, q, v, torch.tensor([0, 1]), 1, **options)
    torch.testing.assert_close(out, torch.nn.functional.silu(torch.tensor(2.0)) * v)
