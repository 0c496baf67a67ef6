"""Importing the library is light: nothing that compiles, draws or reads tables, and no driver."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAVY = ("triton", "numba", "matplotlib", "pandas", "perfetto", "torch._inductor")


def loaded_by(statement: str, candidates: tuple[str, ...]) -> list[str]:
    """Which of `candidates` a fresh process has imported after `statement`.

    The process sees no accelerator and has no leave to interpret Triton kernels.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | hidden
    report = f"import sys; {statement}; print(*(name for name in {candidates!r} if name in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", report], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.parametrize("module", ["tritonrec", "tritonrec.ops"])
def test_importing_the_ops_loads_nothing_heavy(module):
    assert loaded_by(f"import {module}", HEAVY) == []


@pytest.mark.parametrize("module", ["nn", "data", "embedding", "checkpoint", "trace", "pipeline"])
def test_importing_a_package_loads_nothing_heavy(module):
    # Clustering is a numba function of its own, so numba may be loaded; compiling waits for the first call.
    assert set(loaded_by(f"import tritonrec.{module}", HEAVY)) <= {"numba"}


def test_the_command_line_starts_without_torch():
    assert loaded_by("import tritonrec.harness.cli", ("torch", *HEAVY)) == []


def test_a_heavy_import_would_be_seen():
    assert loaded_by("import matplotlib.pyplot, numba", HEAVY) == ["numba", "matplotlib"]
