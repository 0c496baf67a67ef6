"""Promise: a log of events in Parquet is grouped by user once, into the sequences that it has in memory."""

import os
import threading

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from tritonrec.data import NextItemStream, grouped, load
from tritonrec.data.grouped import sequences_of
from tritonrec.data.parquet import table_of


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITONREC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def log(tmp_path):
    """Three shards of a log, whose users have events in all of them."""
    rows = load("zipf:users=40,items=60,seed=3")
    table = table_of(rows)
    (tmp_path / "log").mkdir()
    for number in range(3):
        part = table.take(np.arange(number, len(table), 3))
        pq.write_table(part, tmp_path / "log" / f"{number}.parquet", row_group_size=50)
    return tmp_path / "log"


def sequences_in(folder):
    found = pq.read_table(folder).to_pydict()
    lists = map(list, map(zip, found["item"], found["timestamp"]))
    return dict(zip(found["user"], lists, strict=True))


def sequences_of_log(path, log=None):
    found = (log or load(f"parquet:{path}")).sequences
    events = list(zip(found.items.tolist(), found.timestamps.tolist(), strict=True))
    bounds = zip(found.offsets[:-1], found.offsets[1:], strict=True)
    lists = [events[first:last] for first, last in bounds]
    return dict(zip(found.user_ids.tolist(), lists, strict=True))


@pytest.mark.if_changed
@pytest.mark.parametrize("bucket_rows", [10**6, 60])
def test_the_sequences_are_those_of_the_log_in_memory(log, cache, monkeypatch, bucket_rows):
    monkeypatch.setattr("tritonrec.data.convert_sequences.BUCKET_ROWS", bucket_rows)
    folder = sequences_of(str(log))
    assert folder.parent == cache / "sequences" and sequences_in(folder) == sequences_of_log(log)
    stream = NextItemStream(folder, 8, 10, 2, seed=0)
    assert stream.num_samples == 40 and next(stream).validate().num_samples == 8


def test_a_log_of_another_file_system_is_read_anew_when_it_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITONREC_CACHE", str(tmp_path))
    memory = fsspec.filesystem("memory")  # tells no time of change
    found = []
    for item in (2, 2, 3):
        if item not in found:
            memory.pipe("/changing/log.csv", f"user,item,time\n1,{item},5\n".encode())
        folder = sequences_of("memory://changing/log.csv")
        found += pq.read_table(next(folder.glob("part-*"))).column("item").to_pylist()[0]
    assert found == [2, 2, 3]


def test_a_log_is_read_once_until_it_changes(log, cache):
    read = []
    first = sequences_of(str(log), read.append)
    total = sum(read)
    assert total == len(load(f"parquet:{log}"))
    assert sequences_of(str(log), read.append) == first and sum(read) == total
    assert sequences_of(f"{log}/*.parquet", read.append) == first and sum(read) == total
    about = (log / "2.parquet").stat()
    os.utime(log / "2.parquet", ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    assert sequences_of(str(log), read.append) != first and sum(read) == 2 * total
    (log / "2.parquet").unlink()
    assert sequences_of(str(log), read.append) != first and sum(read) > 2 * total


def test_of_several_that_want_it_one_writes(log, cache):
    read, folders = [], []
    threads = [
        threading.Thread(target=lambda: folders.append(sequences_of(str(log), read.append))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(read) == len(load(f"parquet:{log}")) and len(folders) == 4 and len(set(folders)) == 1


def test_what_fails_leaves_nothing_that_a_later_run_would_take(log, cache, monkeypatch):
    def failing(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("tritonrec.data.convert_sequences.pq.write_table", failing)
        with pytest.raises(OSError, match="No space"):
            sequences_of(str(log))
    assert [path.suffix for path in (cache / "sequences").iterdir()] == [".lock"]
    assert sequences_in(sequences_of(str(log))) == sequences_of_log(log)


def test_a_cache_that_cannot_be_written_to_is_named(log, monkeypatch):
    monkeypatch.setenv("TRITONREC_CACHE", "/proc/nowhere")
    with pytest.raises(OSError, match=r"cannot write /proc/nowhere/sequences/[0-9a-f]{16}"):
        sequences_of(str(log))


def test_a_folder_of_another_layout_is_another_one(log, cache, monkeypatch):
    first = sequences_of(str(log))
    monkeypatch.setattr(grouped, "GROUP_USERS", 7)
    second = sequences_of(str(log))
    assert second != first and pq.ParquetFile(next(second.glob("part-*"))).num_row_groups == 6
