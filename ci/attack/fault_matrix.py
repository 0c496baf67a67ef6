"""Something goes wrong on one rank: every other one must say which rank it was, where, and why.

    python ci/attack/fault_matrix.py --world-size 2,3,4 [--only killed] [--json FILE [--missing]]

A small run of `nestpipe` that saves every second step meets one fault of `FAULTS` on one rank: killed,
stopped (SIGSTOP), slow beyond the timeout, and errors raised in a stage of every lane; ranks that end early
or that have other data, parameters, settings or versions. A cell is sound if one error comes in time
(`bound`) and names the rank, its stage with the batch where there is one, and the cause; no process and no
shared memory is left; and the newest checkpoint loads at another world size. A rank that is slow to write is
no fault, and that run has to end. Where ranks of a busy machine time out before the fault, the cell is run
again. Prints every message; exit status 1 for a cell that is not sound. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tritonrec import checkpoint
from tritonrec.distributed import Communicators, RankDiedError, RankPool
from tritonrec.files import save_json
from tritonrec.harness.job import Job
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import Trainer, Window, WindowConfig, agreement
from tritonrec.pipeline.modes import base_schedule

TIMEOUT = 5.0
CLOSED, SILENT = 5.0, TIMEOUT + 10.0
"""Seconds until the error, where a socket closes, and where a rank is silent: the timeout, the reports that
name the rank, and the answers of the others (`RankPool`)."""
STEPS, AT, SAVE_EVERY = 12, 5, 2
"""Of the run; the step of the fault, and of the saves: 2 and 4 are there when it comes."""
JOB = Job(
    "zipf:users=60,items=200,seed=1", batch_size=8, max_seq_len=9, num_negatives=1, lr=0.05,
    sizes=HSTUConfig(dim=6, layers=1, heads=2, qk_dim=3, v_dim=3, max_seq_len=9),
)  # fmt: skip
STAGES = {stage.lane: stage.name for stage in reversed(base_schedule("nestpipe").stages)}
"""The first stage of every lane."""
RAISED = "the disk of this rank is gone"
SHOWN = 150
"""Characters of a message in the table."""
NEVER = "the fault never happened"
TRIES = 3
"""Runs of a cell at most, where the fault never happens."""
IN_A_STAGE = ("killed", "stopped", "slow", "raises")


@dataclass(frozen=True)
class Cell:
    """A fault on rank `victim` of `world_size`, in a `lane` where it is one of `IN_A_STAGE`."""

    fault: str
    world_size: int
    victim: int
    lane: str = ""

    @property
    def stage(self) -> str:
        """Where it happens."""
        return "save" if self.lane == "checkpoint" else STAGES.get(self.lane, "")


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: `problems` is empty where it is sound.

    Args:
        message: the error. seconds: from the fault to it. newest: the step of the checkpoint that loaded.
    """

    cell: Cell
    message: str
    seconds: float
    newest: int | None
    problems: tuple[str, ...]


def cells(world_sizes: list[int]) -> Iterator[Cell]:
    """Every fault on every rank, in every lane where it applies."""
    for world_size in world_sizes:
        for victim in range(world_size):
            for fault in FAULTS:
                lanes = [*STAGES, "checkpoint"] if fault in IN_A_STAGE else [""]
                yield from (Cell(fault, world_size, victim, lane) for lane in lanes)


# The faults, on the rank itself.


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _slow() -> None:
    time.sleep(4 * TIMEOUT)


def _raises() -> None:
    raise OSError(RAISED)


def _in_stage(action: Callable[[], None], trainer: Trainer, cell: Cell, moment: Path) -> None:
    def act() -> None:
        time.sleep(TIMEOUT / 4)  # until it was seen there
        moment.write_text(str(time.time()))
        action()

    if cell.lane == "checkpoint":
        from tritonrec.checkpoint import writer

        write_table = writer.write_table

        def writing(write: Any, *arguments: Any) -> Any:
            if write.__self__.step > AT:
                act()
            return write_table(write, *arguments)

        writer.write_table = writing
        return

    done = []

    def before(window: Window) -> None:
        if window.step == AT and not done:
            done.append(window)
            act()

    trainer.program.before(cell.stage, before)


