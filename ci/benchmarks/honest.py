"""Timings that cannot be cheated: a checked output in every round, input that is not the last one's, and a
physical floor.

    time_rounds(benchmark, in_turn([Given(call, (keys,), is_right), ...]), least_bytes)
    by_turns({"ours": rounds, "peer": rounds}, 21, least_bytes)

A round gets values of its own in new memory, mostly a copy of one of a few variants whose answers were
computed before (`in_turn`), so that what is remembered from the round before is wrong. After its
time is taken, its output is checked, its inputs are compared with a copy, and the output is overwritten: an
element that the next round leaves unwritten holds poison, also where its memory is used again. A figure below
half the time in which the same number of bytes can be copied here is refused.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

LEAST_ROUNDS, MOST_ROUNDS = 5, 100
SECONDS = 0.2
"""Of all rounds of a function, by an early call."""
SECONDS_WITH_CHECKS = 1.0
"""Of all rounds with what surrounds them; `LEAST_ROUNDS` may take longer."""
LEAST_TURNS, SECONDS_OF_TURNS = 11, 6.0
"""`by_turns` ends after so many seconds unless told otherwise, but not before so many turns."""
SLACK = 2.0
"""A function that only reads needs half the time of a copy."""
COPIES = 15
CACHE = 1 << 28
"""Bytes written before a time on a device is taken, so that no input lies in its cache."""

Check = Callable[..., None]
Stopwatch = Callable[[Callable[[], object]], float]


class CheatError(AssertionError):
    """A timing that proves nothing; says why."""


@dataclass
class Given:
    """What a round gets.

    Args:
        call: takes the arguments; this alone is timed.
        check: (output, *arguments) raises AssertionError for a wrong output; called after every round.
        writes: positions of arguments that the call may change; these are given as poison or zeros, or the
            check knows what becomes of them.
        prepare: (*arguments) -> the arguments of the call, made anew in each round and not timed.
        before: the arguments as the call must leave them; None copies them.
    """

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    check: Check
    writes: Iterable[int] = ()
    prepare: Callable[..., tuple[Any, ...]] | None = None
    before: tuple[Any, ...] | None = None


Rounds = Callable[[int], Given]
"""The number of a round -> what it gets."""


class Round:
    """One call: run, then checked, then its output is overwritten."""

    def __init__(self, given: Given, number: int):
        self.given, self.number = given, number
        self.arguments = given.prepare(*given.arguments) if given.prepare else given.arguments
        self.before = {
            n: copied(argument) if given.before is None else given.before[n]
            for n, argument in enumerate(self.arguments)
            if n not in set(given.writes)
        }
        self.output: Any = None

    def run(self) -> None:
        self.output = self.given.call(*self.arguments)

    def finish(self) -> None:
        """Raise `CheatError` for a changed input or a wrong output; poison the output."""
        name = _named(self.given.call)
        for n, before in self.before.items():
            if not _same(self.arguments[n], before):
                raise CheatError(f"{name} changed its argument {n}")
        try:
            self.given.check(self.output, *self.arguments)
        except (AssertionError, IndexError, RuntimeError) as error:  # poison is no index either
            raise CheatError(f"{name} is wrong in round {self.number}: {error}") from error
        poison(self.output)


def in_turn(variants: Sequence[Given]) -> Rounds:
    """Rounds that take turns among prepared variants, each on a copy of its variant's arguments."""

    def rounds(number: int) -> Given:
        variant = variants[number % len(variants)]
        before = variant.arguments if variant.prepare is None else None
        return replace(variant, arguments=copied(variant.arguments), before=before)

    return rounds


def time_rounds(benchmark: Any, rounds: Rounds, least_bytes: int, device: torch.device | str = "cpu") -> None:
    """Time a contender with pytest-benchmark, on a GPU until it has finished.

    `least_bytes` is what any implementation reads and writes at least. Raises `CheatError` for a wrong
    output, a changed input, or a time that the memory does not allow.
    """
    on_gpu = torch.device(device).type == "cuda"
    now: dict[str, Any] = {"number": 0}

    def setup() -> None:
        now["round"] = Round(rounds(now["number"]), now["number"])
        now["number"] += 1
        if on_gpu:
            torch.cuda.synchronize()

    def timed() -> None:
        now["round"].run()
        if on_gpu:
            torch.cuda.synchronize()

    def teardown() -> None:
        now["name"] = _named(now["round"].given.call)
        now.pop("round").finish()

    for _ in range(2):  # the first one may compile
        start = time.perf_counter()
        setup()
        began = time.perf_counter()
        timed()
        took = time.perf_counter() - began
        teardown()
        whole = time.perf_counter() - start
    count = int(min(SECONDS / max(took, 1e-9), SECONDS_WITH_CHECKS / whole))
    count = max(LEAST_ROUNDS, min(MOST_ROUNDS, count))
    benchmark.pedantic(timed, setup=setup, teardown=teardown, rounds=count)
    best = benchmark.stats.stats.min if getattr(benchmark, "stats", None) else took
    share = refuse_impossible(now["name"], best, least_bytes, device)
    benchmark.extra_info["of_a_copy"] = round(share, 3)


