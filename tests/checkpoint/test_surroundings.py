"""What others do to the directory of a run: files that go, links, masks of modes; and ranks out of range."""

from __future__ import annotations

import json
import os
import stat
import warnings
from pathlib import Path

import pytest
import torch
from simulated import ascending, load_on, on_ranks, part_of, random_table, same, save_on, whole

from tritonrec.checkpoint import CheckpointError, Saver, load, range_of, save, steps
from tritonrec.checkpoint.agreement import Agreement
from tritonrec.checkpoint.files import manifest_of
from tritonrec.data.balancing import partition_samples
from tritonrec.nn import DLRM, DLRMConfig
from tritonrec.serving import TableWiseDLRM, own_samples
from tritonrec.slipstream.rows import HotRows, owned

RANKS = [(2, 2), (5, 2), (-1, 2), (0, 0), (0, -1), (1, -1), (0, 2**31), (0.0, 1), (True, 2), ("0", 1)]


@pytest.mark.parametrize("rank, world_size", RANKS)
def test_a_rank_out_of_range_is_refused_with_its_world_size(tmp_path, rank, world_size):
    save(tmp_path, 1, {"w": torch.ones(2)}, {"t": random_table(1, 20)}, {})
    own = {"rank": rank, "world_size": world_size}
    model = DLRM(DLRMConfig(("ad",), 2, 4, (4,), (4,)))
    hot = HotRows(("ad",), (0,), (torch.arange(3),), (torch.ones(3),), 0)
    calls = [
        lambda: load(tmp_path, **own),
        lambda: save(tmp_path, 2, {}, {}, {}, **own),
        lambda: Saver(tmp_path, **own),
        lambda: range_of(rank, world_size),
        lambda: own_samples(8, rank, world_size),
        lambda: TableWiseDLRM(model, {"ad": 0}, {"ad": lambda ids: ids}, rank, world_size),
        lambda: owned(hot, rank, world_size),
    ]
    for call in calls:
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        told = f"got rank {rank!r} and world_size {world_size!r}", f"rank must be of type int, got {rank!r}"
        assert any(each in str(caught.value) for each in told)
    assert steps(tmp_path) == [1] and not (tmp_path / ".lock").exists()


@pytest.mark.parametrize("world_size", [0, -1])
def test_samples_are_partitioned_over_at_least_one_rank(world_size):
    with pytest.raises(ValueError, match=f"world_size must be at least 1, got {world_size}"):
        partition_samples(torch.tensor([2.0, 1.0]), world_size)


def grows(directory: Path, world_size: int, lose) -> tuple[list[bool], list[str]]:
    """Five saves, every fourth full, with `lose(step)` before each; which were full, and the warnings."""
    table = random_table(2, 80)

    def work(rank, gather):
        own, found = part_of(table, rank, world_size), []
        with Saver(directory, rank=rank, world_size=world_size, gather=gather, full_every=4) as saver:
            for step in range(1, 6):
                own["rows"][:2] += step
                saver.wait()
                gather("before the loss")
                if rank == 0:
                    lose(step)
                gather("after the loss")
                found.append(saver.next_is_full())
                assert saver.next_is_full() == found[-1]
                if found[-1]:
                    saver.save(step, {}, {"t": own}, {})
                else:
                    changed = {column: values[:2] for column, values in own.items()}
                    saver.save(step, {}, {"t": changed}, {}, erased={})
        return found, own

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = on_ranks(world_size, work)
    for result in results:
        assert not isinstance(result, Exception), result
    kinds = [found for found, _ in results]
    assert kinds == kinds[:1] * world_size
    expected = {column: torch.cat([own[column] for _, own in results]) for column in table}
    assert same(whole(load_on(2, directory), "t"), ascending(expected))
    words = [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]
    return kinds[0], words


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("what", ["base", "delta", "shortened", "manifest", "folder"])
def test_a_full_checkpoint_is_saved_where_files_below_are_gone(tmp_path, world_size, what):
    """Before the third save; the fourth and fifth hold changes again."""
    gone: list[str] = []

    def lose(step: int) -> None:
        if step != 3:
            return
        folder = tmp_path / f"step-{2 if what in ('delta', 'shortened') else 1:012d}"
        file = sorted(folder.glob("t.*"))[0]
        if what == "manifest":
            file = manifest_of(tmp_path, 2)
        gone.append(str(file))
        if what == "shortened":
            os.truncate(file, 10)
        elif what == "folder":
            for each in folder.iterdir():
                each.unlink()
            folder.rmdir()
        else:
            file.unlink()

    kinds, words = grows(tmp_path, world_size, lose)
    assert kinds == [True, False, True, False, False]
    (word,) = words
    assert (gone[0] in word or what == "folder") and "a full checkpoint is saved instead" in word


def test_no_warning_while_all_files_exist(tmp_path):
    assert grows(tmp_path, 1, lambda step: None) == ([True, False, False, False, True], [])


def test_changes_upon_a_base_without_its_files_are_refused(tmp_path):
    table = random_table(3, 40)
    base = save_on(2, tmp_path, 1, {"t": table})[0]
    file = sorted((tmp_path / "step-000000000001").glob("t.*"))[0]
    file.unlink()
    with pytest.raises(
        CheckpointError, match=rf"{file} is missing, and an incremental checkpoint needs it: save a"
    ):
        save_on(2, tmp_path, 2, {"t": table}, base=base, erased={})