FAULTS: dict[str, Callable[[], None] | None] = {
    "killed": _killed, "stopped": _stopped, "slow": _slow, "raises": _raises,
    "raises in data": None, "ends early": None, "other data": None, "other parameters": None,
    "other configuration": None, "other version": None,
}  # fmt: skip


def work(communicators: Communicators, cell: Cell | None, folder: str) -> int:
    """Train and save on this rank, with the fault of `cell` if it is its victim."""
    fault = cell.fault if cell is not None and cell.victim == communicators.rank else ""
    moment = Path(folder, "moment")
    model, tables, optimizer = JOB.build("adam")
    config = WindowConfig(3 if fault == "other configuration" else 2)
    if fault == "other parameters":
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 1.0
    if fault == "other version":
        agreement.__version__ = "0.0.0"
    if fault.startswith("other ") and fault != "other data":
        moment.write_text(str(time.time()))
    loader = JOB.loader(communicators.rank, communicators.world_size)
    with Trainer(model, tables, optimizer, communicators, "nestpipe", config) as trainer:
        if fault in IN_A_STAGE:
            _in_stage(FAULTS[fault], trainer, cell, moment)

        def batches(first: int) -> Iterator[Any]:
            for step in range(first, first + SAVE_EVERY):
                if step == AT and fault in ("raises in data", "ends early", "other data"):
                    moment.write_text(str(time.time()))
                    if fault == "ends early":
                        return
                    if fault == "raises in data":
                        raise OSError(RAISED)
                    step += 1
                yield loader.batch(step)

        with trainer.saver(Path(folder, "checkpoint")) as saver:
            for first in range(0, STEPS, SAVE_EVERY):
                for result in trainer.run(batches(first)):
                    step = result.step + 1
                saver.save(step)
    return step


# The judgement, outside.


def expected(cell: Cell) -> list[str]:
    """Patterns that one line of the error must have."""
    rank, stage = rf"\brank {cell.victim}\b", rf"\b{cell.stage}\({AT}\b"
    if cell.lane == "checkpoint":
        stage = rf"\bsave\({AT + 1}\)|step-0*{AT + 1}\.json"
    return {
        "killed": [rank, stage, "SIGKILL"],
        "stopped": [rank, stage, "has not|stopped"],
        "slow": [rank, stage, "has not"],
        "raises": [rank, stage, RAISED],
        "raises in data": [rank, rf"the batch after step {AT - 1} was read", RAISED],
        "ends early": [rank, "ended after", rf"\b{AT}\b"],
        "other data": [rank, rf"step {AT + 1}\b"],
        "other parameters": [rank, "parameter .* SHA-256"],
        "other configuration": [rank, "micro_batches=3", "micro_batches=2"],
        "other version": [rank, "tritonrec=0.0.0"],
    }[cell.fault]


def bound(cell: Cell) -> float:
    """Seconds that the error may take."""
    return SILENT if cell.fault in ("stopped", "slow") else CLOSED


def shared_memory(pids: list[int]) -> list[str]:
    """Segments of these processes; torch and multiprocessing put the process id into a name."""
    names = [entry.name for entry in Path("/dev/shm").iterdir()]
    return sorted(name for name in names if any(re.search(rf"(^|\D){pid}(\D|$)", name) for pid in pids))


def run(cell: Cell) -> Outcome:
    """Run a cell in a pool of its own."""
    problems, message = [], ""
    with tempfile.TemporaryDirectory(prefix="fault-matrix-") as folder:
        with RankPool((cell.world_size,), timedelta(seconds=TIMEOUT)) as pool:
            pids = [process.pid for process in pool.processes]
            try:
                pool.run(work, cell.world_size, cell, folder)
            except RankDiedError as error:
                message = str(error)
            ended = time.time()
        moment = Path(folder, "moment")
        seconds = ended - float(moment.read_text()) if moment.exists() else 0.0
        if not moment.exists():
            problems.append(NEVER)
        if left := [pid for pid in pids if _alive(pid)]:
            problems.append(f"processes are left: {left}")
        newest = _load_newest(Path(folder, "checkpoint"), problems)
    if bool(message) == (cell.fault == "slow" and cell.lane == "checkpoint"):  # a disk may take its time
        problems.append("it stopped the run" if message else "the run ended as if nothing had happened")
    if message:
        missing = [
            [word for word in expected(cell) if not re.search(word, line)] for line in message.splitlines()
        ]
        if least := min(missing, key=len):
            problems.append(f"no line has {' and '.join(least)}")
    if more := shared_memory(pids):
        problems.append(f"shared memory is left: {more}")
    if message and seconds > bound(cell):
        problems.append(f"it took {seconds:.1f} s")
    return Outcome(cell, message, round(seconds, 2), newest, tuple(problems))


