"""`Saver` writes the state of the moment it was given, one checkpoint at a time, and hides no failure."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
import torch
from simulated import ascending, load_on, on_ranks, part_of, random_table, same, whole

from tritonrec.checkpoint import CheckpointError, Saver, load, save, saver, single_rank, steps

pytestmark = pytest.mark.smoke


class Gate:
    """A `Gather` of one rank that stands still until it is opened."""

    def __init__(self):
        self.opened, self.entered = threading.Event(), threading.Event()

    def __call__(self, text: str) -> list[str]:
        self.entered.set()
        assert self.opened.wait(20)
        return single_rank(text)


def test_what_is_saved_is_the_state_at_the_call(tmp_path):
    gate = Gate()
    table, dense = random_table(1, 50), {"w": torch.zeros(4)}
    before = {column: values.clone() for column, values in table.items()}
    with Saver(tmp_path, gather=gate) as saver:
        saver.save(1, dense, {"t": table}, {"a": 1})
        dense["w"] += 1
        table["rows"] += 1
        table["keys"] ^= 1
        gate.opened.set()
        assert saver.wait().step == 1
        assert 0 < saver.blocked < saver.seconds and saver.waited <= saver.blocked
    found = load(tmp_path)
    assert found.dense["w"].tolist() == [0] * 4
    assert same(found.tables["t"], ascending(before))


def test_a_program_may_change_its_folder_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gate, elsewhere = Gate(), tmp_path / "elsewhere"
    elsewhere.mkdir()
    with Saver("saved", gather=gate) as saver:
        saver.save(1, {"w": torch.zeros(4)}, {}, {})
        monkeypatch.chdir(elsewhere)
        gate.opened.set()
    assert steps(tmp_path / "saved") == [1] and not [*elsewhere.iterdir()]


def test_what_is_written_elsewhere_without_a_base_is_full_each_time(tmp_path):
    seen = []

    def write(directory, step, *state, **options):
        seen.append((step, options.get("base")))

    with Saver(tmp_path, full_every=3, write=write) as saver:
        for step in range(3):
            assert saver.next_is_full(step)
            saver.save(step, {}, {}, {})
    assert seen == [(0, None), (1, None), (2, None)]


def test_owned_tensors_are_not_copied(tmp_path):
    gate = Gate()
    dense = {"w": torch.zeros(4)}
    with Saver(tmp_path, gather=gate) as saver:
        saver.save(1, dense, {}, {}, owned=True)
        assert gate.entered.wait(20)
        dense["w"] += 1  # against the rules, and so it shows
        gate.opened.set()
    assert load(tmp_path).dense["w"].tolist() == [1] * 4


def test_the_next_save_waits_for_the_one_before(tmp_path):
    gate = Gate()
    with Saver(tmp_path, gather=gate) as saver:
        saver.save(1, {}, {}, {})
        assert gate.entered.wait(20)
        second = threading.Thread(target=saver.save, args=(2, {}, {}, {}))
        second.start()
        assert steps(tmp_path) == [] and second.is_alive()
        gate.opened.set()
        second.join()
        assert steps(tmp_path)[0] == 1
        assert 0 < saver.waited <= saver.blocked
    assert steps(tmp_path) == [1, 2]


def test_closing_waits(tmp_path):
    gate = Gate()
    saver = Saver(tmp_path, gather=gate)
    saver.save(1, {}, {}, {})
    threading.Thread(target=gate.opened.set).start()
    saver.close()
    assert steps(tmp_path) == [1]
    saver.close()


def become_a_file(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.write_text("a file")


@pytest.mark.parametrize("call", ["save", "wait", "close", "next_is_full", "exit"])
def test_a_failure_surfaces_at_the_next_call(tmp_path, call):
    saver = Saver(tmp_path / "place", full_every=5)
    become_a_file(tmp_path / "place")
    saver.save(1, {}, {}, {})
    with pytest.raises(CheckpointError, match=r"place/step-000000000001\.json could not be .*File exists"):
        {"save": lambda: saver.save(2, {}, {}, {}), "exit": lambda: saver.__exit__(None, None, None)}.get(
            call, getattr(saver, call, None)
        )()
    (tmp_path / "place").unlink()
    assert saver.next_is_full()
    saver.save(3, {}, {}, {})
    saver.close()
    assert steps(tmp_path / "place") == [3]


def test_a_failure_is_added_to_the_error_that_ended_the_run(tmp_path):
    with pytest.raises(KeyError, match="the run's own") as caught, Saver(tmp_path / "place") as saver:
        become_a_file(tmp_path / "place")
        saver.save(1, {}, {}, {})
        raise KeyError("the run's own")
    assert "could not be written" in caught.value.__notes__[0]


@pytest.mark.parametrize("world_size", [1, 3])
def test_full_and_incremental_checkpoints_alternate(tmp_path, world_size):
    """Every third is full; each delta holds a row that changed and one that went."""
    table = random_table(2, 60)

    def work(rank, gather):
        current = part_of(table, rank, world_size)
        with Saver(tmp_path, rank=rank, world_size=world_size, gather=gather, full_every=3) as saver:
            kinds = []
            for step in range(1, 8):
                current["rows"][0] += step
                erased, current = current["keys"][-1:], {c: v[:-1] for c, v in current.items()}
                kinds.append(saver.next_is_full())
                if kinds[-1]:
                    saver.save(step, {}, {"t": current}, {})
                else:
                    changed = {column: values[:1] for column, values in current.items()}
                    saver.save(step, {}, {"t": changed}, {}, erased={"t": erased})
            return kinds, current

    results = on_ranks(world_size, work)
    assert [kinds for kinds, _ in results] == [[True, False, False, True, False, False, True]] * world_size
    expected = {column: torch.cat([current[column] for _, current in results]) for column in table}
    assert same(whole(load_on(2, tmp_path), "t"), ascending(expected))


def test_the_save_after_a_failure_is_full_on_all_ranks(tmp_path):
    table = random_table(3, 20)

    def work(rank, gather):
        own = part_of(table, rank, 2)
        saver = Saver(tmp_path, rank=rank, world_size=2, gather=gather, full_every=4)
        saver.save(1, {}, {"t": own}, {})
        assert not saver.next_is_full()
        bad = own if rank else own | {"keys": own["keys"].flip(0) * 0}
        saver.save(2, {}, {"t": bad}, {}, erased={})
        with pytest.raises((CheckpointError, ValueError), match="key 0 occurs more than once"):
            saver.wait()
        assert saver.next_is_full()
        saver.save(3, {}, {"t": own}, {})
        saver.close()

    assert on_ranks(2, work) == [None, None]
    assert steps(tmp_path) == [1, 3]


def test_the_wrong_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match="full_every must be 0 or more, got -1"):
        Saver(tmp_path, full_every=-1)
    with Saver(tmp_path, full_every=2) as saver:
        with pytest.raises(ValueError, match="the next checkpoint is full and takes no erased keys"):
            saver.save(1, {}, {}, {}, erased={})
        saver.save(1, {}, {}, {})
        with pytest.raises(ValueError, match="the next checkpoint is incremental and takes the erased keys"):
            saver.save(2, {}, {}, {})


def test_a_checkpoint_in_the_place_of_the_one_saved_last_is_no_base(tmp_path):
    saved = save(tmp_path, 4, {"w": torch.zeros(2)}, {}, {})
    assert saver._base_on_disk(saved)[0] is None
    shutil.rmtree(tmp_path)
    save(tmp_path, 4, {"w": torch.ones(2)}, {}, {})
    assert saver._base_on_disk(saved)[0] == f"{saved.path} is another checkpoint than the one saved last"


def test_a_folder_that_is_not_there_has_no_steps(tmp_path):
    assert steps(tmp_path / "none") == []
