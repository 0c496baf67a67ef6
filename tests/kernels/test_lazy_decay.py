"""Lazy weight decay: the bits of a row that was decayed in every update, whenever it is touched."""

import pytest
import torch
from impls import GPU, IMPLS

from tritonrec.kernels.sparse_optimizers.op import MOST_UPDATES, sparse_lazy_decay


def factors(steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 1 - 0.2 * torch.rand(steps, generator=generator)


def touched_at(impl, rows, dim, steps, touches, pad=0, seed=0):
    """Weight | last update (R, dim + 1) after `steps` updates, of which row r sees touches[r]."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(rows, dim + pad + 1, generator=generator)
    table[:, -1] = 0
    table = table.cuda() if impl == "triton" and GPU else table
    given = factors(steps, seed).to(table.device)
    for step in range(1, steps + 1):
        indices = [row for row in range(rows) if step in touches[row]]
        indices = torch.tensor(indices[::-1], dtype=torch.int64, device=table.device)
        sparse_lazy_decay(table[:, :dim], table[:, -1:], indices, given, step, impl=impl)
    return table.cpu()


def same_bits(one, other):
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("dim", [1, 5, 130])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_row_touched_late_has_the_bits_of_one_touched_in_every_update(impl, dim):
    always = [range(1, 10)] * 5
    late = [range(1, 10), (1, 9), (1, 2, 9), (1, 5, 6, 9), (1, 8, 9)]
    assert same_bits(touched_at(impl, 5, dim, 9, late, 2), touched_at("reference", 5, dim, 9, always, 2))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_row_begins_with_its_first_update(impl):
    table, given = torch.ones(3, 3), factors(7)
    table[:, 2] = torch.tensor([0.0, float("nan"), -4.0])
    moved = table.cuda() if impl == "triton" and GPU else table
    indices = torch.arange(3, device=moved.device)
    sparse_lazy_decay(moved[:, :2], moved[:, 2:], indices, given.to(moved.device), 7, impl=impl)
    assert same_bits(moved.cpu(), torch.tensor([[given[6]] * 2 + [7.0]] * 3))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("last", [7.0, 8.0, 3e9, float("inf")])
def test_a_row_that_was_updated_later_is_left_as_it_is(impl, last):
    table, given = torch.full((2, 3), 5.0), factors(7)
    table[:, 2] = last
    moved = table.cuda() if impl == "triton" and GPU else table
    indices = torch.tensor([1], device=moved.device)
    sparse_lazy_decay(moved[:, :2], moved[:, 2:], indices, given.to(moved.device), 7, impl=impl)
    assert moved.cpu().tolist() == [[5.0, 5.0, last], [5.0, 5.0, 7.0]]


def test_updates_are_counted_as_far_as_a_float32_counts():
    last = torch.tensor(float(MOST_UPDATES))
    assert last - 1 + 1 == last and last - 1 != last and last + 1 == last