def run_until_it_happens(cell: Cell) -> Outcome:
    """The first run of a cell in which its fault has happened."""
    outcomes: list[Outcome] = []
    while not outcomes or (NEVER in outcomes[-1].problems and len(outcomes) < TRIES):
        outcomes.append(run(cell))
    return outcomes[-1]


def _alive(pid: int) -> bool:
    with suppress(ProcessLookupError, FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _load_newest(folder: Path, problems: list[str]) -> int | None:
    """The newest checkpoint's step, after it was loaded on one rank."""
    saved = checkpoint.steps(folder) if folder.is_dir() else []
    if not saved:
        return None
    try:
        checkpoint.load(folder, saved[-1], rank=0, world_size=1)
    except checkpoint.CheckpointError as error:
        problems.append(f"checkpoint {saved[-1]} does not load: {error}")
    return saved[-1]


def table(outcomes: list[dict[str, Any]]) -> str:
    """Markdown: for each fault its cells, the seconds and one of the messages."""
    lines = ["| fault | cells, sound | seconds: median, longest | message |", "| --- | --- | --- | --- |"]
    for fault in FAULTS:
        mine = [each for each in outcomes if each["cell"]["fault"] == fault]
        told = [each for each in mine if each["message"]]
        if told:
            sound = sum(not each["problems"] for each in mine)
            seconds = sorted(each["seconds"] for each in told)
            message = told[len(told) // 2]["message"].splitlines()[0].rpartition("RankDiedError: ")[2]
            message = message if len(message) <= SHOWN else f"{message[:SHOWN]} ..."
            times = f"{statistics.median(seconds):.1f}, {seconds[-1]:.1f}"
            lines.append(f"| {fault} | {len(mine)}, {sound} | {times} | `{message}` |")
    return "\n".join(lines)


def _sound_cells(file: Path) -> dict[Cell, dict[str, Any]]:
    """The sound outcomes of a file of ``--json``; none where there is no file."""
    found = json.loads(file.read_text())["cells"] if file.exists() else []
    return {Cell(**each["cell"]): each for each in found if not each["problems"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--world-size", default="2,3,4")
    parser.add_argument("--only", default="", help="faults whose name begins with this")
    parser.add_argument("--lanes", default=None, help="of these lanes only, separated by commas")
    parser.add_argument("--victim", type=int, default=None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--missing", action="store_true", help="keep the sound cells of --json as they are")
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of these files of --json")
    args = parser.parse_args()
    if args.table:
        print(table([each for file in args.table for each in json.loads(file.read_text())["cells"]]))
        return
    if args.missing and not args.json:
        parser.error("--missing goes with --json")
    kept = _sound_cells(args.json) if args.missing else {}
    outcomes = []
    for cell in cells([int(each) for each in args.world_size.split(",")]):
        if not cell.fault.startswith(args.only) or (
            args.lanes is not None and cell.lane and cell.lane not in args.lanes.split(",")
        ):
            continue
        if args.victim is not None and cell.victim != args.victim:
            continue
        if cell in kept:
            continue
        outcome = run_until_it_happens(cell)
        outcomes.append(outcome)
        words = f"{cell.fault} rank {cell.victim} of {cell.world_size} {cell.lane}"
        print(f"{'sound' if not outcome.problems else 'WRONG'} {outcome.seconds:5.1f} s  {words}", flush=True)
        print("    " + outcome.message.replace("\n", "\n    "), flush=True)
        for problem in outcome.problems:
            print(f"    problem: {problem}", flush=True)
    if args.json:
        found = {**kept, **{each.cell: asdict(each) for each in outcomes}}
        every = [found[cell] for cell in cells(sorted({cell.world_size for cell in found})) if cell in found]
        save_json({"timeout": TIMEOUT, "cells": every}, args.json)
    wrong = sum(bool(each.problems) for each in outcomes)
    print(f"{len(outcomes)} cells, {wrong} wrong")
    sys.exit(1 if wrong or not (outcomes or kept) else 0)


if __name__ == "__main__":
    main()
