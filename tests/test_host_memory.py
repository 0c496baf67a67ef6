"""Promise: glibc keeps freed memory in our processes, and nothing is called where there is no glibc."""

import ctypes
import sys
from types import SimpleNamespace

import pytest

from tritonrec.host_memory import keep_freed_memory

GIB, MIB = 1 << 30, 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's setting")
def test_the_c_library_accepts_both_settings(monkeypatch):
    mallopt, results = getattr(ctypes.CDLL(None), "mallopt", None), []
    if mallopt is None:
        pytest.skip("this C library has no mallopt")

    def recorded(option, value):
        results.append((option, value, mallopt(option, value)))

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=recorded))
    keep_freed_memory()
    assert results == [(-3, 32 * MIB, 1), (-1, GIB, 1)]  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD; 1: accepted


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_a_c_library_without_mallopt_is_left_alone(monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    keep_freed_memory()
