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
from tritonrec.kernels.hstu_attention.triton_bias import Bias
from tritonrec.kernels.hstu_attention.triton_mask import Rules
from tritonrec.kernels.hstu_attention.triton_tiles import Layout, order_kernel

dtype, everything = getattr(torch, sys.argv[1]), sys.argv[2] == "everything"
element = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
ids, table = "*i64", "*fp32"
described = {  # None: not asked for
    "layout": Layout(ids, ids, ids, ids) if everything else Layout(ids, None, None, None),
    "rules": Rules(*("i32",) * 5) if everything else Rules(None, None, "i32", "i32", None),
    "bias": Bias(*(
        kind if everything or not kind.startswith("*") else None
        for kind in (table, "i32", "i32", "i32", table, "i32", ids, ids, "fp32")
    )),
    "scales_ptr": table if everything else None,
}
names = {"tiles_ptr": ids, "count_ptr": ids, "offsets_ptr": ids, "rows_ptr": ids}
names |= {"dpos_ptr": table, "parts_ptr": table, "dts_ptr": table, "alpha": "fp32", "scale": "fp32"}

def compiled(kernel, config, atomic=False):
    signature, constants = {}, {"WIDEN": False, "ATOMIC": atomic, **config}
    constants = {name: constants[name] for name in kernel.arg_names if name.isupper()}
    for n, name in enumerate(kernel.arg_names):
        kind = described.get(name, "")
        if name in constants or kind is None:
            signature[name], constants[name] = "constexpr", constants.get(name)
        elif isinstance(kind, tuple):
            signature[name] = type(kind)(*("constexpr" if part is None else part for part in kind))
            constants |= {(n, m): None for m, part in enumerate(kind) if part is None}
        elif name.endswith("_strides"):
            signature[name] = ("i32", "i32")
        elif name == "dq_ptr" and atomic:
            signature[name] = table
        else:
            signature[name] = kind or names.get(name) or ("*" + element if name.endswith("_ptr") else "i32")
    options = {name: value for name, value in config.items() if not name.isupper()}
    source = ASTSource(kernel, signature, constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert len(made.asm["cubin"]) > 0
    assert "tf32" not in made.asm["ptx"]
    assert bool(re.search(r"\b(atom|red)\.", made.asm["ptx"])) == atomic
    print(kernel.__name__, atomic, made.metadata.shared)
    return made

for dims in ((50, 64), (128, 128)):
    plain, heavy = (triton_attention.configuration(*dims, dtype, heavy) for heavy in (everything, True))
    tables = triton_attention.table_configuration(*dims, dtype, 64)
    kernels = [
        (triton_attention.forward_kernel, plain), (triton_attention.rows_kernel, heavy),
        (triton_attention.columns_kernel, heavy), (triton_attention.columns_kernel, heavy, True),
    ]
    if everything:
        kernels += [(triton_attention.positions_kernel, tables), (triton_attention.times_kernel, tables)]
    for kernel, *how in kernels:
        made = compiled(kernel, *how)
        assert made.metadata.shared <= 99 * 1024, (kernel, dims, made.metadata.shared)
        assert ("wgmma" in made.asm["ptx"]) == (dtype != torch.float32), (kernel, dims)
compiled(order_kernel, {"BLOCK_M": 64, "BLOCK": 512})
if everything:
    compiled(triton_attention.parts_kernel, {"BLOCK_M": 64, "ENTRIES": 64})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "options", "kernels"),
    [("float32", "none", 9), ("bfloat16", "none", 9), ("bfloat16", "everything", 14)],
)
def test_attention_compiles_for_sm_90(dtype, options, kernels, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, dtype, options], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == kernels


RELATIVE = r"""
import re, sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tritonrec.kernels.relative_aggregate import triton_relative

times = sys.argv[1] == "times"
for dim in (32, 50, 128):
    config = triton_relative.configuration(torch.empty(1, 1, dim))
    config |= {"ENTRIES": triton_relative.ENTRIES, "HAS_TIMES": times}
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
    constants = {"ASSIGN": assign, "ERASE": erase, "BLOCK": 128}
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
    print(name, assign, erase)
"""


@pytest.mark.slow
def test_hash_table_compiles_for_sm_90(tmp_path):
    """Groups are read whole; finding and erasing take no atomics; a claim compares and swaps a row once."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", HASH_TABLE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 4


RELAXED = r"""
import re, sys, launches, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for launch in launches.launches("sm_90", sys.argv[1]):
    attributes = {path: [["tt.divisibility", 16]] for path in launch.aligned}
    source = ASTSource(launch.kernel, launch.signature, launch.constants, attributes)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options).asm["ptx"]
    print(launch.name, *sorted(set(re.findall(r"\b(?:atom|red)\.\S+|\b(?:fence|membar)\.\S+", ptx))))
"""


@pytest.mark.slow
@pytest.mark.parametrize("only", ["unique padded", "intersect", "hash"])
def test_atomics_order_nothing_but_themselves(only, tmp_path):
    """An ordered one waits for all memory and empties the first-level cache."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f".{os.pathsep}ci/compile"}
    done = subprocess.run(
        [sys.executable, "-c", RELAXED, only], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [name for line in done.stdout.splitlines() for name in line.split()[1:]]
    assert found and all(".relaxed." in name for name in found), done.stdout
