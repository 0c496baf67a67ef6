"""Promise: exchanges deliver what was sent, exact sums refuse to wrap, a lost rank is named in time."""

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tritonrec.distributed import (
    Communicator,
    Communicators,
    RankDiedError,
    RankPool,
    Watch,
    from_environment,
    join,
    launch,
    rank_process,
)
from tritonrec.distributed.launch import RANK_BYTES
from tritonrec.distributed.rank_process import StopRequests, is_lost
from tritonrec.distributed.signals import end_with_parent
from tritonrec.ops import ExactSumError
from tritonrec.resilience import ElasticPool, elastic_pool
from tritonrec.room import Room

pytestmark = pytest.mark.multi_rank
WORLD = 3


def exchange(communicators, seed):
    """Everybody sends everybody (r + 2 s) % 4 rows, some none; rows say who sent them to whom."""
    rank, world = communicators.rank, communicators.world_size
    send = [(rank + 2 * to) % 4 for to in range(world)]
    receive = [(source + 2 * rank) % 4 for source in range(world)]
    rows = [[float(rank), float(to), float(n)] for to in range(world) for n in range(send[to])]
    values = torch.tensor(rows, dtype=torch.float32).reshape(-1, 3)
    got = communicators.communication.all_to_all(values, send, receive)
    expected = [[float(s), float(rank), float(n)] for s in range(world) for n in range(receive[s])]
    assert got.tolist() == expected
    return seed + rank


def reduce_near_the_end(communicators, value):
    sums = torch.tensor([1, value if communicators.rank == 1 else 2], dtype=torch.int64)
    return communicators.reduce.all_reduce(sums, "dense gradients").tolist()


def die(communicators, victim):
    if communicators.rank == victim:
        os._exit(17)
    communicators.communication.all_to_all_equal(torch.zeros(communicators.world_size, 1))


def stall(communicators, victim):
    """The others wait in vain, on a lane's group and on the default one."""
    if communicators.rank == victim:
        time.sleep(60)
    with pytest.raises(RuntimeError):
        communicators.communication.all_to_all_equal(torch.zeros(communicators.world_size, 1))
    dist.barrier()


def come_late(rank):
    time.sleep(5 * rank)


