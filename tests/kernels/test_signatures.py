"""Promise: a kernel of the CPU has one signature, and a first call compiles few kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from speeds import slow_except

sys.path.insert(0, str(Path(__file__).parents[2] / "ci" / "benchmarks"))
from measure_first_calls import PROGRAMS

ROOT = Path(__file__).parents[2]
UNIQUE, ATTENTION, _, EVERY_OP, TRAINING = PROGRAMS.values()
OTHERS = {"tritonrec.embedding.numba_select.unpinned": 2}  # metadata in uint8 and in int32
COUNTED = """
import json, sys
from numba.core import event
from numba.core.dispatcher import Dispatcher
sys.path.insert(0, "ci/compile")
names = []
class Listener(event.Listener):
    def on_start(self, found):
        function = found.data["dispatcher"].py_func
        names.append(f"{function.__module__}.{function.__name__}")
    def on_end(self, _): pass
event.register("numba:compile", Listener())
import torch
from tritonrec import ops
exec(sys.argv[1])
kernels = {
    f"{name}.{kernel.__name__}": [str(types) for types in kernel.signatures]
    for name, module in sorted(sys.modules.items()) if name.startswith("tritonrec.")
    for kernel in vars(module).values() if isinstance(kernel, Dispatcher) and kernel.__module__ == name
}
compiled = [name for name in names if name.startswith("tritonrec.")]
print(json.dumps({"compiled": compiled, "kernels": kernels}))
"""
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


def counted(program, **environment):
    """What a fresh process compiles, and the kernels of the modules that it has loaded with their types."""
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, program], capture_output=True, text=True, timeout=280, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("program", slow_except([UNIQUE], COMPILED))
def test_a_first_call_compiles_no_more_than_it_needs(program, tmp_path):
    found = counted(program, NUMBA_CACHE_DIR=str(tmp_path))["compiled"]
    assert sorted(found) == [f"tritonrec.kernels.{name}" for name in COMPILED[program]]


@pytest.mark.parametrize("program", slow_except([UNIQUE], [UNIQUE, EVERY_OP, TRAINING]))
def test_a_kernel_has_one_signature(program):
    kernels = {name: types for name, types in counted(program)["kernels"].items() if types}
    assert len(kernels) > (1 if program == UNIQUE else 50)
    several = {name: types for name, types in kernels.items() if len(types) > OTHERS.get(name, 1)}
    listing = "\n".join("\n    ".join([name, *types]) for name, types in several.items())
    assert not several, f"compiled once for each combination of types, so give the kernel one:\n{listing}"
