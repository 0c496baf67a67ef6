"""What a micro-batch and its lanes cost on the host: ratios of a training step, and where its time is.

MovieLens-100K, one thread a rank. Variants take turns step by step (pipelined ones eight steps by eight
steps), so that a change of the machine's speed meets all; the median of the ratios is printed, by wall time
of the slowest rank and by processor time of all. The waterfall is the recorder's: milliseconds of processor
time of each stage, summed over micro-batches.

    python ci/benchmarks/measure_step.py --batch-size 64
    git worktree add /tmp/before COMMIT
    python ci/benchmarks/measure_step.py --before /tmp/before --json ci/baselines/step.json

With ``--before`` the package of another tree and this one take turns, each `--rounds` times in a process of
its own after one that compiles its kernels, and medians over the rounds are written.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile
from typing import Any

import torch

from tritonrec.distributed import Communicators, RankPool
from tritonrec.harness.job import Job
from tritonrec.host_memory import keep_freed_memory
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import Trainer, WindowConfig
from tritonrec.trace import NullRecorder

MODEL = HSTUConfig(dim=64, layers=2, heads=2, qk_dim=32, v_dim=32, max_seq_len=50, dropout=0.2)
WARM, RUN, MANY = 5, 8, 8  # steps, steps of a pipelined run, micro-batches
Variant = tuple[str, int, str]
ONE, EIGHT, PIPED = ("sequential", 1, "batch"), ("sequential", MANY, "batch"), ("nestpipe", MANY, "batch")
WINDOW_ONE, WINDOW_EIGHT = ("sequential", 1, "window"), ("sequential", MANY, "window")
RATIOS = {
    "sequential N = 8 over N = 1": (EIGHT, ONE),
    "nestpipe N = 8 over sequential N = 8": (PIPED, EIGHT),
    "batch over window, N = 1": (ONE, WINDOW_ONE),
    "batch over window, N = 8": (EIGHT, WINDOW_EIGHT),
}


class StageTimes(NullRecorder):
    """Seconds of processor time of each stage in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))

    @contextmanager
    def span(
        self, lane: str, name: str, *, batch: int, micro_batch: int | None = None, **args: Any
    ) -> Iterator[dict[str, Any]]:
        """A stage's work."""
        began = time.thread_time()
        yield args
        self.seconds[name][batch] += time.thread_time() - began

    def medians_ms(self, steps: int) -> dict[str, float]:
        """Of each stage, micro-batches together, in the steps that are warm."""
        warm = range(WARM, steps)
        return {
            name: round(1e3 * median(times[step] for step in warm), 3)
            for name, times in self.seconds.items()
            if times.keys() >= set(warm)
        }


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Wall and processor milliseconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3


