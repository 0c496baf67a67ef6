"""Promise: a process knows its rank by the variables of torchrun, SLURM and MPI; a doubt is an error."""

import os
import re
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from tritonrec.distributed import RankDiedError, Watch, from_environment, join
from tritonrec.distributed.environment import LAUNCHERS, Here, check_address, first_machine, rank_here, settle
from tritonrec.distributed.stores import serve_store
from tritonrec.harness.cli import app
from tritonrec.resilience import run_elastic

pytestmark = pytest.mark.multi_rank

SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "71"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "prterun-7@1"}
MASTER = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"}


@pytest.fixture
def alone(monkeypatch):
    """The environment of a process that nobody has started as a rank."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI", "MV2_", "MPI_", "FLUX_", "MASTER_", "LOCAL_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    "given",
    {
        "torchrun": {"RANK": "2", "WORLD_SIZE": "4"},
        "srun": SLURM,
        "a step of fewer ranks": {**SLURM, "SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "4"},
        "Open MPI": OPEN_MPI,
        "mpirun under sbatch": {**OPEN_MPI, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        "torchrun under srun": {"RANK": "2", "WORLD_SIZE": "4", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
        "MVAPICH": {"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "4"},
        "MPICH": {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2"},
        "Flux": {"FLUX_TASK_RANK": "2", "FLUX_JOB_SIZE": "4"},
        "torchrun's agents, one a task": {
            "RANK": "2", "WORLD_SIZE": "4", **SLURM, "SLURM_PROCID": "0", "TORCHELASTIC_RUN_ID": "7"
        },
        "srun with PMIx": {"PMIX_RANK": "2", **SLURM},
    }.values(),
)  # fmt: skip
def test_a_rank_is_known_by_its_launchers_variables(given):
    found = settle({**given, **MASTER})
    assert (found.rank, found.world_size) == (2, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "x"}, "WORLD_SIZE='x' must be a whole number, 1 or more"),
        ({"RANK": "0", "WORLD_SIZE": "2.0"}, "WORLD_SIZE='2.0' must be"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0' must be"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK='' must be a whole number, 0 or more"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1' must be"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set and RANK is not"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE='x' must be"),
        (
            {"RANK": "0", "WORLD_SIZE": "4", **SLURM, **MASTER},
            "RANK=0 and SLURM_PROCID=2 disagree, of WORLD_SIZE=4 and SLURM_NTASKS=4: two processes may",
        ),
        ({**OPEN_MPI, "PMI_RANK": "1", "PMI_SIZE": "4"}, "OMPI_COMM_WORLD_RANK=2 and PMI_RANK=1 disagree"),
        ({"RANK": "1"}, "RANK=1 is set and WORLD_SIZE is not"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "LOCAL_RANK=1 does not fit RANK=0"),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK=2 does not fit RANK=3 of WORLD_SIZE=4",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not: set it to rank 0's machine"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "has MASTER_ADDR and no MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", **MASTER, "MASTER_PORT": "70000"}, "MASTER_PORT='70000' must be"),
        ({"SLURM_PROCID": "2"}, "SLURM_PROCID=2 is set and SLURM_STEP_NUM_TASKS or SLURM_NTASKS"),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "many"}, "SLURM_NTASKS='many' must be"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1 is set and PMIX_SIZE is not"),
        ({"PALS_RANKID": "1"}, "PALS_RANKID=1 is set and PMI_SIZE is not"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE=2 is set and PMI_RANK is not, so this process's rank is unknown"),
        ({"LOCAL_RANK": "1", "NODE_RANK": "1"}, "LOCAL_RANK=1 is set and RANK is not, so this process's"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS=2 is set and SLURM_PROCID is not"),
        (OPEN_MPI, "Open MPI started rank 2 of 4, and its variables do not say where rank 0 is: set MASTER_"),
        ({**SLURM, "SLURM_NODELIST": "[", "SLURM_NNODES": "2"}, "names none"),
    ],
)
def test_variables_that_do_not_fit_together_are_one_error(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        settle(dict(given))


@pytest.mark.parametrize(
    "given", [{}, {"WORLD_SIZE": "1"}, {"SLURM_NTASKS": "4"}, {"PMI_SIZE": "1"}, {"LOCAL_RANK": "0"}]
)
def test_a_process_that_was_started_alone_is_alone(given):
    assert settle(given)[:2] == (0, 1) and "RANK" not in given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"WORLD_SIZE": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "2"},
            r"SLURM has started 4 \(SLURM_PROCID=2\)",
        ),
        (
            {"WORLD_SIZE": "1", "RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
            "Open MPI has started 2",
        ),
    ],
)
def test_a_process_that_is_told_to_be_alone_hears_of_others(given, message):
    with pytest.warns(UserWarning, match=message):
        assert rank_here(given).world_size == 1


def test_every_launcher_has_variables_of_its_own():
    assert len({each[:3] for each in LAUNCHERS}) == len(LAUNCHERS)
    for launcher in LAUNCHERS:
        given = {launcher.rank: "1", launcher.size: "3"}
        assert rank_here(given) == (1, 3, launcher.name, None)
        if launcher.local_rank:
            assert rank_here({**given, launcher.local_rank: "0"}).local_rank == 0


def test_slurm_says_where_the_ranks_meet():
    given = {**SLURM, "SLURM_NODELIST": "gpu-[03-07,9]-ib,other", "SLURM_NNODES": "6", "SLURM_STEP_ID": "0"}
    settle(given)
    assert (given["RANK"], given["WORLD_SIZE"], given["MASTER_ADDR"]) == ("2", "4", "gpu-03-ib")
    others = {**given, "SLURM_PROCID": "0"}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del others[name]
    settle(others)
    assert others["MASTER_PORT"] == given["MASTER_PORT"] and 20_000 <= int(given["MASTER_PORT"]) < 30_000
    later = {**SLURM, "SLURM_NODELIST": "a", "SLURM_STEP_ID": "1"}
    assert settle(later) and later["MASTER_PORT"] != given["MASTER_PORT"]  # beside it
    here = {**SLURM, "SLURM_NODELIST": "node1", "SLURM_NNODES": "1"}
    assert settle(here) and here["MASTER_ADDR"] == "127.0.0.1"
    here = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}
    assert settle(here) and here["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("listed", "first"),
    [("a", "a"), ("a-1,b", "a-1"), ("n[1-4]", "n1"), ("n[07,9],m", "n07"), ("r[1-2].x,y", "r1.x")],
)
def test_the_first_machine_of_slurms_list(listed, first):
    assert first_machine(listed) == first


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.parametrize("run", [lambda: from_environment().__enter__(), lambda: run_elastic(print)])
def test_four_processes_of_srun_are_not_four_of_rank_0(alone, run):
    for name, value in {**SLURM, "SLURM_NNODES": "2", "SLURM_NODELIST": "no-such-machine.invalid"}.items():
        alone.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        alone.setenv(name, "")  # so that what `settle` sets is undone
        alone.delenv(name)
    with pytest.raises(ValueError, match=r"MASTER_ADDR=no-such-machine.invalid is no machine"):
        run()


def test_a_look_up_without_an_answer_has_a_limit(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **rest: threading.Event().wait())
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"MASTER_ADDR=nowhere is no machine .*no answer within 0\.1 s"):
        check_address("nowhere", timedelta(seconds=0.1))
    assert time.monotonic() - began < 30


@pytest.mark.if_changed
def test_rank_0_that_never_listens_is_named_in_time_and_no_thread_stays(alone):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }.items():
        alone.setenv(name, str(value))
    before = threading.enumerate()
    with pytest.raises(RankDiedError, match=rf"rank 0 did not answer at 127.0.0.1:{port} .*: nobody listens"):
        from_environment(timedelta(seconds=1)).__enter__()
    assert {*threading.enumerate()} <= {*before}


def test_a_port_in_use_is_said_before_any_wait(alone):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
            alone.setenv(name, value)
        alone.setenv("MASTER_PORT", str(port))
        with (
            pytest.raises(ValueError, match=f"^port {port} of 127.0.0.1 is in use") as caught,
            from_environment(timedelta(seconds=30)),
        ):
            pass
    assert "give MASTER_PORT another one" in str(caught.value) and not dist.is_initialized()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Here(1, 2), "another process is rank 1 of these 2 too"),
        (Here(2, 3), "WORLD_SIZE=3 here and 2 at another rank"),
    ],
)
def test_processes_that_do_not_fit_together_are_told_when_they_come(other, message):
    store = dist.HashStore()
    join._come(store, Here(0, 2))
    join._come(store, Here(1, 2))
    with pytest.raises(ValueError, match=message):
        join._come(store, other)


def listening(port):
    """Addresses at which this machine listens on a port, from the kernel's tables."""
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as lines:
            for line in list(lines)[1:]:
                local, state = line.split()[1], line.split()[3]
                address, number = local.split(":")
                if state == "0A" and int(number, 16) == port:
                    found.add(address)
    return found


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="the kernel's table of connections")
def test_a_store_of_local_ranks_listens_on_the_loopback_interface_only():
    port = free_port()
    for store in (serve_store("127.0.0.1"), serve_store("127.0.0.1", port)):
        found = listening(store.port)
        assert found and found <= {"0100007F", "00000000000000000000000001000000"}
        client = dist.TCPStore("127.0.0.1", store.port, None, False, wait_for_workers=False)
        client.set("a", "b")
        assert store.get("a") == b"b"
    store = serve_store(None)
    assert not listening(store.port) & {"0100007F"}
    dist.TCPStore("127.0.0.1", store.port, None, False, wait_for_workers=False).set("a", "b")
    assert store.get("a") == b"b"


