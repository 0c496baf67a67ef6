"""A rank that trains, in a process of its own or in a pool, and stops itself at a chosen place."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from tritonrec.checkpoint import writer
from tritonrec.distributed import Watch, from_environment
from tritonrec.harness.job import Job
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import Program, Trainer, Window, WindowConfig
from tritonrec.resilience import PeerCopies
from tritonrec.serving.live import Publisher

SIZES = HSTUConfig(dim=6, layers=1, heads=2, qk_dim=3, v_dim=4, max_seq_len=9)
JOB = Job(
    "zipf:users=60,items=200,seed=1", batch_size=8, max_seq_len=9, num_negatives=1, sizes=SIZES, lr=0.05
)


def stop_at(where: str, watch: Watch) -> None:
    """SIGSTOP this process: in the middle of a ``save``, or before ``compute`` of the fourth window."""

    def stop() -> None:
        reports = watch._number
        while watch._number < reports + 2:  # until it was seen there
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGSTOP)

    def stop_in_window(window: Window) -> None:
        if window.number == 3:
            stop()

    def die() -> None:
        os._exit(17)

    def fail() -> None:
        raise OSError("the disk of this rank is gone")

    if where == "save":
        write_table = writer.write_table

        def stopping(write, *arguments):
            if write.__self__.step == 4:
                stop()
            return write_table(write, *arguments)

        writer.write_table = stopping
    elif where in ("compute", "die", "fail"):
        before_compute({"compute": stop_in_window, "die": die, "fail": fail}[where])


def before_compute(function) -> None:
    """Every program made from now on calls `function` before stage ``compute``."""
    make = Program.__init__

    def made(program, *arguments, **options):
        make(program, *arguments, **options)
        program.before("compute", function)

    Program.__init__ = made


def work_by_hand(communicators, where, victim, checkpoint):
    """Two steps and a save; then `victim` stops, or is told to end, and the others go on with `where`."""
    loader = JOB.loader(communicators.rank, communicators.world_size)
    with Trainer(*JOB.build("adam"), communicators, "nestpipe", WindowConfig(2)) as trainer:
        for _result in trainer.run(loader.batch(step) for step in range(2)):
            pass
        trainer.save(checkpoint)
        publisher = Publisher(trainer, f"{checkpoint}/live", every=1) if where == "a publication" else None
        print(f"begun {time.time()}", flush=True)
        if communicators.rank == victim:
            os.kill(os.getpid(), signal.SIGTERM if "SIGTERM" in where else signal.SIGSTOP)
        with communicators.watch.doing(where):
            if where == "a save":
                trainer.save(checkpoint)
            elif publisher:
                with publisher:
                    publisher.publish()
            elif where == "a load":
                trainer.load(checkpoint)
            elif where.startswith("a copy"):
                PeerCopies().keep(trainer)
            elif where == "a restoration":
                PeerCopies().restore(trainer)
            elif where == "a trainer":
                Trainer(*JOB.build("adam"), communicators, "nestpipe", WindowConfig(2))
            elif where.startswith("a step"):
                list(trainer.run([loader.batch(2)]))
            else:
                trainer.evaluate(loader)


def work(communicators, where, victim, checkpoint, steps=1000):
    if where.startswith("a"):
        return work_by_hand(communicators, where, victim, checkpoint)
    if communicators.rank == victim:
        stop_at(where, communicators.watch)
    run = Run(JOB, "nestpipe", WindowConfig(2), steps=steps, checkpoint=checkpoint, save_every=4)
    return train(communicators, run, quiet=True)["step"]


def stop_when_joining(place):
    """SIGSTOP this process before ``dist.PLACE`` joins it with the others."""
    join = getattr(dist, place)

    def stop(*arguments, **options):
        os.kill(os.getpid(), signal.SIGSTOP)
        return join(*arguments, **options)

    setattr(dist, place, stop)


def main(where: str, victim: str, timeout: str, checkpoint: str) -> None:
    if where.startswith("join"):
        print(f"begun {time.time()}", flush=True)
        if os.environ["RANK"] == victim:
            stop_when_joining(where.partition(" ")[2])
    try:
        with from_environment(timedelta(seconds=float(timeout))) as communicators:
            if not where.startswith(("a", "join")):
                print(f"begun {time.time()}", flush=True)
            work(communicators, where, int(victim), checkpoint)
    except Exception as error:
        print(f"ended {time.time()} {type(error).__name__}: {error}", flush=True)
        os._exit(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
