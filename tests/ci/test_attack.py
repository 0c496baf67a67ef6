"""The attack on ops sees stray writes, crashes, differences from references and errors that name nothing."""

import dataclasses
import subprocess
import sys
from pathlib import Path

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


def test_a_call_that_ends_its_process_is_reported_and_the_rest_goes_on(attack, monkeypatch, tmp_path):
    """The worker is one that dies at call 3 of the first op."""
    worker = tmp_path / "worker.py"
    worker.write_text("""
import json, os, pathlib, signal, sys
names, seed, stop, begin, place = sys.argv[2:]
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
