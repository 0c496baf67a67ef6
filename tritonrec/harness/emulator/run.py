"""Runs pytest or a script under the emulator."""

from __future__ import annotations

import os
import runpy
import sys

from ...optional import require
from .settings import Emulation, pytest_options

PLUGIN = "tritonrec.harness.emulator.plugin"


def run(command: list[str], settings: Emulation) -> int:
    """Run ``["pytest", ...]`` or ``["python", "script.py", ...]``; the exit status.

    Raises:
        ValueError: the command is another one, or pytest is not installed.
    """
    if command[:1] == ["pytest"]:
        require("pytest", "tritonrec emulate pytest")
        import pytest

        os.environ.pop("TRITON_INTERPRET", None)  # kernels are compiled
        return int(pytest.main(["-p", PLUGIN, *pytest_options(settings), *command[1:]]))
    if command[:1] == ["python"] and len(command) > 1:
        return _run_script(command[1:], settings)
    raise ValueError(
        f"got the command {' '.join(command)!r}: give `pytest ...` or `python script.py ...` behind `--`"
    )


def _run_script(arguments: list[str], settings: Emulation) -> int:
    from .counts import table
    from .driver import emulated

    os.environ.pop("TRITON_INTERPRET", None)  # kernels are compiled
    before = sys.argv
    sys.argv = arguments
    try:
        with emulated(settings) as session:
            try:
                runpy.run_path(arguments[0], run_name="__main__")
            except SystemExit as ended:
                status = ended.code
                return status if isinstance(status, int) else int(status is not None)
            finally:
                print(table(session.rows))
    finally:
        sys.argv = before
    return 0
