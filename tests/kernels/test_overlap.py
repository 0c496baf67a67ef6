"""No op writes over memory that one of its other arguments has, whichever door it is called by."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonrec.kernels import overlap
from tritonrec.kernels.overlap import check_no_overlap

# The tests below are of the check itself, by which all of these ops refuse.


def refused(one, other):
    with pytest.raises(
        ValueError, match=r"^one is written to and shares memory with other: give other.clone"
    ):
        check_no_overlap({"one": one}, {"other": other})


def test_parts_of_one_storage_that_are_apart_pass():
    buffer = torch.randn(16, 8)
    check_no_overlap({"one": buffer[:8], "two": buffer[8:12]}, {"other": buffer[12:]})
    check_no_overlap({"one": buffer[:, :3], "two": buffer[:, 3:5]}, {"other": buffer[:, 5:]})
    check_no_overlap({"one": buffer[::2]}, {"other": buffer[1::2]})
    check_no_overlap({"one": buffer[:, ::2]}, {"other": buffer[:, 1::2]})
    check_no_overlap({"one": buffer[:8]}, {"other": buffer[8:].t()})
    refused(buffer[:9], buffer[8:])
    refused(buffer[:, :4], buffer[:, 3:])
    refused(buffer[:, ::2], buffer[:, 2:4])
    refused(buffer[3], buffer.t()[5])


def test_matrices_with_rows_of_other_lengths_are_searched():
    """Rows of 6 and of 20 floats, the first of which lie beside each other."""
    buffer = torch.zeros(48)
    refused(buffer.as_strided((8, 2), (6, 1)), buffer.as_strided((3, 2), (20, 1), 2))


def test_one_byte_is_enough():
    buffer = torch.zeros(64, dtype=torch.uint8)
    check_no_overlap({"one": buffer[:32].view(torch.float32)}, {"other": buffer[32:]})
    refused(buffer[:32].view(torch.float32), buffer[31:32])


def test_two_storages_over_the_same_memory_are_seen():
    memory = np.zeros(8, np.float32)
    refused(torch.from_numpy(memory[:5]), torch.from_numpy(memory[4:]))
    check_no_overlap({"one": torch.from_numpy(memory[:4])}, {"other": torch.from_numpy(memory[4:])})


def test_what_is_only_read_may_share_memory_and_no_memory_is_never_shared():
    buffer = torch.randn(8)
    check_no_overlap({"one": torch.zeros(2), "none": None}, {"other": buffer, "same": buffer})
    check_no_overlap({"one": buffer[:0]}, {"other": buffer[:0], "none": None})
    check_no_overlap({"one": buffer[3:3]}, {"other": buffer})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1, 4).expand(3, 4),
        torch.zeros(4, 1).expand(4, 3),
        torch.zeros(16).as_strided((4, 4), (3, 1)),
        torch.zeros(16).as_strided((2, 3, 2), (4, 2, 3)),
    ],
)
def test_elements_that_share_memory_are_refused(tensor):
    with pytest.raises(
        ValueError, match=r"^one is written to, and elements of it share memory: it has shape"
    ):
        check_no_overlap({"one": tensor}, {})
    check_no_overlap({"one": torch.zeros(2)}, {"other": tensor})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 4).t(),
        torch.zeros(9, 8)[::2, 1:5],
        torch.zeros(1, 4).as_strided((1, 4), (0, 1)),
        torch.zeros(2, 3, 5).permute(2, 0, 1)[1:, :, ::2],
    ],
)
def test_elements_apart_pass_at_any_strides(tensor):
    check_no_overlap({"one": tensor}, {})


def test_a_pair_that_takes_too_long_to_tell_counts_as_shared(monkeypatch):
    buffer = torch.zeros(64)
    one, other = buffer.as_strided((3, 3), (7, 3)), buffer.as_strided((3, 3), (11, 5), 1)
    monkeypatch.setattr(overlap.np, "shares_memory", too_hard)
    refused(one, other)


def too_hard(*arguments, **options):
    raise np.exceptions.TooHardError


views = st.tuples(
    st.integers(1, 4), st.integers(1, 4), st.integers(0, 9), st.integers(0, 5), st.integers(0, 12)
)


@given(views, views)
def test_a_view_is_refused_where_sets_of_its_elements_say_so(first, second):
    def addresses(rows, columns, row_stride, stride, start):
        return [start + row_stride * r + stride * c for r in range(rows) for c in range(columns)]

    def view(rows, columns, row_stride, stride, start):
        return torch.zeros(64).as_strided((rows, columns), (row_stride, stride), start)

    def agree(expected, *arguments):
        if not expected:
            check_no_overlap(*arguments)
            return
        with pytest.raises(ValueError, match="share"):
            check_no_overlap(*arguments)

    buffer = torch.zeros(64)
    one, other = (buffer.as_strided(v[:2], v[2:4], v[4]) for v in (first, second))
    own = addresses(*first)
    if len(set(own)) < len(own):
        agree(True, {"one": view(*first)}, {})
        return
    strides = sorted((s, n) for n, s in zip(first[:2], first[2:4], strict=True) if n > 1)
    if len(strides) == 2 and strides[1][0] <= (strides[0][1] - 1) * strides[0][0]:
        return  # rows that lie in each other's gaps: no layout of an argument that is written
    agree(bool(set(own) & set(addresses(*second))), {"one": one}, {"other": other})


def test_columns_of_one_matrix_are_told_apart_without_a_search(monkeypatch):
    matrix = torch.zeros(9, 8)
    monkeypatch.setattr(np, "shares_memory", None)
    check_no_overlap({"left": matrix[:, :5]}, {"right": matrix[:, 5:]})


def test_a_tensor_without_memory_hides_no_overlap():
    there, here = torch.zeros(3, device="meta"), torch.zeros(3)
    with pytest.raises(ValueError, match="out is written to and shares memory with x"):
        check_no_overlap({"nowhere": there, "out": here}, {"none": None, "x": here[1:]})
