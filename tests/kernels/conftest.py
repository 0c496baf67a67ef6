"""What tests of kernels share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tritonrec.kernels import murmur


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
