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
    names = ["arguments", "case_runner", "doors", "draws", "guarded", "hostile", "ops", "verdicts"]
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


@pytest.mark.if_changed
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


def test_a_call_that_ends_its_process_is_reported_and_the_rest_goes_on(attack, monkeypatch, tmp_path, capsys):
    """The worker is one that dies at its case 3, and hangs at its case 5."""
    worker = tmp_path / "worker.py"
    worker.write_text("""
import json, os, signal, sys
first, stop = map(int, sys.argv[sys.argv.index("--work") + 1].split(":"))
for number in range(first, stop):
    print(json.dumps({"begins": number}), flush=True)
    if number == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 5:
        signal.alarm(1)
        signal.pause()
    kind = "difference" if number == 6 else "accepted"
    print(json.dumps({"number": number, "kind": kind, "reason": "of bits", "defect": False}), flush=True)
""")
    monkeypatch.setattr(attack, "__file__", str(worker))
    doors = [attack.calls()[name] for name in ("silu", "registered.silu")]
    assert not attack.attack_doors(doors, 7, 4)
    silu, registered, *wrong = capsys.readouterr().out.splitlines()
    assert silu.split() == ["silu", "3", "0"] and registered.split() == ["registered.silu", "2", "0"]
    assert wrong == [
        "    registered.silu call 1: crash: the process ended with -11",
        "    registered.silu call 2: crash: the process took too long",
        "    silu call 3: difference: of bits",
    ]
    assert attack.attack_doors(doors, 7, 1) and "crash" not in capsys.readouterr().out
