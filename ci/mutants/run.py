"""Which mutants of the host code, and of numba's kernels, survive the tests that run their lines.

    python ci/mutants/run.py --map out/coverage_map.json --sample 300 --seed 1 --out out/mutants.jsonl
    python ci/mutants/run.py --map out/coverage_map.json --all --out out/mutants.jsonl --minutes 600
    python ci/mutants/run.py --map out/coverage_map.json --kernels --sample 300 --out out/kernels.jsonl
    python ci/mutants/run.py --map out/coverage_map.json --again --out out/mutants.jsonl
    python ci/mutants/run.py --out out/mutants.jsonl --report

Each mutant (`edits.py`) is written into a copy of the repository, where a forked process runs tests of its
line, of the map that `coverage_map.py` makes: the fastest first, `MOST_TESTS` and `MOST_SECONDS` at most. The
process that forks has imported nothing of ours. With ``--again`` the survivors of the file have to stand the
tests of their line up to `MOST_SECONDS_AGAIN`, and `RANKS`, which train on two ranks; with
``--tests`` those that are named. One JSON line a run of a mutant, of which the last counts; it goes on where
the file ends. `equivalent.json` has the survivors that no test can kill, each with its reason; the code of
those that are ``gone`` had no use and was taken out. Linux only.

    python ci/mutants/run.py --intentions --out out/intentions.jsonl

`intentions.jsonl` has mutants made by hand, of host code and of Triton's kernels, each against what some code
is for, with the tests that see it; the exit status is 1 where one survives.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import zlib
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from chosen import chosen_files
from edits import Mutant, is_one, mutants_of

ROOT = Path(__file__).resolve().parents[2]
MOST_TESTS, MOST_SECONDS, MOST_SECONDS_AGAIN = 80, 8.0, 20.0
ALIKE = 8
"""A test counts as twice as long after so many tests of its file: other files find other faults."""
PATIENCE, CPU_SECONDS = 120.0, 300
"""Seconds beyond ten times what the tests take, and of the processor; a mutant that takes longer hangs."""
MEMORY = 12 << 30
"""Bytes of address space of a mutant."""
IDLE = 40.0
"""Seconds asleep: a test may wait for ranks, which are sessions of their own."""
EQUIVALENT = Path(__file__).with_name("equivalent.json")
INTENTIONS = Path(__file__).with_name("intentions.jsonl")
SURVIVES = ("survived", "no test")
RANKS = [
    "tests/harness/test_contract.py::test_a_mode_is_bit_identical_to_its_reference"
    "[nestpipe batch world_size=2 N=3 clustering=off rowwise_adagrad steps=5]"
]


class FirstFailure:
    """Writes the first test that fails, or whose collection does, to a file."""

    def __init__(self, file: Path):
        self.file = file

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.file.exists():
            self.file.write_text(report.nodeid)

    def pytest_collectreport(self, report):
        if report.failed and not self.file.exists():
            self.file.write_text(f"collection of {report.nodeid}")


class CoverageMap:
    """Maps of `coverage_map.py`, which have no test in common."""

    def __init__(self, *maps: str):
        self.names, self.seconds = list[str](), list[float]()
        self.lines: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for document in (json.loads(Path(each).read_text()) for each in maps):
            first = len(self.names)
            for name, seconds in document["tests"]:
                self.names.append(name)
                self.seconds.append(seconds)
            for file, lines in document["lines"].items():
                for n, tests in lines.items():
                    self.lines[file][int(n)] += [first + test for test in tests]

    def of(self, mutant: Mutant, every: bool) -> dict[str, float]:
        """Tests of the line, with their seconds; of one that imports or compiled code run, those `near`."""
        covering = self.lines.get(mutant.file, {}).get(mutant.line) or self.near(mutant.file)
        most = (len(covering), MOST_SECONDS_AGAIN) if every else (MOST_TESTS, MOST_SECONDS)
        return {self.names[test]: self.seconds[test] for test in self.chosen(covering, *most)}

    def near(self, file: str) -> list[int]:
        """Tests of a file; where it has none, those of its folder and of what is in it."""
        files = [file] if self.lines.get(file) else []
        folder = str(Path(file).parent)
        files = files or [each for each in self.lines if each.startswith(f"{folder}/")]
        return sorted({test for each in files for tests in self.lines[each].values() for test in tests})

    def chosen(self, covering: list[int], most: int, most_seconds: float) -> list[int]:
        """The fastest tests, those of a file one after the other, which have their fixtures in common."""
        by_file: dict[str, int] = {}
        rank = {}
        for test in sorted(covering, key=lambda test: self.seconds[test]):
            file = self.names[test].partition("::")[0]
            rank[test] = by_file[file] = by_file.get(file, -1) + 1
        order = sorted(rank, key=lambda test: self.seconds[test] * (1 + rank[test] / ALIKE))
        taken, total = [], 0.0
        for test in order:
            if len(taken) < most and total + self.seconds[test] <= most_seconds:
                taken.append(test)
                total += self.seconds[test]
        files = list(dict.fromkeys(self.names[test].partition("::")[0] for test in taken))
        return sorted(taken, key=lambda test: files.index(self.names[test].partition("::")[0]))


def run_tests(copy: Path, names: list[str], limit: float) -> tuple[str, str, float]:
    """(outcome, the test that failed, CPU seconds) of `names` in a forked process, in the `copy`."""
    failure = copy.parent / "failure"
    failure.unlink(missing_ok=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = os.fork()
    if child == 0:
        _child(copy, names, failure)
    hung = wait(child, limit, IDLE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # the group that the child has made, with all it started
    _, status = os.waitpid(child, 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    by = failure.read_text() if failure.exists() else ""
    code = os.waitstatus_to_exitcode(status)
    if hung or -code in (signal.SIGXCPU, signal.SIGKILL):
        return "timeout", by, seconds
    return ("survived" if code == 0 else "killed"), by or f"exit status {code}", seconds


def wait(child: int, patience: float, idle: float) -> bool:
    """Wait for its end; whether it had to be given up: asleep with all its session, or after `patience`."""
    began, asleep, last = time.monotonic(), None, 0
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.01 if time.monotonic() - began < 2 else 0.5)
        if time.monotonic() - began > 2:
            ticks, runs = _activity(child)
            now = time.monotonic()
            if runs or ticks > last + 10 or asleep is None:
                asleep, last = now, ticks
            if now - asleep > idle or now - began > patience:
                return True
    return False


def _activity(group: int) -> tuple[int, bool]:
    """Ticks of the processor of a session, and whether a thread of it runs or wants to."""
    ticks, runs = 0, False
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) != group:
                continue
            for task in (folder / "task").iterdir():
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                runs |= fields[0] in "RD"
                ticks += int(fields[11]) + int(fields[12])
        except (OSError, ValueError):
            continue
    return ticks, runs


def _child(copy: Path, names: list[str], failure: Path) -> None:
    code = 99
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        with open(os.devnull, "r+b") as nothing:
            for stream in (0, 1, 2):
                os.dup2(nothing.fileno(), stream)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path[0] = str(copy)
        code = int(pytest.main(["-x", "-q", "-p", "no:randomly", *names], plugins=[FirstFailure(failure)]))
    finally:
        os._exit(code)


class Judge:
    """Judges mutants in processes that import them; tests that fail without a mutant too are left out."""

    def __init__(self, copy: Path):
        self.copy, self.good, self.bad = copy, set[str](), set[str]()

    def judge(self, mutant: Mutant, names: list[str], seconds: float) -> dict:
        """The JSON line of a mutant, of tests that take about so many seconds."""
        path, source = self.copy / mutant.file, (ROOT / mutant.file).read_text()
        status, by, cpu = "no test", "", 0.0
        while names := [name for name in names if name not in self.bad]:
            _write(path, mutant.applied(source))
            try:
                status, by, used = run_tests(self.copy, names, 10 * seconds + PATIENCE)
            finally:
                _write(path, source)
            cpu += used
            at_fault = [name for name in names if by.removeprefix("collection of ") in (name, _file(name))]
            new = [name for name in at_fault if name not in self.good]
            if not new or run_tests(self.copy, new, 10 * seconds + PATIENCE)[0] == "survived":
                self.good |= set(new)
                break
            self.bad |= set(new)
            status, by = "no test", ""
        return line_of(mutant, status, by, len(names), cpu)


def _file(name: str) -> str:
    return name.partition("::")[0]


def line_of(mutant: Mutant, status: str, by: str, tests: int, cpu: float) -> dict:
    by = "" if status == "survived" else by
    ends = {"status": status, "by": by, "tests": tests, "cpu_seconds": round(cpu, 2)}
    texts = {key: " ".join(getattr(mutant, key).split())[:60] for key in ("before", "after")}
    return {"name": mutant.name, "line": mutant.line, **texts, **ends}


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()  # compared by seconds and size, which an edit may leave alone


def warm_up() -> None:
    """Import what every test imports but our own modules, so that a fork need not."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    vars(sys.modules["__main__"]).pop("__file__", None)  # ranks would import it, from a path without it
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    import hypothesis  # noqa: F401
    import numba  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch.distributed
    import torch.optim.swa_utils  # noqa: F401
    import triton.language  # noqa: F401


