"""Promise: a lab touches nothing but namespaces of its own, and takes them down whatever happens."""

import io
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tritonrec.harness import network
from tritonrec.harness.cli import app
from tritonrec.harness.network import (
    LabError,
    Network,
    built,
    clean,
    existing,
    remove,
    require_tools,
    why_no_user_namespace,
)  # fmt: skip

GONE = 2**22 + 1
"""No process has this number: Linux counts to 2**22."""


class Machine:
    """Stands in for the commands: remembers them and the namespaces, and fails where it is told to."""

    def __init__(self, namespaces=(), fails=lambda command: False, pids=""):
        self.namespaces, self.fails, self.pids = list(namespaces), fails, pids
        self.commands = []

    def __call__(self, command):
        self.commands.append(command)
        if self.fails(command):
            raise LabError(f"{' '.join(command)} failed: injected")
        if command[:3] == ("ip", "netns", "add"):
            self.namespaces.append(command[3])
        elif command[:3] == ("ip", "netns", "delete"):
            self.namespaces.remove(command[3])
        elif command[:3] == ("ip", "netns", "pids"):
            return self.pids
        elif command[:3] == ("ip", "netns", "list"):
            return "".join(f"{name} (id: {at})\n" for at, name in enumerate(self.namespaces))
        return ""


def test_every_command_stays_in_a_namespace_of_the_lab():
    lab = Network(3, 100.0, owner=77)
    made = []
    for command in lab.setup():
        if command[:3] == ("ip", "netns", "add"):
            made.append(command[3])
        else:
            assert command[1] == "-n" and command[2] in made, command
            assert "netns" not in command or command[command.index("netns") + 1] in made
    assert made == lab.namespaces
    assert made == [f"tritonrec-lab-77-{part}" for part in ("hub", 0, 1, 2)]


def test_both_ends_of_every_link_are_limited():
    lab = Network(3, 12.5, owner=77)
    limited = {(c[2], c[c.index("dev") + 1]): c for c in lab.setup() if c[0] == "tc"}
    own = {(lab.namespace(rank), "eth0") for rank in range(3)}
    assert limited.keys() == own | {(lab.hub, f"node{node}") for node in range(3)}
    for command in limited.values():
        assert command[command.index("rate") + 1] == "12500000bit" and "tbf" in command
        assert int(command[command.index("burst") + 1].removesuffix("b")) >= 3028  # two packets pass at once
    addresses = [c[c.index("add") + 1] for c in lab.setup() if "addr" in c]
    assert addresses == ["10.77.0.1/24", "10.77.0.2/24", "10.77.0.3/24"]


def test_ranks_of_a_node_share_its_namespace_and_its_link():
    lab = Network(6, 100.0, owner=77, nodes=2)
    assert lab.namespaces == [f"tritonrec-lab-77-{part}" for part in ("hub", 0, 1)]
    assert [lab.namespace_of(rank)[-1] for rank in range(6)] == ["0", "0", "0", "1", "1", "1"]
    assert sum(command[0] == "tc" for command in lab.setup()) == 4
    for nodes in (1, 4, -2):
        with pytest.raises(LabError, match=f"2 nodes or more, which divide its 6 ranks, got {nodes}"):
            Network(6, 100.0, 77, nodes)


@pytest.mark.parametrize("step", range(len(Network(2, 100.0, 77).setup())))
def test_a_failure_half_way_leaves_nothing(step):
    lab = Network(2, 100.0, owner=77)
    broken = lab.setup()[step]
    machine = Machine(["someone-else"], fails=lambda command: command == broken)
    with pytest.raises(LabError, match="injected"), built(lab, machine, watched=False):
        raise AssertionError("built in spite of the failure")
    assert machine.namespaces == ["someone-else"]


@pytest.mark.parametrize("stuck", range(3))
@pytest.mark.parametrize("step", ["pids", "delete"])
def test_a_namespace_that_cannot_be_removed_spares_no_other(stuck, step):
    lab = Network(2, 100.0, owner=77)
    broken = ("ip", "netns", step, lab.namespaces[stuck])
    machine = Machine(fails=lambda command: command == broken)
    with pytest.raises(LabError, match=r"^ip netns .* failed: injected$"), built(lab, machine, watched=False):
        assert machine.namespaces == lab.namespaces
    assert machine.namespaces == [lab.namespaces[stuck]]
    with pytest.raises(LabError, match=r"failed: injected$"):
        remove([*lab.namespaces, lab.namespaces[stuck]], Machine(lab.namespaces, machine.fails))


