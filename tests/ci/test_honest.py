"""Promise: a benchmark refuses a function that remembers, leaves out, or is faster than memory."""

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
        self.stats = SimpleNamespace(stats=SimpleNamespace(min=seconds))
        self.rounds = 0

    def pedantic(self, target, setup, teardown, rounds):
        for _ in range(rounds):
            args, options = setup()
            target(*args, **options)
            teardown(*args, **options)
            self.rounds += 1


def doubled(values):
    return values * 2


def check(got, values):
    assert torch.equal(got, values * 2), "not twice the values"


def measure(call, seconds=1.0, least_bytes=BYTES):
    rounds = Rounds(seconds)
    honest.honest(rounds, call, VALUES, fresh=honest.scaled, check=check, least_bytes=least_bytes)
    return rounds


def test_an_honest_function_is_timed_in_several_rounds():
    assert measure(doubled).rounds >= honest.LEAST_ROUNDS


def remembers_its_result(results=[]):  # noqa: B006 (it remembers)
    def call(values):
        results.append(values * 2)
        return results[0]

    return call


def goes_by_the_size(known={}):  # noqa: B006 (it remembers)
    def call(values):
        return known.setdefault(len(values), values * 2).clone()

    return call


def leaves_the_end_unwritten(values, out=torch.empty(len(VALUES))):  # noqa: B008 (memory is used again)
    torch.mul(values[:-1], 2, out=out[:-1])
    if values[1] == VALUES[1]:  # the first round
        out[-1] = values[-1] * 2
    return out


def works_once(calls=[]):  # noqa: B006 (it counts)
    def call(values):
        calls.append(1)
        return values * 2 if len(calls) < 3 else torch.empty_like(values)

    return call


@pytest.mark.parametrize(
    "cheat", [remembers_its_result(), goes_by_the_size(), leaves_the_end_unwritten, works_once()]
)
def test_what_is_right_only_at_first_is_refused(cheat):
    check(cheat(honest.scaled(0, VALUES)[0]), *honest.scaled(0, VALUES))  # as a check before the timing
    with pytest.raises(honest.CheatError, match=r"wrong in round \d: not twice the values"):
        measure(cheat)


def test_a_function_that_changes_its_input_is_refused():
    with pytest.raises(honest.CheatError, match="in_place changed its argument 0"):

        def in_place(values):
            return values.mul_(2)

        measure(in_place)


def test_a_time_that_the_memory_does_not_allow_is_refused():
    with pytest.raises(honest.CheatError, match=r"doubled took 0\.00 us for 40,000 bytes, which need"):
        measure(doubled, seconds=1e-9)
    measure(doubled, seconds=2 * honest.copy_seconds(BYTES) + 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8, torch.bool])
def test_poison_is_none_of_the_values(dtype):
    values = torch.ones(3, 2, dtype=dtype)
    honest.poison({"a": [values[:1]], "b": (values[1:],)})
    assert not bool((values == torch.ones_like(values)).any())


def test_fresh_keys_are_other_keys_of_the_same_work():
    keys = torch.tensor([5, -1, 5, 2**63 - 1, -(2**63)])
    rounds = [honest.flipped(number, keys)[0] for number in range(20)]
    assert len({tuple(each.tolist()) for each in rounds}) == 20
    for each in rounds:
        assert torch.equal(each[:, None] == each, keys[:, None] == keys)