def listed(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_a_linked_step_folder_is_never_emptied(tmp_path):
    """One that no checkpoint names goes, the link alone; one that a checkpoint needs stays."""
    run, other = tmp_path / "run", tmp_path / "other"
    save(other, 5, {"w": torch.ones(3)}, {}, {})
    save(other, 7, {"w": torch.ones(3)}, {}, {})
    (other / "step-000000000005" / ".partial-mine").write_text("mine")
    before = listed(other)
    for step in (1, 2, 3):
        save(run, step, {"w": torch.full((3,), step)}, {}, {})
        (run / "step-000000000005").symlink_to(other / "step-000000000005")
        (run / "step-000000000007").symlink_to(tmp_path / "nowhere")
    save(run, 4, {"w": torch.zeros(3)}, {}, {})
    assert listed(other) == before
    assert listed(run) == sorted(
        [f"step-{step:012d}.json" for step in (3, 4)] + [f"step-{step:012d}" for step in (3, 4)]
        + [str(path.relative_to(run)) for path in run.rglob("*.safetensors")]
    )  # fmt: skip
    folder = run / "step-000000000004"
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    moved, text = listed(tmp_path / "moved"), manifest_of(run, 4).read_text()
    manifest_of(run, 4).write_text("{")  # which may be of a newer tritonrec
    save(run, 5, {"w": torch.ones(3)}, {}, {})
    manifest_of(run, 4).write_text(text)
    assert load(run, step=4).dense["w"].tolist() == [0] * 3
    for step in (6, 7):
        save(run, step, {"w": torch.ones(3)}, {}, {})
    assert not folder.is_symlink() and listed(tmp_path / "moved") == moved


def test_a_linked_manifest_and_a_linked_file_go_without_their_targets(tmp_path):
    save(tmp_path / "run", 1, {"w": torch.ones(3)}, {}, {})
    kept = tmp_path / "kept"
    kept.mkdir()
    for path in [manifest_of(tmp_path / "run", 1), *(tmp_path / "run" / "step-000000000001").iterdir()]:
        path.rename(kept / path.name)
        path.symlink_to(kept / path.name)
    before = {path: path.read_bytes() for path in kept.iterdir()}
    assert load(tmp_path / "run").dense["w"].tolist() == [1] * 3
    for step in (2, 3):
        save(tmp_path / "run", step, {"w": torch.ones(3)}, {}, {})
    assert steps(tmp_path / "run") == [2, 3] and len(listed(tmp_path / "run")) == 6
    assert {path: path.read_bytes() for path in kept.iterdir()} == before


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002, 0o000])
def test_all_files_follow_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        with Saver(tmp_path / "run") as saver:
            saver.save(1, {"w": torch.ones(3)}, {"t": random_table(4, 20)}, {})
            saver.wait()
            paths = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
            modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
    finally:
        os.umask(before)
    assert len(paths) == 1 + 1 + 2 + 2 and (tmp_path / "run" / ".lock") in modes
    assert {mode for path, mode in modes.items() if path.suffix or path.name == ".lock"} == {0o666 & ~mask}
    assert {mode for path, mode in modes.items() if not path.suffix and path.name != ".lock"} == {
        0o777 & ~mask
    }


def test_every_table_and_tensor_that_differs_is_named(tmp_path):
    table = random_table(5, 20)
    dense = {"w": torch.ones(2, 3), "b": torch.ones(3), "old": torch.ones(1)}
    save(tmp_path, 9, dense, {"t": table, "u": table}, {})
    assert load(tmp_path, like={"t": table, "u": table}, like_dense=dense).step == 9
    wider = table | {"rows": torch.zeros(0, 4), "score": torch.zeros(0, dtype=torch.int32)}
    wider |= {"heat": torch.zeros(0).half(), "recent": torch.zeros(0)}
    with pytest.raises(ValueError) as caught:
        load(tmp_path, like={"t": wider, "v": table})
    assert str(caught.value).partition("tables: ")[2].split("; ") == [
        "column 'heat' of table 't' is uint8 () in the checkpoint, float16 () here",
        "column 'recent' of table 't' is not there in the checkpoint, float32 () here",
        "column 'rows' of table 't' is float32 (3,) in the checkpoint, float32 (4,) here",
        "column 'score' of table 't' is int64 () in the checkpoint, int32 () here",
        "table 'u' is only in the checkpoint",
        "table 'v' is only here",
    ]
    with pytest.raises(ValueError) as caught:
        load(tmp_path, like_dense={"w": torch.ones(2, 4), "b": torch.ones(3).half(), "new": torch.ones(1)})
    assert str(caught.value).partition("parameters: ")[2].split("; ") == [
        "'b' is torch.float32 of shape (3,) in the checkpoint, torch.float16 of shape (3,) here",
        "'new' is not there in the checkpoint, torch.float32 of shape (1,) here",
        "'old' is torch.float32 of shape (1,) in the checkpoint, not there here",
        "'w' is torch.float32 of shape (2, 3) in the checkpoint, torch.float32 of shape (2, 4) here",
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_takes_back_a_phase_that_failed_elsewhere(rank):
    undone = []
    agreement = Agreement(lambda text: [text, json.dumps({"error": "rank 2: full"})], rank, "no save")
    with (
        pytest.raises(CheckpointError, match="no save: rank 2: full"),
        agreement.phase(lambda: undone.append(1)),
    ):
        pass
    assert len(undone) == (rank == 0)