LOCAL = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "127.0.0.5": "127.0.0.5", "::1": "::1"}
"""Addresses of local ranks, and where their store listens."""


@pytest.mark.parametrize("address", [*LOCAL, "192.0.2.1", socket.gethostname()])
def test_groups_of_local_ranks_are_on_the_loopback_interface(alone, address):
    joined, names = [], []
    given = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": address,
        "MASTER_PORT": "1",
        "GLOO_SOCKET_IFNAME": "",
    }
    for variable, value in given.items():
        alone.setenv(variable, value)
    alone.delenv("GLOO_SOCKET_IFNAME")
    alone.setattr(join, "serve_store", lambda *given: given)
    alone.setattr(join, "loopback_interface", lambda: "lo")
    alone.setattr(join, "_come", lambda *given: None)
    alone.setattr(join, "connect_to", lambda *given: given)
    alone.setattr(join.dist, "PrefixStore", lambda name, store: names.append(name) or store)
    alone.setattr(join, "Watch", lambda *given, **rest: Watch(None, 0, 2, timedelta(seconds=5)))
    alone.setattr(
        join.dist, "init_process_group",
        lambda *given, **rest: joined.append((rest["store"][0], os.environ.get("GLOO_SOCKET_IFNAME"))),
    )  # fmt: skip
    for _ in range(2):
        join.join_environment(timedelta(seconds=5))
    assert joined == [(LOCAL.get(address), "lo" if address in LOCAL else None)] * 2  # None: all interfaces
    assert names[0] == names[1] != names[2] == names[3]  # a store may outlive the groups of a process


@pytest.mark.parametrize("given", [{"WORLD_SIZE": "x", "RANK": "0"}, {"WORLD_SIZE": "3"}, {"PMIX_RANK": "1"}])
def test_the_command_says_what_is_wrong_with_the_variables(alone, given):
    for name, value in given.items():
        alone.setenv(name, value)
    result = CliRunner().invoke(app, ["train", "--data", "zipf:users=20,items=30", "--steps", "1"])
    words = " ".join(result.output.split())
    assert result.exit_code == 2 and next(iter(given)) in words and "Traceback" not in words


def test_a_process_that_has_joined_is_told_so(alone):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", **MASTER}.items():
        alone.setenv(name, value)
    alone.setattr(join.dist, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="has joined a default process group already"):
        join.join_environment(timedelta(seconds=5))
