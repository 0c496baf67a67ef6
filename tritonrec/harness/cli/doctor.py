"""The command `doctor`."""

from __future__ import annotations

import typer

from .. import doctor as machine


def doctor() -> None:
    """Describe this machine, and test whether batch invariance holds on it."""
    raise typer.Exit(machine.doctor())