def report(lines: list[dict], equivalent: dict[str, str]) -> None:
    """Counts, and every survivor that is not known to be equivalent."""
    counts = Counter(outcome(line, equivalent) for line in lines)
    by = Counter(line["by"].partition("::")[0] for line in lines if line["status"] == "killed")
    for line in lines:
        if outcome(line, equivalent) in SURVIVES:
            print(f"{line['name']} (line {line['line']}): {line['before']}  ->  {line['after']}")
    print(f"{len(lines)} mutants: {dict(counts)}")
    killed = counts["killed"] + counts["timeout"]
    if others := len(lines) - counts["equivalent"] - counts["gone"]:
        print(f"killed or hung, of those not equivalent: {killed / others:.1%}")
    print("killed by: " + ", ".join(f"{name} {count}" for name, count in by.most_common()))
    print(f"seconds of the processor: {sum(line['cpu_seconds'] for line in lines):.0f}")


def outcome(line: dict, equivalent: dict[str, str]) -> str:
    """A survivor that is known to be equivalent is so; a test that kills it counts more."""
    return "equivalent" if line["status"] in SURVIVES and line["name"] in equivalent else line["status"]


def intended(root: Path) -> Iterator[tuple[Mutant, list[str]]]:
    """The mutants of `INTENTIONS` with their tests; ValueError for one whose text is not in its file.

    Each of a mutant's edits is made at every place of its text.
    """
    for row in map(json.loads, INTENTIONS.read_text().splitlines()):
        source = edited = (root / row["file"]).read_text()
        for before, after in row["edits"]:
            if before not in edited:
                raise ValueError(f"{row['file']} has no {before!r}, of: {row['why']}")
            edited = edited.replace(before, after)
        start = _alike(source, edited)
        alike = _alike(source[start:][::-1], edited[start:][::-1])
        texts = (text[start : len(text) - alike] for text in (source, edited))
        line, end = 1 + source[:start].count("\n"), len(source) - alike
        yield Mutant(row["file"], line, "intention", start, end, *texts, row["why"]), row["tests"]