def by_turns(
    contenders: dict[str, Rounds],
    turns: int,
    least_bytes: int,
    stopwatch: Stopwatch | None = None,
    device: torch.device | str = "cpu",
    until: float = SECONDS_OF_TURNS,
) -> dict[str, list[float]]:
    """Seconds of each contender in each turn; every turn starts with another one, and all get the same round.

    `stopwatch` is the processor time of this thread unless given. Ends when `until` seconds have passed, but
    not before `LEAST_TURNS`. The turn of number 0, which may compile, is checked and not counted. Raises as
    `time_rounds` does.
    """
    stopwatch = stopwatch or clocked(time.thread_time)
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    began = time.perf_counter()
    for number in range(turns + 1):
        if number > LEAST_TURNS and time.perf_counter() - began > until:
            break
        for name in names[number % len(names) :] + names[: number % len(names)]:
            one = Round(contenders[name](number), number)
            took = stopwatch(one.run)
            one.finish()
            if number:
                seconds[name].append(took)
    for name, each in seconds.items():
        refuse_impossible(name, min(each), least_bytes, device)
    return seconds


def clocked(clock: Callable[[], float]) -> Stopwatch:
    def stopwatch(run: Callable[[], object]) -> float:
        began = clock()
        run()
        return clock() - began

    return stopwatch


def by_events(run: Callable[[], object]) -> float:
    """Seconds between two events around what a call starts on the GPU; its cache holds none of the input."""
    _fill_cache()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def _fill_cache() -> None:
    torch.empty(CACHE, dtype=torch.uint8, device="cuda").zero_()


def refuse_impossible(
    name: str, seconds: float, least_bytes: int, device: torch.device | str = "cpu"
) -> float:
    """The share of a copy's speed; `CheatError` where it is more than `SLACK`."""
    as_a_copy = copy_seconds(least_bytes, device)
    least = as_a_copy / SLACK
    if seconds < least:
        raise CheatError(
            f"{name} took {seconds * 1e6:.2f} us for {least_bytes:,} bytes, which need "
            f"{least * 1e6:.2f} us here at {SLACK:g} times the speed of a copy: it cannot have moved them"
        )
    return as_a_copy / seconds


def copy_seconds(size: int, device: torch.device | str = "cpu") -> float:
    """The best time of a copy that reads and writes `size` bytes in total, on this machine."""
    source = torch.ones(max(size // 2, 1), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    stopwatch = by_events if source.is_cuda else _shorter_clock
    return min(stopwatch(lambda: target.copy_(source)) for _ in range(COPIES))


def _shorter_clock(run: Callable[[], object]) -> float:
    """Wall or processor time: other work makes the one longer, more threads the other."""
    wall, processor = time.perf_counter(), time.process_time()
    run()
    processor = time.process_time() - processor
    return min(time.perf_counter() - wall, processor)


def poison(output: Any) -> None:
    """Overwrite every tensor, array and list of numbers in an output: NaN, the least integer, or the other
    truth value. Arrays that cannot be written stay."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            output.detach().fill_(torch.nan)
        elif output.dtype == torch.bool:
            output.logical_not_()
        elif output.numel():
            output.fill_(torch.iinfo(output.dtype).min)
    elif isinstance(output, np.ndarray):
        if output.flags.writeable:
            poison(torch.from_numpy(output))
    elif isinstance(output, dict):
        poison(list(output.values()))
    elif _of_numbers(output):
        output[:] = [-(2**63)] * len(output)
    elif isinstance(output, list | tuple):
        for each in output:
            poison(each)


def copied(value: Any) -> Any:
    """The same values in other memory, in tensors, arrays and what holds them; a copied tensor is a leaf."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, np.ndarray):
        return value.copy()
    if _of_numbers(value):
        return list(value)
    if type(value) in (list, tuple):
        return type(value)(copied(each) for each in value)
    return copy.deepcopy(value)


def _of_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], int | float)


def _same(one: Any, other: Any) -> bool:
    """Whether `one` still holds what its copy `other` does."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if torch.equal(one, other):
            return True
        return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
    if _of_numbers(one):
        return one == other
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if hasattr(one, "__dict__") and not callable(one):
        return all(_same(getattr(one, name), value) for name, value in vars(other).items())
    return bool(one is other or one == other)


def _named(call: Callable[..., Any]) -> str:
    return getattr(call, "__name__", str(call))
