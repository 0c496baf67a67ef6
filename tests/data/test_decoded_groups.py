"""Promise: a row group that several readers divide is decoded once, and has the rows that each would read."""

import pickle
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tritonrec.data import Stream, parquet_rows
from tritonrec.data.parquet_rows import DecodedGroups, ParquetRows, RowReader

ROWS = 1003


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of one row group, of more rows than any reader's stretch, and of small ones."""
    path, random = tmp_path_factory.mktemp("shards"), np.random.default_rng(5)
    for name, first, last, size in [("a", 0, 600, 600), ("b", 600, 640, 8), ("c", 640, ROWS, 301)]:
        numbers = np.arange(first, last)
        words = [None if number % 7 == 0 else f"w{number % 11}" for number in numbers]
        columns = {
            "x": pa.array(numbers),
            "word": pa.array(words).dictionary_encode(),
            "bag": pa.array(
                [random.integers(-9, 9, number % 5).tolist() for number in numbers], pa.list_(pa.int16())
            ),
        }
        pq.write_table(pa.table(columns), path / f"{name}.parquet", row_group_size=size)
    return path


def collate(step, ids, table):
    return ids.tolist(), table.to_pylist()


def stream(path, rank=0, world_size=1):
    return Stream(path, collate, 32, 7, rank, world_size, buffer_rows=128, readers=16)


def batches(made, epochs=2):
    return [next(made) for _ in range(epochs * made.steps_per_epoch)]


@pytest.fixture(scope="module")
def by_each_reader(folder):
    made = stream(folder)
    made._decoded._groups.clear()
    found = batches(made)
    assert made.counts.rows > 6 * ROWS
    return found


@pytest.mark.if_changed
def test_it_is_decoded_once_and_for_all_epochs(folder, by_each_reader):
    made = stream(folder)
    assert made.plan.divided.tolist() == [0, 6]
    assert batches(made) == by_each_reader
    assert ROWS < made.counts.rows <= 901 + 2 * 2 * 102  # small groups in every epoch, by up to two readers
    numbers, rows = by_each_reader[1]
    assert numbers == [row["x"] for row in rows]


@pytest.mark.parametrize("world_size", [2, 16])
def test_ranks_have_the_same_batches(folder, by_each_reader, world_size):
    """On threads that begin at once; a rank of one reader decodes its part alone."""
    first, barrier = stream(folder, 0, world_size), Barrier(world_size)

    def read(rank):
        made = first.of_rank(rank, world_size)
        barrier.wait()
        return batches(made)

    with ThreadPoolExecutor(world_size) as pool:
        parts = list(pool.map(read, range(world_size)))
    for whole, *each in zip(by_each_reader, *parts, strict=True):
        assert ([n for ids, _ in each for n in ids], [row for _, rows in each for row in rows]) == whole
    assert len(first._decoded._files) == (2 if world_size == 2 else 0)


def test_what_does_not_fit_is_decoded_by_each_reader_and_says_so(folder, by_each_reader):
    made = stream(folder)
    made._decoded = DecodedGroups(made.rows, [0, 6], 8, most_bytes=30_000)
    with pytest.warns(UserWarning, match=r"of up to 600 rows are decoded by each reader.*: write the files"):
        assert batches(made) == by_each_reader
    kept = list(Path(made._decoded._folder.name).iterdir())
    assert 0 < sum(file.stat().st_size for file in kept) <= 30_000 and len(kept) < 2


def test_no_more_than_a_quarter_of_the_disk_is_taken(folder, by_each_reader, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4 * 30_000))
    made = stream(folder)
    with pytest.warns(UserWarning, match=r"as no more fit .*[0-9] bytes are left"):
        assert batches(made) == by_each_reader
    assert sum(file.stat().st_size for file in Path(made._decoded._folder.name).iterdir()) <= 30_000


def test_without_a_folder_for_temporary_files(folder, by_each_reader, monkeypatch, tmp_path):
    made = stream(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.warns(UserWarning, match="no more fit on the disk of temporary files .*gone"):
        assert batches(made) == by_each_reader


@pytest.mark.if_changed
def test_beside_a_tmp_in_memory_they_are_in_the_cache(folder, by_each_reader, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITONREC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(parquet_rows, "in_memory", lambda path: path == tempfile.gettempdir())
    made = stream(folder)
    assert batches(made) == by_each_reader
    assert Path(made._decoded._folder.name).parent == tmp_path / "cache"
    monkeypatch.setattr(parquet_rows, "in_memory", lambda path: True)
    with pytest.warns(UserWarning, match="no more fit on the disk of temporary files .*cache are in memory"):
        assert batches(stream(folder)) == by_each_reader


def test_a_damaged_group_is_named_each_time(folder, tmp_path):
    raw = (folder / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(raw)
    made = stream(tmp_path)
    (tmp_path / "a.parquet").write_bytes(raw[:40] + bytes(len(raw) - 1240) + raw[-1200:])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"a\.parquet: row group 0 cannot be read"):
            next(made)
    (tmp_path / "a.parquet").write_bytes(raw)
    assert next(made) == next(stream(tmp_path))


def test_a_stream_is_pickled_before_it_reads(folder, by_each_reader):
    assert batches(pickle.loads(pickle.dumps(stream(folder)))) == by_each_reader


def test_a_reader_may_go_back_in_a_group(folder):
    rows = ParquetRows(folder)
    plain, mapped = RowReader(rows), RowReader(rows, at_once=16, decoded=DecodedGroups(rows, [0], 16))
    stretches = [*rows.stretches([0])]
    for first, last in [(599, 600), (15, 17), (16, 33), (0, 1), (40, 40), (32, 600)]:
        stretch = stretches[0]._replace(first=first, last=last)
        assert mapped.read(stretch).equals(plain.read(stretch))
    assert mapped.counts.rows == 600


def test_its_files_are_no_memory_of_the_process(folder):
    """A map of them would be: each page that was read once, of up to 4 GiB."""
    maps = Path("/proc/self/maps")
    if maps.exists():
        made = stream(folder)
        batches(made, 1)
        assert made._decoded._files and made._decoded._folder.name not in maps.read_text()
