"""The runner of TorchRec's tests puts our classes in place and tells passes, changes and failures apart."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "ci"))

import torchrec_tests

FILE = torchrec_tests.FILES[0]
SOURCE = """
import unittest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection as Bags
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from a_module_that_nobody_has import something


def bags():
    return EmbeddingBagCollection([EmbeddingBagConfig(4, 3, "t", pooling=PoolingType.SUM)])


class BagsTest(unittest.TestCase):
    def test_made(self):
        assert Bags is EmbeddingBagCollection and Bags.__module__.startswith("tritonrec")

    def test_scripted(self):
        torch.jit.script(Bags([EmbeddingBagConfig(4, 3, "t")]))
        EmbeddingBagCollection

    def test_wrong(self):
        EmbeddingBagCollection([]).nothing

    def test_of_something_else(self):
        self.fail("names none of our classes")
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Output and exit status of a run on a clone with one file."""
    (tmp_path / FILE).parent.mkdir(parents=True)

    def run(source=SOURCE, listed=None):
        (tmp_path / FILE).write_text(source)
        monkeypatch.setattr(torchrec_tests, "NOT_APPLICABLE", listed or {})
        monkeypatch.setattr(sys, "argv", ["torchrec_tests.py", str(tmp_path), "--files", FILE])
        with pytest.raises(SystemExit) as ended:
            torchrec_tests.main()
        return capsys.readouterr().out, ended.value.code

    return run


@pytest.mark.filterwarnings("ignore")
def test_each_test_is_told_apart(run):
    out, status = run()
    assert status == 1 and out.count("1 passed, 1 passed with a change, 0 not applicable, 1 failed") == 2
    assert (
        "passed with a change: test_embedding_modules.BagsTest.test_scripted: without torch.jit.script" in out
    )
    assert (
        "failed: test_embedding_modules.BagsTest.test_wrong: ValueError: features need distinct names" in out
    )
    assert "the installed TorchRec has no a_module_that_nobody_has" in out and "something_else" not in out
