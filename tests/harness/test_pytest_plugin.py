"""Promise: a test that takes `tritonrec_verify` fails with the report of a model that breaks bits."""

import subprocess
import sys

import pytest
import torch

from tritonrec import nn
from tritonrec.data import NextItemLoader, load
from tritonrec.embedding import FeatureConfig

pytestmark = pytest.mark.tritonrec_verify(modes=("nestpipe",), micro_batches=(1,))


@pytest.fixture(scope="module")
def given():
    loader = NextItemLoader(load("zipf:users=30,items=30,seed=2"), 5, 6, 1, seed=0)
    return [loader.batch(0)], [FeatureConfig("item", 4)]


class Model(torch.nn.Module):
    def __init__(self, made):
        super().__init__()
        torch.manual_seed(0)
        self.mix = made.Linear(4, 4)

    def forward(self, batch, rows, seed):
        return nn.sum_by_sample(self.mix(rows["item"][: batch.num_tokens]).tanh().sum(1), batch.offsets)


@pytest.mark.tritonrec_verify(micro_batches=(2,))
def test_the_closest_marker_and_the_call_come_first(tritonrec_verify, given):
    report = tritonrec_verify(lambda: Model(nn), *given, world_sizes=(2,))
    cases = [(case.mode, case.world_size, case.micro_batches) for case, _ in report.cases]
    assert cases == [("nestpipe", 2, 2)]


def test_it_fails_with_the_report(tritonrec_verify, given):
    found = r"not batch-invariant: mix\nreason: .*tritonrec\.nn\.Linear"
    with pytest.raises(pytest.fail.Exception, match=found):
        tritonrec_verify(lambda: Model(torch.nn), *given)


def test_loading_it_loads_no_torch():
    program = "import sys, tritonrec.harness.pytest_plugin; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
