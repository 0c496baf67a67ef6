"""Promise: a peer that cannot be built is skipped with the reason, and one that can gives checked answers."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "ci" / "benchmarks"
HEADER = """
#include <unordered_map>
namespace ankerl::unordered_dense { template <class K, class V> using map = std::unordered_map<K, V>; }
"""


@pytest.fixture(scope="module")
def peers():
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    import strong_peers

    yield strong_peers
    sys.path.remove(str(FOLDER))
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == FOLDER:
            del sys.modules[name]


def test_without_a_compiler_a_map_is_skipped(peers, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(peers.Skipped, match=r"there is no g\+\+"):
        peers.CppMap("boost", tmp_path, [])


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_header_that_does_not_compile_is_the_reason(peers, tmp_path):
    (tmp_path / "ankerl").mkdir()
    (tmp_path / "ankerl" / "unordered_dense.h").write_text("#error too old\n")
    with pytest.raises(peers.Skipped, match="too old"):
        peers.CppMap("ankerl", tmp_path, [tmp_path])


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_map_answers_as_the_key_index_does(peers, tmp_path):
    (tmp_path / "ankerl").mkdir()
    (tmp_path / "ankerl" / "unordered_dense.h").write_text(HEADER)
    map_ = peers.CppMap("ankerl", tmp_path, [tmp_path])
    keys = np.array([7, -3, 7, 2**63 - 1, -(2**63), -3, 7])
    full, rows = map_.filled(keys)
    assert rows.tolist() == [0, 1, 0, 2, 3, 1, 0]
    assert map_.find(full, np.array([-3, 5, 2**63 - 1])).tolist() == [1, -1, 2]
    distinct, inverse, counts = map_.unique(keys)
    assert distinct.tolist() == [7, -3, 2**63 - 1, -(2**63)] and counts.tolist() == [3, 2, 1, 1]
    assert inverse.tolist() == rows.tolist()
