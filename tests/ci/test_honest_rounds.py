"""Promise: what surrounds a timing is outside of it, sees all inputs and outputs, and every suite has it."""

import ast
from pathlib import Path
from types import SimpleNamespace

import honest
import kernel_cases
import kernel_cases_of_rows  # noqa: F401  fills the cases, as the next one does
import kernel_cases_of_tokens  # noqa: F401
import numpy as np
import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "ci" / "benchmarks"

VALUES = torch.arange(12.0)


def anything(_output, *_arguments):
    pass


def once(call, *arguments, check=anything, **given):
    one = honest.Round(honest.Given(call, arguments, check, **given), 0)
    one.run()
    one.finish()
    return one


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8, torch.bool])
def test_poison_is_none_of_the_values(dtype):
    values = torch.ones(3, 2, dtype=dtype)
    honest.poison({"a": [values[:1]], "b": (values[1:],)})
    assert not bool((values == torch.ones_like(values)).any())


def add_one(value):
    value += 1


def first_of(value):
    value[0] = 7


def in_list(value):
    value[0].zero_()


def in_attribute(value):
    value.ids.mul_(2)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        (torch.arange(3), add_one), (np.arange(3), add_one), ([1, 2, 3], first_of),
        ([torch.ones(2)], in_list), (SimpleNamespace(ids=torch.ones(2)), in_attribute),
        (torch.full((2,), torch.nan), first_of),
    ],
)  # fmt: skip
def test_a_change_of_any_kind_of_argument_is_refused(argument, change):
    once(lambda value: None, argument)
    with pytest.raises(honest.CheatError, match=f"{change.__name__} changed its argument 0"):
        once(change, argument)
    once(change, argument, writes=(0,))


@pytest.fixture
def gpu(monkeypatch):
    """A log of what a GPU is given, by a stand-in of its events."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            self.name = ("start", "end")[log.count("new") % 2]
            log.append("new")

        def record(self):
            log.append(self.name)

        def elapsed_time(self, _other):
            return 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    monkeypatch.setattr(honest, "_fill_cache", lambda: log.append("flush"))
    monkeypatch.setattr(honest, "copy_seconds", lambda size, device: size * 1e-9)
    return log


def logged(log):
    def call(values):
        log.append("call")
        return values * 2

    def check(got, values):
        log.append("check")
        assert torch.equal(got, values * 2), "not twice the values"

    return honest.in_turn([honest.Given(call, (VALUES,), check)])


def test_between_events_lies_the_call_alone(gpu):
    times = honest.by_turns({"call": logged(gpu)}, 2, 8, honest.by_events, "cuda")
    assert times == {"call": [1e-3, 1e-3]}
    assert gpu == ["flush", "new", "new", "start", "call", "end", "wait", "check"] * 3
    with pytest.raises(
        honest.CheatError, match=r"call took 1000\.00 us for 4,000,000 bytes, which need 2000\.00"
    ):
        honest.by_turns({"call": logged(gpu)}, 2, 4_000_000, honest.by_events, "cuda")


SUITES = [path for path in sorted(FOLDER.glob("bench_*.py")) if path.name != "bench_torchrec.py"]


@pytest.mark.parametrize("path", SUITES)
def test_no_suite_times_beside_the_mechanism(path):
    tree = ast.parse(path.read_text())
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert called & {"time_rounds", "by_turns", "Round"}, "does not time honestly"
    assert "benchmark" not in called and "do_bench" not in called, "times a call whose output nobody checks"


OF_PLAIN_TORCH = ["gather_rows", "silu", "sparse_rowwise_adagrad", "norm_mul_dropout"]


@pytest.mark.if_changed
@pytest.mark.parametrize("name", OF_PLAIN_TORCH)
def test_a_case_refuses_the_answer_of_another_seed(name):
    """By the last peer, which compiles nothing."""
    cases = [kernel_cases.CASES[name](torch.device("cpu"), seed) for seed in range(2)]
    contender = list(cases[0].calls)[-1]
    for case in cases:
        once_of(case.given(contender), case.check)
    first, second = (case.given(contender) for case in cases)
    with pytest.raises(honest.CheatError, match="is wrong in round 0"):
        once_of(first, second.check)


def once_of(given, check):
    one = honest.Round(honest.in_turn([given])(0), 0)
    one.given.check = check
    one.run()
    one.finish()
