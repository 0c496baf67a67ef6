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
from test_arguments import whole

from tritonrec import ops
from tritonrec.kernels.hstu_attention.call import Call
from tritonrec.kernels.op import OPS

ROOT = Path(__file__).resolve().parent.parent.parent
registered = torch.ops.tritonrec


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
NUMBERS = 1e-8, 0.9, 0.9, 0.0, 1  # eps, betas, weight decay, step
WILD = {
    "segment_sum": lambda door: door.segment_sum(
        torch.ones(1, 64), torch.zeros(10**7, dtype=torch.int64), 1, "window", 36, "x", None, None, "auto"
    ),
    "segment_sum_into": lambda door: door.segment_sum_into(
        torch.zeros(2, 3), torch.ones(2, 10**6), whole(0, 1), 2, "window", 36, "x", None, None, None, "auto"
    ),
    "sparse_sgd": lambda door: door.sparse_sgd(
        torch.zeros(4, 3), torch.arange(4), torch.ones(4, 300_000), 0.1, *NUMBERS, None, "auto"
    ),
    "sparse_adam": lambda door: door.sparse_adam(
        torch.zeros(4, 3), torch.zeros(4, 2), torch.zeros(4, 3), torch.arange(4), torch.ones(4, 3), 0.1,
        *NUMBERS, None, "auto",
    ),
    "scatter_rows": lambda door: door.scatter_rows(
        torch.zeros(4, 3), torch.arange(4), torch.ones(4, 300_000), None, None, "auto"
    ),
    "hash_find": lambda door: door.hash_find(
        torch.zeros(8, dtype=torch.int64), torch.zeros(7, dtype=torch.int32), whole(4), None, "auto"
    ),
    "random_indices": lambda door: door.random_indices(
        1, 2, 3, torch.arange(9), torch.arange(4), 5, 9, "auto"
    ),
    "silu_backward": lambda door: door.silu_backward(torch.ones(2), torch.ones(10**7), "auto"),
    "linear": lambda door: door.linear(torch.ones(2, 10**6), torch.ones(3, 4), None, None, "auto"),
    "linear_weight_grad": lambda door: door.linear_weight_grad(
        torch.zeros(2, 3, dtype=torch.int64), torch.ones(4, 2), torch.ones(1, 3), whole(0, 1), 36, "x", None,
        "", "auto",
    ),
    "norm_mul_dropout_backward": lambda door: door.norm_mul_dropout_backward(
        torch.ones(4, 3), torch.ones(4, 3), None, torch.ones(3), torch.ones(3), 0.0, 1, None, None,
        torch.ones(1), torch.ones(1), "auto",
    ),
    "norm_mul_dropout_backward of a gradient of other rows": lambda door: door.norm_mul_dropout_backward(
        torch.ones(3, 3), torch.ones(4, 3), None, torch.ones(3), torch.ones(3), 0.0, 1, None, None,
        torch.ones(4), torch.ones(4), "auto",
    ),
    "relative_aggregate_backward": lambda door: door.relative_aggregate_backward(
        TOKENS, TOKENS, torch.ones(2, 5), whole(0, 10**8), 10**8, None, "auto"
    ),
    "hstu_attention_backward": lambda door: door.hstu_attention_backward(
        TOKENS, TOKENS, TOKENS, TOKENS, *Call(whole(0, 10**9), 10**9, 0.5, 3), "auto"
    ),
    "sampled_softmax_backward": lambda door: door.sampled_softmax_backward(
        torch.ones(2), torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 10**6, 3).expand(2, -1, 3),
        torch.ones(1, 1, dtype=torch.bool), 1.0, None, "auto",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WILD)
def test_a_registered_op_checks_its_arguments(name):
    with torch.no_grad(), pytest.raises(ValueError, match=r"must|equally many|but"):
        WILD[name](registered)


def test_a_registered_op_names_a_sparse_tensor_and_one_on_another_device():
    source, rows = torch.ones(3, 2), whole(1, 0)
    with pytest.raises(ValueError, match=r"^source is torch.sparse_coo: give source.to_dense"):
        registered.gather_rows(source.to_sparse(), rows, None, "cpu")
    with pytest.raises(ValueError, match=r"^source is on cpu, rows on meta: move one of them"):
        registered.gather_rows(source, rows.to("meta"), None, "cpu")
    with pytest.raises(ValueError, match=r"^sample_ids is on cpu, positions on meta"):
        registered.random_indices(1, 2, 3, rows, rows.to("meta"), 5, 9, "auto")
    with pytest.raises(TypeError, match=r"^rows must be a torch.Tensor, got None$"):
        ops.gather_rows(source, None)


def test_random_indices_of_two_devices_are_refused():
    with pytest.raises(ValueError, match=r"^sample_ids is on cpu, positions on meta"):
        ops.random_indices(1, 2, 3, whole(1, 2), whole(1, 2).to("meta"), 5, 9)


def test_a_negated_view_is_not_written_to():
    out = torch.zeros(4, 3)._neg_view()
    with pytest.raises(ValueError, match=r"^weight is written to and is a negated or conjugated view"):
        ops.sparse_sgd(out, whole(1), torch.ones(1, 3), 0.1)


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
        assert torch.equal(ops.hash_assign(*table(), asked, torch.zeros_like(asked), impl=impl), found)
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
    ("changes", "error", "message"),
    [
        ({"max_seq_len": -1}, ValueError, r"max_seq_len must be in \[0, 2\*\*27\], got -1"),
        ({"max_seq_len": 2**27 + 1}, ValueError, r"max_seq_len must be in \[0, 2\*\*27\]"),
        ({"max_seq_len": 4.0}, TypeError, "max_seq_len must be a whole number, got 4.0"),
        ({"max_attn_len": None}, TypeError, "max_attn_len must be a whole number, got None"),
        ({"alpha": None}, TypeError, "alpha must be a number, got None"),
        ({"contextual_seq_len": 2, "seq_offsets": [0, 4]}, TypeError, "seq_offsets must be a torch.Tensor"),
    ],
)
def test_numbers_of_attention_are_checked_by_name(changes, error, message):
    given = {
        "q": TOKENS,
        "k": TOKENS,
        "v": TOKENS,
        "seq_offsets": whole(0, 4),
        "max_seq_len": 4,
        "alpha": 0.5,
    }
    with pytest.raises(error, match=message):
        ops.hstu_attention(**grouped(**{**given, **changes}, scaling_seqlen=3))


def test_more_segments_than_memory_has_addresses_for_are_refused():
    with pytest.raises(
        ValueError, match=r"num_segments = 4611686018427387904 rows of 3 columns fit no memory"
    ):
        ops.segment_sum(torch.ones(2, 3), whole(0, 1), 2**62)
