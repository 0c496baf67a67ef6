"""Keys chosen by somebody who knows the hash cost no more than others, and no result tells where one lay."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hash_tables import empty, keys_of
from impls import GPU, TRITON
from murmur_inverse import key_with_hash

from tritonrec import ops
from tritonrec.kernels import murmur
from tritonrec.kernels.hash_table import op
from tritonrec.kernels.intersect import numba_intersect
from tritonrec.kernels.unique import numba_unique

COUNT = 1200
SECRETS = [1 << 62 | 1, (1 << 63) - 1, 0x5DEECE66D1B2A3C5]
RANDOM = torch.randint(-(2**63), 2**63 - 1, (COUNT,), generator=torch.Generator().manual_seed(8))
# one home in tables that go by the highest bits of the hash, or by the lowest
HIGH = keys_of([key_with_hash(0x12345678 << 32 | i) for i in range(COUNT)])
LOW = keys_of([key_with_hash(i << 32 | 0x12345678) for i in range(COUNT)])


def hashes(keys):
    return [murmur.mix64(key ^ murmur.SECRET) for key in keys.tolist()]


def lines_of_unique(keys):
    """Cache lines that a search for each key visits in the table of `unique`, on average."""
    table = numba_unique._empty_table(COUNT)
    unsigned, inverse, order = (
        keys.numpy().view(np.uint64),
        np.empty(COUNT, np.int64),
        np.empty(COUNT, np.uint64),
    )
    numba_unique._count_keys(unsigned, inverse, order, table, 0, 0, np.uint64(murmur.SECRET))
    lines = len(table) // numba_unique.LINE
    words = table.reshape(lines, numba_unique.LINE)
    line_of = {int(key): line for line in range(lines) for key in words[line, : numba_unique.SLOTS]}
    homes = [((hashed >> 32) * lines) >> 32 for hashed in hashes(keys)]
    return 1 + sum((line_of[int(k)] - home) % lines for k, home in zip(unsigned, homes, strict=True)) / COUNT


def slots_of_intersect(keys):
    """Slots that a search for each key visits in the table of `intersect`, on average."""
    words = numba_intersect.fill(keys.numpy().view(np.uint64), np.uint64(murmur.SECRET)).reshape(-1, 2)
    slot_of = {int(position) - 1: slot for slot, (_, position) in enumerate(words) if position}
    shift = 65 - len(words).bit_length()
    return 1 + sum((slot_of[i] - (h >> shift)) % len(words) for i, h in enumerate(hashes(keys))) / len(keys)


def slots_of_scratch(keys):
    """Slots that a search for each key visits in the scratch table of Triton's kernels, on average."""
    from tritonrec.kernels import triton_scratch

    holders, slots = triton_scratch.build(keys.cuda() if GPU else keys)
    homes = [hashed % len(holders) for hashed in hashes(keys)]
    return 1 + sum((s - h) % len(holders) for s, h in zip(slots.tolist(), homes, strict=True)) / len(keys)


@pytest.mark.parametrize(("count", "hostile"), [
    (lines_of_unique, HIGH), (slots_of_intersect, HIGH),
    pytest.param(slots_of_scratch, LOW[:120], marks=TRITON.marks),
])  # fmt: skip
def test_keys_of_one_home_are_spread(count, hostile, monkeypatch):
    assert count(hostile) > len(hostile) / 9, "without a secret, most of the keys before it"
    for secret in SECRETS:
        monkeypatch.setattr(murmur, "SECRET", secret)
        assert count(hostile) < 1.15 * count(RANDOM[: len(hostile)]) < 2.5


@pytest.mark.parametrize("impl", ["cpu", TRITON])
def test_no_secret_shows_in_a_result(impl, monkeypatch):
    size = COUNT if impl == "cpu" or GPU else 60
    keys = torch.cat([HIGH[:size], RANDOM[:size], LOW[:size], HIGH[: size // 2].flip(0)])
    left, right = keys[: 2 * size], torch.cat([keys[size // 2 : size], keys[2 * size : 3 * size]])
    place = (lambda t: t.cuda()) if impl == "triton" and GPU else (lambda t: t)
    expected = [*ops.unique(keys, impl="reference"), *ops.intersect(left, right, impl="reference")]
    for secret in [0, *SECRETS]:
        monkeypatch.setattr(murmur, "SECRET", secret)
        found = [*ops.unique(place(keys), impl=impl), *ops.intersect(place(left), place(right), impl=impl)]
        assert all(torch.equal(got.cpu(), want) for got, want in zip(found, expected, strict=True))


def test_owners_are_the_same_in_every_process(monkeypatch):
    owners = [ops.owner_of(RANDOM, 7), *ops.bucketize(RANDOM, 7)]
    monkeypatch.setattr(murmur, "SECRET", SECRETS[2])
    assert all(map(torch.equal, owners, [ops.owner_of(RANDOM, 7), *ops.bucketize(RANDOM, 7)]))


def test_a_table_of_ones_own_takes_keys_with_a_secret():
    """What docs/ops.md advises where somebody else chooses the ids: the same rows, and walks of one group."""
    hostile = keys_of([key_with_hash((i & 255) << 24 | (i >> 8) << 56 | 1 << 32 | 5) for i in range(COUNT)])
    visits = {}
    for secret in (0, SECRETS[2]):
        table = empty(2048)
        rows, _ = ops.hash_insert(*table, hostile ^ secret, 0)
        assert torch.equal(rows, torch.arange(COUNT))
        assert torch.equal(ops.hash_find(*table, hostile.flip(0) ^ secret), rows.flip(0))
        slot_of = {int(key): slot for slot, key in enumerate(table[0]) if table[1][slot] >= 0}
        walks = ([slot in group for group in op.probe(key, 2048)] for key, slot in slot_of.items())
        visits[secret] = sum(walk.index(True) + 1 for walk in walks) / COUNT
    assert visits[0] > 70 and visits[SECRETS[2]] < 1.5


def test_each_process_draws_its_own():
    code = "from tritonrec.kernels import murmur; print(murmur.SECRET)"
    drawn = {subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(2)}
    assert len(drawn) == 2


def test_secrets_differ_and_are_odd_numbers_of_63_bits():
    drawn = {murmur.draw_secret() for _ in range(50)}
    assert len(drawn) == 50 and all(secret >> 62 == 1 and secret & 1 for secret in drawn)
