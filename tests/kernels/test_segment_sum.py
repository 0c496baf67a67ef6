"""Rows summed by key: "window" in order of occurrence, "batch" alike in any order and never wrapping."""

import numpy as np
import pytest
import torch
from impls import IMPLS, on
from speeds import slow_except

from tritonrec.kernels import dispatch
from tritonrec.kernels.fixed_point.errors import ExactSumError
from tritonrec.kernels.fixed_point.op import from_fixed_point, to_fixed_point
from tritonrec.kernels.packed_rows.op import add_packed_rows, pack_rows
from tritonrec.kernels.rows.op import segment_sum

CONSISTENCIES = ["window", "batch"]


def case(name, seed=0):
    """Values, segments and their number, by name."""
    rng = np.random.default_rng(seed)
    occurrences, segments, dim = {
        "empty": (0, 4, 5),
        "no_segments": (0, 0, 3),
        "no_columns": (6, 3, 0),
        "one_row": (1, 1, 1),
        "odd_dim": (40, 7, 13),
        "one_hot_key": (60, 3, 4),
        "block_minus_one": (9, 4, 127),
        "block": (9, 4, 128),
        "block_plus_one": (9, 4, 129),
        "skewed": (90, 20, 8),
    }[name]
    keys = rng.integers(0, max(segments, 1), occurrences)
    if name == "skewed":
        keys = rng.zipf(1.3, occurrences) % segments
    if name == "one_hot_key":
        keys[:] = 1
    values = rng.standard_normal((occurrences, dim)) * np.exp(rng.standard_normal((occurrences, dim)) * 4)
    return torch.from_numpy(values.astype(np.float32)), torch.from_numpy(keys), segments


