"""Timings that cannot be cheated: fresh input and a checked output in every round, and a physical floor.

    honest(benchmark, call, keys, fresh=flipped, check=is_right, least_bytes=8 * len(keys))

A round gets new values in new memory (`fresh`), so nothing can be remembered from the round before. After its
time is taken, its output is checked, its inputs are compared with a copy, and the output is overwritten: an
element that the next round leaves unwritten holds poison, also where its memory is used again. A figure below
half the time in which the same number of bytes can be copied here is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

LEAST_ROUNDS, MOST_ROUNDS = 5, 100
SECONDS = 0.2
"""Of all rounds of a function, by its first call."""
SLACK = 2.0
"""A function that only reads needs half the time of a copy."""
COPIES = 15

Check = Callable[..., None]
Fresh = Callable[..., tuple[Any, ...]]


class CheatError(AssertionError):
    """A timing that proves nothing; says why."""


def honest(
    benchmark: Any,
    call: Callable[..., Any],
    *args: Any,
    fresh: Fresh,
    check: Check,
    least_bytes: int,
    writes: Iterable[int] = (),
) -> None:
    """Time ``call(*args)`` with pytest-benchmark, in rounds that cannot help each other.

    Args:
        fresh: (round, *args) -> the arguments of that round: other values, the same amount of work.
        check: (output, *arguments) raises AssertionError for a wrong output; called after every round.
        least_bytes: what any implementation reads and writes at least.
        writes: positions of arguments that the call may change; `fresh` fills these with poison or zeros.

    Raises `CheatError` for a wrong output, a changed input, or a time that the memory does not allow.
    """
    rounds: dict[str, Any] = {"number": 0}
    kept = set(range(len(args))) - set(writes)

    def setup() -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = fresh(rounds["number"], *args)
        rounds["given"] = given
        rounds["copies"] = {n: given[n].clone() for n in kept if isinstance(given[n], torch.Tensor)}
        rounds["number"] += 1
        return given, {}

    def timed(*given: Any) -> None:
        rounds["output"] = call(*given)

    def teardown(*_given: Any) -> None:
        output, given = rounds.pop("output"), rounds["given"]
        for number, copy in rounds["copies"].items():
            if not _same(given[number], copy):
                raise CheatError(f"{_named(call)} changed its argument {number}")
        try:
            check(output, *given)
        except AssertionError as error:
            raise CheatError(f"{_named(call)} is wrong in round {rounds['number']}: {error}") from error
        poison(output)

    given, _ = setup()
    began = time.perf_counter()
    timed(*given)
    took = time.perf_counter() - began
    teardown()
    count = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(SECONDS / max(took, 1e-9))))
    benchmark.pedantic(timed, setup=setup, teardown=teardown, rounds=count)
    best = benchmark.stats.stats.min if getattr(benchmark, "stats", None) else took
    refuse_impossible(call, best, least_bytes)


def refuse_impossible(call: Callable[..., Any], seconds: float, least_bytes: int) -> None:
    """Raise `CheatError` for a time in which not even `SLACK` times the bytes of a copy can move."""
    least = copy_seconds(least_bytes) / SLACK
    if seconds < least:
        raise CheatError(
            f"{_named(call)} took {seconds * 1e6:.2f} us for {least_bytes:,} bytes, which need "
            f"{least * 1e6:.2f} us here at {SLACK:g} times the speed of a copy: it cannot have moved them"
        )


def copy_seconds(size: int) -> float:
    """The best time of a copy that reads and writes `size` bytes in total, on this machine."""
    source = torch.ones(max(size // 2, 1), dtype=torch.uint8)
    target = torch.empty_like(source)
    times = []
    for _ in range(COPIES):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return min(times)


def poison(output: Any) -> None:
    """Overwrite every tensor in an output: NaN, the least integer, or the other truth value."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            output.detach().fill_(torch.nan)
        elif output.dtype == torch.bool:
            output.logical_not_()
        elif output.numel():
            output.fill_(torch.iinfo(output.dtype).min)
    elif isinstance(output, dict):
        poison(list(output.values()))
    elif isinstance(output, list | tuple):
        for each in output:
            poison(each)


def flipped(number: int, *args: Any) -> tuple[Any, ...]:
    """Every int64 tensor with bits of the round flipped: distinct keys stay distinct, equal ones equal, and
    the work is the same. Others are copied."""
    mask = (number + 1) * 0x9E3779B97F4A7C15 % 2**62
    return tuple(_flipped(each, mask) if isinstance(each, torch.Tensor) else each for each in args)


def _flipped(values: torch.Tensor, mask: int) -> torch.Tensor:
    return values ^ mask if values.dtype == torch.int64 else values.clone()


def scaled(number: int, *args: Any) -> tuple[Any, ...]:
    """Every float tensor times a sign and a power of two of the round, which round nothing; others copied."""
    factor = (-1.0) ** number * 2.0 ** -(number % 4)
    return tuple(_scaled(each, factor) if isinstance(each, torch.Tensor) else each for each in args)


def _scaled(values: torch.Tensor, factor: float) -> torch.Tensor:
    return values * factor if values.is_floating_point() else values.clone()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _named(call: Callable[..., Any]) -> str:
    return getattr(call, "__name__", str(call))
