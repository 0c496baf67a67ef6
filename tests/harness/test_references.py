"""A run that differs from its reference: is it the run, or the reference?"""

import json
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import pytest
import torch
from safetensors.torch import load_file, save_file

from tritonrec.distributed import Communicators
from tritonrec.harness.verify import run_case
from tritonrec.harness.verify.cases import Case
from tritonrec.harness.verify.contract import Verifier
from tritonrec.harness.verify.references import References, differences
from tritonrec.harness.verify.thread_ranks import ThreadPool
from tritonrec.harness.verify.tools import FAULTS

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
        about = json.loads((folder / "about.json").read_text())
        (found,) = about["differences"]
        assert found["tensor"] == "1/loss/values" and found["at"] == [int(states["1/loss/ids"][3])]
        assert {"processor", "capability", "threads_outside", "torch"} <= about["environment"].keys()
    finally:
        rmtree(folder)


@pytest.mark.if_changed
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


def first_difference(one, other):
    return next((each["tensor"] for each in differences(one, other)), None)


def test_the_first_difference_goes_by_step_and_sees_shapes_and_missing_tensors():
    one = {f"{step}/{name}": torch.arange(3.0) + step for step in (2, 10) for name in ("a", "b")}
    assert first_difference(one, dict(one)) is None
    other = {**one, "10/a": one["10/a"] + 1, "2/b": torch.tensor([2.0, 3.0, -0.0])}
    assert first_difference(one, other) == "2/b"
    assert first_difference(one, {**one, "10/a": one["10/a"][:2]}) == "10/a"
    assert first_difference(one, {name: one[name] for name in one if name != "2/a"}) == "2/a"
    zeros = {"0/a": torch.zeros(1)}
    assert first_difference(zeros, {"0/a": -torch.zeros(1)}) == "0/a"
    assert first_difference(zeros, {"0/a": torch.zeros(1, dtype=torch.int32)}) == "0/a"
    nan = torch.full((1,), torch.nan)
    assert first_difference({"0/a": nan}, {"0/a": nan.clone()}) is None


def test_every_difference_is_told_by_sample_id_or_index():
    ids = torch.tensor([40, -7, 9])
    one = {
        "0/loss/ids": ids, "0/loss/values": torch.arange(3.0), "0/dense/weight": torch.zeros(2, 2),
        "0/table/item/ids": ids, "0/table/item/rows": torch.zeros(3, 2),
    }  # fmt: skip
    other = {name: values.clone() for name, values in one.items()}
    other["0/loss/values"][torch.tensor([0, 2])] += 1
    other["0/dense/weight"][1, 0] = -0.0
    other["0/table/item/rows"][1] = 5
    other["1/loss/ids"] = ids
    assert list(differences(one, other)) == [
        {"tensor": "0/dense/weight", "of": 4, "at": [[1, 0]], "values": [0.0, -0.0]},
        {"tensor": "0/loss/values", "of": 3, "at": [40, 9], "values": [0.0, 1.0]},
        {"tensor": "0/table/item/rows", "of": 6, "at": [-7], "values": [0.0, 5.0]},
        {"tensor": "1/loss/ids", "values": ["missing", "torch.int64 (3,)"]},
    ]


def test_references_are_recorded_on_one_thread(job, tmp_path, monkeypatch):
    seen, before = [], torch.get_num_threads()
    states = run_case._reference_states
    monkeypatch.setattr(
        run_case, "_reference_states", lambda *of: seen.append(torch.get_num_threads()) or states(*of)
    )
    torch.set_num_threads(2)
    try:
        run_case.record_reference(CASE.reference(job), 1, str(tmp_path))
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_reference_of_a_window_knows_what_all_batches_of_an_update_have_used(job):
    case = Case("nestpipe", "window", 1, 2, False, "adam", 6, variant="scale")
    states, loader = run_case._in_turn(Communicators.local(), job, case), case.job(job).loader()
    for step, state in enumerate(states):
        batches = [
            loader.global_batch(each).lookups()["item"].ids for each in range(step - step % 3, step + 1)
        ]
        assert torch.equal(state["table/item/used"], torch.cat(batches).unique())
