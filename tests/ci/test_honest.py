"""Promise: a benchmark refuses a function that remembers, leaves out, or is faster than memory.

The same cheats are given to all three ways of timing: fresh values for each round, a few variants in turn,
and contenders by turns.
"""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

FILE = Path(__file__).resolve().parents[2] / "ci" / "benchmarks" / "honest.py"
spec = importlib.util.spec_from_file_location("honest", FILE)
honest = sys.modules["honest"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(honest)

VALUES = torch.arange(5000, dtype=torch.float32)
BYTES = 8 * len(VALUES)


class Rounds:
    """As much of pytest-benchmark's fixture as `honest` uses; the best time is given."""

    def __init__(self, seconds=1.0):
        self.stats, self.extra_info = SimpleNamespace(stats=SimpleNamespace(min=seconds)), {}
        self.rounds = 0

    def pedantic(self, target, setup, teardown, rounds):
        for _ in range(rounds):
            setup()
            target()
            teardown()
            self.rounds += 1


def doubled(values):
    return values * 2


def check(got, values):
    assert torch.equal(got, values * 2), "not twice the values"


def scaled(number):
    """The values times a sign and a power of two of the round, which round nothing."""
    return VALUES * ((-1.0) ** number * 2.0 ** -(number % 4))


def rounds_of(call):
    return lambda number: honest.Given(call, (scaled(number),), check)


def by_fresh_values(call, seconds=1.0, least_bytes=BYTES):
    rounds = Rounds(seconds)
    honest.time_rounds(rounds, rounds_of(call), least_bytes)
    return rounds


def variants(call):
    """Each knows its own answer, made beforehand."""
    found = []
    for number in range(3):
        values = scaled(number)

        def known(got, *_values, exact=values * 2):
            assert torch.equal(got, exact), "not twice the values"

        found.append(honest.Given(call, (values,), known))
    return found


def by_variants(call, seconds=1.0, least_bytes=BYTES):
    rounds = Rounds(seconds)
    honest.time_rounds(rounds, honest.in_turn(variants(call)), least_bytes)
    return rounds


def by_contenders(call, seconds=1.0, least_bytes=BYTES):
    """The call as one of two contenders; `seconds` is what the stopwatch says of every call."""

    def stopwatch(run):
        run()
        return seconds

    contenders = {call.__name__: rounds_of(call), "peer": rounds_of(doubled)}
    times = honest.by_turns(contenders, 12, least_bytes, stopwatch)
    return SimpleNamespace(rounds=len(times["peer"]))


WAYS = [by_fresh_values, by_variants, by_contenders]
pytestmark = pytest.mark.parametrize("measure", WAYS, ids=lambda way: way.__name__)


def test_an_honest_function_is_timed_in_several_rounds(measure):
    assert measure(doubled).rounds >= honest.LEAST_ROUNDS


def remembers_its_result():
    results = []

    def call(values):
        results.append(values * 2)
        return results[0]

    return call


def goes_by_the_size():
    known = {}

    def call(values):
        return known.setdefault(len(values), values * 2).clone()

    return call


def leaves_the_end_unwritten():
    out, calls = torch.empty(len(VALUES)), []

    def call(values):
        torch.mul(values[:-1], 2, out=out[:-1])
        if not calls:
            out[-1] = values[-1] * 2
        calls.append(1)
        return out

    return call


def leaves_what_never_changes_unwritten():
    """The first of the values is 0 in every round: poison alone tells that nobody wrote it again."""
    out, calls = torch.empty(len(VALUES)), []

    def call(values):
        torch.mul(values[1:], 2, out=out[1:])
        if not calls:
            out[0] = 0
        calls.append(1)
        return out

    return call


def works_three_times():
    calls = []

    def call(values):
        calls.append(1)
        return values * 2 if len(calls) < 4 else torch.zeros_like(values)

    return call


def right_for_the_first_values_only():
    def call(values):
        return values * 2 if torch.equal(values, VALUES) else torch.zeros_like(values)

    return call


CHEATS = [
    remembers_its_result, goes_by_the_size, leaves_the_end_unwritten,
    leaves_what_never_changes_unwritten, works_three_times,
    right_for_the_first_values_only,
]  # fmt: skip


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.__name__)
def test_what_is_right_only_at_first_is_refused(measure, cheat):
    first = scaled(0)
    check(cheat()(first), first)  # what a check before the timing sees
    with pytest.raises(honest.CheatError, match=r"wrong in round \d+: not twice the values"):
        measure(cheat())


def test_a_function_that_changes_its_input_is_refused(measure):
    with pytest.raises(honest.CheatError, match="in_place changed its argument 0"):

        def in_place(values):
            return values.mul_(2)

        measure(in_place)


def test_a_time_that_the_memory_does_not_allow_is_refused(measure):
    with pytest.raises(honest.CheatError, match=r"doubled took 0\.00 us for 40,000 bytes, which need"):
        measure(doubled, seconds=1e-9)
    measure(doubled, seconds=2 * honest.copy_seconds(BYTES) + 1e-3)
