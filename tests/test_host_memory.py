"""Promise: glibc keeps freed memory in our processes, and nothing is called where there is no glibc."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tritonrec import host_memory
from tritonrec.embedding.key_index import KeyIndex
from tritonrec.host_memory import keep_freed_memory, return_freed_memory
from tritonrec.kernels.compilation import say_once
from tritonrec.pipeline import WindowConfig
from tritonrec.pipeline.sums import Sums

GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(host_memory, "_kept", False)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's setting")
def test_the_c_library_accepts_both_settings(monkeypatch):
    mallopt, results = getattr(ctypes.CDLL(None), "mallopt", None), []
    if mallopt is None:
        pytest.skip("this C library has no mallopt")

    def recorded(option, value):
        results.append((option, value, mallopt(option, value)))

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=recorded))
    keep_freed_memory()
    assert results == [(-4, 0, 1), (-1, GIB, 1)]  # M_MMAP_MAX, M_TRIM_THRESHOLD; 1: accepted


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_a_c_library_without_mallopt_is_left_alone(monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    keep_freed_memory()
    assert not host_memory._kept


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's setting")
@pytest.mark.parametrize(("keeps", "faults"), [(False, 20_000), (True, 0)])
def test_a_block_of_64_mib_takes_page_faults_once(keeps, faults):
    found = subprocess.run(
        [sys.executable, "-c", _BLOCKS, str(int(keeps))], capture_output=True, text=True, check=True
    )
    assert int(found.stdout) >= faults if faults else int(found.stdout) < 1000


_BLOCKS = """
import resource, sys
from tritonrec.host_memory import keep_freed_memory
if int(sys.argv[1]):
    keep_freed_memory()
bytearray(64 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):
    bytearray(64 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def trims(monkeypatch):
    calls = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(
        ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=lambda *_: 1, malloc_trim=calls.append)
    )
    return calls


def test_large_blocks_are_given_back_where_memory_is_kept(monkeypatch):
    calls = trims(monkeypatch)
    return_freed_memory(GIB)
    assert calls == []
    keep_freed_memory()
    return_freed_memory(4 * MIB - 1)
    assert calls == []
    return_freed_memory(4 * MIB)
    assert calls == [0]


def test_an_index_gives_the_smaller_one_back(monkeypatch):
    calls = trims(monkeypatch)
    monkeypatch.setattr(host_memory, "_WASTE", 12 * 1024)  # of 1024 slots
    keep_freed_memory()
    index = KeyIndex(slots=512)
    index.find_or_insert(torch.arange(500) * 977)
    index.grow(1)
    assert calls == [] and index.slots == 1024
    index.find_or_insert(torch.arange(1000) * 991)
    index.grow(1)
    assert calls == [0] and index.slots == 2048


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's setting")
def test_large_buffers_that_are_given_back_are_said_once(capsys):
    say_once.cache_clear()
    sums = Sums(WindowConfig(), torch.device("cpu"))
    sums.zeros(1 << 10, 64)
    assert capsys.readouterr().err == ""
    for _ in range(2):
        sums.zeros(1 << 16, 64)
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and "blocks of over 32 MiB" in text and "keep_freed_memory()" in text
    say_once.cache_clear()
    keep_freed_memory()
    sums.zeros(1 << 16, 64)
    assert capsys.readouterr().err == ""
