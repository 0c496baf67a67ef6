"""Promise: ranks end with their launcher, however it ends, and no temporary folder stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from speeds import slow_except

from tritonrec.distributed import RankPool

pytestmark = pytest.mark.multi_rank

LAUNCHER = """
import os, sys, threading, time
from contextlib import suppress
from tritonrec.distributed import RankPool
from tritonrec.files import ScratchFolder

def work(communicators, folder):
    os.write(1, f"{os.getpid()}\\n".encode())  # in one piece, beside those of other ranks
    for number in range(10_000):  # writes on until it ends
        with suppress(OSError):
            open(f"{folder}/{communicators.rank}-{number}", "w").close()
        time.sleep(0.01)

def nothing(communicators):
    pass

def launch():
    with ScratchFolder() as folder, RankPool((int(sys.argv[1]),)) as pool:
        print("folder", folder, flush=True)
        pool.run(work, int(sys.argv[1]), folder)

def make_in_a_thread():
    pools = []

    def make():
        pools.append(RankPool((1,)))
        pools[0].run(nothing, 1)

    maker = threading.Thread(target=make)
    maker.start()
    maker.join()
    with ScratchFolder() as folder, pools[0] as pool:
        print("folder", folder, flush=True)
        pool.run(work, 1, folder)

def forget():
    pool = RankPool((1,))
    threading.Thread(target=pool.run, args=(work, 1, "/nowhere"), daemon=True).start()
    print("folder", os.environ["TMPDIR"], flush=True)
    sys.stdin.readline()

if __name__ == "__main__":
    {"thread": make_in_a_thread, "forget": forget}.get(sys.argv[-1], launch)()
"""


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits for its parent does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


class Launched:
    """A launcher whose ranks are at work."""

    def __init__(self, tmp_path, ranks: int = 1, *words: str):
        script, self.temporary = tmp_path / "launcher.py", tmp_path / "temporary"
        script.write_text(LAUNCHER)
        self.temporary.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, script, str(ranks), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, "TMPDIR": str(self.temporary)},
        )  # fmt: skip
        assert self.process.stdout.readline().startswith(f"folder {self.temporary}")
        self.ranks = [int(self.process.stdout.readline()) for _ in range(ranks)]

    def nothing_is_left(self) -> None:
        self.process.wait(20)
        wait_until(lambda: not any(map(is_alive, self.ranks)), 10, "a rank lives on")
        wait_until(lambda: not [*self.temporary.glob("tritonrec-*")], 10, "a temporary folder stays")


@pytest.mark.if_changed
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "number", slow_except([signal.SIGKILL], [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
)
def test_ranks_and_folders_end_when_the_launcher_is_killed(tmp_path, number):
    launched = Launched(tmp_path, 2 if number == signal.SIGKILL else 1)
    launched.process.send_signal(number)
    launched.nothing_is_left()
    assert launched.process.returncode == -number


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel kills ranks on Linux only")
def test_a_stopped_rank_ends_too(tmp_path):
    launched = Launched(tmp_path)
    os.kill(launched.ranks[0], signal.SIGSTOP)
    launched.process.kill()
    launched.nothing_is_left()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_started_by_a_thread_outlive_the_thread_and_not_the_process(tmp_path):
    launched = Launched(tmp_path, 1, "thread")
    time.sleep(0.2)
    assert is_alive(launched.ranks[0])
    launched.process.kill()
    launched.nothing_is_left()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_launcher_that_closes_no_pool_ends_with_its_ranks(tmp_path):
    launched = Launched(tmp_path, 1, "forget")
    launched.process.stdin.close()
    launched.nothing_is_left()
    assert launched.process.returncode == 0


def until_stopped(communicators, file):
    """Counts until the stop is requested; returns the state of the event before and after."""
    before = communicators.stop.is_set()
    with open(file, "w") as out:
        out.write("begun")
    return before, communicators.stop.wait(60)


@pytest.mark.slow
def test_a_launcher_and_a_signal_request_ranks_to_stop(tmp_path):
    """SIGINT, which a terminal also sends to ranks, is the same request; the next task starts without one."""
    import threading

    with RankPool((1,)) as pool:
        for number, ask in enumerate(
            (
                pool.request_stop,
                lambda: os.kill(pool.processes[0].pid, signal.SIGTERM),
                lambda: os.kill(pool.processes[0].pid, signal.SIGINT),
            )
        ):
            file = tmp_path / str(number)

            def when_it_has_begun(file=file, ask=ask):
                wait_until(file.exists, 30, "the task did not begin")
                ask()

            helper = threading.Thread(target=when_it_has_begun)
            helper.start()
            assert pool.run(until_stopped, 1, file) == [(False, True)]
            helper.join()
        assert pool.processes[0].is_alive()
        pool.request_stop()  # of the task that is over
        assert pool.run(is_stop_requested, 1) == [False]
        pool._tasks[0] += 1
        pool.request_stop()  # of the next one, before the rank has read it
        pool._tasks[0] -= 1
        assert pool.run(is_stop_requested, 1) == [True]


def is_stop_requested(communicators):
    time.sleep(0.3)
    return communicators.stop.is_set()
