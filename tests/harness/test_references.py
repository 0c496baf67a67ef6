"""A run that differs from its reference: is it the run, or the reference?"""

import json
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import pytest
import torch
from safetensors.torch import load_file, save_file

from tritonrec.harness.verify import references, run_case
from tritonrec.harness.verify.cases import Case
from tritonrec.harness.verify.contract import Verifier
from tritonrec.harness.verify.faults import FAULTS
from tritonrec.harness.verify.references import References, all_differences, first_difference
from tritonrec.harness.verify.thread_ranks import ThreadPool

CASE = Case("dbp", "batch", 1, 2, False, "sgd", 2)


@pytest.fixture
def verifier(job):
    with Verifier(job, ThreadPool()) as verifier:
        yield verifier


def test_a_reference_that_differs_from_itself_is_named_and_kept(verifier, job):
    verifier.record([CASE])
    file = Path(verifier._references.path, CASE.reference(job).file_name)
    states = load_file(file)
    good = {name: values.clone() for name, values in states.items()}
    states["1/loss/values"][3] += 1e-4
    states["1/loss/values"][5] = -states["1/loss/values"][5]
    save_file(states, file)
    for _ in range(2):  # the second time from memory
        result = verifier.run(CASE)
        assert not result.identical and result.first_difference is not None
        assert "the reference differs from itself: 1/loss/values" in result.error
    folder = Path(result.error.rsplit(" ", 1)[1])
    try:
        for name, expected in (("first", states), ("second", good)):
            kept = load_file(folder / f"{name}.safetensors")
            assert kept.keys() == expected.keys()
            assert all(torch.equal(kept[each], expected[each]) for each in kept)
        about = json.loads((folder / "differences.json").read_text())
        assert about["processor"] and about["torch.backends.cpu.get_cpu_capability()"]
        assert about["torch threads of the process"] == torch.get_num_threads()
        first, second = states["1/loss/values"], good["1/loss/values"]
        assert [each["at"] for each in about["differences"]["1/loss/values"]] == [[3], [5]]
        assert about["differences"]["1/loss/values"][1] == {
            "at": [5], "values": [first[5].item(), second[5].item()],
            "bits": [first.view(torch.int32)[5].item(), second.view(torch.int32)[5].item()],
        }  # fmt: skip
    finally:
        rmtree(folder)


def test_references_are_recorded_with_one_thread(verifier, monkeypatch):
    seen, threads = [], torch.get_num_threads()
    monkeypatch.setattr(references, "record_reference", lambda *_: seen.append(torch.get_num_threads()))
    torch.set_num_threads(3)
    try:
        verifier.record([CASE])
        assert seen == [1] and torch.get_num_threads() == 3
        monkeypatch.setattr(references, "record_reference", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            verifier.record([replace(CASE, steps=CASE.steps + 1)])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def test_all_values_that_differ_are_listed():
    one = {
        "0/a": torch.tensor([[1.0, 0.0], [float("nan"), 2.0]]),
        "0/b": torch.tensor(3),
        "1/a": torch.ones(2),
    }
    other = {"0/a": torch.tensor([[1.0, -0.0], [float("nan"), 2.5]]), "0/b": torch.tensor(4)}
    found = all_differences(one, other)
    assert [each["at"] for each in found["0/a"]] == [[0, 1], [1, 1]]
    assert found["0/b"] == [{"at": [], "values": [3, 4], "bits": [3, 4]}]
    assert found["1/a"] == "only in the first recording"
    assert all_differences(one, one) == {}
    assert all_differences({"0/a": torch.ones(2)}, {"0/a": torch.ones(3)})["0/a"].startswith(
        "(2,) torch.float32"
    )


def test_a_run_that_differs_from_a_sound_reference_is_to_blame(verifier, monkeypatch):
    lost = next(fault for fault in FAULTS if fault.name == "lost-micro-batch-gradient")
    with monkeypatch.context() as patch:
        patch.setattr(run_case, "Injection", lambda: lost.injection)
        result = verifier.run(CASE)
    assert not result.identical and result.first_difference is not None and result.error is None
    assert verifier.run(CASE).identical


def test_an_injected_fault_records_nothing_again(verifier, monkeypatch):
    monkeypatch.setattr(References, "doubt", lambda *_: pytest.fail("recorded again"))
    lost = next(fault for fault in FAULTS if fault.name == "lost-micro-batch-gradient")
    assert not verifier.run(replace(CASE, micro_batches=4), lost.name).identical


def test_the_first_difference_goes_by_step_and_sees_shapes_and_missing_tensors():
    one = {f"{step}/{name}": torch.arange(3.0) + step for step in (2, 10) for name in ("a", "b")}
    assert first_difference(one, dict(one)) is None
    other = {**one, "10/a": one["10/a"] + 1, "2/b": torch.tensor([2.0, 3.0, -0.0])}
    assert first_difference(one, other) == "2/b"
    assert first_difference(one, {**one, "10/a": one["10/a"][:2]}) == "10/a"
    assert first_difference(one, {name: one[name] for name in one if name != "2/a"}) == "2/a"
    zeros = {"0/a": torch.zeros(1)}
    assert first_difference(zeros, {"0/a": -torch.zeros(1)}) == "0/a"
    nan = torch.full((1,), torch.nan)
    assert first_difference({"0/a": nan}, {"0/a": nan.clone()}) is None
