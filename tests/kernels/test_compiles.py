"""The hash table's kernels compile for an absent accelerator to the loads and atomics that they count on.

Registers, stack, shared memory, matrix instructions, atomics and TF32 of every kernel are those of
`ci/compile/compile_matrix.py`.
"""

import os
import subprocess
import sys

import pytest

# In a process of its own: there Triton compiles, where the other tests let it interpret.
HASH_TABLE = r"""
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tritonrec.kernels.hash_table import triton_hash_table

types = {"slot_rows_ptr": "*i32", "wanted_ptr": "*i1", "num_keys": "i32", "num_groups": "i32"}
for name, erase in (("_find_kernel", False), ("_find_kernel", True), ("_claim_kernel", False)):
    kernel = getattr(triton_hash_table, name)
    constants = {"ERASE": erase, "BLOCK": 128}
    constants = {one: value for one, value in constants.items() if one in kernel.arg_names}
    signature = {one: "constexpr" if one in constants else types.get(one, "*i64") for one in kernel.arg_names}
    pointers = [n for n, one in enumerate(kernel.arg_names) if one.endswith("_ptr")]
    aligned = {(n,): [["tt.divisibility", 16]] for n in pointers}  # as torch allocates
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert len(compiled.asm["cubin"]) > 0
    # a group of eight slots in vectors of 16 bytes by neighbouring threads, not slot by slot
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
    assert ("ld.global.v2.b64" in compiled.asm["ptx"]) == (name == "_find_kernel")
    atomics = set(re.findall(r"\b(?:atom|red)\.\S+", compiled.asm["ptx"]))
    assert atomics == ({"atom.global.relaxed.gpu.cas.b32"} if name == "_claim_kernel" else set()), atomics
    print(name, erase)
"""


@pytest.mark.slow
def test_hash_table_compiles_for_sm_90(tmp_path):
    """Groups are read whole; finding and erasing take no atomics; a claim compares and swaps a row once."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", HASH_TABLE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 4
