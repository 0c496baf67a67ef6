"""Numbered cases in a process of their own, which may die, wait or take memory without end.

The worker prints the number of each case before it begins, and its line of JSON after.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

MEMORY = 1 << 30
"""Bytes that a case may take beyond those of the process before it."""
SECONDS = 20
"""For a case."""


def run_all(
    numbers: Iterable[int],
    run_case: Callable[[int], dict[str, Any]],
    memory: int = MEMORY,
    seconds: int = SECONDS,
) -> None:
    """Run cases in this process, which one that takes longer than `seconds` ends; with a limit of memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # also where no Python runs that could handle it
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, resource.RLIM_INFINITY))
    for number in numbers:
        print(json.dumps({"begins": number}), flush=True)
        signal.alarm(seconds)
        case = run_case(number)
        signal.alarm(0)
        print(json.dumps(case), flush=True)


def attack(command: list[str], numbers: range) -> Iterator[dict[str, Any]]:
    """The lines of all cases of a script with the option ``--work FIRST:STOP``, which calls `run_all`.

    A worker that dies is a defect of the case it was at, and another goes on behind it.
    """
    while numbers:
        with subprocess.Popen(
            [sys.executable, *command, "--work", f"{numbers.start}:{numbers.stop}"],
            stdout=subprocess.PIPE,
            text=True,
        ) as worker:
            assert worker.stdout is not None
            at = None
            for line in worker.stdout:
                case = json.loads(line)
                at = case.get("begins")
                if at is None:
                    numbers = range(case["number"] + 1, numbers.stop)
                    yield case
        if at is None and worker.returncode:
            raise SystemExit(f"the worker ended with {worker.returncode} before its first case")
        if at is not None:
            numbers = range(at + 1, numbers.stop)
            hung = worker.returncode == -signal.SIGALRM
            how = "took too long" if hung else f"ended with {worker.returncode}"
            end = {"crash": f"the process {how}"}
            yield {"number": at, "kind": "?", "fits": None, "ends": end, "defect": True}


def range_of(text: str) -> range:
    """FIRST:STOP."""
    first, stop = map(int, text.split(":"))
    return range(first, stop)
