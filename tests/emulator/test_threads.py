"""Promise: several threads may launch kernels for the first time, as the lanes of a trainer do."""

import threading
import time

import pytest
import torch
import triton
import triton.language as tl

from tritonrec.harness.emulator.driver import _Utilities, current
from tritonrec.kernels import dispatch

pytestmark = pytest.mark.skipif(dispatch.emulated is None, reason="needs pytest --emulate")
THREADS = 6


@triton.jit
def add_kernel(x_ptr, y_ptr, size, ADDED: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(y_ptr + place, tl.load(x_ptr + place, mask=place < size) + ADDED, mask=place < size)


def in_threads(work):
    """Run ``work(number)`` in threads that begin together; their errors."""
    errors, ready = [], threading.Barrier(THREADS)

    def run(number):
        try:
            ready.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_threads_compile_load_and_launch_the_same_kernels(monkeypatch):
    load = _Utilities.load_binary

    def slowly(self, *arguments):
        time.sleep(0.05)  # as CUDA does, without Python's lock
        return load(self, *arguments)

    monkeypatch.setattr(_Utilities, "load_binary", slowly)

    def work(number):
        for added in range(4):
            added = 100 + (number + added) % 4
            out = torch.empty(8)
            add_kernel[(1,)](torch.arange(8.0), out, 8, ADDED=added, BLOCK=8)
            assert torch.equal(out, torch.arange(8.0) + added)

    assert in_threads(work) == []


def test_every_launch_of_every_thread_is_counted():
    session = current()
    before = session.launches

    def work(number):
        for _ in range(5):
            add_kernel[(1,)](torch.zeros(8), torch.empty(8), 8, ADDED=7, BLOCK=8)

    assert in_threads(work) == []
    assert session.launches == before + 5 * THREADS
