"""A kernel without tuples computes what the kernel with tuples does; what has no way without is refused."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from impls import TRITON
from triton.runtime.interpreter import InterpretedFunction

from tritonrec.kernels import flat_tuples
from tritonrec.kernels.flat_tuples import Flat, TupleError, flattened, taking_tuples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [*TRITON.marks]


class Source(NamedTuple):
    """Numbers, and how they are read; None for no shift."""

    ptr: torch.Tensor
    shift_ptr: torch.Tensor | None
    step: int


class Span(NamedTuple):
    start: int
    count: int


class Swapped(NamedTuple):
    count: int
    start: int


class Numbered(NamedTuple):
    start_0: int
    count: int


@triton.jit
def read(source, at):
    value = tl.load(source.ptr + at * source.step)
    if source.shift_ptr is not None:
        value += tl.load(source.shift_ptr + at)
    return value


@triton.jit
def span_of(source, sizes, scale=3):
    return Span(count=read(source, 1) + sizes[1], start=sizes[0] * scale)


@triton.jit
def later(span, by):
    return Span(span.start + by, span.count)


@triton.jit
def twice(span):
    return later(span, span.count)


@triton.jit
def ends(span):
    return span.start, span.start + span.count


@triton.jit
def inner_sum(source, sizes):
    """No tuple goes in or comes out, but inside there is one."""
    span = span_of(source, sizes, scale=2)
    return span.start + 1000 * span[1]


@triton.jit
def every_use_kernel(out_ptr, source, sizes, other, factor):
    span = span_of(sizes=sizes, source=source)
    span = twice(span)
    first, stop = ends(span)
    span = later(span, 1)
    again = span
    pair = ends(again)
    mixed = Span(read(other, 0), factor)
    tl.store(out_ptr, first)
    tl.store(out_ptr + 1, stop)
    tl.store(out_ptr + 2, pair[0] * 100 + pair[1])
    tl.store(out_ptr + 3, inner_sum(other, sizes) + mixed.start * mixed.count)
    tl.store(out_ptr + 4, read(source, at=2))
    total = tl.full((), 0, tl.int64)
    for i in range(span.start, again.start + again.count):
        total += i * sizes[0]
    tl.store(out_ptr + 5, total)


def every_use():
    """Arguments whose items are all different; the second source has a None where the first has a pointer."""
    numbers = torch.tensor([7, 2, 5, 11, 3, 13], device=DEVICE)
    out = torch.full((7,), -1, device=DEVICE)
    other = Source(numbers[3:], None, 1)
    return out, (out, Source(numbers, numbers[1:], 2), (4, 6), other, 17)


def test_every_use_of_a_tuple_has_the_same_results():
    (meant, arguments), (got, same) = every_use(), every_use()
    every_use_kernel[(1,)](*arguments)
    Flat(every_use_kernel)[(1,)](*same[:3], factor=17, other=same[3])
    assert torch.equal(got, meant)
    # span_of: start 4 * 3, count (5 + 5) + 6; twice: start + count
    assert got[:2].tolist() == [28, 44] and got[2] == 29 * 100 + 45 and got[6] == -1


def test_each_item_is_a_parameter_of_its_own():
    forms = (("source", Source._fields), ("sizes", ("0", "1")), ("other", Source._fields))
    kernel, returned = flattened(every_use_kernel, forms)
    assert returned is None and kernel.fn.__name__ == "every_use_kernel"
    assert kernel.arg_names == [
        "out_ptr", "source_ptr", "source_shift_ptr", "source_step", "sizes_0", "sizes_1",
        "other_ptr", "other_shift_ptr", "other_step", "factor",
    ]  # fmt: skip
    assert flattened(every_use_kernel, forms)[0] is kernel
    assert flattened(span_of, forms[:2])[1] == Span._fields
    assert flattened(ends, (("span", Span._fields),))[1] == ("0", "1")


def test_what_has_no_tuple_stays_as_it_is():
    assert flattened(without, ()) == (without, None)
    assert flattened(two, ()) == (two, ("0", "1"))


def test_functions_of_one_name_stay_apart():
    """Triton tells apart what a kernel calls by names and types, so each rewriting has a name of its own."""
    forms = [Span._fields, Swapped._fields]
    names = {flattened(ends, (("span", fields),), called=True)[0].fn.__name__ for fields in forms}
    assert len(names) == 2
    out = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    Flat(of_two_kinds_kernel)[(1,)](out, Span(3, 40), Swapped(40, 3))
    assert out.tolist() == [43, 43]


def test_where_triton_has_tuples_the_kernel_is_launched_itself():
    assert flat_tuples.HAS_TUPLES and taking_tuples(every_use_kernel) is every_use_kernel


@triton.jit
def without(x):
    return tl.sum(x, axis=0)


@triton.jit
def two(x):
    return x, x + 1


@triton.jit
def of_two_kinds_kernel(out_ptr, span, swapped):
    _, stop = ends(span)
    _, other_stop = ends(swapped)
    tl.store(out_ptr, stop)
    tl.store(out_ptr + 1, other_stop)


# What is refused: a function each, with the message. None of them is a program in some other way.


@triton.jit
def to_triton(span):
    return tl.maximum(span, 0)


@triton.jit
def compared(span):
    return span is None


@triton.jit
def walked(span):
    total = 0
    for item in span:
        total += item
    return total


@triton.jit
def at_a_variable(span, i):
    return span[i]


@triton.jit
def behind_the_end(span):
    return span[2]


@triton.jit
def from_the_end(span):
    return span[-1]


@triton.jit
def unknown_field(span):
    return span.stop


@triton.jit
def written(span):
    span.start = 3
    return span.count


@triton.jit
def chosen(span, flag):
    other = later(span, 1) if flag else span
    return other.start


@triton.jit
def unnamed(span):
    return later(span, 1).start


@triton.jit
def handed_on_unnamed(span):
    return ends(later(span, 1))


@triton.jit
def to_three(span):
    a, b, c = later(span, 1)
    return a + b + c


@triton.jit
def to_two_names(span):
    a = b = later(span, 1)
    return a.start + b.count


@triton.jit
def two_kinds_returned(span, FLAG: tl.constexpr):
    if FLAG:
        return Span(span.start, 1)
    return Swapped(1, span.start)


@triton.jit
def once_a_tuple(span, FLAG: tl.constexpr):
    if FLAG:
        return Span(span.start, 1)
    return span.start


@triton.jit
def a_number_before(span):
    more = 0
    more = later(span, more)
    return more.start


@triton.jit
def a_number_behind(span):
    more = later(span, 1)
    more = 0
    return more


@triton.jit
def other_fields(span):
    span = Swapped(span.count, span.start)
    return span.start


@triton.jit
def half_made(span):
    half = Span(span.start)
    return half.start


@triton.jit
def name_taken(span):
    span_start = 3
    return span.start + span_start


@triton.jit
def names_meet(span):
    more = Numbered(span.start, 6)
    more_start = 3, 4
    return more_start[0] + more.start_0


@triton.jit
def in_a_tuple(span):
    deep = (span.start, (span.count, 1))
    return deep[0]


@triton.jit
def in_a_named_tuple(span):
    return Span(span.start, (span.count, 1))


@triton.jit
def starred_in_a_tuple(span):
    more = (span.start, *span)
    return more[0]


@triton.jit
def starred(span):
    return ends(*span)


@triton.jit
def in_a_dictionary(span, options):
    return ends(span, **options)


@triton.jit
def too_many(span):
    return ends(span, 1)


@triton.jit(noinline=True)
def with_options(span):
    return span.start


REFUSED = [
    (to_triton, "or returned, no more: span"), (compared, "no more"), (walked, "no more"),
    (at_a_variable, "of start, count one is read"), (behind_the_end, "constant index"),
    (from_the_end, "constant index"), (unknown_field, "by name or constant index: span.stop"),
    (written, "constant index: span.start"), (chosen, "gets a name"), (unnamed, "gets a name"),
    (handed_on_unnamed, "gets a name before it is handed on"), (to_three, "or this one to 2"),
    (two_kinds_returned, "another return"),
    (once_a_tuple, "another return"), (a_number_before, "more was something else before"),
    (a_number_behind, "no more: more"), (other_fields, "span was something else before"),
    (half_made, "all its fields, start, count"), (name_taken, "span_start is a variable beside the"),
    (starred, "one by one"), (in_a_dictionary, "one by one"), (too_many, "one by one"),
    (names_meet, "more_start_0 is a variable beside the tuple more_start"), (in_a_tuple, "single values"),
    (in_a_named_tuple, "single values"), (starred_in_a_tuple, "single values"),
    (with_options, "a plain triton.jit"),
]  # fmt: skip


if isinstance(to_two_names, InterpretedFunction):  # a compiled kernel's own checks refuse it before
    REFUSED.append((to_two_names, "assigned to one name"))


@pytest.mark.parametrize(("function", "why"), REFUSED, ids=[function.fn.__name__ for function, _ in REFUSED])
def test_what_has_no_way_is_refused_by_file_and_line(function, why):
    with pytest.raises(TupleError) as error:
        flattened(function, (("span", Span._fields),))
    assert why in str(error.value)
    assert f"{Path(__file__).name}:" in str(error.value)


def test_the_line_of_an_error_is_that_of_the_statement():
    with pytest.raises(TupleError) as error:
        flattened(unknown_field, (("span", Span._fields),))
    line = int(str(error.value).split(":")[1].split(",")[0])
    assert Path(__file__).read_text().splitlines()[line - 1] == "    return span.stop"


def test_a_tuple_in_a_tuple_is_refused():
    with pytest.raises(TupleError, match="single values"):
        Flat(every_use_kernel)[(1,)](None, ((1, 2), 3), (), (), 0)


def test_a_function_in_a_function_is_refused():
    span = 3

    @triton.jit
    def inner(sizes):
        return sizes[0] + span

    with pytest.raises(TupleError, match="a function inside of another one"):
        flattened(inner, (("sizes", ("0", "1")),))


@triton.jit
def returns_early(span, FLAG: tl.constexpr):
    if FLAG:
        return
    tl.device_assert(span.start >= 0)


@triton.jit
def becomes_a_number(span):
    span, stop = ends(span)
    return stop


def test_a_function_may_return_nothing_and_gives_the_name_of_a_tuple_to_nothing_else():
    assert flattened(returns_early, (("span", Span._fields),))[1] is None
    with pytest.raises(TupleError, match="a tuple is read by field, handed on, assigned or returned"):
        flattened(becomes_a_number, (("span", Span._fields),))
