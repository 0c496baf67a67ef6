"""Where a dimension is 0, all implementations agree with the reference, or refuse with its words."""

import pytest
import torch
from impls import TRITON
from poison import poisoned_memory

from tritonrec import ops

OFFSETS = torch.tensor([0, 2, 3])
NO_TOKENS = torch.tensor([0, 0, 0])
EPS = 1e-6


def zeros(*shape, dtype=torch.int64):
    return torch.zeros(shape, dtype=dtype)


def some(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))) + 0.5


def offsets(tokens):
    return OFFSETS if tokens else NO_TOKENS


def table():
    return zeros(8), torch.full((8,), -1, dtype=torch.int32)


def written(op, first, *rest, **options):
    """The tensors that `op` writes to, after it: the first one, or the first few."""
    tensors = first if isinstance(first, tuple) else (first,)
    op(*tensors, *rest, **options)
    return tensors


def attention(tokens, heads, dim_qk, dim_v, biased):
    shapes = [(tokens, heads, dim_qk)] * 2 + [(tokens, heads, dim_v)]
    tables = [some(2) + 1, some(3) + 1] if biased else []

    def call(impl, q, k, v, pos=None, ts=None):
        times = None if ts is None else torch.arange(tokens)
        return ops.hstu_attention(
            q, k, v, offsets(tokens), 2, alpha=0.5, scaling_seqlen=2, impl=impl,
            bias=ops.HSTUBias(pos, ts, times),
        )  # fmt: skip

    return call, [*(some(*shape) for shape in shapes), *tables]


def differentiable():
    """Name -> a call with `impl` before its differentiable arguments, and those."""
    cases = {}
    for sizes in [
        (3, 2, 0, 4),
        (3, 2, 4, 0),
        (3, 2, 0, 0),
        (3, 0, 4, 4),
        (0, 2, 4, 4),
        (0, 2, 0, 4),
        (0, 0, 0, 0),
    ]:
        for biased in (False, True):
            cases[f"attention {sizes} {'biased' * biased}"] = attention(*sizes, biased)
    cases["attention of no queries"] = (
        lambda impl, q, k, v: ops.hstu_attention(
            q, k, v, OFFSETS, 2, alpha=0.5, scaling_seqlen=2, delta_offsets=NO_TOKENS, impl=impl
        ),
        [some(0, 1, 2), some(3, 1, 2), some(3, 1, 2)],
    )
    cases["attention of no sequences"] = (
        lambda impl, q, k, v: ops.hstu_attention(
            q, k, v, zeros(1), 0, alpha=0.5, scaling_seqlen=2, impl=impl
        ),
        [some(0, 1, 2)] * 3,
    )
    for tokens, heads, dim in [(3, 0, 4), (3, 2, 0), (0, 2, 4), (0, 0, 0)]:
        for times in (None, torch.arange(tokens)):
            cases[f"relative {tokens, heads, dim} {times is None}"] = (
                lambda impl, v, weights, n=tokens, t=times: ops.relative_aggregate(
                    v, weights, offsets(n), 2, t, impl=impl
                ),
                [some(tokens, heads, dim), some(heads, 3)],
            )
    for tokens, heads, dim, dim_v in [(3, 0, 4, 4), (3, 2, 0, 4), (3, 2, 4, 0), (0, 2, 4, 4), (0, 0, 0, 0)]:
        cases[f"softmax attention {tokens, heads, dim, dim_v}"] = (
            lambda impl, q, k, v, n=tokens: ops.softmax_attention(q, k, v, offsets(n), 2, impl=impl),
            [some(tokens, heads, dim), some(tokens, heads, dim), some(tokens, heads, dim_v)],
        )
    cases["softmax attention without keys"] = (
        lambda impl, q, k, v: ops.softmax_attention(
            q, k, v, offsets(3), 2, key_offsets=zeros(len(offsets(3))), impl=impl
        ),
        [some(3, 1, 2), some(0, 1, 2), some(0, 1, 2)],
    )
    for tokens, inner, outer in [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0), (3, 0, 0)]:
        sizes = tokens, inner, outer
        plain = [some(tokens, inner), some(outer, inner)]
        cases[f"linear {sizes}"] = (lambda impl, x, w: ops.linear(x, w, impl=impl), plain)
        cases[f"linear {sizes} with a bias"] = (
            lambda impl, x, w, b: ops.linear(x, w, b, impl=impl),
            [*plain, some(outer)],
        )
        cases[f"norm_linear_silu {sizes}"] = (
            lambda impl, *given: ops.norm_linear_silu(*given, EPS, (), impl=impl),
            [some(tokens, inner), some(inner), some(inner), some(outer, inner), some(outer)],
        )
    for tokens, dim in [(0, 3), (3, 0), (0, 0)]:
        for p in (0.0, 0.5):
            cases[f"norm {tokens, dim} {p}"] = (
                lambda impl, *given, p=p, n=tokens: ops.norm_mul_dropout(
                    *given, EPS, p, 1, zeros(n), zeros(n), impl=impl
                ),
                [some(tokens, dim), some(tokens, dim), some(dim), some(dim)],
            )
    for tokens, count, dim in [(0, 2, 3), (3, 0, 2), (3, 2, 0), (0, 0, 0), (3, 0, 0)]:
        valid = torch.ones(tokens, count, dtype=torch.bool)
        cases[f"sampled_softmax {tokens, count, dim}"] = (
            lambda impl, *given, valid=valid: ops.sampled_softmax(*given, valid, impl=impl),
            [some(tokens, dim), some(tokens, dim), some(tokens, count, dim)],
        )
    for shape in [(0,), (0, 3), (3, 0), ()]:
        cases[f"silu {shape}"] = (lambda impl, x: ops.silu(x, impl=impl), [some(*shape)])
    return cases


