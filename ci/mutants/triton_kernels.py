"""Which mutants of Triton's kernels survive the checks of `tests/kernels/test_mutants.py`, interpreted.

    python ci/mutants/triton_kernels.py --sample 100 --seed 1 --out out/triton.jsonl
    python ci/mutants/triton_kernels.py --only tritonrec/kernels/unique --out out/triton.jsonl
    python ci/mutants/run.py --out out/triton.jsonl --report

Each mutant (`edits.py`) is an edit of a function that Triton compiles, loaded in a forked process in place of
the kernel, where the checks of its file run until the first one that fails. A check that ends in any error
has found it, and so has the end of the process: an edit may lead outside of a buffer. Checks run on
each file as it is before. One JSON line a mutant; the next run leaves them out. Linux only.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from edits import Mutant, is_one, mutants_of
from run import EQUIVALENT, last_lines, line_of, report
from warm import MEMORY, wait

ROOT = Path(__file__).resolve().parents[2]
PLAIN_SECONDS, LONGER, MORE_SECONDS = 1800, 3, 30
"""Of the processor, for a file's checks; a mutant has hung after so many times theirs, and more."""
PATIENCE = 7200.0
"""Seconds of a clock; a kernel that never ends spends those of the processor before."""
FOUND = 1
"""Exit status of a process whose check has failed."""


class Checks:
    """The checks of each file of kernels, by its path."""

    def __init__(self) -> None:
        os.environ["TRITON_INTERPRET"] = "1"
        torch.set_num_threads(1)  # a fork would wait for OpenMP's threads, which it has none of
        sys.path[:0] = [str(ROOT / "tests" / name) for name in ("kernels", "")]
        os.chdir(ROOT)
        tests = importlib.import_module("test_mutants")
        self.mutate = importlib.import_module("mutate")
        self.poisoned = importlib.import_module("poison").poisoned_memory
        self.modules = {f"tritonrec/kernels/{name.replace('.', '/')}.py": name for name in tests.CHECKS}
        self.of = {path: tests.CHECKS[name] for path, name in self.modules.items()}

    def failing(self, file: str, text: str, folder: Path, note: Path) -> bool:
        """Whether a check fails on this text of a file; the check under way is named in the file `note`."""
        edits = [((ROOT / file).read_text(), text)]
        with self.mutate.mutated(self.modules[file], edits, folder), self.poisoned():
            for check in self.of[file]:
                note.write_text(_name(check))
                try:
                    check()
                except Exception:
                    return True
        return False


def _name(check: Callable[[], object]) -> str:
    """The test that a check calls."""
    called = [cell.cell_contents for cell in check.__closure__ or ()] + [
        value for value in check.__defaults__ or () if callable(value)
    ]
    for each in called:
        if callable(each):
            return f"{each.__module__}.{each.__name__}"
    return ".".join(name for name in check.__code__.co_names if name != "IMPL")


def run_checks(checks: Checks, file: str, text: str, scratch: Path, most: int) -> tuple[str, str, float]:
    """(outcome, the check that failed, CPU seconds) of a text of a file, in a forked process."""
    note = scratch / "note"
    note.write_text("")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = os.fork()
    if child == 0:
        _child(lambda folder: checks.failing(file, text, folder, note), scratch, most)
    hung = wait(child, PATIENCE)
    if hung:
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    code, by = os.waitstatus_to_exitcode(status), note.read_text()
    outcome = "survived" if code == 0 else "killed"
    if hung or -code in (signal.SIGXCPU, signal.SIGKILL):
        outcome = "timeout"
    elif code not in (0, FOUND):
        by = f"exit status {code} in {by}"
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return outcome, by, cpu


def judge(checks: Checks, mutant: Mutant, scratch: Path, most: int) -> dict:
    """The JSON line of a mutant."""
    text = mutant.applied((ROOT / mutant.file).read_text())
    outcome, by, cpu = run_checks(checks, mutant.file, text, scratch, most)
    return line_of(mutant, outcome, by, len(checks.of[mutant.file]), cpu)


def _child(failing: Callable[[Path], bool], scratch: Path, most: int) -> None:
    code = 99
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))
        with open(os.devnull, "r+b") as nothing:
            for stream in (0, 1, 2):
                os.dup2(nothing.fileno(), stream)
        warnings.simplefilter("ignore")
        folder = Path(tempfile.mkdtemp(dir=scratch))
        code = FOUND if failing(folder) else 0
        shutil.rmtree(folder)
    except BaseException:
        code = FOUND  # the mutant is no module any more
    finally:
        os._exit(code)


def mutants(checks: Checks, only: tuple[str, ...]) -> Iterator[Mutant]:
    """Those of every file with checks."""
    for file in checks.modules:
        source = (ROOT / file).read_text()
        for mutant in mutants_of(ROOT, file, compiled=True):
            if mutant.name.startswith(only) and is_one(mutant, source):
                yield mutant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path, help="JSON lines; what is there is not run again")
    parser.add_argument("--sample", type=int, help="so many mutants, drawn at random; by default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[""], help="mutants whose name begins with one of these")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many")
    parser.add_argument("--part", default="1/1", help="2/3 is the second of three processes with one file")
    args = parser.parse_args()
    checks, end = Checks(), time.monotonic() + 60 * args.minutes
    every = sorted(mutants(checks, tuple(args.only)), key=lambda mutant: mutant.name)
    random.Random(args.seed).shuffle(every)
    part, parts = map(int, args.part.split("/"))
    done = last_lines(args.out)
    left = [
        mutant
        for mutant in every[: args.sample]
        if mutant.name not in done and zlib.crc32(mutant.name.encode()) % parts == part - 1
    ]
    print(f"{len(every)} mutants, {len(left)} to run", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch, args.out.open("a") as out:
        most: dict[str, int] = {}
        for mutant in left:
            if time.monotonic() > end:
                break
            if mutant.file not in most:
                text = (ROOT / mutant.file).read_text()
                plain, by, cpu = run_checks(checks, mutant.file, text, Path(scratch), PLAIN_SECONDS)
                if plain != "survived":
                    raise SystemExit(f"{mutant.file} without a mutant: {plain}, {by}")
                most[mutant.file] = int(LONGER * cpu + MORE_SECONDS)
            line = judge(checks, mutant, Path(scratch), most[mutant.file])
            print(json.dumps(line), file=out, flush=True)
    report([*last_lines(args.out).values()], json.loads(EQUIVALENT.read_text()))


if __name__ == "__main__":
    main()
