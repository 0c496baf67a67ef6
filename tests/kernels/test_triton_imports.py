"""Block sizes are constants: nothing is compiled, launched or timed to choose them."""

import os
import subprocess
import sys

import pytest

IMPORTS = """
import subprocess, sys, time
import triton, triton.compiler, triton.runtime.jit, triton.testing

def forbidden(*args, **kwargs):
    raise AssertionError("compiled, launched or timed at import")

triton.compile = triton.compiler.compile = forbidden
triton.runtime.jit.JITFunction.run = forbidden
triton.testing.do_bench = forbidden
triton.autotune = forbidden
import importlib, pkgutil
import tritonrec.kernels
names = [m.name for m in pkgutil.walk_packages(tritonrec.kernels.__path__, "tritonrec.kernels.")]
names = [name for name in names if name.split(".")[-1].startswith("triton_")]
for name in names:
    importlib.import_module(name)
from triton.runtime.autotuner import Autotuner, Heuristics
for name in names:
    for value in vars(sys.modules[name]).values():
        assert not isinstance(value, (Autotuner, Heuristics)), name
print(len(names))
"""


@pytest.mark.slow
def test_nothing_is_compiled_or_timed_at_import():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", IMPORTS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 12
