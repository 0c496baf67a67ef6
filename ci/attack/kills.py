"""Kill ranks, launchers and both at random moments; nothing may stay, and the run goes on with the same bits.

    python ci/attack/kills.py --kills 200 --seed 7

Each kill is a small `tritonrec train` at a random world size, with replicas of the tables or without, whose
launcher, one rank or everything gets SIGKILL, SIGTERM or SIGHUP: while it starts, at any time, or in the
middle of a save. Afterwards no process and no temporary folder of it may be left within `PATIENCE`; the
newest checkpoint must load, and training on from there, at another world size and number of micro-batches,
must end with the SHA-256 of a run that nobody killed. One JSON line a kill, and a summary; exit status 1 on
any failure.

A rank alone takes SIGTERM and SIGHUP as the wish to stop after its step. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from tritonrec import checkpoint
from tritonrec.distributed import Communicators, RankDiedError, RankPool
from tritonrec.distributed.signals import end_with_parent
from tritonrec.files import ScratchFolder
from tritonrec.harness.job import Job
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import WindowConfig

STEPS = 60
PATIENCE = 30.0
"""Seconds until a run that was hit must be over; its ranks wait `TIMEOUT` for each other."""

TIMEOUT = 8
MESHES = [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (2, 2)]
JOB = Job(
    "zipf:users=60,items=200,seed=1", batch_size=8, max_seq_len=9, num_negatives=1, lr=0.01,
    sizes=HSTUConfig(dim=8, layers=1, heads=2, qk_dim=4, v_dim=4, max_seq_len=9, dropout=0.2),
)  # fmt: skip


@dataclass(frozen=True)
class Kill:
    """What is run, and who is hit when.

    Args:
        mesh: world size and replicas. micro_batches, save_every, full_every: of the run.
        victim: ``"rank"``, ``"server"`` (the process that forks ranks), ``"launcher"`` or ``"all"``.
        number: the signal's name.
        phase: ``"start"``, ``"run"`` or ``"save"``. delay: seconds after that moment.
        resume: world size, replicas and micro-batches of the run that goes on.
    """

    mesh: tuple[int, int]
    micro_batches: int
    save_every: int
    full_every: int
    victim: str
    number: str
    phase: str
    delay: float
    resume: tuple[int, int, int]


def drawn(draw: random.Random) -> Kill:
    """A kill whose numbers all come from `draw`."""
    mesh = draw.choice(MESHES)
    phase = draw.choices(("start", "run", "save"), (1, 4, 4))[0]
    return Kill(
        mesh=mesh,
        micro_batches=draw.choice((1, 2, 3)),
        save_every=draw.choice((1, 2, 5)),
        full_every=draw.choice((0, 1, 3)),
        victim=draw.choice(("rank", "server", "launcher", "all")),
        number=draw.choice(("SIGKILL", "SIGKILL", "SIGTERM", "SIGHUP")),
        phase=phase,
        delay={"start": 4.0, "run": 1.0, "save": 0.01}[phase] * draw.random(),
        resume=(*draw.choice([other for other in MESHES if other != mesh]), draw.choice((1, 2, 3, 4))),
    )


def command(kill: Kill, folder: Path) -> list[str]:
    """The command that is killed."""
    sizes = JOB.sizes
    options = {
        "data": JOB.data, "steps": STEPS, "world-size": kill.mesh[0], "replicas": kill.mesh[1],
        "micro-batches": kill.micro_batches, "batch-size": JOB.batch_size, "max-seq-len": JOB.max_seq_len,
        "negatives": JOB.num_negatives, "lr": JOB.lr, "dim": sizes.dim, "layers": sizes.layers,
        "heads": sizes.heads, "dropout": sizes.dropout, "checkpoint": folder, "timeout": TIMEOUT,
        "save-every": kill.save_every, "full-every": kill.full_every,
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "tritonrec", "train", *words]


def processes_of(token: str) -> dict[int, str]:
    """Process id -> command line of all that inherited the token, other than those that have ended."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if token.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has ended meanwhile, or is not ours
                continue
    return found


def ranks_of(token: str, launcher: int) -> list[int]:
    """The launcher's ranks, forked or spawned; the launcher itself where it is the only rank."""
    started = [pid for pid, words in processes_of(token).items() if "spawn_main" in words]
    forked = [pid for pid in started if parent_of(pid) in started]
    return forked or started or [launcher]


def parent_of(pid: int) -> int | None:
    """Its parent's process id; None if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def in_a_save(folder: Path) -> bool:
    """Whether a step's files are there and its manifest is not."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return False
    return any(name.startswith("step-") and "." not in name and f"{name}.json" not in names for name in names)


