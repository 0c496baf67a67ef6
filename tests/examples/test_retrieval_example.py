"""Promise: the example of retrieval finds what exact search finds, as far as its index goes."""

import importlib.util
import re
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "retrieval.py"
DATA = "zipf:users=60,items=300,median_length=6,seed=1"


def recalls(folder, kinds, capsys):
    spec = importlib.util.spec_from_file_location("retrieval_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(folder, DATA, 2, 10, kinds)
    text = capsys.readouterr().out
    return {kind: float(value) for kind, value in re.findall(r"(\w+): recall@10 ([\d.]+)", text)}


@pytest.mark.slow
def test_items_of_16_bits_have_nearly_the_recall_of_exact_search(tmp_path, capsys):
    found = recalls(tmp_path, ["half"], capsys)
    assert 0.9 < found["half"] <= 1


@pytest.mark.slow
def test_indexes_of_faiss(tmp_path, capsys):
    pytest.importorskip("faiss", reason="faiss is not installed: pip install 'tritonrec[faiss]'")
    found = recalls(tmp_path, ["flat", "ivf", "hnsw"], capsys)
    assert found["flat"] > 0.99 and found["hnsw"] > 0.8 and 0.2 < found["ivf"] <= 1
