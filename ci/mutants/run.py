"""Which mutants of the host code survive the tests that run their lines.

    python ci/mutants/run.py --map out/coverage_map.json --sample 300 --seed 1 --out out/mutants.jsonl
    python ci/mutants/run.py --map out/coverage_map.json --all --out out/mutants.jsonl --minutes 600
    python ci/mutants/run.py --map out/coverage_map.json --again --out out/mutants.jsonl
    python ci/mutants/run.py --out out/mutants.jsonl --report

Each mutant (`edits.py`) is written into a copy of the repository, where a forked process runs tests of its
line, of the map that `coverage_map.py` makes: the fastest of each test file first, `MOST_TESTS` and
`MOST_SECONDS` at most. The fork is one of a session that has collected the tests (`warm.py`), or, where the
edit changes an import, one that has imported nothing of ours. With ``--again`` the survivors of the file have
to stand the tests of their line up to `MOST_SECONDS_AGAIN`, and `RANKS`, which train on two ranks. One JSON
line a run of a mutant, of which the last counts; it goes on where the file ends. Linux only.
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
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from chosen import chosen_files
from edits import Mutant, is_one, mutants_of
from warm import MEMORY, Task, run_warm

ROOT = Path(__file__).resolve().parents[2]
MOST_TESTS, MOST_SECONDS, MOST_SECONDS_AGAIN = 40, 8.0, 60.0
PATIENCE, CPU_SECONDS = 400.0, 90
"""Seconds beyond ten times what the tests take, and of the processor; a mutant that takes longer hangs."""
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
    """The map of `coverage_map.py`."""

    def __init__(self, file: str):
        document = json.loads(Path(file).read_text())
        self.names = [name for name, _ in document["tests"]]
        self.seconds = [seconds for _, seconds in document["tests"]]
        self.lines = {
            file: {int(n): each for n, each in lines.items()} for file, lines in document["lines"].items()
        }

    def of(self, mutant: Mutant, every: bool) -> tuple[list[str], float]:
        """Tests of the line, and their seconds; of a line that runs at import, those of its file."""
        lines = self.lines.get(mutant.file, {})
        covering = lines.get(mutant.line) or sorted({test for each in lines.values() for test in each})
        most = (len(covering), MOST_SECONDS_AGAIN) if every else (MOST_TESTS, MOST_SECONDS)
        chosen = self.chosen(covering, *most)
        return [self.names[test] for test in chosen], sum(self.seconds[test] for test in chosen)

    def chosen(self, covering: list[int], most: int, most_seconds: float) -> list[int]:
        by_file: dict[str, int] = {}
        rank = {}
        for test in sorted(covering, key=lambda test: self.seconds[test]):
            file = self.names[test].partition("::")[0]
            rank[test] = by_file[file] = by_file.get(file, -1) + 1
        order, taken, total = sorted(rank, key=lambda test: (rank[test], self.seconds[test])), [], 0.0
        for test in order:
            if len(taken) < most and total + self.seconds[test] <= most_seconds:
                taken.append(test)
                total += self.seconds[test]
        return taken


def run_tests(copy: Path, names: list[str], limit: float) -> tuple[str, str, float]:
    """(outcome, the test that failed, CPU seconds) of `names` in a forked process, in the `copy`."""
    failure = copy.parent / "failure"
    failure.unlink(missing_ok=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = os.fork()
    if child == 0:
        _child(copy, names, failure)
    deadline, done = time.monotonic() + limit, None
    while done is None and time.monotonic() < deadline:
        done = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if done is None:
            time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # the group that the child has made, with all it started
    _, status = os.waitpid(child, 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    by = failure.read_text() if failure.exists() else ""
    code = os.waitstatus_to_exitcode(status)
    if done is None or -code in (signal.SIGXCPU, signal.SIGKILL):
        return "timeout", by, seconds
    return ("survived" if code == 0 else "killed"), by or f"exit status {code}", seconds


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


def judge(copy: Path, mutant: Mutant, names: list[str], predicted: float) -> dict:
    """Run tests on a mutant in a process that imports it; its JSON line."""
    path, source = copy / mutant.file, (ROOT / mutant.file).read_text()
    status, by, cpu = "no test", "", 0.0
    try:
        _write(path, mutant.applied(source))
        if names:
            status, by, cpu = run_tests(copy, names, 10 * predicted + PATIENCE)
    finally:
        _write(path, source)
    return line_of(mutant, status, by, len(names), cpu)


def line_of(mutant: Mutant, status: str, by: str, tests: int, cpu: float) -> dict:
    by = "" if status == "survived" else by
    ends = {"status": status, "by": by, "tests": tests, "cpu_seconds": round(cpu, 2)}
    return {"name": mutant.name, **asdict(mutant), **ends}


def judge_warm(
    copy: Path, left: list[Mutant], tests: CoverageMap, every: bool, end: float, put: Callable[[dict], None]
) -> None:
    """Judge mutants of functions in a forked `WarmSession`, until the time `end`; the others are left."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        by_name = {mutant.name: mutant for mutant in left}
        sys.path[0] = os.environ["PYTHONPATH"] = str(copy)
        with open(copy.parent / "warm.log", "w") as log:
            os.dup2(log.fileno(), 1)

        def task(mutant: Mutant) -> Task:
            source = (ROOT / mutant.file).read_text()
            names, predicted = tests.of(mutant, every)
            return mutant.name, copy / mutant.file, source, mutant.applied(source), names, predicted

        def done(name: str, status: str, by: str, count: int, cpu: float) -> None:
            if status != "at import":
                put(line_of(by_name[name], status, by, count, cpu))

        run_warm(copy, [task(mutant) for mutant in left], done, every, copy.parent, end)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()  # compared by seconds and size, which an edit may leave alone


