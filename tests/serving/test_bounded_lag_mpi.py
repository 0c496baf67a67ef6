"""Promise: one-sided puts of MPI carry the same exchanges, with the same errors, in ranks of mpiexec.

Without MPI a stand-in of one process shows what a rank reads and waits for.
"""

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tritonrec.distributed import RankDiedError
from tritonrec.harness.network import Network
from tritonrec.harness.serve import mpi as of_harness
from tritonrec.harness.serve.mpi import available, mpiexec
from tritonrec.serving.bounded_lag import mpi, numba_puts
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
    fine = done.stdout.count("fine")  # UCX prints there too, in the middle of lines
    assert done.returncode == 0 and fine == 3, done.stdout + done.stderr


@pytest.mark.parametrize("network", [None, Network(3, 50.0, 7)])
def test_mpiexec_starts_a_program_in_each_host_of_a_network(tmp_path, monkeypatch, network):
    told, launcher = tmp_path / "told", tmp_path / "mpiexec"
    launcher.write_text(f'#!/bin/sh\necho "$*" > {told}; env >> {told}; exit 5\n')
    launcher.chmod(0o755)
    monkeypatch.setattr(of_harness, "mpiexec", lambda: str(launcher))
    with pytest.raises(RuntimeError, match="status 5; --no-mpi leaves MPI out"):
        of_harness.run_with_mpi(3, 1, 0, [4], 0, lambda: None, network)
    words, *environment = told.read_text().splitlines()
    programs = [each.split() for each in words.split(" : ")]
    hosts = [f"tritonrec-lab-7-{rank}" for rank in range(3)]
    if network is None:
        assert [each[:3] for each in programs] == [["-n", "3", sys.executable]]
    else:
        assert [each[:7] for each in programs] == [
            ["-n", "1", "ip", "netns", "exec", host, sys.executable] for host in hosts
        ]
    assert ("MPIR_CVAR_NOLOCAL=1" in environment) == (network is not None)
    assert f"GLOO_SOCKET_IFNAME={'eth0' if network else 'lo'}" in environment


class RankWindow:
    """A window of `Turns`, which others write into at once."""

    def __init__(self, windows, size):
        self.windows, self.memory = windows, np.zeros(size, np.uint8)
        self.tomemory = lambda: self.memory
        self.Lock_all = self.Sync = lambda: None
        self.Flush = lambda peer: None
        self.Flush_all = lambda: None

    def Put(self, data, peer, target):
        place, count, _ = target
        self.windows[peer].memory[place : place + count] = data[0]

    def Accumulate(self, value, peer, target, operation):
        self.windows[peer].memory[target[0] : target[0] + 8].view(np.int64)[:] += value[0]

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


def test_a_rank_has_started_what_it_has_put(ranks):
    here, there = ranks(2, 2)
    assert here.started(0, 0) == [0, 0]
    post(there, 0)
    assert here.started(0, 0) == [0, 0] and here.started(2, 2) == [2, 1]
    post(there, 1)
    assert here.started(2, 2) == [2, 2] and here.started(1, 1) == [1, 1]


def test_what_has_arrived_is_not_waited_for(ranks, monkeypatch):
    here, there = ranks(2, 0)
    post(here, 0)
    post(there, 0)
    monkeypatch.setattr(mpi, "time", SimpleNamespace(monotonic=time.monotonic))  # without sleep
    assert here._await(0, 2, 5.0) == numba_puts.ALL_HERE
    assert here._await(0, 4, 0.0) == numba_puts.OVER


def test_a_message_may_fill_its_room(ranks):
    here, there = ranks(2, 0)
    exact = here.layout.room // 8
    with pytest.raises(
        ValueError, match=rf"a message of {8 * exact + 8} bytes does not fit a room of {8 * exact}"
    ):
        post(here, 0, exact + 1)
    mine, its = post(here, 0, exact), post(there, 0, exact)
    assert finish(here, mine) == [*range(exact), *range(1000, 1000 + exact)]
    assert finish(there, its)[:exact] == list(range(exact, 2 * exact))


@pytest.mark.parametrize("died", [False, True])
def test_the_first_report_reaches_every_rank(ranks, died):
    first, second, third = ranks(3, 0)
    first.report(0, "no rows", died)
    second.report(0, "other rows", not died)
    exchange = post(third, 0)
    error, text = (RankDiedError, "^rank 0 gave up: no rows$") if died else (RuntimeError, "^no rows$")
    with pytest.raises(error, match=text):
        finish(third, exchange)
