"""With the number of occupied slots beside it, an insert reads no more of a table than its keys' way."""

from unittest import mock

import pytest
import torch
from hash_tables import contents, empty, keys_of
from impls import IMPLS
from murmur_inverse import key_with_hash
from no_sync import Pretended
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from tritonrec import ops
from tritonrec.kernels import dispatch
from tritonrec.kernels.hash_table.op import HASH_ERASE, HASH_INSERT


def number(impl, value):
    return keys_of([value], impl)[0]


@pytest.mark.parametrize("impl", IMPLS)
def test_the_number_of_occupied_slots_is_kept(impl):
    """Through inserts of old and new keys, padding, refusals, erasures of absent keys, and growth."""
    table, used, status = empty(16, impl), number(impl, 0), number(impl, 0)

    def occupied():
        assert int(used) == len(contents(*table))
        return int(used)

    ops.hash_insert(*table, keys_of(range(10), impl), 0, used=used, impl=impl)
    assert occupied() == 10
    ops.hash_insert(*table, keys_of(range(8, 20), impl), 10, count=number(impl, 5), used=used, impl=impl)
    assert occupied() == 13
    with pytest.raises(ops.HashTableFullError, match="8 keys do not fit into a table of 16 slots with 13"):
        ops.hash_insert(*table, keys_of(range(12, 20), impl), 13, used=used, impl=impl)
    assert occupied() == 13
    ops.hash_insert(*table, keys_of(range(12, 20), impl), 13, status=status, used=used, impl=impl)
    assert occupied() == 13 and int(status) == 7
    erased = ops.hash_erase(
        *table, keys_of([3, 77, 5, 9, 0], impl), count=number(impl, 4), used=used, impl=impl
    )
    assert erased.tolist() == [3, -1, 5, 9, -1] and occupied() == 10
    ops.hash_insert(*table, keys_of([], impl), 13, used=used, impl=impl)
    ops.hash_erase(*table, keys_of([], impl), used=used, impl=impl)
    assert occupied() == 10
    ops.hash_insert(*table, keys_of(range(100, 106), impl), 13, used=used, impl=impl)  # the last slots
    assert occupied() == 16
    table = ops.hash_grow(*table, impl=impl)
    ops.hash_insert(*table, keys_of([1, 200], impl), 19, used=used, impl=impl)
    assert occupied() == 17


@pytest.mark.parametrize("value", [-1, 17])
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_a_number_that_no_table_can_have_is_refused(impl, value):
    table, used = empty(16, impl), torch.tensor(value)
    for call in (
        lambda: ops.hash_insert(*table, keys_of([1]), 0, used=used, impl=impl),
        lambda: ops.hash_erase(*table, keys_of([1]), used=used, impl=impl),
    ):
        with pytest.raises(ValueError, match=f"number of occupied slots of 16, got {value}"):
            call()
    with pytest.raises(ValueError, match=r"used must be \(\) int64"):
        ops.hash_insert(*table, keys_of([1]), 0, used=torch.tensor([0]), impl=impl)
    assert contents(*table) == {}


class Sizes(TorchDispatchMode):
    """The most elements that an op outside of a launched kernel takes or gives."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in [*args, *(kwargs or {}).values(), out]:
            if isinstance(each, torch.Tensor):
                self.most = max(self.most, each.numel())
        return out


@pytest.mark.interpreter
@pytest.mark.parametrize("counted", [True, False])
def test_no_op_of_torch_takes_the_whole_table(counted):
    table, used = empty(4096, "triton"), number("triton", 0) if counted else None
    keys, status = keys_of(range(40), "triton"), number("triton", 0)
    unseen = Pretended().unseen(InterpretedFunction.run)
    with mock.patch.object(InterpretedFunction, "run", unseen), Sizes() as sizes:
        HASH_INSERT.launch(*table, keys, 0, None, None, None, status, used, impl="triton")
        HASH_ERASE.launch(*table, keys, None, used, impl="triton")
    assert (sizes.most == 40) == counted


@pytest.mark.interpreter
@pytest.mark.skipif(dispatch.emulated is None, reason="only the emulator counts bytes")
def test_kernels_read_as_many_bytes_of_any_table():
    from tritonrec.harness.emulator.driver import current

    rows, counted = current().rows, []
    keys = keys_of([key_with_hash(home) for home in range(40)], "triton")  # none in the way of another
    for slots in (1 << 10, 1 << 16):
        before = sum(row.counts.bytes_read for row in rows.values())
        table, used = empty(slots, "triton"), number("triton", 0)
        ops.hash_insert(*table, keys, 0, used=used, impl="triton")
        ops.hash_erase(*table, keys, used=used, impl="triton")
        counted.append(sum(row.counts.bytes_read for row in rows.values()) - before)
    assert 0 < counted[0] == counted[1]
