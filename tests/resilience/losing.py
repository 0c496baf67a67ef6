"""Ranks that torchrun could have started, of which some are killed at a chosen place."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

import torch

from tritonrec.checkpoint import writer
from tritonrec.distributed import Communicators
from tritonrec.distributed.fork_server import start_process
from tritonrec.distributed.launch import one_thread_each
from tritonrec.harness.job import Job
from tritonrec.harness.train.gather import state_digest
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import Trainer, Window, WindowConfig
from tritonrec.resilience import PeerCopies, peer_copies, run_elastic

STEPS = 8
JOB = Job(
    "zipf:users=60,items=200,seed=1", batch_size=8, max_seq_len=9, num_negatives=1, lr=0.05,
    sizes=HSTUConfig(dim=6, layers=1, heads=2, qk_dim=3, v_dim=3, max_seq_len=9),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A run of `world_size` ranks, some of which are lost.

    Args:
        victims: by rank the place of its death: "STAGE STEP", "save STEP", "keep STEP", "restore" or "meet";
            with "raises " before it for an error, with "stops " for SIGSTOP.
        copy_every, save_every: steps; 0: never. directory: of checkpoints.
    """

    world_size: int
    victims: dict[int, str]
    copy_every: int = 0
    save_every: int = 0
    directory: str = ""
    replicas: int = 1
    micro_batches: int = 2
    mode: str = "nestpipe"
    min_ranks: int = 1
    timeout: float = 20.0
    job: Job = JOB


@dataclass(frozen=True)
class Outcome:
    """Of a rank: loss by step, the digest of the state, and for each call ranks and first step."""

    losses: dict[int, str]
    digest: str
    calls: list[tuple[int, int]]


def rank_main(connection: multiprocessing.connection.Connection, case: Case, rank: int, port: int) -> None:
    """The process of a rank; sends its `Outcome`, or its error as a text."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(case.world_size), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    copies, calls, losses = PeerCopies(), [], {}
    how, place = _how(case.victims.get(rank, ""))

    def train(communicators: Communicators) -> str:
        act = how if len(calls) == (place == "restore") else None
        return _train(case, communicators, copies, calls, losses, act, place)

    try:
        digest = run_elastic(train, timedelta(seconds=case.timeout), case.replicas, case.min_ranks)
        connection.send(Outcome(losses, digest, calls))
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")


def _train(
    case: Case,
    communicators: Communicators,
    copies: PeerCopies,
    calls: list[tuple[int, int]],
    losses: dict[int, str],
    act: Callable[[], None] | None,
    place: str,
) -> str:
    loader = case.job.loader(communicators.rank, communicators.world_size)
    model, tables, optimizer = case.job.build("adam")
    config = WindowConfig(case.micro_batches)
    with ExitStack() as stack:
        trainer = stack.enter_context(Trainer(model, tables, optimizer, communicators, case.mode, config))
        saver = stack.enter_context(trainer.saver(case.directory)) if case.save_every else None
        if act is not None:
            _plant(trainer, act, place)
        start = copies.restore(trainer, case.directory or None)
        calls.append((communicators.world_size, start))
        for stop in range(start + 1, STEPS + 1):
            due = [every and stop % every == 0 for every in (case.copy_every, case.save_every)]
            if not any(due) and stop < STEPS:
                continue
            for result in trainer.run(loader.batch(step) for step in range(trainer.next_step, stop)):
                assert losses.setdefault(result.step, result.loss.hex()) == result.loss.hex()
            if due[0]:
                copies.keep(trainer)
            if due[1] and saver:
                saver.save(stop)
                saver.wait()
        return state_digest(communicators, tables, trainer.dense.tensors())


def _how(victim: str) -> tuple[Callable[[], None] | None, str]:
    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def fail() -> None:
        raise OSError("the disk of this rank is gone")

    kind, _, rest = victim.partition(" ")
    if kind in ("raises", "stops"):
        return {"raises": fail, "stops": stop}[kind], rest
    return (kill if victim else None), victim


def _plant(trainer: Trainer, act: Callable[[], None], place: str) -> None:
    """Call `act` at a place of this process."""
    name, _, at = place.partition(" ")
    if name == "restore":
        _before(peer_copies, "_redistribute", act)
    elif name == "keep":
        _before(peer_copies, "_pass_on", act, lambda *_: trainer.next_step == int(at))
    elif name == "save":
        _before(writer, "write_table", act, lambda write, *_: write.__self__.step == int(at))
    else:

        def before(window: Window) -> None:
            if window.step == int(at):
                act()

        trainer.program.before(name, before)


def _before(owner, name: str, act: Callable[[], None], where=lambda *_: True) -> None:
    function = getattr(owner, name)

    def acting(*arguments, **options):
        if where(*arguments):
            act()
        return function(*arguments, **options)

    setattr(owner, name, acting)


class Ranks:
    """The processes of a case; a context manager that ends all of them."""

    def __init__(self, case: Case):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.connections, self.processes = [], []
        for rank in range(case.world_size):
            here, there = multiprocessing.Pipe()
            with one_thread_each():  # as a pool's, so that the process that forks them is the same
                self.processes.append(start_process(f"rank {rank}", rank_main, (there,), case, rank, port))
            self.connections.append(here)

    def outcomes(self, seconds: float = 120.0) -> list[Outcome | str | None]:
        """By rank what it has sent; None for one that ended without a word, or has not ended."""
        found: list[Outcome | str | None] = []
        for connection in self.connections:
            try:
                found.append(connection.recv() if connection.poll(seconds) else None)
            except (EOFError, OSError):
                found.append(None)
        return found

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def undisturbed(job: Job) -> Outcome:
    """What a run of one rank without a loss gives."""
    with Ranks(Case(1, {}, job=job)) as ranks:
        (found,) = ranks.outcomes()
    assert isinstance(found, Outcome), found
    return found
