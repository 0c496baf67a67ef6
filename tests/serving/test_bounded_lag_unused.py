"""An exchange that is made and never used leaves no thread of gloo behind that polls for ever."""

import gc
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from thread_ranks import ThreadRanks

from tritonrec.serving.bounded_lag import BoundedLagAllToAll
from tritonrec.serving.bounded_lag.window import Process

WORLD = 3
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="/proc has the time of each thread, on Linux")


def ticks_of_gloo():
    """Clock ticks of processor time that each thread of gloo has taken."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        if "gloo" in name:
            found[task.name] = sum(map(int, rest.split()[11:13]))
    return found


def poll_for_ever(threads):
    """Whether these threads take processor time in each of 20 quarters of a second."""
    for _ in range(20):
        before = ticks_of_gloo()
        time.sleep(0.25)
        after = ticks_of_gloo()
        if all(after[task] == before[task] for task in threads & before.keys() & after.keys()):
            return False
    return True


def used(group):
    exchange = BoundedLagAllToAll(group, 1, 64, transport="messages")
    exchange.start(torch.ones(WORLD), [1] * WORLD)
    exchange.drain()


def unused(group):
    BoundedLagAllToAll(group, 1, 64, transport="messages")


def refused(group):
    with pytest.raises(ValueError, match="does not fit the capacity"):
        BoundedLagAllToAll(group, 1, 64).start(torch.ones(17 * WORLD), [17] * WORLD)


@ON_LINUX
@pytest.mark.parametrize("last", [unused, refused])
def test_an_exchange_that_is_forgotten_leaves_no_thread_that_polls(last):
    of_others = ticks_of_gloo().keys()  # a test before this one may have left groups in this process
    ranks = ThreadRanks(WORLD)
    for _ in range(3):
        ranks.run(used)
    ranks.run(last)
    gc.collect()
    threads = ticks_of_gloo().keys() - of_others
    assert threads, "no thread of gloo was found"
    assert not poll_for_ever(threads)


@ON_LINUX
def test_a_process_that_nobody_watches_any_more_leaves_no_file_open():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    watched = [Process(os.getpid()) for _ in range(3)]
    assert not any(each.has_ended for each in watched)
    assert len(os.listdir("/proc/self/fd")) == before + 3
    watched.clear()
    assert len(os.listdir("/proc/self/fd")) == before
