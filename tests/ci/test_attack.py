"""The attack on ops sees stray writes, crashes, differences from references and errors that name nothing."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ATTACK = Path(__file__).resolve().parent.parent.parent / "ci" / "attack"


@pytest.fixture(scope="module")
def attack():
    """ci/attack/ops.py, imported for these tests only: other modules have its names too."""
    sys.path.insert(0, str(ATTACK))
    names = ["arguments", "doors", "draws", "guarded", "hostile", "ops", "verdicts"]
    before = {name: sys.modules.pop(name, None) for name in names}
    try:
        import ops

        yield ops
    finally:
        sys.path.remove(str(ATTACK))
        for name in names:
            sys.modules.pop(name, None)
            if before[name] is not None:
                sys.modules[name] = before[name]


def test_memory_shows_a_byte_before_a_gap_between_rows_and_an_argument_that_is_only_read(attack):
    arena = attack.Arena()
    (matrix,) = arena.place([torch.arange(24.0).view(4, 6)[:, :3]])
    assert torch.equal(matrix, torch.arange(24.0).view(4, 6)[:, :3]) and matrix.stride() == (6, 1)
    assert not arena.spoiled([]) and not arena.spoiled([matrix])
    matrix += 1
    assert arena.spoiled([])
    assert not arena.spoiled([matrix])
    for place in (-1, 3, 5):
        (matrix,) = arena.place([torch.zeros(4, 6)[:, :3]])
        matrix.as_strided((1,), (1,), matrix.storage_offset() + place).fill_(7.0)
        assert arena.spoiled([matrix]), place


def test_memory_behind_an_argument_ends_the_process():
    code = """
import guarded, torch
(vector,) = guarded.Arena().place([torch.zeros(3)])
print("placed", flush=True)
vector.as_strided((1,), (1,), vector.storage_offset() + 3).fill_(7.0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ATTACK, capture_output=True, text=True)
    assert done.stdout == "placed\n" and done.returncode < 0


def outcomes(attack, function):
    """What the attack says of 40 calls of a `scatter_rows` that is another function."""
    call = dataclasses.replace(attack.calls()["scatter_rows"], doors=[function])
    arenas, draws = [attack.Arena() for _ in range(9)], attack.Draws(3)
    return {attack.attack(call, index, arenas, draws)[0] for index in range(40)}


def test_outcomes_are_told_apart(attack):
    from tritonrec.ops import scatter_rows

    def wrong(destination, rows, values, impl, **rest):
        scatter_rows(destination, rows, values, impl=impl, **rest)
        if impl != "reference" and destination.numel():
            destination[-1, -1] += 1

    def stray(destination, rows, values, impl, **rest):
        scatter_rows(destination, rows, values, impl=impl, **rest)
        if isinstance(values, torch.Tensor) and values.numel() and values.dtype == torch.float32:
            values.fill_(3)

    def silent(**given):
        raise ValueError("no")

    def nearly(**given):
        raise IndexError("overrows of the destinations")

    assert outcomes(attack, scatter_rows) == {"accepted", "refused"}
    assert "difference" in outcomes(attack, wrong)
    assert "spoiled" in outcomes(attack, stray)
    assert outcomes(attack, silent) == outcomes(attack, nearly) == {"unnamed"}


@pytest.mark.parametrize(
    ("op", "got", "expected", "kind"),
    [
        ("gather_rows", torch.ones(3), torch.ones(3), "accepted"),
        ("gather_rows", torch.ones(3), torch.ones(3).double(), "difference"),
        ("gather_rows", torch.ones(3), torch.ones(3, 1), "difference"),
        ("gather_rows", torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), "accepted"),
        ("gather_rows", torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]), "difference"),
        ("gather_rows", torch.tensor([1.0 + 2.0**-20]), torch.ones(1), "difference"),
        ("silu", torch.tensor([1.0 + 2.0**-20]), torch.ones(1), "accepted"),
        ("silu", torch.tensor([1.1]), torch.ones(1), "difference"),
        ("silu", torch.tensor([0.5, 3e5]), torch.tensor([0.5, 2e5]), "difference"),
        ("gather_rows", 3, 3, "accepted"),
        ("gather_rows", 3, 4, "difference"),
    ],
)
def test_results_are_compared_in_shape_dtype_and_value(attack, op, got, expected, kind):
    import verdicts

    assert ("silu" in verdicts.ROUNDED, "gather_rows" in verdicts.ROUNDED) == (True, False)
    call = dataclasses.replace(attack.calls()["gather_rows"], op=op)
    assert verdicts.compare(call, [got], [expected])[0] == kind


