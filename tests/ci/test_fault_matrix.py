"""Promise: whatever goes wrong on a rank, one message names it, its stage and batch, and the cause."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import fault_matrix
import pytest
from fault_matrix import FAULTS, IN_A_STAGE, Cell, cells, expected, run

from tritonrec.distributed import RankDiedError, RankPool

ATTACK = Path(__file__).resolve().parents[2] / "ci" / "attack"

pytestmark = [
    pytest.mark.multi_rank,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
KILLED = Cell("killed", 2, 1, "compute")
QUICK = [Cell("other version", 2, 0)]  # test_ranks.py has a rank that dies in every run
SLOW = [
    KILLED,
    *(Cell(fault, 3, 1, "communication" if fault in IN_A_STAGE else "") for fault in FAULTS),
    *(Cell(fault, 2, 0, "checkpoint") for fault in IN_A_STAGE),
]


@pytest.mark.if_changed
@pytest.mark.parametrize(
    "cell", [*QUICK, *(pytest.param(cell, marks=pytest.mark.slow) for cell in SLOW)], ids=str
)
def test_a_cell_is_sound(cell):
    assert run(cell).problems == ()


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("", "the run ended as if nothing had happened"),
        ("rank 0: RuntimeError: Connection closed by peer", "no line has "),
        ("rank 1 died (SIGKILL)", r"no line has \bcompute\(5\b"),
        ("rank 0 died (SIGKILL): it was last seen in compute(5, 0)", r"no line has \brank 1\b"),
        ("rank 1 died (SIGKILL)\nrank 1: in compute(5, 0)", "no line has "),
    ],
)  # fmt: skip
def test_a_poor_message_is_a_problem(monkeypatch, message, problem):
    def answer(pool, function, world_size, cell, folder):
        Path(folder, "moment").write_text(str(time.time()))
        if message:
            raise RankDiedError(message)

    monkeypatch.setattr(RankPool, "run", answer)
    monkeypatch.setattr(RankPool, "_start", lambda pool: vars(pool).update(processes=[]))
    monkeypatch.setattr(RankPool, "close", lambda pool: None)
    (found,) = run(KILLED).problems
    assert found.startswith(problem)


def test_processes_and_memory_that_are_left_are_problems(monkeypatch):
    def answer(pool, function, world_size, cell, folder):
        Path(folder, "moment").write_text(str(time.time()))
        raise RankDiedError("rank 1 died (SIGKILL): it was last seen in compute(5, 0)")

    monkeypatch.setattr(RankPool, "run", answer)
    processes = [SimpleNamespace(pid=1)]  # which is alive
    monkeypatch.setattr(RankPool, "_start", lambda pool: vars(pool).update(processes=processes))
    monkeypatch.setattr(RankPool, "close", lambda pool: None)
    monkeypatch.setattr(fault_matrix, "shared_memory", lambda pids: [f"torch_{pids[0]}"])
    assert run(KILLED).problems == ("processes are left: [1]", "shared memory is left: ['torch_1']")


def test_every_cell_is_recorded_and_sound():
    recorded = json.loads((ATTACK.parent / "baselines" / "fault_matrix.json").read_text())["cells"]
    assert [Cell(**each["cell"]) for each in recorded] == list(cells([2, 3, 4]))
    assert not any(each["problems"] for each in recorded)


def test_every_fault_is_in_the_matrix():
    found = list(cells([2, 3]))
    lanes = {cell.lane for cell in found if cell.fault in IN_A_STAGE}
    assert {cell.fault for cell in found} == set(FAULTS) and len(lanes) == len(fault_matrix.STAGES) + 1
    assert {(cell.world_size, cell.victim) for cell in found} == {(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)}
    assert all(expected(cell) for cell in found) and len(found) == len(set(found))
