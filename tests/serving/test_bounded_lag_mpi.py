"""Promise: one-sided puts of MPI carry the same exchanges, with the same errors, in ranks of mpiexec.

Without MPI a stand-in of one process shows what a rank reads and waits for.
"""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tritonrec.distributed import RankDiedError
from tritonrec.harness.serve.mpi import available, mpiexec
from tritonrec.serving.bounded_lag.messages import Deadline
from tritonrec.serving.bounded_lag.mpi import MpiWindows
from tritonrec.serving.bounded_lag.transport import Exchange


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


class RankWindow:
    """A window of `Turns`, which others write into at once."""

    def __init__(self, windows, size):
        self.windows, self.memory = windows, np.zeros(size, np.uint8)
        self.tomemory = lambda: self.memory
        self.Lock_all = self.Sync = lambda: None
        self.Flush = lambda peer: None

    def Put(self, data, peer, target):
        place, count, _ = target
        self.windows[peer].memory[place : place + count] = data[0]

    def Fetch_and_op(self, value, before, peer, place, operation):
        word = self.windows[peer].memory[place : place + 8].view(np.int64)
        before[0][:] = word
        word += value[0]


class Turns:
    """A stand-in for `mpi4py.MPI`: the ranks take turns in one thread, as their windows were made."""

    BYTE = INT64_T = SUM = ANY_SOURCE = ANY_TAG = None

    def __init__(self):
        self.COMM_WORLD = self.Win = self.group = self
        self.windows = []
        self.Incl = self.Create_group = lambda _: self
        self.Barrier = lambda: None
        self.Iprobe = lambda source, tag: False

    def Allocate(self, size, unit, comm):
        self.windows.append(RankWindow(self.windows, size))
        return self.windows[-1]


@pytest.fixture
def ranks(monkeypatch):
    """Makes the windows of so many ranks of a bound."""
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=Turns()))
    return lambda world_size, bound: [
        MpiWindows(range(world_size), rank, bound, 0) for rank in range(world_size)
    ]


def post(windows, number, rows=2):
    """Start exchange `number` of a rank, with as many rows for each."""
    world_size = windows.world_size
    values = torch.arange(rows * world_size, dtype=torch.int64) + 100 * number + 1000 * windows.rank
    exchange = Exchange(None, number, values, [rows] * world_size, None, None)
    windows.post(exchange, values)
    return exchange


def finish(windows, exchange):
    return windows.finish(exchange, Deadline(timedelta(seconds=5))).tolist()


def test_a_fast_rank_overwrites_nothing_that_a_slow_one_has_not_read(ranks):
    """Rank 0 starts 6 once it has completed 3; rank 1 has started 3 and read 0, so six are kept for it."""
    fast, slow = ranks(2, 2)
    started = {number: (post(fast, number), post(slow, number)) for number in range(4)}
    assert finish(slow, started[0][1]) == [2, 3, 1002, 1003]
    for number in range(4):
        assert finish(fast, started[number][0]) == [n + 100 * number for n in (0, 1, 1000, 1001)]
    for number in range(4, 7):
        post(fast, number)
    for number in range(1, 4):
        assert finish(slow, started[number][1]) == [n + 100 * number for n in (2, 3, 1002, 1003)]


@pytest.mark.parametrize("died", [False, True])
def test_the_first_report_reaches_every_rank(ranks, died):
    first, second, third = ranks(3, 0)
    first.report(0, "no rows", died)
    second.report(0, "other rows", not died)
    exchange = post(third, 0)
    error, text = (RankDiedError, "^rank 0 gave up: no rows$") if died else (RuntimeError, "^no rows$")
    with pytest.raises(error, match=text):
        finish(third, exchange)
