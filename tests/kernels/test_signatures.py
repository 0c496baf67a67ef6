"""Promise: a kernel of the CPU has one signature, and a first call compiles few kernels."""

import functools
import re

import ahead
import pytest
import torch
from ahead import PROGRAMS
from speeds import slow_except

from tritonrec import ops
from tritonrec.kernels.hstu_attention import numba_attention
from tritonrec.kernels.linear import numba_linear
from tritonrec.kernels.relative_aggregate import numba_relative
from tritonrec.kernels.softmax_attention import numba_softmax_attention

UNIQUE, ATTENTION, _, EVERY_OP, TRAINING = PROGRAMS.values()
OTHERS = {
    "tritonrec.data.numba_ranking.count_above": 2,  # scores in float32, ranks in int64
    "tritonrec.embedding.numba_select.unpinned": 2,  # metadata in uint8 and in int32
    "tritonrec.kernels.hash_table.numba_hash_table.hash_items": 2,  # rows in int32 and in int64
}
LITERAL = re.compile(r"Literal\[int\]\(\d+\)")
COMPILED = {
    UNIQUE: ["unique.numba_unique._count_keys", "unique.numba_unique._read_counts"],
    ATTENTION: [
        "hstu_attention.numba_attention.add_bias_gradient_of_row",
        "hstu_attention.numba_attention.add_bias_to_row",
        "hstu_attention.numba_attention.backward",
        "hstu_attention.numba_attention.forward",
        "hstu_attention.numba_bias.add_bias",
        "hstu_attention.numba_bias.add_bias_gradient",
        "hstu_attention.numba_mask.find_runs",
        "hstu_attention.numba_mask.find_spans",
        "numba_matmul._add_chains",
        "numba_matmul._add_narrow",
        "numba_matmul._add_wide",
        "numba_matmul.add_products",
        "numba_sequences.transpose",
    ],
}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """What a program compiles where nothing is compiled yet, found once."""
    return functools.cache(lambda program: ahead.counted(program, cache=tmp_path_factory.mktemp("cache")))


@pytest.mark.if_changed
@pytest.mark.parametrize("program", slow_except([UNIQUE], COMPILED))
def test_a_first_call_compiles_no_more_than_it_needs(program, first):
    assert sorted(first(program)["compiled"]) == [f"tritonrec.kernels.{name}" for name in COMPILED[program]]


@pytest.mark.parametrize("program", slow_except([UNIQUE], [UNIQUE, EVERY_OP, TRAINING]))
def test_a_kernel_has_one_signature(program, first):
    # a helper that is given a number of the source is a part of its caller's code
    found = (first if program in COMPILED else ahead.counted)(program)["kernels"].items()
    kernels = {name: {LITERAL.sub("int", each) for each in types} for name, types in found if types}
    assert len(kernels) > (1 if program == UNIQUE else 50)
    several = {name: types for name, types in kernels.items() if len(types) > OTHERS.get(name, 1)}
    listing = "\n".join("\n    ".join([name, *types]) for name, types in several.items())
    assert not several, f"compiled once for each combination of types, so give the kernel one:\n{listing}"


def results_with_offsets(dtype):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(5, 2, 4, generator=generator)
    table, offsets, counts = (
        torch.randn(2, 6, generator=generator),
        torch.tensor([0, 2, 5]),
        torch.tensor([1, 0]),
    )
    mask = ops.HSTUMask(num_targets=counts.to(dtype))
    sums, flat_rows = torch.zeros(8, 8, dtype=torch.int64), rows.view(5, 8)
    offsets = offsets.to(dtype)
    ops.linear_weight_grad(sums, flat_rows, flat_rows, offsets, impl="cpu")
    return [
        ops.hstu_attention(rows, rows, rows, offsets, 5, alpha=0.5, scaling_seqlen=5, mask=mask, impl="cpu"),
        ops.softmax_attention(rows, rows, rows, offsets, 5, impl="cpu"),
        ops.relative_aggregate(rows, table, offsets, 5, impl="cpu"),
        sums,
    ]


def test_integers_of_another_width_compile_nothing_again_and_change_no_bit():
    kernels = [
        numba_attention.forward, numba_softmax_attention.forward, numba_relative.forward,
        numba_linear.add_weight_gradients,
    ]  # fmt: skip
    wide = results_with_offsets(torch.int64)
    before = [{*kernel.signatures} for kernel in kernels]
    narrow = results_with_offsets(torch.int32)
    assert all(map(torch.equal, wide, narrow))
    assert [{*kernel.signatures} for kernel in kernels] == before and all(before)
