"""Whichever rank is killed, at whichever file operation: the last complete checkpoint loads, and is right."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from crashing import change_at, dense_at, table_at
from simulated import ascending, load_on, same, whole
from speeds import slow_except

from tritonrec.checkpoint import steps


class Crasher:
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("crashing.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, directory: Path, world_size: int, victims: list[int], **when) -> dict:
        request = {"directory": str(directory), "world_size": world_size, "victims": victims} | when
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        assert self.process.wait(20) == 0


@pytest.fixture(scope="module")
def crasher():
    crasher = Crasher()
    yield crasher
    crasher.close()


def check(directory: Path, at_least: int, at_most: int, world_size: int) -> None:
    """The checkpoints in `directory` are right, and the newest is of a step in the range."""
    saved = steps(directory)
    assert at_least <= (saved or [0])[-1] <= at_most
    for step in saved[-2:]:
        checkpoints = load_on(world_size, directory, step=step)
        assert same(whole(checkpoints, "t"), ascending(table_at(step)))
        assert same(checkpoints[0].dense, dense_at(step)) and checkpoints[0].meta == {"step": step}


def killed_run(crasher: Crasher, directory: Path, world_size: int, victims: list[int], **when) -> dict:
    """Run on from what is there, and check what is left; `load` at a world size of its own."""
    before = (steps(directory) or [0])[-1]
    result = crasher.run(directory, world_size, victims, **when)
    check(directory, before + result["saved"], before + result["saved"] + 1, (before + world_size) % 3 + 1)
    return result


@pytest.mark.parametrize(
    "world_size, victim, stride", slow_except([(2, 0, 3)], [(1, 0, 1), (2, 0, 3), (2, 1, 1), (3, 2, 2)])
)
def test_a_rank_killed_at_every_file_operation(crasher, tmp_path, world_size, victim, stride):
    """Each run goes on where the one before was killed, with a full checkpoint and a delta."""
    killed_run(crasher, tmp_path, world_size, [])
    whole_run = killed_run(crasher, tmp_path, world_size, [])
    assert whole_run["endings"] == [0] * world_size and whole_run["saved"] == 2
    passed = whole_run["passed"][victim]
    assert {"fsync", "replace", "save_file"} <= set(passed)
    assert victim or {"write_text", "unlink", "rmdir", "mkdir"} <= set(passed)
    seen = set()
    for point in range(1, len(passed) + 1, stride):
        result = killed_run(crasher, tmp_path, world_size, [victim], point=point)
        assert result["endings"][victim] == -9
        # Who lost a rank stops, and says so; but a rank that had nothing more to ask of it is done.
        assert all(code in (0, 3) for rank, code in enumerate(result["endings"]) if rank != victim)
        seen.add(result["saved"])
    assert seen >= {0, 1}
    assert killed_run(crasher, tmp_path, world_size, [])["saved"] == 2
    files = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert len(files) <= 2 + 4  # nothing is left of the killed: two manifests and the folders they name


def test_ranks_killed_at_any_time(crasher, tmp_path):
    """One rank or all of them, between the start and about the end of a run; the times are drawn once. Every
    other run saves changes first, to what another world size saved.
    """
    draw = random.Random(7)
    for number in range(12):
        world_size = draw.choice([1, 2, 3])
        victims = draw.choice([[draw.randrange(world_size)], list(range(world_size))])
        after = draw.uniform(0.001, 0.08)
        killed_run(crasher, tmp_path, world_size, victims, after=after, follows=bool(number % 2))
    assert killed_run(crasher, tmp_path, 2, [])["saved"] == 2


def test_the_changes_of_a_crashing_run_make_the_difference():
    """The model of these tests itself: rows before, changes and erased keys give the rows after."""
    for step in range(1, 20):
        before, (changed, erased) = table_at(step - 1), change_at(step)
        assert len(erased) and 0 < len(changed["keys"]) < len(table_at(step)["keys"])
        keep = ~torch.isin(before["keys"], torch.cat([erased, changed["keys"]]))
        joined = {column: torch.cat([before[column][keep], changed[column]]) for column in before}
        assert same(ascending(joined), ascending(table_at(step)))
