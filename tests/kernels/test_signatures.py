"""Promise: a kernel of the CPU has one signature, and a first call compiles few kernels."""

import sys
from pathlib import Path

import pytest
from speeds import slow_except

sys.path.insert(0, str(Path(__file__).parents[2] / "ci" / "compile"))
import ahead
from ahead import PROGRAMS

UNIQUE, ATTENTION, _, EVERY_OP, TRAINING = PROGRAMS.values()
OTHERS = {"tritonrec.embedding.numba_select.unpinned": 2}  # metadata in uint8 and in int32
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
        "numba_matmul.add_products",
        "numba_sequences.transpose",
    ],
}


@pytest.mark.parametrize("program", slow_except([UNIQUE], COMPILED))
def test_a_first_call_compiles_no_more_than_it_needs(program, tmp_path):
    found = ahead.counted(program, cache=tmp_path)["compiled"]
    assert sorted(found) == [f"tritonrec.kernels.{name}" for name in COMPILED[program]]


@pytest.mark.parametrize("program", slow_except([UNIQUE], [UNIQUE, EVERY_OP, TRAINING]))
def test_a_kernel_has_one_signature(program):
    kernels = {name: types for name, types in ahead.counted(program)["kernels"].items() if types}
    assert len(kernels) > (1 if program == UNIQUE else 50)
    several = {name: types for name, types in kernels.items() if len(types) > OTHERS.get(name, 1)}
    listing = "\n".join("\n    ".join([name, *types]) for name, types in several.items())
    assert not several, f"compiled once for each combination of types, so give the kernel one:\n{listing}"
