"""A number given as a tensor, and a seed, is in its range, dtype, shape and place, or is refused by name."""

import pytest
import torch
from hash_tables import EXTREMES, contents, empty, keys_of
from impls import HOST_TRITON

from tritonrec import ops
from tritonrec.kernels.hash_table import op as hash_table

DOORS = {
    "public": lambda *given, **rest: ops.hash_insert(*given[:-1], impl=given[-1], **rest),
    "registered": lambda keys, rows, new, next_row, free=None, impl="auto", *, status=None: (
        torch.ops.tritonrec.hash_insert(keys, rows, new, 0, free, None, next_row, status, None, impl)
    ),
}


@pytest.mark.parametrize("next_row", [-1, -3, -(2**63), 2**31 + 1, 2**62, 2**63 - 1])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("impl", ["reference", "cpu", HOST_TRITON])
def test_a_counter_of_rows_outside_of_int32_is_refused(impl, door, next_row):
    table, counter, status = empty(16), torch.tensor(next_row), torch.tensor(0)
    for options in ({}, {"status": status}):
        with pytest.raises(ValueError, match=rf"next_row must be in \[0, 2\*\*31\], got {next_row}$"):
            DOORS[door](*table, keys_of([4, 2, 9]), counter, None, impl, **options)
    assert contents(*table) == {} and int(counter) == next_row and int(status) == 0


@pytest.mark.parametrize("impl", ["reference", "cpu", HOST_TRITON])
def test_a_counter_may_run_out(impl):
    table, counter = empty(16), torch.tensor(2**31 - 2)
    rows, inserted = ops.hash_insert(*table, keys_of([5, -1]), counter, impl=impl)
    assert rows.tolist() == [2**31 - 2, 2**31 - 1] and inserted.all() and int(counter) == 2**31
    again, inserted = ops.hash_insert(*table, keys_of([-1, 5]), counter, impl=impl)
    assert again.tolist() == [2**31 - 1, 2**31 - 2] and not inserted.any() and int(counter) == 2**31
    with pytest.raises(ValueError, match="1 new keys from row 2147483648 pass the last int32 row"):
        ops.hash_insert(*table, keys_of([7]), counter, impl=impl)
    assert len(contents(*table)) == 2


def test_an_accelerator_asserts_without_a_wait(monkeypatch):
    """Where the host may not look, the check is queued on the device."""
    monkeypatch.setattr(hash_table, "on_host", lambda tensor: False)
    table, keys = empty(8), keys_of([3, 1])
    good = torch.tensor([4, 5])
    for call_, name in (
        (lambda: ops.hash_insert(*table, keys, torch.tensor(-2)), "next_row"),
        (lambda: ops.hash_insert(*table, keys, torch.tensor(2**63 - 1)), "next_row"),
        (lambda: ops.hash_insert(*table, keys, 0, torch.tensor([1, -1])), "free_rows"),
    ):
        with pytest.raises(RuntimeError, match=rf"^{name} must be in \[0, 2\*\*31"):
            call_()
    assert contents(*table) == {}
    ops.hash_insert(*table, keys, torch.tensor(0), good)
    assert contents(*table) == {3: 4, 1: 5}


@pytest.mark.parametrize("look", [
    lambda status: ops.check_summed(status, (2, 3)), lambda status: ops.check_inserted(status, empty(8)[1]),
], ids=["check_summed", "check_inserted"])  # fmt: skip
def test_a_status_that_no_op_wrote_is_refused(look):
    look(torch.tensor(0))
    for status in (torch.tensor(-5), torch.tensor(-(2**63))):
        with pytest.raises(ValueError, match=f"status must be 0 or what an op wrote, got {int(status)}"):
            look(status)
    for status in (torch.tensor(0.5), torch.zeros(2, dtype=torch.int64), torch.tensor(3, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"status must be \(\) int64, got shape"):
            look(status)
    for status in (7, None):
        with pytest.raises(TypeError, match=r"status must be a torch\.Tensor, got"):
            look(status)


def test_a_status_names_a_value_of_that_shape():
    with pytest.raises(ops.ExactSumError, match=r"sums\[1, 2\]"):
        ops.check_summed(torch.tensor(6), (2, 3), name="sums")
    with pytest.raises(ValueError, match="status must be 0 or what an op wrote, got 7"):
        ops.check_summed(torch.tensor(7), (2, 3))


@pytest.mark.parametrize("name", ["seed", "stream", "step"])
def test_a_seed_is_an_int64(name):
    """2**64 more of it would be the same seed."""
    given = {"seed": 5, "stream": 6, "step": 7}
    for number in (2**63, -(2**63) - 1, 2**64 + 5, 2**70):
        with pytest.raises(ValueError, match=rf"^{name} must lie in \[-2\*\*63, 2\*\*63\), got {number}$"):
            ops.derive_seed(**{**given, name: number})
    seeds = {ops.derive_seed(**{**given, name: number}) for number in EXTREMES}
    assert len(seeds) == len(EXTREMES) and all(-(2**63) <= seed < 2**63 for seed in seeds)
