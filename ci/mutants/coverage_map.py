"""Which test runs which line, and how long each test takes: the map by which `run.py` chooses tests.

    pip install coverage
    python ci/mutants/coverage_map.py out/coverage_map.json tests/pipeline tests/embedding ...

Arguments after the file go to pytest; by default all quick tests of `TESTS` but those of interpreted Triton
kernels. Lines that only another process of a test runs (a rank of `RankPool`) have no test in the map.
Takes minutes.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import coverage
import pytest
from chosen import chosen_files

ROOT = Path(__file__).resolve().parents[2]
TESTS = [
    "pipeline", "embedding", "distributed", "checkpoint", "kernels", "nn", "slipstream", "test_caches.py",
    "emulator/test_graphs.py",
]  # fmt: skip
QUICK = ["-q", "-m", "not slow", "-k", "not triton", *(f"tests/{name}" for name in TESTS)]


class Contexts:
    """Tells coverage which test is running, and keeps the seconds of its call."""

    def __init__(self, measured: coverage.Coverage):
        self.measured, self.seconds, self.failed = measured, {}, set()
        self.setups = defaultdict(float)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        self.measured.switch_context(item.nodeid)
        yield

    def pytest_runtest_logreport(self, report):
        if report.when == "setup":  # a fixture of the file is made again in each process
            file = report.nodeid.partition("::")[0]
            self.setups[file] = max(self.setups[file], report.duration)
        else:
            self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.outcome != "passed":
            self.failed.add(report.nodeid)

    def all_seconds(self, name):
        return self.seconds[name] + self.setups[name.partition("::")[0]]


def main(out: str, arguments: list[str]) -> int:
    os.chdir(ROOT)
    files = chosen_files(ROOT) + chosen_files(ROOT, kernels=True)
    measured = coverage.Coverage(data_file=None, include=[str(ROOT / file) for file in files])
    contexts = Contexts(measured)
    measured.start()
    code = pytest.main(arguments or QUICK, plugins=[contexts])
    measured.stop()
    data, tests = measured.get_data(), [name for name in contexts.seconds if name not in contexts.failed]
    number = {name: n for n, name in enumerate(tests)}
    lines: dict[str, dict[int, list[int]]] = {}
    for file in files:
        found = data.contexts_by_lineno(str(ROOT / file))
        lines[file] = {
            line: sorted(number[name] for name in names if name in number) for line, names in found.items()
        }
    document = {
        "tests": [[name, round(contexts.all_seconds(name), 4)] for name in tests],
        "lines": lines,
    }
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(json.dumps(document))
    by_file = defaultdict(int, {file: len(each) for file, each in lines.items()})
    print(f"{len(tests)} tests, {sum(by_file.values())} lines of {len(files)} files: {out}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
