"""Hash maps of C++ (hash_maps.cpp), peers of `unique` and `hash_find`.

boost 1.81 or later (Debian's libboost1.81-dev) and github.com/martinus/unordered_dense; g++ looks for headers
that are elsewhere in the folders of CPLUS_INCLUDE_PATH.
"""

from __future__ import annotations

import atexit
import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

NAMES = ("boost", "ankerl")


@cache
def library(name: str) -> ctypes.CDLL:
    """One map, compiled for this processor; ImportError with the reason where that cannot be."""
    folder = tempfile.mkdtemp(prefix="tritonrec-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, f"{name}.so")
    command = ["g++", "-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", f"-D{name.upper()}"]
    command += [str(Path(__file__).with_name("hash_maps.cpp")), "-o", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise ImportError("there is no g++") from None
    if done.returncode:
        raise ImportError(next(line for line in done.stderr.splitlines() if "error" in line))
    calls = ctypes.CDLL(str(path))
    calls.make.restype, calls.unique.restype = ctypes.c_void_p, ctypes.c_int64
    return calls


def _pointers(*arrays: np.ndarray) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(each.ctypes.data) for each in arrays]


class CppMap:
    """An empty map of keys to row numbers, in order of insertion."""

    def __init__(self, name: str):
        self._calls = library(name)
        self._map = ctypes.c_void_p(self._calls.make())

    def __del__(self) -> None:
        if hasattr(self, "_map"):
            self._calls.release(self._map)

    def insert(self, keys: np.ndarray) -> np.ndarray:
        return self._rows(self._calls.insert, keys)

    def find(self, keys: np.ndarray) -> np.ndarray:
        return self._rows(self._calls.find, keys)

    def _rows(self, call, keys: np.ndarray) -> np.ndarray:
        rows = np.empty(len(keys), np.int64)
        given, found = _pointers(keys, rows)
        call(self._map, given, ctypes.c_int64(len(keys)), found)
        return rows


def unique(name: str, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct keys in order of first occurrence, each key's place among them, and their counts."""
    distinct, inverse, counts = (np.empty(len(keys), np.int64) for _ in range(3))
    given, *outputs = _pointers(keys, distinct, inverse, counts)
    count = library(name).unique(given, ctypes.c_int64(len(keys)), *outputs)
    return distinct[:count], inverse, counts[:count]
