"""Block sizes and warps by table: (kernel, architecture, class) -> configuration, nothing timed or compiled.

A table lies beside its kernel, ``<kernel>/tuned/<kernel>.json``::

    {"kernel": "silu", "chosen_by": "...", "architectures":
        {"sm_90": {"any": [{"config": {"BLOCK": 1024, "num_warps": 4}, "evidence": {...}}, ...]}}}

At most six rows for a class; the first one is used, the others are what a search tries first. A class names
what fixes a result's bits (head dimension, row width, dtype), never the size of a batch, so the table cannot
make a row depend on its neighbours. ``python ci/compile/tune.py`` writes the tables.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

MOST_ROWS = 6
FOLDER = Path(__file__).parent

Config = dict[str, Any]


def config(kernel: str, klass: str, device: torch.device) -> Config:
    """Constants and launch options of `kernel` for a class on a device; a new dict at every call.

    An architecture without rows of its own takes those of the nearest earlier one of its family, and where
    there is none, as in the interpreter, those of ``"default"``. KeyError if the table lacks the class.
    """
    return dict(_chosen(kernel, klass, architecture(device)))


def row_class(width: int, least: int = 16, most: int = 1024) -> str:
    """Class of rows `width` wide: ``"d64"`` for 33 to 64; the outermost take what lies beyond them."""
    return f"d{min(most, max(least, 1 << max(0, width - 1).bit_length()))}"


@cache
def architecture(device: torch.device) -> str:
    """``"sm_90"``, ``"gfx942"``, or ``"default"`` for anything without a table."""
    if device.type != "cuda":
        return "default"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def table(kernel: str) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Rows by architecture and class."""
    return json.loads((FOLDER / kernel / "tuned" / f"{kernel}.json").read_text())["architectures"]


def rows(kernel: str, klass: str, arch: str) -> list[dict[str, Any]]:
    """The committed rows that serve `klass` on `arch`, the chosen one first."""
    by_arch = table(kernel)
    for name in (arch, *_earlier(arch, list(by_arch)), "default"):
        if klass in by_arch.get(name, {}):
            return by_arch[name][klass]
    raise KeyError(f"{kernel}/tuned/{kernel}.json has no class {klass!r} for {arch} or default")


@cache
def _chosen(kernel: str, klass: str, arch: str) -> Config:
    return rows(kernel, klass, arch)[0]["config"]


def _earlier(arch: str, known: list[str]) -> list[str]:
    """Architectures of the same family (``sm_``, ``gfx9``) before `arch`, the nearest first."""
    family = arch[:4] if arch.startswith("gfx") else arch[:3]
    before = [name for name in known if name.startswith(family) and _number(name) < _number(arch)]
    return sorted(before, key=_number, reverse=True)


def _number(arch: str) -> int:
    digits = arch.removeprefix("sm_").removeprefix("gfx")
    try:
        return int(digits, 16)
    except ValueError:
        return -1
