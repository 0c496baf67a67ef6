"""Promise: what surrounds a timing is outside of it, sees all inputs and outputs, and every suite has it."""

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "ci" / "benchmarks"
sys.path.insert(0, str(FOLDER))
import honest  # noqa: E402
import kernel_cases  # noqa: E402
import kernel_cases_of_rows  # noqa: E402, F401  fills the cases, as the next one does
import kernel_cases_of_tokens  # noqa: E402, F401

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


def test_poison_reaches_arrays_and_lists_of_numbers():
    array, numbers, read_only = np.ones(3), [1, 2], np.ones(2)
    read_only.flags.writeable = False
    honest.poison((array, [numbers], read_only, None, len))
    assert np.isnan(array).all() and 1 not in numbers and len(numbers) == 2 and read_only.all()


def test_fresh_keys_are_other_keys_of_the_same_work():
    keys = torch.tensor([5, -1, 5, 2**63 - 1, -(2**63)])
    rounds = [honest.flipped(number, keys)[0] for number in range(20)]
    assert len({tuple(each.tolist()) for each in rounds}) == 20
    for each in rounds:
        assert torch.equal(each[:, None] == each, keys[:, None] == keys)


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


def test_a_round_writes_into_a_copy_of_its_variant():
    def doubles(values, out):
        return torch.mul(values, 2, out=out)

    def check(got, values, out):
        assert torch.equal(got, VALUES * 2) and got is out

    out = torch.full_like(VALUES, torch.nan)
    rounds = honest.in_turn([honest.Given(doubles, (VALUES, out), check, writes=(1,))])
    for number in range(3):
        one = honest.Round(rounds(number), number)
        one.run()
        one.finish()
        assert one.arguments[0].data_ptr() != VALUES.data_ptr() and one.output.isnan().all()
    assert torch.equal(VALUES, torch.arange(12.0)) and out.isnan().all()


def test_variants_take_turns():
    variants = [honest.Given(torch.neg, (torch.tensor(float(n)),), anything) for n in range(3)]
    rounds = honest.in_turn(variants)
    assert [rounds(number).arguments[0].item() for number in range(5)] == [0, 1, 2, 0, 1]


def test_what_is_prepared_is_made_anew_in_each_round_before_its_time():
    log = []

    def prepare(values):
        log.append("prepare")
        return values.square(), values

    def gradient(out, values):
        log.append("call")
        return torch.autograd.grad(out.sum(), values, retain_graph=True)[0]

    def check(got, _out, values):
        assert torch.equal(got, 2 * values), "another gradient"

    leaf = VALUES.clone().requires_grad_()
    rounds = honest.in_turn([honest.Given(gradient, (leaf,), check, prepare=prepare)])
    for number in range(2):
        one = honest.Round(rounds(number), number)
        log.append("start")
        one.run()
        one.finish()
    assert log == ["prepare", "start", "call"] * 2


class Rounds:
    """As much of pytest-benchmark's fixture as `time_rounds` uses; keeps what was inside of a time."""

    stats = None

    def __init__(self, log):
        self.log, self.extra_info = log, {}

    def pedantic(self, target, setup, teardown, rounds):
        self.log.clear()
        for _ in range(rounds):
            setup()
            self.log.append("start")
            target()
            self.log.append("end")
            teardown()


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


def test_on_a_gpu_a_time_ends_when_it_has_finished(gpu):
    honest.time_rounds(Rounds(gpu), logged(gpu), 8, "cuda")
    assert gpu[:6] == ["wait", "start", "call", "wait", "end", "check"] and gpu.count("check") >= 5


def test_all_contenders_of_a_turn_get_the_same_round_and_start_by_turns():
    seen = []

    def rounds_of(name):
        def rounds(number):
            seen.append((number, name))
            return honest.Given(lambda: None, (), anything)

        return rounds

    honest.by_turns({name: rounds_of(name) for name in "ab"}, 3, 0, lambda run: run() or 1.0)
    assert seen == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b"), (3, "b"), (3, "a")]


def test_turns_end_when_the_time_is_over_but_not_at_once():
    def rounds(_number):
        return honest.Given(lambda: None, (), anything)

    times = honest.by_turns({"a": rounds}, 1000, 0, lambda run: run() or 1.0, until=0.0)
    assert len(times["a"]) == honest.LEAST_TURNS


SUITES = [path for path in sorted(FOLDER.glob("bench_*.py")) if path.name != "bench_torchrec.py"]


@pytest.mark.parametrize("path", [*SUITES, FOLDER / "plain_sasrec.py"])
def test_no_suite_times_beside_the_mechanism(path):
    tree = ast.parse(path.read_text())
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert called & {"honest", "time_rounds", "by_turns", "Round"}, "does not time honestly"
    assert "benchmark" not in called and "do_bench" not in called, "times a call whose output nobody checks"


OF_PLAIN_TORCH = ["gather_rows", "silu", "sparse_rowwise_adagrad", "norm_mul_dropout"]


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
