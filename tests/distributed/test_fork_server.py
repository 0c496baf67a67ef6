"""Promise: forked ranks are as separate as spawned ones, and follow the environment of their launcher."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from tritonrec.distributed import RankDiedError, RankPool, fork_server
from tritonrec.distributed.fork_server import ForkedProcess
from tritonrec.distributed.signals import STOP_SIGNALS

pytestmark = [
    pytest.mark.multi_rank,
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux"),
    pytest.mark.skipif(torch.accelerator.is_available(), reason="ranks are spawned beside an accelerator"),
]


def surroundings(_):
    """Of a rank: its parent, a variable, its folder, the first place of its modules, random numbers."""
    return (
        os.getppid(), os.environ.get("A_VARIABLE"), os.getcwd(), sys.path[0],
        (random.random(), np.random.rand()), signal.getsignal(signal.SIGCHLD),
    )  # fmt: skip


def open_files(process):
    """Pipes and sockets, but for those of input and output."""
    found = set()
    for each in set(os.listdir(f"/proc/{process}/fd")) - {"0", "1", "2"}:
        with suppress(FileNotFoundError):  # the one by which the folder was read
            found.add(os.readlink(f"/proc/{process}/fd/{each}"))
    return {each for each in found if each.startswith(("pipe:", "socket:"))}


def of_rank_and_server(_):
    return open_files("self"), open_files(os.getppid())


@pytest.mark.if_changed
def test_ranks_have_the_surroundings_of_their_launcher_at_the_start_of_the_pool(monkeypatch, tmp_path):
    with RankPool((1,)) as pool:
        ((first, variable, *_),) = pool.run(surroundings, 1)
    assert all(each.closed for each in (*pool._connections, *pool._lifelines))
    assert variable is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/any")  # as torch does when it compiles something
    with RankPool((2,)) as pool:
        (parent, _, folder, path, numbers, action), other = pool.run(surroundings, 2)
        inherited = open_files("self")
        for own, of_server in pool.run(of_rank_and_server, 2):
            assert of_server - inherited and not own & of_server - inherited
    assert parent == other[0] == first  # imported once
    assert parent != os.getpid()
    assert (folder, path) == (str(tmp_path), str(tmp_path / "modules"))
    assert numbers[0] != other[4][0] and numbers[1] != other[4][1]
    assert action == signal.SIG_DFL
    # Libraries read variables when they are imported, so a change takes another server.
    monkeypatch.setattr(fork_server, "_server", fork_server._server)  # the tests behind this one use it
    monkeypatch.setenv("A_VARIABLE", "set")
    with RankPool((1,)) as pool:
        ((parent, variable, *_),) = pool.run(surroundings, 1)
    assert variable == "set" and parent != first


def parent_process(_):
    return os.getppid()


def kill_the_server(_):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.slow  # test_launcher_ends.py kills what the server's ranks belong to, in every run
def test_a_server_that_was_killed_ends_its_ranks_and_another_takes_its_place():
    with RankPool((1,)) as pool:
        (server,) = pool.run(parent_process, 1)
        with pytest.raises(RankDiedError, match=r"^rank 0 died \(SIGKILL\)"):
            pool.run(kill_the_server, 1)
        pool.restart()
        assert pool.run(parent_process, 1) != [server]


SCRIPT = """
from tritonrec.distributed import RankPool

def add(communicators, number):
    return communicators.rank + number

if __name__ == "__main__":
    with RankPool((2,)) as pool:
        print(pool.run(add, 2, 40))
"""


@pytest.mark.slow  # functions of modules run in every test of a pool
def test_functions_of_a_script_run_and_nothing_is_printed_beside(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, env=environment
    )
    assert (done.stdout, done.stderr, done.returncode) == ("[40, 41]\n", "", 0)


def actions_here(connection):
    connection.send([*map(signal.getsignal, STOP_SIGNALS), signal.pthread_sigmask(signal.SIG_BLOCK, [])])


@pytest.mark.if_changed
def test_a_signal_that_a_terminal_sends_while_the_server_imports_is_not_its_own(capfd):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    server, (here, there) = fork_server.ForkServer(), Pipe()
    for number in STOP_SIGNALS:
        os.kill(server.process.pid, number)
    process = server.start("rank 0", actions_here, (there,))
    assert here.poll(120) and here.recv() == [signal.SIG_DFL] * len(STOP_SIGNALS) + [set()]
    process.join()
    assert process.exitcode == 0 and signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    assert capfd.readouterr().err == ""


def test_where_nothing_can_be_forked_a_process_is_spawned(monkeypatch):
    context = mock.MagicMock()
    monkeypatch.setattr(fork_server, "fork_server", lambda: None)
    monkeypatch.setattr(fork_server.multiprocessing, "get_context", lambda kind: kind == "spawn" and context)
    here, there = multiprocessing.Pipe()
    process = fork_server.start_process("rank 3", print, (there,), 7)
    assert process is context.Process.return_value
    process.start.assert_called_once_with()
    assert context.Process.call_args.kwargs["name"] == "rank 3" and context.Process.call_args.kwargs["daemon"]
    assert there.closed  # after the start: it has to be sent
    here.close()


def test_the_number_of_a_process_is_received_once():
    there, here = Pipe()
    there.send_bytes(b"41")
    there.close()
    server = SimpleNamespace(process=SimpleNamespace(exitcode=3, join=lambda seconds: None))
    process = ForkedProcess(server, here)
    assert process.pid == 41 and process.pid == 41 and process.exitcode is None
    process.join(9)
    assert process.exitcode == 3 and process.pid == 41


def test_the_server_ends_with_its_parent_from_the_start(monkeypatch):
    class Asked(Exception):
        pass

    def asked(parent):
        raise Asked(parent)

    monkeypatch.setattr(fork_server, "let_in", lambda action: None)
    monkeypatch.setattr(fork_server, "end_with_parent", asked)
    with pytest.raises(Asked, match=r"^41$"):
        fork_server._serve(41, None, [])


def test_a_server_that_is_stopped_is_no_endless_wait(monkeypatch):
    monkeypatch.setattr(fork_server, "ANSWER_SECONDS", 0.2)
    server = fork_server.ForkServer()
    try:
        os.kill(server.process.pid, signal.SIGSTOP)
        process = server.start("a rank", print, [])
        with pytest.raises(RuntimeError, match=r"forks the ranks of this one, has done nothing for 0\.2 s"):
            _ = process.pid
        with pytest.raises(RuntimeError, match="was it stopped"):
            server.start("a rank", print, [], bytes(1 << 23))
    finally:
        server.process.kill()


def test_a_rank_is_killed_though_its_server_has_forked_none_yet():
    server = fork_server.ForkServer()
    os.kill(server.process.pid, signal.SIGSTOP)  # as one whose imports take long
    processes = [server.start(f"rank {rank}", print, []) for rank in range(2)]
    for process in processes:
        process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL and process.pid is None


@pytest.mark.if_changed
def test_a_rank_that_is_killed_leaves_the_others_of_its_server():
    server = fork_server.ForkServer()
    killed, other = (server.start(f"rank {rank}", time.sleep, [], 600) for rank in range(2))
    assert other.pid is not None
    killed.kill()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL and other.is_alive()
    other.kill()
    other.join(60)
    assert not other.is_alive() and server.process.is_alive()
    server.process.kill()