def calls_of(call: Callable[[], Any]) -> int:
    """Calls of Python and C functions by this thread."""
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def switches_of(call: Callable[[], Any]) -> int:
    """How often threads of this process went to sleep."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before


Series = dict[Variant, list[tuple[float, float]]]


@dataclass
class Taken:
    """Of one rank: (wall, processor) milliseconds of steps and of steps in pipelined runs, by variant."""

    steps: Series
    runs: Series
    counts: dict[str, int]
    waterfall_ms: dict[str, dict[str, float]]


def measure_rank(communicators: Communicators, batch_size: int, steps: int) -> Taken:
    """All variants on this rank, which takes its part of each batch."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as commands and ranks do
    job = Job("ml-100k", batch_size=batch_size, max_seq_len=50, num_negatives=32, sizes=MODEL)
    loader = job.loader(communicators.rank, communicators.world_size)
    batches = [loader.batch(step) for step in range(steps + RUN * (steps // RUN))]
    variants = {variant for pair in RATIOS.values() for variant in pair}
    recorders = {variant: StageTimes() for variant in variants}

    def trainer(variant: Variant) -> Trainer:
        mode, micro_batches, consistency = variant
        config = WindowConfig(micro_batches, consistency, seed=job.seed)
        return Trainer(*job.build("adam"), communicators, mode, config, recorders[variant])  # type: ignore

    trainers = {variant: trainer(variant) for variant in sorted(variants)}
    taken: Series = defaultdict(list)
    plain = [variant for variant in trainers if variant != PIPED]
    for at, batch in enumerate(batches[:steps]):
        for variant in plain if at % 2 else reversed(plain):
            taken[variant].append(timed(lambda batch=batch, v=variant: trainers[v].step(batch)))
    waterfall = {f"N = {each[1]}": recorders[each].medians_ms(steps) for each in (ONE, EIGHT)}
    runs: Series = {PIPED: [], EIGHT: []}
    list(trainers[PIPED].run(iter(batches[: steps - RUN])))
    for first in range(steps, len(batches), RUN):
        for variant in runs:
            some = batches[first : first + RUN]
            found = timed(lambda some=some, v=variant: list(trainers[v].run(iter(some))))
            runs[variant].append((found[0] / RUN, found[1] / RUN))
    last = [loader.batch(len(batches) + step) for step in range(RUN)]
    counts = {
        f"calls of a step, N = {each[1]}": calls_of(lambda each=each: trainers[each].step(last[0]))
        for each in (ONE, EIGHT)
    }
    sleeps = switches_of(lambda: list(trainers[PIPED].run(iter(last))))
    counts["sleeps of threads in a nestpipe step"] = sleeps // RUN
    for each in trainers.values():
        each.close()
    warm = {variant: series[WARM:] for variant, series in taken.items()}
    return Taken(warm, runs, counts, waterfall)


def of_all_ranks(parts: list[Series]) -> Series:
    """Of each step the wall time of the slowest rank, and the processor time of all."""
    found = {}
    for variant in parts[0]:
        together = zip(*(part[variant] for part in parts), strict=True)
        found[variant] = [(max(wall for wall, _ in each), sum(cpu for _, cpu in each)) for each in together]
    return found


def measure(batch_size: int, steps: int, ranks: int) -> dict[str, Any]:
    """Medians, ratios and the waterfall; counts and waterfall are those of the first rank."""
    with RankPool([ranks]) as pool:
        parts = pool.run(measure_rank, ranks, batch_size, steps)
    taken, runs = of_all_ranks([part.steps for part in parts]), of_all_ranks([part.runs for part in parts])
    results: dict[str, Any] = {"batch_size": batch_size, "ranks": ranks, "ms": {}, "ratios": {}}
    for variant, series in {**taken, PIPED: runs[PIPED]}.items():
        wall, cpu = (round(median(values), 2) for values in zip(*series, strict=True))
        results["ms"][" ".join(map(str, variant))] = {"wall": wall, "cpu": cpu}
    for name, (one, other) in RATIOS.items():
        source = runs if PIPED in (one, other) else taken
        both = list(zip(source[one], source[other], strict=True))
        wall, cpu = (round(median(a[clock] / b[clock] for a, b in both), 3) for clock in (0, 1))
        results["ratios"][name] = {"wall": wall, "cpu": cpu}
    results["counts"], results["waterfall_ms"] = parts[0].counts, parts[0].waterfall_ms
    return results


def medians(found: list[Any]) -> Any:
    """Of equally nested numbers, number by number."""
    if isinstance(found[0], dict):
        return {name: medians([each[name] for each in found]) for name in found[0]}
    return type(found[0])(round(median(found), 3))


def measure_trees(before: str, rounds: int, options: list[str]) -> dict[str, Any]:
    """Medians of this script's results with the package of the tree `before` and of its own."""
    trees = {"before": Path(before), "now": Path(__file__).parents[2]}
    found: dict[str, list[Any]] = {name: [] for name in trees}
    for number in range(rounds + 1):
        for name in trees if number % 2 else reversed(trees):
            with NamedTemporaryFile(suffix=".json") as file:
                command = [sys.executable, __file__, *options, "--json", file.name]
                environment = {**os.environ, "PYTHONPATH": str(trees[name])}
                subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
                if number:  # the first one compiles
                    found[name].append(json.load(file))
    return {name: medians(each) for name, each in found.items()}


def show(results: dict[str, Any]) -> None:
    """Print one tree's results."""
    for kind in ("ms", "ratios"):
        for name, found in results[kind].items():
            print(f"{name:40s} wall {found['wall']:8.3f}  cpu {found['cpu']:8.3f}")
    for name, count in results["counts"].items():
        print(f"{name:40s} {count:8d}")
    one, eight = results["waterfall_ms"].values()
    for name in one:
        print(f"{name:20s} N = 1 {one[name]:7.2f}  N = {MANY} {eight[name]:7.2f} ms")


def main() -> None:
    """Print, and write where a file is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--json")
    parser.add_argument("--before", help="a tree of an older commit, to measure in turns with this one")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.steps < 2 * RUN:
        parser.error(f"--steps: {2 * RUN} or more, got {options.steps}")
    sizes = options.batch_size, options.steps, options.ranks
    if options.before:
        names = ("--batch-size", "--steps", "--ranks")
        given = [str(part) for pair in zip(names, sizes, strict=True) for part in pair]
        results = measure_trees(options.before, options.rounds, given)
    else:
        results = measure(*sizes)
    load = os.getloadavg()[0]
    print(f"batch size {sizes[0]}, {sizes[2]} ranks, {os.cpu_count()} cores, load {load:.1f}")
    for name, each in results.items() if options.before else [("", results)]:
        print(name)
        show(each)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
