"""Promise: one-sided puts of MPI carry the same exchanges, with the same errors, in ranks of mpiexec."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tritonrec.harness.serve.mpi import available, mpiexec


@pytest.mark.slow
@pytest.mark.multi_rank
@pytest.mark.skipif(not available(), reason="needs mpi4py and mpiexec")
def test_rows_arrive_and_disagreements_are_errors(tmp_path):
    script = Path(__file__).with_name("mpi_ranks.py")
    done = subprocess.run(
        [mpiexec(), "-n", "3", sys.executable, str(script), str(tmp_path / "store")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    fine = done.stdout.splitlines().count("fine")  # UCX also prints there, about windows that are kept
    assert done.returncode == 0 and fine == 3, done.stdout + done.stderr