def test_what_runs_inside_is_killed_but_not_the_caller():
    killed = []

    def kill(pid, number):
        killed.append((pid, number))
        if pid == 12:
            raise ProcessLookupError

    remove(["a"], Machine(["a"], pids=f"11\n12\n{os.getpid()}\n13\n"), kill)
    assert killed == [(11, signal.SIGKILL), (12, signal.SIGKILL), (13, signal.SIGKILL)]


def test_clean_removes_only_labs_whose_owner_is_gone():
    mine = f"tritonrec-lab-{os.getpid()}-0"
    dead = [f"tritonrec-lab-{GONE}-hub", f"tritonrec-lab-{GONE}-0"]
    machine = Machine(["someone-else", dead[0], mine, dead[1]])
    assert existing(machine) == [dead[0], mine, dead[1]]
    assert clean(machine) == (dead, [mine])
    assert machine.namespaces == ["someone-else", mine]


def test_the_watchdog_waits_for_its_owner_and_removes_what_is_left(monkeypatch):
    machine = Machine(["tritonrec-lab-7-hub", "tritonrec-lab-7-1", "tritonrec-lab-8-0"])
    read = []
    monkeypatch.setattr(network.sys, "stdin", SimpleNamespace(buffer=_Pipe(read, machine)))
    monkeypatch.setattr(network, "existing", lambda: existing(machine))
    monkeypatch.setattr(network, "remove", lambda names: remove(names, machine))
    network.watch(["tritonrec-lab-7-hub", "tritonrec-lab-7-0", "tritonrec-lab-7-1"])
    assert read == [0]  # no command before the pipe ended
    assert machine.namespaces == ["tritonrec-lab-8-0"]


class _Pipe(io.BytesIO):
    def __init__(self, read, machine):
        super().__init__()
        self._read, self._machine = read, machine

    def read(self, *args):
        self._read.append(len(self._machine.commands))
        return super().read(*args)


@pytest.mark.parametrize(
    ("user", "tools", "message"),
    [
        (1000, ("ip", "tc"), r"root, or namespaces of its user's, .* forbids \(not permitted\)"),
        (0, ("ip",), "the command 'tc'"),
        (0, ("tc",), "the command 'ip'"),
        (1000, (), "the command 'ip' .*, and the command 'tc'"),
    ],
)
def test_what_is_missing_is_named_and_nothing_created(monkeypatch, user, tools, message):
    monkeypatch.setattr(network.os, "geteuid", lambda: user)
    monkeypatch.setattr(network, "why_no_user_namespace", lambda: "not permitted")
    monkeypatch.setattr(network.shutil, "which", lambda name: name if name in tools else None)
    with pytest.raises(LabError, match=f"needs {message}.*nothing was created"):
        require_tools()
    monkeypatch.setattr(network.subprocess, "run", lambda *a, **k: pytest.fail("a command was run"))
    for arguments in (["lab"], ["lab", "--clean"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert "a lab needs" in result.output and "Traceback" not in result.output


def test_without_root_the_command_runs_again_in_namespaces_of_the_user(monkeypatch):
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network.shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(network, "why_no_user_namespace", lambda: "")
    monkeypatch.setattr(network.sys, "argv", ["tritonrec", "lab", "--rate", "50"])
    ran = []
    monkeypatch.setattr(network.os, "execvp", lambda *given: ran.append(given))
    require_tools()
    ((name, command),) = ran
    assert name == command[0] == "unshare"
    assert command[-6:] == [sys.executable, "-m", "tritonrec", "lab", "--rate", "50"]


@pytest.mark.if_changed
@pytest.mark.skipif(
    not shutil.which("tc") or bool(why_no_user_namespace()),
    reason="needs iproute2, and may make user namespaces",
)
def test_in_a_user_s_namespaces_a_lab_is_built_and_taken_down():
    program = """
import os
from tritonrec.harness.network import Network, built, existing
with built(Network(2, 100.0, os.getpid())):
    print(os.geteuid(), len(existing()))
print(len(existing()))
"""
    command = network.in_user_namespace([sys.executable, "-c", program])
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "3", "0"], done.stderr