def with_gradients(call, leaves):
    def run(impl):
        own = [leaf.clone().requires_grad_() for leaf in leaves]
        out = call(impl, *own)
        return [out.detach(), *torch.autograd.grad(out, own, torch.full_like(out, 1.5), allow_unused=True)]

    return run


def others():
    """Name -> a call with `impl`."""
    cases = {}
    for shape in [(0,), (0, 3), (3, 0), ()]:
        ones, sums = torch.ones(shape), zeros(*shape)
        cases[f"to_fixed_point {shape}"] = lambda impl, x=ones: [ops.to_fixed_point(x, impl=impl)]
        cases[f"to_fixed_point {shape} status"] = lambda impl, x=ones: [
            ops.to_fixed_point(x, impl=impl, status=torch.tensor(0))
        ]
        cases[f"sum_of_squares {shape}"] = lambda impl, x=ones: [ops.sum_of_squares(x, impl=impl)]
        cases[f"from_fixed_point {shape}"] = lambda impl, x=sums: [ops.from_fixed_point(x, impl=impl)]
    for rows, columns, segments in [(0, 3, 2), (3, 0, 2), (0, 0, 0), (0, 3, 0), (3, 3, 0)]:
        for consistency in ("window", "batch"):
            for count in (None, torch.tensor(0)):
                given = some(rows, columns), zeros(rows), segments
                cases[f"segment_sum {rows, columns, segments} {consistency} {count}"] = (
                    lambda impl, given=given, options={"consistency": consistency, "count": count}: [
                        ops.segment_sum(*given, impl=impl, **options)
                    ]
                )
    for rows, k, dim in [(0, 0, 3), (3, 0, 2), (3, 2, 0), (0, 2, 3), (0, 2, 0), (0, 0, 0)]:
        name, at, source, moved = f"{rows, k, dim}", torch.arange(k), some(rows, dim), some(k, dim)
        first = zeros(k)
        for count in (None, torch.tensor(0)):
            rest = {"count": count}
            cases[f"gather {name} {count}"] = lambda impl, s=source, r=first, o=rest: [
                ops.gather_rows(s, r, impl=impl, **o)
            ]
            cases[f"scatter {name} {count}"] = lambda impl, s=source, r=at, v=moved, o=rest: written(
                ops.scatter_rows, s.clone(), r, v, impl=impl, **o
            )
            cases[f"scatter {name} {count} source"] = lambda impl, s=source, r=at, v=moved, o=rest: written(
                ops.scatter_rows, s.clone(), r, v, impl=impl, source=torch.zeros_like(r), **o
            )
            cases[f"sgd {name} {count}"] = lambda impl, s=source, r=at, v=moved, o=rest: written(
                ops.sparse_sgd, s.clone(), r, v, 0.1, impl=impl, **o
            )
            cases[f"adagrad {name} {count}"] = lambda impl, s=source, r=at, v=moved, o=rest: written(
                ops.sparse_rowwise_adagrad, (s.clone(), torch.ones(len(s), 1)), r, v, 0.1, impl=impl, **o
            )
            cases[f"adam {name} {count}"] = lambda impl, s=source, r=at, v=moved, o=rest: written(
                ops.sparse_adam, (s.clone(), s.clone(), s.square()), r, v, 0.1, impl=impl, **o
            )
        whole = zeros(rows, dim)
        cases[f"pack {name}"] = lambda impl, v=whole, r=first: ops.pack_rows(v, r, impl=impl)
        cases[f"add packed {name}"] = lambda impl, v=whole, r=first: written(
            ops.add_packed_rows, v.clone(), r, r.byte(), zeros(0, dtype=torch.uint8), impl=impl
        )
    for tokens, inner, outer in [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)]:
        given = zeros(outer, inner), some(tokens, outer), some(tokens, inner), offsets(tokens)
        cases[f"weight gradient {tokens, inner, outer}"] = lambda impl, given=given: written(
            ops.linear_weight_grad, given[0].clone(), *given[1:], impl=impl
        )
    none, three, no = zeros(0), torch.tensor([4, -1, 2**62]), torch.tensor(0)
    return cases | {
        "unique": lambda impl: ops.unique(none, impl=impl),
        "unique padded": lambda impl: ops.unique(none, impl=impl, padded=True),
        "unique of none that hold": lambda impl: ops.unique(three, impl=impl, padded=True, count=no),
        "intersect left": lambda impl: ops.intersect(none, three, impl=impl),
        "intersect right": lambda impl: ops.intersect(three, none, impl=impl, padded=True),
        "intersect of none that hold": lambda impl: ops.intersect(three, three, impl=impl, right_count=no),
        "bucketize": lambda impl: ops.bucketize(none, 3, impl=impl),
        "counting_sort": lambda impl: ops.counting_sort(none, 3, impl=impl),
        "counting_sort of many": lambda impl: ops.counting_sort(none, 300, impl=impl),
        "counting_sort of none that hold": lambda impl: ops.counting_sort(three, 300, impl=impl, count=no),
        "owner_of": lambda impl: [ops.owner_of(none, 3, impl=impl)],
        "initial_rows": lambda impl: [ops.initial_rows(0, 0, none, 3, 1.0, impl=impl)],
        "initial_rows of no columns": lambda impl: [ops.initial_rows(0, 0, three, 0, 1.0, impl=impl)],
        "random_indices": lambda impl: [ops.random_indices(0, 0, 0, none, none, 3, 5, impl=impl)],
        "random_indices of no columns": lambda impl: [
            ops.random_indices(0, 0, 0, three, three, 0, 5, impl=impl)
        ],
        "hash_insert": lambda impl: ops.hash_insert(*table(), none, 0, impl=impl),
        "hash_insert a counter": lambda impl: ops.hash_insert(*table(), none, torch.tensor(3), impl=impl),
        "hash_insert no free rows": lambda impl: ops.hash_insert(*table(), three, 0, none, impl=impl),
        "hash_insert none that hold": lambda impl: ops.hash_insert(*table(), three, 0, impl=impl, count=no),
        "hash_find": lambda impl: [ops.hash_find(*table(), none, impl=impl)],
        "hash_assign": lambda impl: [ops.hash_assign(*table(), none, none, impl=impl)],
        "hash_erase": lambda impl: [ops.hash_erase(*table(), none, impl=impl)],
        "hash_grow": lambda impl: ops.hash_grow(*table(), impl=impl),
    }


CASES = {name: with_gradients(*case) for name, case in differentiable().items()} | others()


def outcome(call, impl):
    with poisoned_memory():
        try:
            return list(call(impl))
        except (ValueError, IndexError) as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("impl", ["cpu", TRITON])
@pytest.mark.parametrize("name", CASES)
def test_implementations_agree(name, impl):
    found, expected = outcome(CASES[name], impl), outcome(CASES[name], "reference")
    if isinstance(expected, str):
        assert found == expected
        return
    assert len(found) == len(expected) > 0
    for got, want in zip(found, expected, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want)


def test_attention_of_no_features_is_its_bias():
    """One token sees itself, with a bias of 2: silu(2) times its value."""
    tables = {"bias": ops.HSTUBias(torch.tensor([2.0])), "impl": "cpu"}
    q, v = torch.zeros(1, 1, 0), torch.tensor([[[3.0, -1.0]]])
    out = ops.hstu_attention(q, q, v, torch.tensor([0, 1]), 1, alpha=0.5, scaling_seqlen=1, **tables)
    expected = torch.nn.functional.silu(torch.tensor(2.0)) * v
    torch.testing.assert_close(out, expected)
