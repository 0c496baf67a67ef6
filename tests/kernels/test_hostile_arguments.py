"""No argument makes an op crash, hang or write elsewhere, by whichever door it comes."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_cases import grouped
from hash_tables import EXTREMES, keys_of
from impls import IMPLS, on

from tritonrec import ops
from tritonrec.kernels.op import OPS

ROOT = Path(__file__).resolve().parent.parent.parent


def whole(*values):
    return torch.tensor(values)


@pytest.mark.slow
def test_a_short_attack_on_every_op_finds_nothing():
    """`python ci/attack/ops.py` with more calls, and each op in a process of its own, is the long one."""
    command = [sys.executable, str(ROOT / "ci" / "attack" / "ops.py"), "--calls", "4", "--seed", "5"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, "--together"], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert len(done.stdout.splitlines()) > len(OPS) + 10


# Calls that once wrote or read out of bounds: registered ops had no checks of their own.
TOKENS = torch.randn(4, 2, 3)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_table_with_absurd_contents_gives_an_answer_in_bounded_time(impl):
    """Keys there twice, in groups that no search visits, rows below -2 and beyond all rows, no empty slot."""
    draw = random.Random(4)
    some = [*EXTREMES, 3, 4, 5, 6]
    for number in range(4 if impl == "triton" else 100):
        size = draw.choice([8, 16, 32])
        # a claim on an accelerator swaps nothing by a row of -3, which no table has
        edges = [-2, -1, 0, 2**31 - 1, -(2**31)] if number % 2 else [-2, 0, 2**31 - 1]
        keys, rows = draw.choices(some, k=size), draw.choices(edges, k=size)
        asked = keys_of(draw.sample(some, draw.randint(0, len(some))), impl)

        def table(keys=keys, rows=rows):
            return keys_of(keys, impl), on(impl, torch.tensor(rows, dtype=torch.int32))

        found = ops.hash_find(*table(), asked, impl=impl)
        owned = {(key, row) for key, row in zip(keys, rows, strict=True) if row >= 0}
        assert all(p in owned or p[1] == -1 for p in zip(asked.tolist(), found.tolist(), strict=True))
        assert torch.equal(ops.hash_erase(*table(), asked, impl=impl), found)
        wide_rows = ops.hash_grow(*table(), impl=impl)[1]
        assert sorted(wide_rows[wide_rows >= 0].tolist()) == sorted(row for row in rows if row >= 0)
        slots = table()
        try:
            given, inserted = ops.hash_insert(*slots, asked, 7, impl=impl)
        except ops.HashTableFullError:
            assert all(map(torch.equal, slots, table()))
            continue
        assert given[inserted].tolist() == list(range(7, 7 + int(inserted.sum())))
        assert bool((given >= 0).all()) and not bool((inserted & (found >= 0)).any())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("number", [2**31, 2**62, 2**63 - 1])
def test_limits_beyond_every_sequence_mean_no_limit(impl, number):
    q = on(impl, torch.randn(9, 1, 4, generator=torch.Generator().manual_seed(1)))
    offsets, contexts, targets = (on(impl, whole(*values)) for values in ((0, 9), (3,), (2,)))

    def attend(**limits):
        return ops.hstu_attention(
            q, q, q, offsets, 9, alpha=0.5, scaling_seqlen=3, impl=impl,
            mask=ops.HSTUMask(num_contexts=contexts, num_targets=targets, **limits),
        )  # fmt: skip

    assert torch.equal(attend(max_attn_len=number), attend())
    for name in ("min_full_attn_seq_len", "attn_prefix_len"):
        assert torch.equal(attend(max_attn_len=1, **{name: number}), attend(max_attn_len=1, **{name: 9}))
    assert torch.equal(attend(target_group_size=number), attend(target_group_size=9))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seq_len": 4.0}, "max_seq_len must be a whole number, got 4.0"),
        ({"max_attn_len": None}, "max_attn_len must be a whole number, got None"),
        ({"contextual_seq_len": 2, "seq_offsets": [0, 4]}, "seq_offsets must be a torch.Tensor"),
    ],
)
def test_numbers_of_attention_are_checked_by_name(changes, message):
    given = {
        "q": TOKENS,
        "k": TOKENS,
        "v": TOKENS,
        "seq_offsets": whole(0, 4),
        "max_seq_len": 4,
        "alpha": 0.5,
    }
    with pytest.raises(TypeError, match=message):
        ops.hstu_attention(**grouped(**{**given, **changes}, scaling_seqlen=3))
