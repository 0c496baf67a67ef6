"""One run saves into a directory at a time: a second one is refused at its start, and harms nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from simulated import on_ranks, part_of, random_table

from tritonrec.checkpoint import CheckpointError, Saver, load, save, steps
from tritonrec.checkpoint.lock import WriterLock

HOLDER = """
import sys
from tritonrec.checkpoint.lock import WriterLock
lock = WriterLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait(20)
    process.stdin.close()
    process.stdout.close()


def left(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_second_run_is_refused_at_its_start_and_named(tmp_path):
    with Saver(tmp_path) as first:
        first.save(1, {"w": torch.ones(2)}, {}, {})
        words = (
            rf"{tmp_path} is in use: process {os.getpid()} on [^ ]+ saves checkpoints there\. One run saves "
        )
        with pytest.raises(CheckpointError, match=words):
            Saver(tmp_path)
        with pytest.raises(CheckpointError, match=words):
            save(tmp_path, 2, {}, {}, {})
        first.save(3, {"w": torch.zeros(2)}, {}, {})
    assert steps(tmp_path) == [1, 3] and load(tmp_path).dense["w"].tolist() == [0, 0]
    save(tmp_path, 4, {}, {}, {})
    with Saver(tmp_path) as second:
        second.save(5, {}, {}, {})
    assert ".lock" not in left(tmp_path)


def test_two_runs_at_once_leave_the_checkpoints_of_one(tmp_path):
    """Both save the same steps, each as soon as it can: one is refused, the other one's are whole."""

    begun = threading.Barrier(2)

    def work(rank, gather):
        try:
            with Saver(tmp_path) as saver:
                begun.wait(20)
                for step in range(1, 4):
                    saver.save(step, {"w": torch.full((3,), rank)}, {}, {})
        except CheckpointError as error:
            begun.wait(20)
            return error

    ends = on_ranks(2, work)
    (refused,) = [rank for rank, end in enumerate(ends) if end is not None]
    assert "is in use" in str(ends[refused])
    assert steps(tmp_path) == [2, 3] and load(tmp_path).dense["w"].tolist() == [1 - refused] * 3


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_of_the_second_run_are_refused(tmp_path, world_size):
    with Saver(tmp_path):
        errors = on_ranks(
            world_size, lambda rank, gather: Saver(tmp_path, rank=rank, world_size=world_size, gather=gather)
        )
        for error in errors:
            assert isinstance(error, CheckpointError) and "is in use" in str(error)
    assert left(tmp_path) == []


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_ranks_of_one_run_share_the_lock(tmp_path, world_size):
    table = random_table(1, 30)

    def work(rank, gather):
        with Saver(tmp_path, rank=rank, world_size=world_size, gather=gather) as saver:
            for step in (1, 2):
                saver.save(step, {}, {"t": part_of(table, rank, world_size)}, {})
                saver.wait()
                assert (tmp_path / ".lock").exists()
            gather("done")

    assert on_ranks(world_size, work) == [None] * world_size
    assert ".lock" not in left(tmp_path) and load(tmp_path).step == 2


@pytest.mark.if_changed
def test_a_run_of_another_process_is_named_until_it_is_killed(tmp_path, holder):
    with pytest.raises(CheckpointError, match=rf"is in use: process {holder.pid} on "):
        Saver(tmp_path)
    assert left(tmp_path) == [".lock"]
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(20)
    assert left(tmp_path) == [".lock"]  # the file stays, and keeps nobody out
    with Saver(tmp_path) as saver:
        saver.save(1, {}, {}, {})
    assert left(tmp_path) == ["step-000000000001", "step-000000000001.json"]


def test_a_run_that_ended_by_an_error_gives_the_lock_up(tmp_path):
    with pytest.raises(KeyError), Saver(tmp_path):
        raise KeyError
    with Saver(tmp_path) as saver, pytest.raises(ValueError, match="no erased keys"):
        saver.save(1, {}, {}, {}, erased={})
    with pytest.raises(ValueError, match="step must be"):
        save(tmp_path, -1, {}, {}, {})
    assert left(tmp_path) == []


def test_a_directory_made_anew_is_locked_anew(tmp_path):
    """Its lock went with the old one: another run may have come meanwhile."""
    place = tmp_path / "place"
    with Saver(place) as first:
        (place / ".lock").unlink()
        place.rmdir()
        first.save(1, {}, {}, {})
        first.wait()
        with pytest.raises(CheckpointError, match="is in use"):
            Saver(place)
        (place / ".lock").unlink()
        with Saver(place):
            first.save(2, {}, {}, {})
            with pytest.raises(CheckpointError, match="is in use"):
                first.wait()
    assert steps(place) == [1]


def test_a_linked_directory_is_the_directory(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with Saver(tmp_path / "link") as saver:
        for step in (1, 2, 3):
            saver.save(step, {"w": torch.full((2,), step)}, {}, {})
        with pytest.raises(CheckpointError, match="is in use"):
            Saver(tmp_path / "real")
    assert (tmp_path / "link").is_symlink() and steps(tmp_path / "real") == [2, 3]
    for name in ("link", "real"):
        assert load(tmp_path / name).dense["w"].tolist() == [3] * 2


def test_a_lock_that_is_a_link_is_not_written_through(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".lock").symlink_to(tmp_path / "mine.txt")
    with pytest.raises(CheckpointError, match=r"\.lock"):
        Saver(tmp_path / "checkpoints")
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(RuntimeWarning, match=rf"{tmp_path}: its file system has no locks") as warned:
        saver = Saver(tmp_path)
    assert [Path(each.filename).name for each in warned] == ["lock.py"]
    with saver:
        saver.save(1, {}, {}, {})
    assert load(tmp_path).step == 1


def test_a_full_disk_leaves_the_lock_without_its_text(tmp_path, monkeypatch):
    lock = WriterLock(tmp_path)
    original = os.fdopen

    def fdopen(*arguments, **options):
        file = original(*arguments, **options)

        def write(text):
            raise OSError(28, "No space left on device")

        file.write = write
        return file

    (tmp_path / ".lock").write_text("not utf-8 follows: ")
    with (tmp_path / ".lock").open("ab") as file:
        file.write(b"\xff")
    monkeypatch.setattr(os, "fdopen", fdopen)
    lock.acquire()
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="is in use: another process"):
        WriterLock(tmp_path).acquire()
    lock.release()
    lock.release()
    assert left(tmp_path) == []


@pytest.mark.parametrize("another", [False, True])
def test_a_file_that_its_last_holder_removes_before_the_lock_is_taken_excludes_nobody(tmp_path, another):
    lock, second = WriterLock(tmp_path), WriterLock(tmp_path)
    take, removed = lock._lock, []

    def after_its_removal(file):
        if not removed:
            removed.append((tmp_path / ".lock").unlink())
            if another:
                second.acquire()
        take(file)

    lock._lock = after_its_removal
    if another:
        with pytest.raises(CheckpointError, match="is in use: process"):
            lock.acquire()
        second.release()
    lock.acquire()
    with pytest.raises(CheckpointError, match="is in use: process"):
        second.acquire()
    lock.release()
    assert not (tmp_path / ".lock").exists()