def wait_for_phase(kill: Kill, folder: Path, process: subprocess.Popen[str]) -> None:
    """Return at the moment the kill is meant for, or when the run has ended before it."""
    while kill.phase != "start" and process.poll() is None:
        if checkpoint.steps(folder) and (kill.phase == "run" or in_a_save(folder)):
            break
        time.sleep(0.0005 if checkpoint.steps(folder) else 0.02)
    time.sleep(kill.delay)


def hit(kill: Kill, token: str, launcher: int, draw: random.Random) -> None:
    ranks = ranks_of(token, launcher)
    victims = {
        "rank": [draw.choice(ranks)],
        "server": [] if ranks == [launcher] else [parent_of(ranks[0])],
        "launcher": [launcher],
        "all": [launcher, *ranks],
    }[kill.victim] or [launcher]
    for pid in filter(None, dict.fromkeys(victims)):
        try:
            os.kill(pid, getattr(signal, kill.number))
        except ProcessLookupError:
            continue


def perform(kill: Kill, draw: random.Random, pool: RankPool, expected: str, place: Path) -> dict[str, object]:
    """Run, kill, look for what is left, and go on; the report's ``problem`` is empty where all is well."""
    folder, temporary, token = place / "checkpoint", place / "temporary", f"killed-{secrets.token_hex(8)}"
    temporary.mkdir(parents=True)
    environment = {**os.environ, "TMPDIR": str(temporary), "TRITONREC_ATTACK": token}
    log = (place / "log").open("w+")
    process = subprocess.Popen(
        command(kill, folder), env=environment, stdout=log, stderr=log, text=True, start_new_session=True,
        preexec_fn=end_with_parent,
    )  # fmt: skip
    wait_for_phase(kill, folder, process)
    ended_before = process.poll() is not None
    began = time.monotonic()
    if not ended_before:
        hit(kill, token, process.pid, draw)
    problem = ""
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        problem = f"the launcher lives on after {PATIENCE:g} s"
    while (left := processes_of(token)) and time.monotonic() - began < PATIENCE:
        time.sleep(0.02)
    over = time.monotonic() - began
    if left:
        problem = problem or f"processes are left after {PATIENCE:g} s: {left}"
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    elif folders := sorted(entry.name for entry in temporary.glob("tritonrec-*")):
        problem = f"left in the temporary folder: {folders}"
    saved = checkpoint.steps(folder)
    report: dict[str, object] = {
        **vars(kill), "status": process.returncode, "ended_before": ended_before,
        "seconds_until_over": round(over, 2), "newest": saved[-1] if saved else None,
    }  # fmt: skip
    if not problem and not ended_before and kill.number == "SIGKILL" and process.returncode == 0:
        problem = "the run ended as if nothing had happened"
    if not problem and saved and saved[-1] < STEPS:
        problem = resumed(kill, pool, expected, folder)
    if problem:
        log.seek(0)
        report["log"] = log.read()[-3000:]
    log.close()
    return {**report, "problem": problem}


def resumed(kill: Kill, pool: RankPool, expected: str, folder: Path) -> str:
    """Train on from the newest checkpoint; what is wrong with that, or nothing."""
    world_size, replicas, micro_batches = kill.resume
    run = Run(
        JOB,
        window=WindowConfig(micro_batches),
        checkpoint=str(folder),
        full_every=kill.full_every,
        resume=True,
    )
    try:
        # Twice where steps are left: the second run loads what the first has added to the checkpoint.
        for steps in sorted({(max(checkpoint.steps(folder), default=STEPS) + STEPS + 1) // 2, STEPS}):
            run = replace(run, steps=steps)
            summary = pool.run(train, world_size, run, True, replicas=replicas)[0]
    except (RankDiedError, ValueError) as error:
        return f"the newest checkpoint does not go on: {error}"
    return "" if summary["digest"] == expected else f"digest {summary['digest']}, expected {expected}"


def attack(kills: int, seed: int) -> bool:
    """Perform `kills`, print their reports and a summary; whether all went well."""
    draw = random.Random(seed)
    expected = train(Communicators.local(), Run(JOB, steps=STEPS), quiet=True)["digest"]
    failures, began = [], time.monotonic()
    by_phase = dict.fromkeys(("start", "run", "save"), 0)
    with RankPool(MESHES, timedelta(seconds=60)) as pool:
        for number in range(kills):
            kill = drawn(draw)
            with ScratchFolder("tritonrec-kills-") as place:
                report = perform(kill, draw, pool, expected, Path(place))
            print(json.dumps({"kill": number, **report}), flush=True)
            by_phase[kill.phase] += not report["ended_before"]
            if report["problem"]:
                failures.append(number)
    print(
        json.dumps(
            {"kills": kills, "seed": seed, "hit": by_phase, "failed": failures,
             "seconds": round(time.monotonic() - began, 1)}
        ),
        flush=True,
    )  # fmt: skip
    return not failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sys.exit(0 if attack(args.kills, args.seed) else 1)


if __name__ == "__main__":
    main()