def test_a_call_is_a_function_of_seed_op_and_number(attack):
    call = attack.calls()["registered.segment_sum_into"]
    one, same, other = (attack.hostile_call(call, *place)[0] for place in ((7, 5), (7, 5), (7, 6)))
    assert repr(one) == repr(same) != repr(other)


@pytest.mark.parametrize("fits", [True, False])
def test_doors_of_an_op_get_the_same_calls_though_the_first_one_writes_to_everything(
    attack, fits, monkeypatch
):
    monkeypatch.setattr(attack.Arena, "place", attack.Arena.place if fits else lambda *_: None)
    arenas, draws, seen = [attack.Arena() for _ in range(9)], attack.Draws(3), []

    def spoiler(**given):
        for value in given.values():
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                value.detach().fill_(1)
            if isinstance(value, list):
                value.clear()
        raise ValueError("no")

    def observer(**given):
        seen.append(repr({n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in given.items()}))
        raise ValueError("no")

    found = attack.calls()
    for call in (found["gather_rows"], found["registered.norm_mul_dropout_backward_exact"]):
        for door in (spoiler, observer):
            for index in range(20):
                attack.attack(dataclasses.replace(call, doors=[door]), index, arenas, draws)
        shared, seen[:] = [*seen], []
        for index in range(20):
            call = dataclasses.replace(call, doors=[observer])
            attack.attack(call, index, arenas, attack.Draws(3))
        assert shared == seen and len(set(seen)) > 10
        seen.clear()


def test_choices_draw_what_those_of_numpy_draw(attack):
    """So a number is that of the same call as in the days of ``rng.choice``."""
    import draws

    words, likely = ["shape", "dtype", "strides", "values"], [0.17, 0.08, 0.5, 0.25]
    bounds = draws.bounds_of(likely)
    one, other = (np.random.default_rng(3) for _ in range(2))
    for _ in range(300):
        assert draws.chosen(one, words) == other.choice(words)
        assert draws.chosen_by(one, words, bounds) == other.choice(words, p=likely)


def test_a_call_that_ends_its_process_is_reported_and_the_rest_goes_on(attack, monkeypatch, tmp_path):
    """The worker is one that dies at call 3 of the first op."""
    worker = tmp_path / "worker.py"
    worker.write_text("""
import json, os, pathlib, signal, sys
names, seed, stop, first, begin, place = sys.argv[2:]
place = pathlib.Path(place)
for name in names.split(","):
    if name == "silu" and int(begin) <= 3:
        place.write_bytes(bytes(8) + (3).to_bytes(8, "little"))
        os.kill(os.getpid(), signal.SIGSEGV)
    print(json.dumps({"op": name, "accepted": 2, "seen": []}), flush=True)
""")
    monkeypatch.setattr(attack, "__file__", str(worker))
    silu, linear = attack.supervise(["silu", "linear"], 7, 9, tmp_path / "progress")
    assert silu["crashes"] == [[3, "signal 11"]] and silu["accepted"] == 2 and attack.bad(silu)
    assert linear["crashes"] == [] and linear["accepted"] == 2 and not attack.bad(linear)
    silu, _ = attack.supervise(["silu", "linear"], 7, 9, tmp_path / "progress", first=4)
    assert silu["crashes"] == []


def test_a_record_goes_on_where_it_ends_with_the_ops_that_are_behind_first(attack, tmp_path, monkeypatch):
    turns = []

    def supervise(names, seed, stop, progress, first=0):
        turns.append((names, first, stop))
        ends = {"accepted": stop - first - 1, "refused": 1, "seen": [], "crashes": []}
        return [{"op": name, **ends} for name in names]

    monkeypatch.setattr(attack, "supervise", supervise)
    monkeypatch.setattr(attack, "TURN", 10)
    file = tmp_path / "attack.json"
    assert attack.run_turns(["silu"], 7, 15, attack.Record(file, 7), 9.0)
    assert attack.run_turns(["silu", "linear"], 7, 20, attack.Record(file, 7), 9.0)
    both = ["silu", "linear"]
    assert turns == [
        (["silu"], 0, 10), (["silu"], 10, 15), (["linear"], 0, 10), (["linear"], 10, 15), (both, 15, 20),
    ]  # fmt: skip
    found = attack.Record(file, 7).document["ops"]
    assert found == {name: {"calls": 20, "accepted": 17, "refused": 3} for name in both}
    with pytest.raises(SystemExit, match="has the calls of seed 7, not of 8"):
        attack.Record(file, 8)
    assert attack.run_turns(both, 7, 99, attack.Record(file, 7), 0.0) and len(turns) == 5