NAMES = [
    "empty",
    "no_segments",
    "no_columns",
    "one_row",
    "odd_dim",
    "one_hot_key",
    "block_minus_one",
    "block",
    "block_plus_one",
    "skewed",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("consistency", CONSISTENCIES)
def test_equals_the_reference(consistency, name, exact_impl):
    impl = exact_impl
    values, segments, count = case(name)
    sums = segment_sum(on(impl, values), on(impl, segments), count, consistency=consistency, impl=impl).cpu()
    assert torch.equal(sums, segment_sum(values, segments, count, consistency=consistency, impl="reference"))


@pytest.mark.smoke
@pytest.mark.parametrize("impl", IMPLS)
def test_batch_does_not_depend_on_order_or_split(impl):
    values, segments, count = case("skewed")
    whole = segment_sum(on(impl, values), on(impl, segments), count, consistency="batch", impl=impl)
    order = torch.randperm(len(segments), generator=torch.Generator().manual_seed(5))
    out = torch.zeros_like(whole)
    for part in order.split([1, 40, 0, 49]):
        segment_sum(
            on(impl, values[part]), on(impl, segments[part]), count, consistency="batch", out=out, impl=impl
        )
    assert torch.equal(out, whole)
    terms = to_fixed_point(on(impl, values[order]), impl=impl)
    assert torch.equal(
        segment_sum(terms, on(impl, segments[order]), count, consistency="batch", impl=impl), whole
    )


def test_window_depends_on_order():
    """The reason for the other consistency: the same rows in another order give other bits."""
    values, segments, count = case("one_hot_key")
    assert not torch.equal(segment_sum(values, segments, count), segment_sum(values.flip(0), segments, count))


@pytest.mark.parametrize("consistency", CONSISTENCIES)
def test_error_is_at_most_twice_that_of_index_add(consistency):
    rng = np.random.default_rng(8)
    values = torch.from_numpy(rng.standard_normal((4000, 16)).astype(np.float32))
    segments = torch.from_numpy(rng.zipf(1.2, 4000) % 50)
    exact = torch.zeros(50, 16, dtype=torch.float64).index_add_(0, segments, values.double())
    plain = torch.zeros(50, 16).index_add_(0, segments, values)
    sums = segment_sum(values, segments, 50, consistency=consistency)
    error = ((sums if consistency == "window" else from_fixed_point(sums)) - exact).abs()
    assert error.max() <= 2 * (plain - exact).abs().max(), f"worst element {divmod(int(error.argmax()), 16)}"


def add(how, impl, out, values, segments, **named):
    """Rows of int64 are added to `out` as they are, or packed: both have the same sums and errors."""
    out, values, segments = (on(impl, each) for each in (out, values, segments))
    if how == "rows":
        return segment_sum(values, segments, len(out), consistency="batch", out=out, impl=impl, **named)
    widths, packed = pack_rows(values, on(impl, torch.arange(len(values))), impl=impl)
    return add_packed_rows(out, segments, widths, packed, impl=impl, **named)


HOW = pytest.mark.parametrize("how", ["rows", "packed rows"])


@pytest.mark.parametrize("sign", [1, -1])
@HOW
@pytest.mark.parametrize("impl", IMPLS)
def test_rows_of_int64_whose_sum_leaves_int64_are_an_error(impl, how, sign):
    """+2**63 is one past the end, -2**63 is the end itself."""
    values, segments, named = torch.zeros(6, 3).long(), torch.tensor([0, 1, 1, 1, 1, 1]), {"name": "uvqk"}
    values[1:, 2] = sign * 2**61
    four = add(how, impl, torch.zeros(2, 3).long(), values[:4], segments[:4])
    assert four[1, 2] == sign * 3 * 2**61
    with pytest.raises(ExactSumError, match=r"uvqk\[(4|5), 2\] = .* segment 1, column 2, leaves") as caught:
        add(how, impl, torch.zeros(2, 3).long(), values, segments, fraction_bits=20, **named)
    assert caught.value.index == ((4, 2) if sign > 0 else (5, 2)) and caught.value.value == sign * 2**61
    with pytest.raises(ExactSumError) as expected:
        segment_sum(values, segments, 2, consistency="batch", fraction_bits=20, **named)
    assert str(caught.value) == str(expected.value)


def test_cpu_leaves_the_row_before_an_overflow_unwrapped():
    out = torch.full((1, 40), 2**62)
    out[0, 33] = 2**63 - 1
    with pytest.raises(ExactSumError):
        segment_sum(torch.ones(1, 40), torch.tensor([0]), 1, consistency="batch", out=out)
    assert out[0, 33] == 2**63 - 1 and (out[0, :33] == 2**62).all() and (out[0, 34:] == 2**62).all()


POOLED = {  # rows of values, occurrences, segments, columns
    "empty": (5, 0, 3, 4), "no_rows": (0, 0, 3, 4), "one": (1, 1, 1, 1), "one_segment": (4, 70, 1, 5),
    "many_of_few": (3, 140, 11, 13), "few_of_many": (500, 30, 9, 64), "blocks": (60, 29, 17, 129),
}  # fmt: skip


def pooled(name, bags, seed=0):
    """Values, source, segments (in order for bags of ids) and their number."""
    rows, occurrences, segments, dim = POOLED[name]
    rng = np.random.default_rng([seed, occurrences, dim])
    values = torch.from_numpy(rng.standard_normal((rows, dim)).astype(np.float32)) * 9
    source = torch.from_numpy(rng.integers(0, max(rows, 1), occurrences))
    keys = torch.from_numpy(rng.zipf(1.4, occurrences) % segments)
    return values, source, keys.sort().values if bags else keys, segments


@pytest.mark.parametrize(("bags", "padded"), [(False, True), (True, False)])
@pytest.mark.parametrize("name", POOLED)
@pytest.mark.parametrize("consistency", CONSISTENCIES)
@pytest.mark.parametrize("impl", IMPLS)
def test_rows_of_a_source_are_added_as_if_they_were_gathered(impl, consistency, name, bags, padded):
    values, source, segments, count = pooled(name, bags)
    valid = torch.tensor(len(source) * 2 // 3) if padded else None
    options = {"consistency": consistency, "impl": impl, "count": None if valid is None else on(impl, valid)}
    wide = on(impl, torch.cat([values, values], 1))[:, : values.shape[1]]
    got = segment_sum(wide, on(impl, segments), count, source=on(impl, source), **options)
    options |= {"impl": "reference", "count": valid}
    assert torch.equal(got.cpu(), segment_sum(values[source], segments, count, **options))
    if consistency == "batch":
        terms = to_fixed_point(values)
        options |= {"impl": impl, "count": None if valid is None else on(impl, valid)}
        exact = segment_sum(on(impl, terms), on(impl, segments), count, source=on(impl, source), **options)
        assert torch.equal(exact, got)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_second_derivatives_of_a_source(impl):
    values, source, segments, count = pooled("one_segment", True)
    values = values.double().float().requires_grad_()
    first = segment_sum(values, segments, count, source=source, impl=impl).square().sum()
    (gradient,) = torch.autograd.grad(first, values, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), values)
    plain = values.detach().requires_grad_()
    first = torch.zeros(count, 5).index_add(0, segments, plain[source]).square().sum()
    (gradient,) = torch.autograd.grad(first, plain, create_graph=True)
    assert torch.allclose(second, torch.autograd.grad(gradient.sum(), plain)[0], rtol=1e-4)


@pytest.mark.parametrize("impl", ["reference", "cpu", pytest.param("triton", marks=pytest.mark.interpreter)])
def test_a_source_outside_and_a_value_without_a_number_are_named(impl):
    values, out = torch.ones(2, 3), torch.zeros(4, 3)
    with pytest.raises(IndexError, match=r"source\[1\] = 2 is outside \[0, 2\)"):
        segment_sum(values, torch.tensor([0, 3]), 4, source=torch.tensor([0, 2]), out=out, impl=impl)
    assert not out.any()
    values[1, 2] = torch.inf
    with pytest.raises(ExactSumError, match=r"rows\[2, 2\] = inf") as raised:
        segment_sum(
            values, torch.tensor([0, 1, 3]), 4, source=torch.tensor([0, 0, 1]), consistency="batch",
            name="rows", impl=impl,
        )  # fmt: skip
    assert raised.value.index == (2, 2)


def test_exact_sums_are_not_differentiable_and_out_refuses_gradients():
    values, segments, count = case("odd_dim")
    values.requires_grad_()
    assert not segment_sum(values, segments, count, consistency="batch").requires_grad
    with pytest.raises(RuntimeError, match="no derivative, and values requires a gradient"):
        segment_sum(values, segments, count, out=torch.zeros(count, 13))


@pytest.mark.parametrize("dim", [5, 33, 64, 128])
@HOW
@pytest.mark.parametrize("impl", IMPLS)
def test_a_sum_that_just_fits_is_added_once(impl, how, dim):
    """With few columns several threads of a GPU load one element: none may load what another has stored."""
    segments = torch.randperm(7, generator=torch.Generator().manual_seed(dim))
    values = 2**61 + torch.arange(7 * dim).reshape(7, dim)
    out = add(how, impl, torch.full((7, dim), 2**62), values, segments)
    expected = torch.empty_like(values)
    expected[segments] = values + 2**62
    assert torch.equal(out.cpu(), expected)


@pytest.fixture(params=["atomics", "no_atomics"])
def parts_of_four(monkeypatch, request):
    """So that few rows are many parts, or blocks; without atomics parts of parts."""
    from tritonrec.kernels.rows import triton_segment_sum, triton_unsorted_sum

    monkeypatch.setattr(triton_segment_sum, "PART", 4)
    monkeypatch.setattr(triton_unsorted_sum, "ROWS", 4)
    monkeypatch.setattr(triton_unsorted_sum, "LOOKED", 2)
    if request.param == "no_atomics":
        monkeypatch.setattr(dispatch, "has_int64_atomics", lambda tensor: False)


CUT = {  # where segments begin and end in the sorted rows, beside parts of four
    "one_segment": [70],
    "at_the_ends_of_parts": [4, 8, 4, 1, 3, 16],
    "across_them": [3, 6, 9, 1, 14, 2],
    "first_row_of_a_part_is_the_last_of_a_segment": [5, 4, 8, 13],
    "with_empty_ones": [0, 17, 0, 0, 65, 0, 1, 0],
    "many_small_ones": [1, 2, 3, 4, 5] * 5,
}


@pytest.mark.parametrize("way", ["whole", "padded", "packed rows"])
@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("impl", IMPLS)
def test_segments_of_any_length_are_added_up_in_parts(impl, name, way, parts_of_four):
    lengths = CUT[name]
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    generator = torch.Generator().manual_seed(len(segments))
    order = torch.randperm(len(segments), generator=generator)
    values = torch.randn(len(segments), 3, generator=generator) * 8
    valid = len(segments) - 9 if way == "padded" else len(segments)
    count = on(impl, torch.tensor(valid)) if way == "padded" else None
    start = torch.arange(len(lengths) * 3).view(-1, 3) - 2**40
    out = on(impl, start.clone())
    segments, terms = segments[order], (values.double() * 2**36).round().to(torch.int64)
    if way == "packed rows":
        out = add(way, impl, start.clone(), terms, segments)
    else:
        segment_sum(
            on(impl, values), on(impl, segments), len(lengths), consistency="batch", out=out, count=count,
            impl=impl,
        )  # fmt: skip
    assert torch.equal(out.cpu(), start.index_add(0, segments[:valid], terms[:valid]))


@pytest.mark.parametrize("impl", IMPLS)
def test_an_overflow_is_named_where_it_is_met(impl, parts_of_four):
    """In the second of two segments, which begins in the middle of a part and has four rows."""
    segments = torch.tensor([0] * 6 + [1] * 4 + [2] * 9)
    values = torch.zeros(19, 2, dtype=torch.int64)
    values[[6, 8, 9], 1] = 2**62
    with pytest.raises(ExactSumError) as raised:
        segment_sum(on(impl, values), on(impl, segments), 3, consistency="batch", impl=impl)
    assert raised.value.index == (8, 1)


@HOW
@pytest.mark.parametrize("impl", IMPLS)
def test_an_overflow_of_parts_is_an_error(impl, how, parts_of_four):
    """Each part of the last segment fits. Where Triton sorts, it names a row of it."""
    segments = torch.tensor([0] * 6 + [1] * 30)
    values = torch.zeros(36, 2, dtype=torch.int64)
    values[[7, 20, 33], 0] = -(2**62)
    values[[7, 20], 1] = 2**61
    with pytest.raises(ExactSumError) as raised:
        add(how, impl, torch.zeros(2, 2, dtype=torch.int64), values, segments)
    row, column = raised.value.index
    sorts = impl == "triton" and (how == "packed rows" or not dispatch.has_int64_atomics(values))
    assert column == 0 and (6 <= row < 36 if sorts else row == 33)


@pytest.mark.parametrize("rows", slow_except([1, 128, 300], [1, 127, 128, 129, 300, 128 * 128 + 1]))
@pytest.mark.parametrize("impl", IMPLS)
def test_the_only_segment_is_added_up_in_parts_of_any_number(impl, rows):
    """A bias's gradient: all rows in one sum, which starts from what `out` has."""
    values = on(impl, torch.randn(rows, 5, generator=torch.Generator().manual_seed(rows)) * 8)
    segments, start = torch.zeros(rows, dtype=torch.int64, device=values.device), torch.arange(5) - 2**40
    got = segment_sum(
        values, segments, 1, consistency="batch", out=on(impl, start.view(1, 5).clone()), impl=impl
    )
    terms = (values.cpu().double() * 2**36).round().to(torch.int64)
    assert torch.equal(got.cpu().view(-1), start + terms.sum(0))
    count = on(impl, torch.tensor(rows // 2))
    part = segment_sum(values, segments, 1, consistency="batch", count=count, impl=impl)
    assert torch.equal(part.cpu().view(-1), terms[: rows // 2].sum(0))
    folded = torch.zeros(5)
    for row in values.cpu() if rows < 400 else []:
        folded = folded + row
    if rows < 400:
        assert torch.equal(segment_sum(values, segments, 1, impl=impl).cpu().view(-1), folded)


@pytest.mark.parametrize("bad", [0, 128, 200, 299])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_bad_value_of_the_only_segment_is_named(impl, bad):
    values = torch.randn(300, 3, generator=torch.Generator().manual_seed(1))
    values[bad, 1] = float("nan")
    segments = on(impl, torch.zeros(300, dtype=torch.int64))
    with pytest.raises(ExactSumError) as raised:
        segment_sum(on(impl, values), segments, 1, consistency="batch", impl=impl)
    assert raised.value.index == (bad, 1)


def test_a_status_takes_the_error_of_a_sum_without_an_out():
    values, segments = torch.tensor([[1.0, torch.nan]]), torch.zeros(1, dtype=torch.int64)
    status = torch.tensor(0)
    segment_sum(values, segments, 1, consistency="batch", status=status)
    assert int(status) == 2
    with pytest.raises(ExactSumError):
        segment_sum(values, segments, 1, consistency="batch")


def test_more_segments_than_memory_are_named():
    with pytest.raises(ValueError, match=r"num_segments = .* fit no memory"):
        segment_sum(torch.zeros(3, 4).half(), torch.zeros(3, dtype=torch.int64), 2**63 - 1)
    with pytest.raises(ValueError, match="consistency must be"):
        segment_sum(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), 2, consistency="exact")