def warm_up() -> None:
    """Import what every test imports but our own modules, so that a fork need not."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    import hypothesis  # noqa: F401
    import numba  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch.distributed
    import torch.optim.swa_utils  # noqa: F401
    import triton.language  # noqa: F401


def report(lines: list[dict]) -> None:
    """Counts, and every survivor."""
    counts = Counter(line["status"] for line in lines)
    by = Counter(line["by"].partition("::")[0] for line in lines if line["status"] == "killed")
    for line in lines:
        if line["status"] in ("survived", "no test"):
            before, after = (" ".join(line[key].split())[:60] for key in ("before", "after"))
            print(f"{line['file']}:{line['line']}  {line['operator']}: {before}  ->  {after}")
    print(f"{len(lines)} mutants: {dict(counts)}")
    print("killed by: " + ", ".join(f"{name} {count}" for name, count in by.most_common()))
    print(f"seconds of the processor: {sum(line['cpu_seconds'] for line in lines):.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--map", help="of coverage_map.py")
    parser.add_argument("--out", required=True, type=Path, help="JSON lines; what is there is not run again")
    parser.add_argument("--sample", type=int, default=0, help="so many mutants, drawn at random")
    parser.add_argument("--all", action="store_true", help="every mutant, in the order of the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="mutants whose name begins with this")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many")
    parser.add_argument("--again", action="store_true", help="the survivors of --out, in all their tests")
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    last = {line["name"]: line for line in lines}
    if args.report:
        return report(list(last.values()))
    every = [mutant for file in chosen_files(ROOT) for mutant in mutants_of(ROOT, file)]
    every = [mutant for mutant in every if mutant.name.startswith(args.only)]
    random.Random(args.seed).shuffle(every)
    if args.again:
        left = [mutant for mutant in every if _survives_a_few(last.get(mutant.name))]
    else:
        chosen = every if args.all or args.only else every[: args.sample]
        left = [mutant for mutant in chosen if mutant.name not in last]
    by_file = sorted(left, key=lambda mutant: mutant.file)
    valid = {each.name for each in by_file if is_one(each, (ROOT / each.file).read_text())}
    left = [mutant for mutant in left if mutant.name in valid]
    print(f"{len(every)} mutants, {len(left)} to run", flush=True)
    tests = CoverageMap(args.map)
    warm_up()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch, args.out.open("a") as out:
        copy = Path(scratch, "repository").resolve()
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", "out", ".venv"))

        def put(line: dict) -> None:
            print(json.dumps(line | {"every_test": args.again}), file=out, flush=True)

        judge_warm(copy, left, tests, args.again, end, put)
        judged = {line["name"]: line for line in map(json.loads, args.out.read_text().splitlines())}
        for mutant in left:
            if time.monotonic() > end:
                break
            done = judged.get(mutant.name)
            if done is not None and done["every_test"] == args.again:
                continue
            names, predicted = tests.of(mutant, every=args.again)
            put(judge(copy, mutant, names + RANKS * args.again, predicted + 20.0 * args.again))
    report(_last(args.out))


def _last(file: Path) -> list[dict]:
    """The last line of each mutant."""
    return list({line["name"]: line for line in map(json.loads, file.read_text().splitlines())}.values())


def _survives_a_few(line: dict | None) -> bool:
    return line is not None and line["status"] in ("survived", "no test") and not line["every_test"]


if __name__ == "__main__":
    main()
