"""Tables and keys of the hash table's tests."""

import torch
from impls import on
from murmur_inverse import key_with_hash

from tritonrec.kernels.hash_table.op import hash_insert
from tritonrec.kernels.murmur import mix64

EXTREMES = [-(2**63), 2**63 - 1, -1, 0, 1, -2]


def empty(num_slots, impl="cpu", leftover=0):
    """An empty table whose unused slots hold `leftover`: no key may be taken for present because of it."""
    slot_keys = torch.full((num_slots,), leftover, dtype=torch.int64)
    return on(impl, slot_keys), on(impl, torch.full((num_slots,), -1, dtype=torch.int32))


def keys_of(values, impl="cpu"):
    return on(impl, torch.tensor(values, dtype=torch.int64))


def insert_in_walk(table, keys, impl):
    """Rows 0, 1, ... for keys of one walk through an empty table, a group's eight keys at a time.

    In a single call any of them may win the nearer group; this way each group's keys are known.
    """
    for first in range(0, len(keys), 8):
        hash_insert(*table, keys_of(keys[first : first + 8], impl), first, impl=impl)


def contents(slot_keys, slot_rows):
    """The table as a dict."""
    pairs = [(k, r) for k, r in zip(slot_keys.tolist(), slot_rows.tolist(), strict=True) if r >= 0]
    assert len(dict(pairs)) == len(pairs), "a key sits in two slots"
    return dict(pairs)


def same_home(count, num_slots=4096):
    """Distinct keys that all start at one group of any table of up to `num_slots` slots."""
    return [key for key in range(-60_000, 60_000) if mix64(key) % (num_slots // 8) == 3][:count]


def in_walk(count, home=0, step=1, start=0):
    """Keys that visit the groups ``home, home + step, ...`` of any table, whatever its size."""
    return [key_with_hash(i << 40 | step << 32 | home) for i in range(start, start + count)]
