"""Promise: a map of C++ that cannot be built says why, and one that can answers as the key index does."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "ci" / "benchmarks"
sys.path.insert(0, str(FOLDER))
import cpp_maps  # noqa: E402

HEADER = """
#include <unordered_map>
namespace ankerl::unordered_dense { template <class K, class V> using map = std::unordered_map<K, V>; }
"""
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture(autouse=True)
def no_library_is_there():
    cpp_maps.library.cache_clear()
    yield
    cpp_maps.library.cache_clear()


def header(folder, text, monkeypatch):
    (folder / "ankerl").mkdir()
    (folder / "ankerl" / "unordered_dense.h").write_text(text)
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", str(folder))


def test_without_a_compiler_a_map_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImportError, match=r"there is no g\+\+"):
        cpp_maps.CppMap("boost")


@needs_compiler
def test_a_header_that_does_not_compile_is_the_reason(tmp_path, monkeypatch):
    header(tmp_path, "#error too old\n", monkeypatch)
    with pytest.raises(ImportError, match="too old"):
        cpp_maps.CppMap("ankerl")


@needs_compiler
def test_a_map_answers_as_the_key_index_does(tmp_path, monkeypatch):
    header(tmp_path, HEADER, monkeypatch)
    keys, map_ = np.array([7, -3, 7, 2**63 - 1, -(2**63), -3, 7]), cpp_maps.CppMap("ankerl")
    rows = map_.insert(keys)
    assert rows.tolist() == [0, 1, 0, 2, 3, 1, 0]
    assert map_.find(np.array([-3, 5, 2**63 - 1])).tolist() == [1, -1, 2]
    distinct, inverse, counts = cpp_maps.unique("ankerl", keys)
    assert distinct.tolist() == [7, -3, 2**63 - 1, -(2**63)] and counts.tolist() == [3, 2, 1, 1]
    assert inverse.tolist() == rows.tolist()
