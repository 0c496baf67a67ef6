"""The implementations of an op as parameters of a test, and where their tensors lie."""

from __future__ import annotations

from typing import TypeVar

import pytest
import torch

T = TypeVar("T")
GPU = torch.cuda.is_available()
TRITON = pytest.param("triton", marks=pytest.mark.gpu if GPU else pytest.mark.interpreter)
HOST_TRITON = pytest.param(
    "triton", marks=[pytest.mark.interpreter, pytest.mark.skipif(GPU, reason="host check")]
)
"""For what is an asynchronous assertion on a GPU, after which the process has no GPU."""
IMPLS = ["reference", "cpu", TRITON]


def on(impl: str, value: T) -> T:
    """A tensor where `impl` takes it; anything else as it is."""
    return value.cuda() if impl == "triton" and GPU and isinstance(value, torch.Tensor) else value  # type: ignore[return-value]
