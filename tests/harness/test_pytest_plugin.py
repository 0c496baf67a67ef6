"""Promise: a test that takes `tritonrec_verify` fails with the report of a model that breaks bits."""

import subprocess
import sys

pytest_plugins = ["pytester"]

TESTS = """
import pytest
import torch
from tritonrec import nn
from tritonrec.data import NextItemLoader, load
from tritonrec.embedding import FeatureConfig

pytestmark = pytest.mark.tritonrec_verify(modes=("nestpipe",), micro_batches=(1,))
loader = NextItemLoader(load("zipf:users=30,items=30,seed=2"), 5, 6, 1, seed=0)
given = [loader.batch(0)], [FeatureConfig("item", 4)]


class Model(torch.nn.Module):
    def __init__(self, made):
        super().__init__()
        torch.manual_seed(0)
        self.mix = made.Linear(4, 4)

    def forward(self, batch, rows, seed):
        return nn.sum_by_sample(self.mix(rows["item"][: batch.num_tokens]).tanh().sum(1), batch.offsets)


@pytest.mark.tritonrec_verify(micro_batches=(2,))
def test_sound(tritonrec_verify):
    report = tritonrec_verify(lambda: Model(nn), *given, world_sizes=(2,))
    assert [(case.mode, case.world_size, case.micro_batches) for case, _ in report.cases] == [("nestpipe", 2, 2)]


def test_unsound(tritonrec_verify):
    tritonrec_verify(lambda: Model(torch.nn), *given)
"""


def test_the_fixture_and_its_marker(pytester):
    pytester.makepyfile(TESTS)
    options = "--strict-markers", "-p", "tritonrec.harness.pytest_plugin", "-p", "no:cacheprovider"
    done = pytester.runpytest_inprocess(*options)
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["first module that is not batch-invariant: mix", "reason: *BLAS*"])


def test_loading_it_loads_no_torch():
    program = "import sys, tritonrec.harness.pytest_plugin; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
