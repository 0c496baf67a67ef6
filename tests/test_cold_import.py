"""Importing the library is light: nothing that compiles, draws or reads tables, and no driver."""

from __future__ import annotations

import os
import subprocess
import sys

HEAVY = ("triton", "numba", "matplotlib", "pandas", "perfetto", "torch._inductor")


def loaded_by(statements: list[str], candidates: tuple[str, ...]) -> list[list[str]]:
    """Which of `candidates` a fresh process has imported after each of the statements.

    The process sees no accelerator and has no leave to interpret Triton kernels.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | hidden
    report = f"print(*(name for name in {candidates!r} if name in sys.modules))"
    program = "\n".join(["import sys", *(f"{statement}; {report}" for statement in statements)])
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return [line.split() for line in result.stdout.splitlines()]


def test_importing_a_package_loads_nothing_heavy():
    light = ["tritonrec", "tritonrec.ops"]
    # Clustering is a numba function of its own, so numba may be loaded; compiling waits for the first call.
    packages = [
        f"tritonrec.{name}" for name in ("nn", "trace", "checkpoint", "embedding", "data", "pipeline")
    ]
    modules = [*light, *packages, "matplotlib.pyplot, numba"]
    *found, heavy = loaded_by([f"import {module}" for module in modules], HEAVY)
    for module, loaded in zip(modules, found, strict=False):
        assert set(loaded) <= (set() if module in light else {"numba"}), module
    assert heavy == ["numba", "matplotlib"], "a heavy import is not seen"


def test_a_first_call_loads_no_compiler_of_torch():
    """torch._dynamo takes longer to import than all else of a first call."""
    first = "import torch; from tritonrec import ops; _ = ops.unique(torch.tensor([5, 3, 5]))"
    dynamo = ("torch._dynamo",)
    assert loaded_by([first, "torch.compile(torch.sin)"], dynamo) == [[], [*dynamo]], (
        "or a heavy import is not seen"
    )


def test_the_command_line_starts_without_torch():
    assert loaded_by(["import tritonrec.harness.cli"], ("torch", *HEAVY)) == [[]]


def test_a_training_step_loads_no_tool():
    """What stands around the core is imported by whoever uses it."""
    step = (
        "from tritonrec.harness.job import Job; from tritonrec.distributed import Communicators; "
        "from tritonrec.pipeline import Trainer; job = Job('zipf:users=20,items=20'); "
        "_ = Trainer(*job.build('adam'), Communicators.local()).step(job.loader().batch(0))"
    )
    tools = tuple(f"tritonrec.{name}" for name in ("resilience", "serving", "slipstream", "torchrec"))
    harness = tuple(
        f"tritonrec.harness.{name}" for name in ("emulator", "fuzz", "lab", "simulator", "verify")
    )
    assert loaded_by([step, f"import {tools[2]}"], tools + harness) == [[], [tools[2]]]
