"""Seconds from the death of a rank to the next result of training, in the ways to go on.

    python ci/benchmarks/measure_elastic.py [--json FILE] [--ranks 3] [--rounds 5]

In the middle of a step rank 1 is killed by SIGKILL, and the same program goes on:

    copy         `run_elastic` with one rank less, from the memory of its neighbour
    checkpoint   `run_elastic` with one rank less, from the newest checkpoint
    restart      ``torchrun --max-restarts``: one agent starts all ranks anew, from the newest checkpoint;
                 with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, since the store that attempts share has the
                 addresses of ranks that have ended (torch 2.13)

In the first two each rank has an agent of torchrun over a c10d rendezvous. Copies and checkpoints are made
after the same steps. The ways take turns. The first result after the death is compared, in all bits, with
that of a run of one rank; otherwise the measurement ends with an error.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import torch.distributed as dist
from frame import options_of, record

from tritonrec.distributed import Communicators, from_environment
from tritonrec.harness.job import Job
from tritonrec.pipeline import Trainer, Window, WindowConfig
from tritonrec.resilience import PeerCopies, run_elastic

WAYS = ("copy", "checkpoint", "restart")
EVERY, AT = 10, 15
"""Steps between copies and checkpoints; the step in which the rank dies."""
LIMIT = 180.0
JOB = Job("zipf:users=2000,items=20000,seed=1", batch_size=64, max_seq_len=20)


def work(communicators: Communicators, way: str, folder: Path, copies: PeerCopies) -> None:
    """Train on a rank until a step after `AT`, and note when its result is there."""
    killed, after = folder / "killed", folder / "after"
    again = killed.exists()
    loader = JOB.loader(communicators.rank, communicators.world_size)
    model, tables, optimizer = JOB.build("adam")
    with ExitStack() as stack:
        trainer = stack.enter_context(
            Trainer(model, tables, optimizer, communicators, "nestpipe", WindowConfig(2))
        )
        saver = stack.enter_context(trainer.saver(folder / "checkpoints")) if way != "copy" else None
        if communicators.rank == 1 and not again:

            def die(window: Window) -> None:
                if window.step == AT:
                    killed.write_text(str(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)

            trainer.program.before("compute", die)
        copies.restore(trainer, folder / "checkpoints")
        while trainer.next_step <= AT + EVERY:
            part = range(trainer.next_step, trainer.next_step + EVERY)
            for result in trainer.run(loader.batch(step) for step in part):
                if communicators.rank == 0 and again:
                    found = (time.time(), result.step, result.loss.hex(), communicators.world_size)
                    temporary = folder / f"of step {result.step}"
                    temporary.write_text(json.dumps(found))
                    with suppress(FileExistsError):
                        os.link(temporary, after)
            if saver is None:
                copies.keep(trainer)
            else:
                saver.save(trainer.next_step)
                saver.wait()


def worker(way: str, folder: Path) -> None:
    """The process of a rank."""
    copies = PeerCopies()
    if way == "restart":
        with from_environment() as communicators:
            work(communicators, way, folder, copies)
    else:
        run_elastic(lambda communicators: work(communicators, way, folder, copies))


def measure(way: str, ranks: int) -> tuple[float, int, str, int]:
    """Seconds from death to result; the step, loss and number of ranks of that."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # any agent may be lost
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    if way == "restart":
        agents, options = 1, ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=3"]
    else:
        agents, options = ranks, [
            f"--nnodes={ranks}", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=elastic",
            f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-conf=is_host=false",
        ]  # fmt: skip
    command = [*torchrun, *options, __file__, "--worker", way]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if way == "restart":
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with (folder / "log").open("w") as log:
            processes = [
                subprocess.Popen(
                    [*command, scratch], env=variables, stdout=log, stderr=log, start_new_session=True
                )
                for _ in range(agents)
            ]
        deadline = time.monotonic() + LIMIT
        try:
            while not (folder / "after").exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{way}: no result in {LIMIT:g} s\n{(folder / 'log').read_text()[-4000:]}"
                    )
                time.sleep(0.05)
        finally:
            for agent in processes:
                with suppress(ProcessLookupError):
                    os.killpg(agent.pid, signal.SIGTERM)
            for agent in processes:
                with suppress(subprocess.TimeoutExpired):
                    agent.wait(10)
                with suppress(ProcessLookupError):
                    os.killpg(agent.pid, signal.SIGKILL)
        moment, step, loss, world_size = json.loads((folder / "after").read_text())
        return moment - float((folder / "killed").read_text()), step, loss, world_size


def losses_alone() -> dict[int, str]:
    """By step the loss of a run of one rank without a loss of ranks."""
    loader = JOB.loader()
    model, tables, optimizer = JOB.build("adam")
    with Trainer(model, tables, optimizer, Communicators.local(), "nestpipe", WindowConfig(2)) as trainer:
        return {each.step: each.loss.hex() for each in trainer.run(map(loader.batch, range(AT + 1)))}


def main() -> None:
    worker_of = {"nargs": 2, "metavar": ("WAY", "FOLDER"), "help": argparse.SUPPRESS}
    given = options_of(__doc__, ranks=3, rounds=5, worker=worker_of)
    if given.worker:
        worker(given.worker[0], Path(given.worker[1]))
        return
    expected = losses_alone()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(given.rounds):
        for way in WAYS:
            took, step, loss, world_size = measure(way, given.ranks)
            if loss != expected[step] or world_size != given.ranks - (way != "restart"):
                raise SystemExit(f"{way}: step {step} of {world_size} ranks has another loss, or other ranks")
            seconds[way].append(took)
            print(f"{way:12} {took:6.2f} s to step {step} on {world_size} ranks", flush=True)
        rows = {way: {"median": statistics.median(each), "all": each} for way, each in seconds.items()}
        record(given, seconds=rows)  # after each round: a run may be ended early
    restart = rows["restart"]["median"]
    for way, row in rows.items():
        print(f"{way:12} {row['median']:6.2f} s, {row['median'] / restart:.2f} of restart's")


if __name__ == "__main__":
    main()
