"""Triton kernels compile for an accelerator that is not here."""

import os
import subprocess
import sys

import pytest

# In a process of its own: there Triton compiles, where the other tests let it interpret.
PROGRAM = r"""
import re, sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tritonrec.kernels.hstu_attention import triton_attention

dtype, targets = getattr(torch, sys.argv[1]), sys.argv[2] == "targets"
element = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
for dim_qk, dim_v in ((50, 64), (128, 128)):
    config = triton_attention.configuration(dim_qk, dim_v, dtype)
    constants = {"HAS_TARGETS": targets, "WIDEN": False, **{k: v for k, v in config.items() if k.isupper()}}
    options = {k: v for k, v in config.items() if not k.isupper()}
    for name in ("forward_kernel", "rows_kernel", "columns_kernel"):
        kernel = getattr(triton_attention, name)
        signature = {}
        for argument in kernel.arg_names:
            if argument in ("offsets_ptr", "targets_ptr"):
                signature[argument] = "*i64"
            elif argument.endswith("_ptr"):
                signature[argument] = "*" + element
            elif argument.endswith("_strides"):
                signature[argument] = ("i32", "i32", "i32")
            elif argument in ("alpha", "scale"):
                signature[argument] = "fp32"
            else:
                signature[argument] = "constexpr" if argument in constants else "i32"
        source = ASTSource(kernel, signature, constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert len(compiled.asm["cubin"]) > 0
        assert compiled.metadata.shared <= 99 * 1024, (name, dim_qk, dim_v, compiled.metadata.shared)
        assert "tf32" not in compiled.asm["ptx"], name
        assert not re.search(r"\b(atom|red)\.", compiled.asm["ptx"]), name
        assert ("wgmma" in compiled.asm["ptx"]) == (dtype != torch.float32), name
        print(name, dim_qk, dim_v, compiled.metadata.shared)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "targets"), [("float32", "none"), ("bfloat16", "targets")])
def test_attention_compiles_for_sm_90(dtype, targets, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, dtype, targets], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 6


RELATIVE = r"""
import re, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tritonrec.kernels.relative_aggregate import triton_relative

times = sys.argv[1] == "times"
for dim in (32, 50, 128):
    config = triton_relative.configuration(dim) | {"ENTRIES": triton_relative.ENTRIES, "HAS_TIMES": times}
    options = {k: v for k, v in config.items() if not k.isupper()}
    for name in ("forward_kernel", "values_kernel", "table_kernel"):
        kernel = getattr(triton_relative, name)
        constants = {k: v for k, v in config.items() if k in kernel.arg_names and k.isupper()}
        signature = {}
        for argument in kernel.arg_names:
            if argument in ("offsets_ptr", "times_ptr"):
                signature[argument] = "*i64"
            elif argument.endswith("_ptr"):
                signature[argument] = "*fp32"
            elif argument.endswith("_strides"):
                signature[argument] = ("i32", "i32", "i32")
            else:
                signature[argument] = "constexpr" if argument in constants else "i32"
        source = ASTSource(kernel, signature, constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert len(compiled.asm["cubin"]) > 0
        assert compiled.metadata.shared <= 99 * 1024, (name, dim, compiled.metadata.shared)
        assert "tf32" not in compiled.asm["ptx"], name
        assert not re.search(r"\b(atom|red)\.", compiled.asm["ptx"]), name
        print(name, dim, compiled.metadata.shared)
"""


@pytest.mark.slow
@pytest.mark.parametrize("channel", ["positions", "times"])
def test_relative_aggregate_compiles_for_sm_90(channel, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", RELATIVE, channel], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 9


HASH_TABLE = r"""
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tritonrec.kernels.hash_table import triton_hash_table

types = {"slot_rows_ptr": "*i32", "wanted_ptr": "*i1", "num_keys": "i32", "num_groups": "i32"}
for name, assign, erase in (
    ("_find_kernel", False, False),
    ("_find_kernel", True, False),
    ("_find_kernel", False, True),
    ("_claim_kernel", False, False),
):
    kernel = getattr(triton_hash_table, name)
    constants = {"ASSIGN": assign, "ERASE": erase, "BLOCK": triton_hash_table.BLOCK}
    constants = {one: value for one, value in constants.items() if one in kernel.arg_names}
    signature = {one: "constexpr" if one in constants else types.get(one, "*i64") for one in kernel.arg_names}
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    assert len(compiled.asm["cubin"]) > 0
    atomics = set(re.findall(r"\b(?:atom|red)\.\S+", compiled.asm["ptx"]))
    assert atomics == ({"atom.global.relaxed.gpu.cas.b32"} if name == "_claim_kernel" else set()), atomics
    print(name, assign, erase)
"""


@pytest.mark.slow
def test_hash_table_compiles_for_sm_90(tmp_path):
    """Finding, assigning and erasing take no atomics; a claim is one compare-and-swap of a row."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", HASH_TABLE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 4
