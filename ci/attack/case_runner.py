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


class TooLong(BaseException):
    """A case takes longer than `SECONDS`; nothing on the way may take it for an error of a file."""


def _too_long(number: int, frame: object) -> None:
    raise TooLong(f"{SECONDS} seconds are over")


def run_all(numbers: Iterable[int], run_case: Callable[[int], dict[str, Any]]) -> None:
    """Run cases in this process, with a limit for the memory and for the time of each."""
    signal.signal(signal.SIGALRM, _too_long)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
    for number in numbers:
        print(json.dumps({"begins": number}), flush=True)
        signal.alarm(SECONDS)
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
            end = {"crash": f"the process ended with {worker.returncode}"}
            yield {"number": at, "kind": "?", "fits": None, "ends": end, "defect": True}


def range_of(text: str) -> range:
    """FIRST:STOP."""
    first, stop = map(int, text.split(":"))
    return range(first, stop)
