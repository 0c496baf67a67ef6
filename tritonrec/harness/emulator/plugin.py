"""pytest's options of the emulator: ``pytest --emulate sm_90 -m interpreter``.

Tests that run Triton's interpreter run compiled kernels instead. The schedules of a test depend on the seed
and on the test alone.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, get_args

import pytest

if TYPE_CHECKING:
    from .driver import Session

_SESSION: pytest.StashKey[Session] = pytest.StashKey()
_STACK: pytest.StashKey[ExitStack] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; what they do is in `settings.Emulation`."""
    from .settings import Architecture

    group = parser.getgroup("emulator", "Triton kernels on an emulated GPU")
    group.addoption("--emulate", choices=get_args(Architecture), help="run Triton kernels as compiled for it")
    group.addoption("--emulate-schedules", type=int, default=1, help="orders of the warps in each launch")
    group.addoption("--emulate-seed", type=int, default=0, help="of the schedules")
    group.addoption("--emulate-uninitialised", action="store_true", help="find reads of unwritten memory")
    group.addoption("--emulate-without-races", action="store_true", help="do not look for races")


def pytest_configure(config: pytest.Config) -> None:
    """Begin the emulation before any test is imported."""
    arch = config.getoption("--emulate")
    if not arch:
        return
    from .driver import emulated
    from .settings import Emulation

    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    settings = Emulation(
        arch=arch,
        schedules=config.getoption("--emulate-schedules"),
        seed=config.getoption("--emulate-seed"),
        races=not config.getoption("--emulate-without-races"),
        uninitialised=config.getoption("--emulate-uninitialised"),
    )
    stack = ExitStack()
    config.stash[_SESSION] = stack.enter_context(emulated(settings))
    config.stash[_STACK] = stack


def pytest_unconfigure(config: pytest.Config) -> None:
    if _STACK in config.stash:
        config.stash[_STACK].close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _SESSION in item.config.stash:
        item.config.stash[_SESSION].restart()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """A table of the kernels that ran."""
    session = config.stash.get(_SESSION, None)
    if session is not None and session.rows:
        from .report import table

        terminalreporter.section(f"emulated {session.settings.arch}")
        terminalreporter.write_line(table(session.rows))
