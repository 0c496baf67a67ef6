"""What the place of a loader depends on: saved with its position, and compared when it goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor


def check_same(state: Mapping[str, Any], own: Mapping[str, Any], what: str = "loader") -> None:
    """Raise ValueError naming all of `own` that a saved position has otherwise: its batches would be others.

    What an earlier version did not save is not compared.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"the position of a {what} is a mapping, got {type(state).__name__}")
    other = {name: value for name, value in own.items() if name in state and state[name] != value}
    if other:
        saved = ", ".join(f"{name} {state[name]}" for name in other)
        here = ", ".join(str(value) for value in other.values())
        raise ValueError(
            f"the position is one of a {what} with {saved}, and this one has {here}: use the same, or begin "
            "anew without the position"
        )


def digest_of(*columns: Tensor | np.ndarray) -> str:
    """Of the values, shapes and types of columns."""
    digest = hashlib.sha256()
    for column in columns:
        array = column.numpy() if isinstance(column, Tensor) else column
        digest.update(f"{array.dtype} {array.shape};".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:16]
