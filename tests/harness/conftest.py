"""One small job and one verifier for all tests of the harness."""

import pytest

from tritonrec.harness.job import Job
from tritonrec.harness.verify.contract import Verifier
from tritonrec.nn import HSTUConfig


def small_job():
    sizes = HSTUConfig(dim=12, layers=1, heads=2, qk_dim=5, v_dim=7, max_seq_len=16, dropout=0.3)
    return Job("zipf:users=120,items=200,seed=5", batch_size=13, max_seq_len=16, num_negatives=3, sizes=sizes)


@pytest.fixture(scope="session")
def job():
    return small_job()


@pytest.fixture(scope="session")
def verifier(pool, job):
    with Verifier(job, pool) as verifier:
        yield verifier
