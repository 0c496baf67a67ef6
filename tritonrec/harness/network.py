"""Network namespaces joined by rate-limited links, and their removal whatever happens.

    rank 0: eth0 10.77.0.1 --- node0 |        |
    rank 1: eth0 10.77.0.2 --- node1 | bridge |  in a hub namespace of its own
    rank 2: eth0 10.77.0.3 --- node2 |        |

With fewer nodes than ranks as many consecutive ranks share a namespace and its link, as those of a machine
do: what they send each other passes no link.

Both ends of every link carry a token bucket (``tc tbf``), so a rank sends and receives at the rate and no
faster. Nothing is created in the namespace of the machine itself. A namespace's name tells the process that
owns it. Three ways lead to its removal: the context manager, an exit handler, and a watchdog process that
acts when its owner is gone, however it went; `clean` removes what even a watchdog left.

This file imports the standard library alone: the watchdog is this file run as a program.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

PREFIX = "tritonrec-lab"
INTERFACE = "eth0"
MAX_RANKS = 200
"""Addresses are 10.77.0.1 and on."""

QUEUE_BYTES = 64_000_000
"""A full queue would drop packets, and a retransmission is no bandwidth limit."""

CLONE_NEWNET = 0x40000000

Command = tuple[str, ...]
Runner = Callable[[Command], str]
"""Runs a command and returns its output; raises `LabError` when it fails."""


class LabError(RuntimeError):
    """The lab cannot be built here, or its settings make no lab."""


@dataclass(frozen=True)
class Network:
    """A lab as data: its commands.

    Args:
        ranks: that are joined.
        rate: Mbit/s of every link, each way.
        owner: process whose lab it is.
        nodes: namespaces, of as many ranks each; 0: one for each rank.
    """

    ranks: int
    rate: float
    owner: int
    nodes: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= MAX_RANKS:
            raise LabError(f"a lab joins 2 to {MAX_RANKS} ranks, got {self.ranks}")
        if self.nodes < 0 or self.nodes == 1 or self.ranks % (self.nodes or self.ranks):
            raise LabError(
                f"a lab has 2 nodes or more, which divide its {self.ranks} ranks, got {self.nodes}"
            )
        if not 0.1 <= self.rate <= 100_000:
            raise LabError(f"the rate of a link is 0.1 to 100000 Mbit/s, got {self.rate:g}")

    @property
    def hub(self) -> str:
        """The namespace of the bridge."""
        return f"{PREFIX}-{self.owner}-hub"

    @property
    def links(self) -> int:
        """How many namespaces of ranks there are."""
        return self.nodes or self.ranks

    def namespace(self, node: int) -> str:
        """The namespace of a node."""
        return f"{PREFIX}-{self.owner}-{node}"

    def namespace_of(self, rank: int) -> str:
        """The namespace that a rank is in."""
        return self.namespace(rank * self.links // self.ranks)

    @property
    def namespaces(self) -> list[str]:
        """All of them, in the order in which they are made."""
        return [self.hub, *(self.namespace(node) for node in range(self.links))]

    def setup(self) -> list[Command]:
        """Commands that build it, in order."""
        hub = self.hub
        commands: list[Command] = [
            ("ip", "netns", "add", hub),
            ("ip", "-n", hub, "link", "add", "bridge", "type", "bridge"),
            ("ip", "-n", hub, "link", "set", "bridge", "up"),
        ]
        for node in range(self.links):
            own, far = self.namespace(node), f"node{node}"
            peer = ("peer", "name", INTERFACE, "netns", own)
            commands += [
                ("ip", "netns", "add", own),
                ("ip", "-n", hub, "link", "add", far, "type", "veth", *peer),
                ("ip", "-n", hub, "link", "set", far, "master", "bridge", "up"),
                ("ip", "-n", own, "link", "set", "lo", "up"),
                ("ip", "-n", own, "addr", "add", f"10.77.0.{node + 1}/24", "dev", INTERFACE),
                ("ip", "-n", own, "link", "set", INTERFACE, "up"),
                self._limit(own, INTERFACE),
                self._limit(hub, far),
            ]
        return commands

    def _limit(self, namespace: str, device: str) -> Command:
        bits = round(self.rate * 1e6)
        # A bucket lets its size pass at once: half a millisecond of the rate, but a few packets.
        bucket = max(10_000, bits // 8 // 2000)
        limits = ("rate", f"{bits}bit", "burst", f"{bucket}b", "limit", f"{QUEUE_BYTES}b")
        return ("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limits)


def execute(command: Command) -> str:
    """Run a command of `ip` or `tc`."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise LabError(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def require_tools() -> None:
    """Raise `LabError` naming what a lab needs and this process lacks; nothing has been created then.

    Without root this command is run again, in this process, in namespaces of its user's: there it may make
    others, and they end with it.
    """
    missing = [f"the command {name!r} (package iproute2)" for name in ("ip", "tc") if not shutil.which(name)]
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    forbidden = "" if is_root or missing else why_no_user_namespace()
    if forbidden:
        missing.append(f"root, or namespaces of its user's, which this machine forbids ({forbidden})")
    if missing:
        raise LabError(f"a lab needs {', and '.join(missing)}; nothing was created")
    if not is_root:
        command = in_user_namespace([sys.executable, "-m", "tritonrec", *sys.argv[1:]])
        os.execvp(command[0], command)


