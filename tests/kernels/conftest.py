"""What tests of kernels share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from impls import TRITON

from tritonrec.kernels import dispatch, murmur


@pytest.fixture(autouse=True)
def no_secret(monkeypatch):
    """Keys that are made to collide do so in every process."""
    monkeypatch.setattr(murmur, "SECRET", 0)


@pytest.fixture
def threads_one_and_two():
    """Runs a function with one thread and with two, and gives both results."""
    before = torch.get_num_threads()

    def run(function: Callable[[], Any]) -> list[Any]:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(function())
        return results

    yield run
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", TRITON, pytest.param("sorted", marks=TRITON.marks)])
def exact_impl(request, monkeypatch):
    """An implementation of exact sums; "sorted": Triton's, of a device that adds no int64 atomically."""
    if request.param == "sorted":
        monkeypatch.setattr(dispatch, "has_int64_atomics", lambda tensor: False)
        return "triton"
    return request.param
