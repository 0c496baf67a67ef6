"""The bits of a sequence are its own in every op over sequences: in any batch, and where another is NaN."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import test_hstu_attention as hstu
import test_relative_aggregate as relative
import test_softmax_attention as softmax
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from impls import IMPLS, TRITON
from speeds import examples, slow_on_triton
from torch import Tensor

from tritonrec.kernels.softmax_attention.op import Call


@dataclass
class Batch:
    """Sequences end to end.

    lengths: (B,) of them. tokens: arguments of a row for each token, dO first. own: arguments (B,).
    """

    lengths: list[int]
    tokens: list[Tensor]
    own: list[Tensor]

    def of(self, order):
        """These sequences in this order."""
        places = torch.arange(sum(self.lengths)).split(self.lengths)
        rows = torch.cat([torch.empty(0, dtype=torch.int64), *(places[b] for b in order)])
        return Batch(
            [self.lengths[b] for b in order], [each[rows] for each in self.tokens],
            [each[torch.tensor(order, dtype=torch.int64)] for each in self.own],
        )  # fmt: skip

    @property
    def offsets(self):
        return torch.tensor([0, *np.cumsum(self.lengths)], dtype=torch.int64)


@dataclass
class SequenceOp:
    """How an op is called on a batch; the implementation "exact" is float64.

    call: its results for an implementation, a batch and the longest length. tokens: those of its results that
    have a row for each token; the others, behind them, have one for each sequence. draw: a batch.
    """

    call: Callable[[str, Batch, int], list[Tensor]]
    draw: Callable[[torch.Generator, list[int], int, int], Batch]
    tokens: int

    def by_sequence(self, impl, batch, room=0):
        """Of each sequence its results."""
        found = self.call(impl, batch, max(batch.lengths, default=0) + room)
        rows = [each.split(batch.lengths) for each in found[: self.tokens]]
        return [*zip(*rows, *(each.unbind() for each in found[self.tokens :]), strict=True)]


def drawn(generator, lengths, heads, *dims):
    return [torch.randn(sum(lengths), heads, dim, generator=generator) for dim in dims]


def draw_hstu(generator, lengths, heads, dim):
    targets = torch.tensor([min(length, 5) for length in lengths])
    return Batch(lengths, drawn(generator, lengths, heads, dim + 3, dim, dim, dim + 3), [targets])


def call_hstu(impl, batch, longest):
    tensors = [each.double() for each in batch.tokens] if impl == "exact" else batch.tokens
    scale = 3 * tensors[1].shape[2] ** -0.5
    rest = batch.offsets, longest, scale, hstu.N, *batch.own
    return hstu.run("reference" if impl == "exact" else impl, tensors, rest)


@cache
def table(heads):
    return torch.randn(heads, 18, generator=torch.Generator().manual_seed(5))


def draw_relative(generator, lengths, heads, dim):
    times = relative.timestamps_of("times", sum(lengths), generator)
    return Batch(lengths, [*drawn(generator, lengths, heads, dim, dim), times], [])


def call_relative(impl, batch, longest, timed):
    do, v, times = batch.tokens
    given = (do, v, table(v.shape[1])), (batch.offsets, longest, times if timed else None)
    return relative.exact(*given) if impl == "exact" else relative.run(impl, *given)


def draw_softmax(generator, lengths, heads, dim):
    return Batch(
        lengths, drawn(generator, lengths, heads, dim, dim, dim, dim), [torch.arange(len(lengths)) + 9]
    )


def call_softmax(impl, batch, longest, p):
    call = Call(batch.offsets, batch.offsets, longest, 0.4, True, None, p, 7, *batch.own)
    if impl == "exact":
        return softmax.by_torch(batch.tokens, call, torch.float64)
    return softmax.run(impl, batch.tokens, call)


OPS = {
    "hstu_attention": SequenceOp(call_hstu, draw_hstu, 4),
    "relative by position": SequenceOp(lambda *given: call_relative(*given, False), draw_relative, 2),
    "relative by time": SequenceOp(lambda *given: call_relative(*given, True), draw_relative, 2),
    "softmax_attention": SequenceOp(lambda *given: call_softmax(*given, 0.0), draw_softmax, 4),
    "softmax with dropout": SequenceOp(lambda *given: call_softmax(*given, 0.3), draw_softmax, 4),
}
QUICK = ("hstu_attention", "relative by position", "softmax with dropout")


def same(found, expected):
    return all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("impl", "name"), slow_on_triton(["cpu", TRITON], OPS, QUICK))
def test_a_sequence_keeps_its_bits_in_any_batch(impl, name, threads_one_and_two):
    """Behind others, before them, alone, with room for longer ones, and on two threads."""
    op = OPS[name]
    lengths, heads, dim = ([301, 1, 0, 210, 66, 130], 2, 64) if impl == "cpu" else ([66, 1, 0, 17], 1, 8)
    batch, order = op.draw(torch.Generator().manual_seed(3), lengths, heads, dim), range(len(lengths))

    def ways():
        backwards = op.by_sequence(impl, batch.of([*order][::-1]), 100)[::-1]
        alone = [*(op.by_sequence(impl, batch.of([b]))[0] for b in order)]
        return op.by_sequence(impl, batch), backwards, alone

    for whole, *others in threads_one_and_two(ways) if impl == "cpu" else [ways()]:
        for other in others:
            for b in order:
                assert same(other[b], whole[b]), f"sequence {b}"


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", QUICK)
def test_nan_stays_in_its_sequence_and_is_seen(name, impl):
    op = OPS[name]
    batch = op.draw(torch.Generator().manual_seed(7), [33, 1, 0, 3, 2], 2, 8)
    expected = op.by_sequence(impl, batch)
    for each in batch.tokens:
        if each.is_floating_point():
            each[34:37] = float("nan")
    found = op.by_sequence(impl, batch)
    assert all(each.isnan().all() for each in found[3][: op.tokens])
    assert all(each.isnan().any() for each in found[3])
    assert all(same(found[b], expected[b]) for b in (0, 1, 2, 4))


@pytest.mark.parametrize("name", OPS)
@settings(max_examples=examples(20))
@given(
    lengths=st.lists(st.integers(0, 23), min_size=1, max_size=5), heads=st.integers(1, 3),
    dim=st.integers(1, 19), seed=st.integers(0, 2**32 - 1), data=st.data(),
)  # fmt: skip
def test_a_batch_is_its_halves_end_to_end(name, lengths, heads, dim, seed, data):
    """Bit for bit, and near to float64."""
    op = OPS[name]
    batch, order = op.draw(torch.Generator().manual_seed(seed), lengths, heads, dim), [*range(len(lengths))]
    cut = data.draw(st.integers(0, len(lengths)))
    whole, exact = (op.by_sequence(impl, batch) for impl in ("cpu", "exact"))
    halves = [each for half in (order[:cut], order[cut:]) for each in op.by_sequence("cpu", batch.of(half))]
    for found, same_sequence, meant in zip(whole, halves, exact, strict=True):
        assert same(found, same_sequence)
        for one, other in zip(found, meant, strict=True):
            limit = 1e-4 * (1 + float(other.abs().amax())) if other.numel() else 0.0
            torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=limit)
