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
    """Add an option for each setting of `settings.Emulation`."""
    from .settings import Architecture, flag, options

    group = parser.getgroup("emulator", "Triton kernels on an emulated GPU")
    group.addoption(
        "--emulate", choices=get_args(Architecture), help="Run Triton kernels as compiled for it."
    )
    for name, default, text in options():
        if isinstance(default, bool):
            group.addoption(flag(name, default), dest=_key(name), action="store_true", help=text)
        else:
            group.addoption(flag(name, default), dest=_key(name), type=int, default=default, help=text)


def _key(name: str) -> str:
    return f"emulate_{name}"


def pytest_configure(config: pytest.Config) -> None:
    """Begin the emulation before any test is imported."""
    arch = config.getoption("--emulate")
    if not arch:
        return
    from .driver import emulated
    from .settings import Emulation, options

    os.environ.pop("TRITON_INTERPRET", None)
    values = {name: config.getoption(_key(name)) for name, _, _ in options()}
    turned = {name for name, default, _ in options() if default is True}
    settings = Emulation(arch, **{name: not v if name in turned else v for name, v in values.items()})
    if not settings.assemble:  # it would be in the keys, and on the GPU it would not
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
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
        from .counts import table

        terminalreporter.section(f"emulated {session.settings.arch}")
        terminalreporter.write_line(table(session.rows))
