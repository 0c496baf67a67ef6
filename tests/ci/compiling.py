"""Triton compiles in a process of its own: in the others it interprets."""

import os
import subprocess
import sys
from pathlib import Path

import intervals
import triton_ir

ROOT = Path(__file__).resolve().parents[2]
COMPILE = ROOT / "ci" / "compile"

__all__ = ["compiled", "intervals", "triton_ir"]


def compiled(*command: object) -> str:
    """What a Python program with these arguments prints; it can import the modules of ci/compile."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT}:{COMPILE}"
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout
