"""Promise: programs that an emulation has assembled are those that Triton looks for on the GPU itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORK = """
import json
import torch
from tritonrec import ops

def work():
    ops.gather_rows(torch.ones(150, 8), torch.arange(150) % 7, impl="triton")
    ops.linear(torch.ones(150, 8), torch.ones(5, 8), impl="triton")
"""
EMULATED = """
from tritonrec.harness.emulator import Emulation, emulated
with emulated(Emulation("sm_90", races=False)) as session:
    work()
print(json.dumps(session.assembled))
"""
WARMED = """
from tritonrec.harness import warmup
from tritonrec.harness.job import Job
from tritonrec.harness.train.run import Run
warmup.STORAGES, warmup.loop.train = ("device",), lambda *given, **named: work()
print(json.dumps(warmup.warm_up_gpu("sm_90", [Run(Job())]).compiled))
"""
ON_A_GPU = """
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit
from tritonrec.kernels import dispatch

class Driver:  # that launches nothing
    get_current_device = get_current_stream = lambda *_: 0
    get_current_target = lambda _: GPUTarget("cuda", 90, 32)
    get_active_torch_device = lambda _: torch.device("cpu")

driver.set_active(Driver())
dispatch.emulated = 9, 0
found = {}
knobs.compilation.listener = lambda src, cache_hit, **_: found.update({src.name: cache_hit})
run = jit.JITFunction.run
jit.JITFunction.run = lambda self, *given, grid, warmup, **named: run(
    self, *given, grid=grid, warmup=True, **named
)
torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
torch.Tensor.new_empty = torch.Tensor.new_zeros
work()
print(json.dumps(found))
"""


def printed(program, cache):
    # without a variable of Triton's, as on a GPU: what is set is in the keys
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", WORK + program], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.if_changed
def test_a_launch_on_the_gpu_finds_what_was_assembled_and_nothing_else(tmp_path):
    assert printed(WARMED, tmp_path / "assembled") == 2
    assert printed(EMULATED, tmp_path / "emulated") == 0
    found = printed(ON_A_GPU, tmp_path / "assembled")
    assert len(found) == 2 and all(found.values()), found
    assert not any(printed(ON_A_GPU, tmp_path / "emulated").values())