@pytest.mark.parametrize("pool", [lambda: RankPool((2, 99)), lambda: ElasticPool(99).run(print)])
def test_more_ranks_than_memory_are_refused_before_one_starts(monkeypatch, pool):
    def start(*_):
        raise AssertionError("a rank was started")

    monkeypatch.setattr(launch, "start_process", start)
    monkeypatch.setattr(elastic_pool, "start_process", start)
    monkeypatch.setattr(launch, "memory_left", lambda: Room(99 * RANK_BYTES - 1, 1 << 40, "the machine"))
    with pytest.raises(
        ValueError, match=r"^99 ranks take 12\.4 GiB .* the machine has .*: start 98 at most$"
    ):
        pool()
    monkeypatch.setattr(launch, "memory_left", lambda: Room(99 * RANK_BYTES, 1 << 40, "the machine"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.warns(RuntimeWarning, match="^99 ranks share 2 processors"), pytest.raises(AssertionError):
        pool()


@pytest.mark.parametrize("world_size", [1, 2, WORLD])
def test_uneven_exchanges_arrive_in_order_of_source(pool, world_size):
    assert pool.run(exchange, world_size, 10) == [10 + rank for rank in range(world_size)]


def test_int64_sums_are_exact(pool):
    # float64 would round this one.
    assert pool.run(reduce_near_the_end, 2, 2**60 + 1) == [[2, 2**60 + 3]] * 2


@pytest.mark.slow
def test_a_sum_that_could_wrap_names_the_tensor():
    with RankPool((2,), timedelta(seconds=3)) as own, pytest.raises(RankDiedError) as caught:
        own.run(reduce_near_the_end, 2, -(2**62))
    assert "ExactSumError: dense gradients[1]" in str(caught.value)


def test_a_rank_that_dies_is_named_within_the_timeout():
    began = time.monotonic()
    with RankPool((WORLD,), timedelta(seconds=10)) as own, pytest.raises(RankDiedError) as caught:
        own.run(die, WORLD, 1)
    assert str(caught.value) == "rank 1 died (exit code 17)"  # and nothing of those that waited for it
    assert time.monotonic() - began < 40


def length(communicators, data):
    return len(data)


@pytest.mark.slow
def test_a_rank_that_reads_nothing_of_a_large_task_is_named():
    with RankPool((2,), timedelta(seconds=3)) as own:
        assert own.run(length, 2, b"x" * 5_000_000) == [5_000_000] * 2
        os.kill(own.processes[1].pid, signal.SIGSTOP)
        own.start_timeout = timedelta(seconds=2)
        with pytest.raises(RankDiedError, match="rank 1 did not answer within"):
            own.run(length, 2, b"x" * 5_000_000)


@pytest.mark.slow
def test_a_rank_that_stalls_is_an_error_within_the_timeout():
    # Ranks may start later than they may keep each other waiting afterwards.
    with RankPool((2,), timedelta(seconds=3), come_late) as own:
        assert own.run(exchange, 2, 0) == [0, 1]
        began = time.monotonic()
        with pytest.raises(RankDiedError) as caught:
            own.run(stall, 2, 1)
        assert time.monotonic() - began < 40
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("rank 0: ") and lines[-1].startswith("rank 1 did not answer within ")


class Arrive:
    """What a pool calls on entering: ranks leave a file behind, and the last one does something else."""

    def __init__(self, folder, ranks, last):
        self.folder, self.ranks, self.last = folder, ranks, last

    def __call__(self, rank):
        Path(self.folder, str(rank)).touch()
        if rank == self.ranks - 1:
            self.last()


def sleep_for_long():
    time.sleep(600)


def leave():
    os._exit(9)


def fail():
    raise OSError("cannot enter namespace 7")


def wait_for(files):
    deadline = time.monotonic() + 120
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_rank_that_hangs_before_the_rendezvous_is_named(tmp_path):
    with RankPool((1, WORLD), enter=Arrive(tmp_path, WORLD, sleep_for_long)) as own:
        wait_for([tmp_path / str(rank) for rank in range(WORLD)])
        own.start_timeout = timedelta(seconds=time.monotonic() - own._started + 1)
        with pytest.raises(RankDiedError) as caught:
            own.run(exchange, WORLD, 0)
    (line,) = str(caught.value).splitlines()  # the others only wait for it
    assert line.startswith("rank 2 did not answer within ")
    assert line.endswith(" s: it was in `enter`, before the rendezvous")


@pytest.mark.parametrize(
    ("does", "message"),
    [
        pytest.param(
            leave,
            "rank 0 died (exit code 9): it was in `enter`, before the rendezvous",
            marks=pytest.mark.slow,
        ),
        (fail, "rank 0: OSError: cannot enter namespace 7"),
    ],
)
def test_a_rank_that_fails_in_enter_is_named_with_its_error(tmp_path, does, message):
    with RankPool((1,), enter=Arrive(tmp_path, 1, does)) as own, pytest.raises(RankDiedError) as caught:
        own.run(exchange, 1, 0)
    assert str(caught.value) == message


@pytest.mark.slow
def test_a_rank_that_dies_while_it_imports_is_named(monkeypatch):
    module = types.ModuleType("only_here")  # the rank has no such module to load it from
    module.enter = types.FunctionType(leave.__code__, {}, "enter")
    module.enter.__module__, module.enter.__qualname__ = "only_here", "enter"
    monkeypatch.setitem(sys.modules, "only_here", module)
    with RankPool((1,), enter=module.enter) as own, pytest.raises(RankDiedError) as caught:
        own.run(exchange, 1, 0)
    assert str(caught.value) == "rank 0 died (exit code 1): it was importing its modules"


class SlowToRead:
    """An argument that takes for ever to unpickle, as one does whose module hangs while it is imported."""

    def __reduce__(self):
        return time.sleep, (600,)


@pytest.mark.slow
def test_a_task_that_is_never_read_is_an_error_and_a_long_one_is_not():
    with RankPool((1,), timedelta(seconds=1)) as own:
        assert own.run(exchange, 1, 5) == [5]
        own.start_timeout = timedelta(seconds=1)
        assert own.run(nap, 1, 1.3) == [1.3]  # work has no deadline
        with pytest.raises(
            RankDiedError, match=r"^rank 0 did not answer within .* s: it was reading its task$"
        ):
            own.run(exchange, 1, SlowToRead())


def nap(communicators, seconds):
    time.sleep(seconds)
    return seconds


def test_ranks_that_torchrun_never_started_are_reported_within_the_timeout(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    message = (
        rf"^rank 1 has not reached stage joining at 127.0.0.1:{port} within 1[0-9.]* s: it was never seen$"
    )
    with pytest.raises(RankDiedError, match=message), from_environment(timedelta(seconds=1)):
        pass


def test_a_world_size_the_pool_was_not_started_for(pool):
    with pytest.raises(ValueError, match=r"not \(7, 1, 1\)"):
        pool.run(exchange, 7, 0)


@pytest.mark.parametrize("mesh", [0, (0, 1), (4, 3), (4, 1, 3), (4, 1, 0), (4, 2, 2), (4, 1, 2, 1)])
def test_a_pool_of_no_ranks_is_refused_before_it_starts(mesh):
    with pytest.raises(ValueError, match=r"must be 1 or more|do not divide|no replicas"):
        RankPool([mesh])


def test_one_rank_needs_no_process_group():
    alone = Communicator()
    values = torch.randn(3, 2)
    got = alone.all_to_all(values, [3], [3])
    assert torch.equal(got, values) and got.data_ptr() != values.data_ptr()
    assert Communicators.local().world_size == 1
    assert alone.all_reduce_bytes(values) == 0
    assert Communicator.all_reduce_bytes(types.SimpleNamespace(world_size=4), values) == 2 * 24 * 3 // 4


def test_a_pool_closes_when_only_some_ranks_have_worked():
    with RankPool((1, 2)) as pool:
        assert len(pool.run(exchange, 1, 0)) == 1
    assert not any(process.is_alive() for process in pool.processes)


def test_replicas_that_do_not_divide_the_environments_ranks_are_refused(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="2 replicas do not divide 1 ranks"), from_environment(replicas=2):
        pass


@pytest.mark.slow
def test_torchrun_starts_ranks(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import sys, torch\n"
        "from tritonrec.distributed import from_environment\n"
        "with from_environment() as c:\n"
        "    total = c.reduce.all_reduce(torch.tensor([c.rank + 1]), 's').item()\n"
        "    sys.stdout.write(f'sum {total}\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 3") == 2


def test_ranks_of_one_machine_compute_on_one_thread_each(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    with launch.one_thread_each():
        assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "1"
        assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert os.environ["OMP_NUM_THREADS"] == "7" and "MKL_NUM_THREADS" not in os.environ


def test_threads_that_start_ranks_put_the_environment_back_as_it_was(monkeypatch):
    """Each would keep what it finds while another one has the environment of ranks."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    inside, second_inside, left = (threading.Event() for _ in range(3))

    def second():
        inside.wait(60)
        with launch.one_thread_each():
            second_inside.set()
            left.wait(60)

    thread = threading.Thread(target=second)
    thread.start()
    with launch.one_thread_each():
        inside.set()
        second_inside.wait(0.2)  # it comes in now, where it does not wait
    left.set()
    thread.join(60)
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_exact_sum_error_is_public():
    assert issubclass(ExactSumError, ArithmeticError)


def test_a_process_that_ends_within_two_seconds_is_not_killed():
    process = types.SimpleNamespace(alive=True, killed=False)

    def join(timeout=None):
        process.alive = process.alive and (timeout is None or timeout < 1)

    def kill():
        process.killed = True

    process.join, process.kill, process.is_alive = join, kill, lambda: process.alive
    launch.join_or_kill([process])
    assert not process.killed and not process.alive


def test_a_restart_ends_the_processes_before_it():
    with RankPool([1]) as pool:
        before = [*pool.processes]
        pool.restart()
        assert not any(process.is_alive() for process in before)
        assert all(process.is_alive() for process in pool.processes)


@pytest.mark.parametrize("fails", [False, True])
def test_the_groups_of_an_environment_are_destroyed_at_the_end(monkeypatch, fails):
    log = []
    watch = Watch(None, 1, 2, timedelta(seconds=1))
    monkeypatch.setattr(watch, "fail", log.append)
    monkeypatch.setattr(watch, "close", lambda: log.append("closed"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(join, "join_environment", lambda timeout: log.append("joined") or watch)
    monkeypatch.setattr(Communicators, "over", lambda *given, **named: types.SimpleNamespace(watch=watch))
    monkeypatch.setattr(join.dist, "destroy_process_group", lambda: log.append("destroyed"))
    error = KeyError("of the work")
    with pytest.raises(KeyError) if fails else nullcontext(), from_environment():
        if fails:
            raise error
    assert log == ["joined", *[error] * fails, "closed", "destroyed"]


@pytest.mark.parametrize("phase", [launch.READING, launch.WORKING])
def test_work_may_take_longer_than_the_start(phase):
    """An answer comes when the time of the start is long over."""
    pool, (here, there), (ended, alive) = RankPool.__new__(RankPool), Pipe(), Pipe()
    process = types.SimpleNamespace(sentinel=ended, is_alive=lambda: True)
    pool._connections, pool.processes, pool._store = [here], [process], None
    pool.start_timeout = pool.timeout = timedelta(seconds=1)
    answer = threading.Timer(0.1, there.send, [("ok", 7)])
    answer.start()
    if phase == launch.WORKING:
        assert pool._collect(range(1), phase, time.monotonic() - 100) == [7]
    else:
        with pytest.raises(
            RankDiedError, match=r"rank 0 did not answer within 100.\d s: it was reading its task"
        ):
            pool._collect(range(1), phase, time.monotonic() - 100)
    answer.join()
    for each in (here, there, ended, alive):
        each.close()


@pytest.mark.skipif(sys.platform != "linux", reason="a signal of Linux")
def test_the_kernel_ends_a_process_with_its_parent():
    libc, found = ctypes.CDLL(None), ctypes.c_int()
    try:
        end_with_parent(os.getppid())
        libc.prctl(2, ctypes.byref(found))  # PR_GET_PDEATHSIG
    finally:
        libc.prctl(1, 0)
    assert found.value == signal.SIGKILL


@pytest.mark.parametrize(("code", "how"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "SIGKILL")])
def test_how_a_process_has_ended_is_said_by_its_code_or_signal(code, how):
    assert launch.how_it_ended(types.SimpleNamespace(join=lambda timeout: None, exitcode=code)) == how


def test_every_rank_is_told_of_its_own_task():
    pool, pipes = RankPool.__new__(RankPool), [Pipe() for _ in range(2)]
    pool._lifelines, pool._tasks = [here for here, _ in pipes], [7, 9]
    pool.request_stop()
    assert [there.recv_bytes() for _, there in pipes] == [b"7", b"9"]
    for each in (end for pipe in pipes for end in pipe):
        each.close()


@pytest.mark.parametrize("world_size", [2, 3, 7])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_value_of_a_sum_is_that_of_all_ranks_together(world_size, sign):
    group = Communicator()
    group.world_size = world_size
    most = (2**63 - 1) // world_size
    group._check_overflow(torch.tensor([5, sign * most]), "a")
    with pytest.raises(ExactSumError, match=r"a\[1\]"):
        group._check_overflow(torch.tensor([5, sign * (most + 1)]), "a")


def test_a_wish_to_stop_is_of_its_task_alone(monkeypatch):
    """Drawn wishes, before their task and after it, and signals: as a list of tasks that are to stop says."""
    handlers, killed, draw = {}, [], random.Random(4)
    monkeypatch.setattr(
        rank_process.signal, "signal", lambda number, handler: handlers.update({number: handler})
    )
    monkeypatch.setattr(rank_process.os, "kill", lambda *given: killed.append(given))
    stop = StopRequests()
    stop.install_signal_handlers()
    for task in range(1, 60):
        early, late, old, signals = (draw.random() < 0.4 for _ in range(4))
        if early:
            stop.request(task)
        stop.begin_task()
        assert stop.event.is_set() == early, task
        if old:
            stop.request(task - 1)
        if late:
            stop.request(task)
        assert stop.event.is_set() == (early or late), task
        if signals:
            handlers[signal.SIGTERM](signal.SIGTERM, None)
            assert stop.event.wait(10) and not killed  # the first one of this task
    for handler in [handlers[signal.SIGINT]] * (1 if signals else 2):
        handler(signal.SIGINT, None)
    assert killed == [(os.getpid(), signal.SIGINT)]


class OwnError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo] Timed out waiting 3000ms for recv"), True),
        (dist.DistError("failed to recv, got 0 bytes. Connection was likely closed."), True),
        (RankDiedError("rank 1 has not reached stage route(3)"), True),
        (RuntimeError("shapes differ"), False),
        (OSError("connection to the shop timed out"), False),
        (ValueError("timeout must be above 0"), False),
        (OwnError("no connection to the shop"), False),
    ],
)
def test_an_error_of_the_ranks_own_is_blamed_on_nobody_else(error, lost):
    assert is_lost(error) == lost
    caused = ValueError("outside")
    caused.__cause__ = error
    assert is_lost(caused) == isinstance(error, RankDiedError)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_groups_of_a_pool_of_several_meshes_share_the_thread_that_moves_messages():
    def added(kind):
        before = len(os.listdir("/proc/self/task"))
        groups = [kind(dist.HashStore(), 0, 1, timedelta(seconds=5)) for _ in range(5)]
        return len(os.listdir("/proc/self/task")) - before, groups

    plain = dist.distributed_c10d.ProcessGroupGloo
    alone, _kept = added(plain)
    with rank_process._one_device():
        shared, _too = added(dist.distributed_c10d.ProcessGroupGloo)
    assert shared <= alone - 5  # one for each group less
    assert dist.distributed_c10d.ProcessGroupGloo is plain


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Connection closed by peer [::1]", r"has fewer batches.* says: Connection closed by peer"),
        ("out has another size", r"^out has another size$"),
    ],
)
def test_a_loop_without_a_watch_says_why_an_exchange_failed(text, says):
    """Own loops give modules a process group, where the backend's error alone tells of uneven loaders."""

    def fails():
        raise RuntimeError(text)

    with pytest.raises(RuntimeError, match=says):
        Communicator()._collective(fails)