def in_user_namespace(command: list[str]) -> list[str]:
    """The command that runs `command` as root of user, network and mount namespaces of its own."""
    # `ip netns` keeps its files below /run
    steps = 'mount -t tmpfs none /run && ip link set lo up && exec "$0" "$@"'
    return ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", steps, *command]


def why_no_user_namespace() -> str:
    """What forbids them; empty where they can be made."""
    try:
        done = subprocess.run(in_user_namespace(["true"]), capture_output=True, text=True)
    except OSError as error:
        return f"unshare of util-linux: {error.strerror}"
    return (done.stderr or done.stdout).strip().replace("\n", "; ") if done.returncode else ""


def existing(run: Runner = execute) -> list[str]:
    """Namespaces of labs, of any owner."""
    names = (line.split()[0] for line in run(("ip", "netns", "list")).splitlines() if line.strip())
    return [name for name in names if name.startswith(f"{PREFIX}-")]


def remove(namespaces: list[str], run: Runner = execute, kill: Callable[[int, int], None] = os.kill) -> None:
    """Kill what runs in these namespaces and delete them; one that fails does not spare the others."""
    failures = []
    for name in namespaces:
        try:
            for pid in map(int, run(("ip", "netns", "pids", name)).split()):
                if pid != os.getpid():
                    _kill(kill, pid)
            run(("ip", "netns", "delete", name))
        except LabError as error:
            failures.append(str(error))
    if failures:
        raise LabError("; ".join(failures))


def clean(run: Runner = execute, alive: Callable[[int], bool] | None = None) -> tuple[list[str], list[str]]:
    """Remove the namespaces whose owner is gone; returns those removed, and those of labs that still run."""
    is_alive = alive or _is_alive
    gone: list[str] = []
    kept: list[str] = []
    for name in existing(run):
        owner = name.removeprefix(f"{PREFIX}-").partition("-")[0]
        (kept if owner.isdigit() and is_alive(int(owner)) else gone).append(name)
    remove(gone, run)
    return gone, kept


@contextmanager
def built(network: Network, run: Runner = execute, watched: bool = True) -> Iterator[Network]:
    """Build a lab, and take it down again on the way out, also when building fails half way.

    Args:
        run: executes the commands.
        watched: start the watchdog, which needs the real commands.
    """
    made: list[str] = []

    def down() -> None:
        remove(made[::-1], run)
        made.clear()

    watchdog = _start_watchdog(network) if watched else None
    atexit.register(down)
    try:
        for command in network.setup():
            run(command)
            if command[:3] == ("ip", "netns", "add"):
                made.append(command[3])
        yield network
    finally:
        try:
            down()
        finally:
            atexit.unregister(down)
            if watchdog is not None:
                watchdog.communicate()  # closes its input: it finds nothing left to do, and ends


@dataclass(frozen=True)
class Enter:
    """Called in a rank's process: moves it into its namespace and points gloo at the link."""

    network: Network

    def __call__(self, rank: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        own = self.network.namespace_of(rank)
        place = os.open(f"/run/netns/{own}", os.O_RDONLY)
        try:
            if libc.setns(place, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {own}")
        finally:
            os.close(place)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def sent_bytes() -> int:
    """Bytes that this process's namespace has sent over its link, or over another of that name."""
    with open("/proc/self/net/dev") as file:
        fields = [line.split() for line in file]
    return next((int(each[9]) for each in fields if each[0] == f"{INTERFACE}:"), 0)


def _start_watchdog(network: Network) -> subprocess.Popen[bytes]:
    """A process in a session of its own: the signals that end the owner's do not reach it."""
    command = [sys.executable, "-I", __file__, *network.namespaces]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def watch(namespaces: list[str]) -> None:
    """Wait until standard input ends, as it does when the owner does; then remove what is left."""
    sys.stdin.buffer.read()
    left = set(existing())
    remove([name for name in namespaces if name in left])


def _is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def _kill(kill: Callable[[int, int], None], pid: int) -> None:
    with suppress(ProcessLookupError):
        kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    watch(sys.argv[1:])