def _alike(one: str, other: str) -> int:
    """Characters that two texts begin with alike."""
    shorter = range(min(len(one), len(other)))
    return bisect_left(shorter, True, key=lambda n: one[: n + 1] != other[: n + 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--map", nargs="+", help="of coverage_map.py")
    parser.add_argument("--out", required=True, type=Path, help="JSON lines; what is there is not run again")
    parser.add_argument("--sample", type=int, default=0, help="so many mutants, drawn at random")
    parser.add_argument("--all", action="store_true", help="every mutant, in the order of the seed")
    parser.add_argument("--kernels", action="store_true", help="of numba, in place of the host code")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[""], help="mutants whose name begins with one of these")
    parser.add_argument("--tests", nargs="+", default=[], help="run these on the survivors, in new processes")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many")
    parser.add_argument("--part", default="1/1", help="2/3 is the second of three processes with one file")
    parser.add_argument("--again", action="store_true", help="the survivors of --out, in all their tests")
    parser.add_argument("--intentions", action="store_true", help="those made by hand, and their tests")
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    last = last_lines(args.out)
    equivalent = json.loads(EQUIVALENT.read_text())
    if args.report:
        return report(list(last.values()), equivalent)
    by_hand = dict(intended(ROOT)) if args.intentions else {}
    every = list(by_hand) or [
        each for file in chosen_files(ROOT, args.kernels) for each in mutants_of(ROOT, file)
    ]
    every = [mutant for mutant in every if mutant.name.startswith(tuple(args.only))]
    random.Random(args.seed).shuffle(every)
    if args.again or args.tests:
        survivors = {name for name, line in last.items() if outcome(line, equivalent) in SURVIVES}
        left = [mutant for mutant in every if mutant.name in survivors]
    else:
        valid = (mutant for mutant in every if is_one(mutant, (ROOT / mutant.file).read_text()))
        chosen = islice(valid, None if args.all or by_hand or any(args.only) else args.sample)
        left = [mutant for mutant in chosen if mutant.name not in last]
    part, parts = map(int, args.part.split("/"))
    left = [mutant for mutant in left if zlib.crc32(mutant.name.encode()) % parts == part - 1]
    print(f"{len(every)} mutants, {len(left)} to run", flush=True)
    tests = None if args.tests or by_hand else CoverageMap(*args.map)
    warm_up()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch, args.out.open("a") as out:
        copy = Path(scratch, "repository").resolve()
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", "out", ".venv"))

        def put(line: dict) -> None:
            print(json.dumps(line | {"every_test": args.again}), file=out, flush=True)

        judge = Judge(copy)
        for mutant in left if by_hand else ():
            put(judge.judge(mutant, by_hand[mutant], PATIENCE / 4))
        if by_hand:
            lines = list(last_lines(args.out).values())
            report(lines, equivalent)
            raise SystemExit(any(outcome(line, equivalent) in SURVIVES for line in lines))
        if tests is None:
            plain, by, _ = run_tests(copy, args.tests, 10 * PATIENCE)
            if plain != "survived":
                raise SystemExit(f"without a mutant: {plain}, {by}")
            judge.good |= set(args.tests)
            for mutant in left:
                put(judge.judge(mutant, args.tests, PATIENCE / 4))
            return report(list(last_lines(args.out).values()), equivalent)
        for mutant in left:
            if time.monotonic() > end:
                break
            seconds = tests.of(mutant, every=args.again)
            names = [*seconds, *RANKS * args.again]
            put(judge.judge(mutant, names, sum(seconds.values()) + 20.0 * args.again))
    report(list(last_lines(args.out).values()), equivalent)


def last_lines(file: Path) -> dict[str, dict]:
    """The last line of each mutant."""
    text = file.read_text() if file.exists() else ""
    return {line["name"]: line for line in map(json.loads, text.splitlines())}


if __name__ == "__main__":
    main()
