"""Promise: a global batch of a stream depends on data, seed and step; a rank reads its part of it."""

import json
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from tritonrec.data import Stream
from tritonrec.data.parquet_rows import ParquetRows, RowReader, schema_of
from tritonrec.data.slices import collected
from tritonrec.data.stream_plan import Stretch

ROWS = 515


def table_of(rows):
    lists = [list(range(number % 5)) for number in rows]
    return pa.table({"x": pa.array(rows, pa.int64()), "bags": pa.array(lists, pa.list_(pa.int32()))})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("shards")
    bounds = [0, 37, 38, 210, 400, ROWS]
    kinds = ["snappy", "zstd", "gzip", "none", "lz4"]
    for number, (first, last) in enumerate(pairwise(bounds)):
        table = table_of(range(first, last))
        name = path / f"day={number}" / "part.parquet"
        name.parent.mkdir()
        pq.write_table(table, name, row_group_size=17, compression=kinds[number])
    (path / "_notes.txt").write_text("no shard")
    return path


def ids(step, sample_ids, table):
    assert table["x"].to_pylist() == sample_ids.tolist()
    assert table["bags"].to_pylist() == [list(range(number % 5)) for number in sample_ids.tolist()]
    return sample_ids.tolist()


def stream(path, rank=0, world_size=1, **options):
    options = {"buffer_rows": 96, "readers": 16, **options}
    return Stream(path, ids, 32, 7, rank, world_size, **options)


@pytest.fixture(scope="module")
def expected(folder):
    made = stream(folder)
    return [next(made) for _ in range(2 * made.steps_per_epoch + 3)]


@pytest.mark.if_changed
@pytest.mark.parametrize("world_size", [2, 3, 16])
def test_ranks_divide_the_batches_of_one_rank(folder, expected, world_size):
    ranks = [stream(folder, rank, world_size) for rank in range(world_size)]
    for step, whole in enumerate(expected):
        assert [number for each in ranks for number in next(each)] == whole
        assert ranks[-1].global_batch(step) == whole


def test_each_epoch_has_each_row_once(folder, expected):
    steps = stream(folder).steps_per_epoch
    for epoch in range(2):
        part = expected[epoch * steps : (epoch + 1) * steps]
        assert sorted(number for batch in part for number in batch) == list(range(ROWS))
    assert expected[:steps] != expected[steps : 2 * steps]


def test_any_step_may_be_read_at_any_time(folder, expected):
    made = stream(folder)
    for step in (30, 3, 3, 4, 18, 0):
        assert made.batch(step) == expected[step]
    assert next(made) == expected[1] and made.step == 2


@pytest.mark.parametrize("world_size", [1, 5])
def test_a_position_holds_at_any_world_size(folder, expected, world_size):
    for position in (1, 16, 17, 20):
        before = stream(folder, 1, 2)
        for _ in range(position):
            next(before)
        state = json.loads(json.dumps(before.state_dict()))
        assert len(json.dumps(state)) < 300
        ranks = [stream(folder, rank, world_size) for rank in range(world_size)]
        for each in ranks:
            each.load_state_dict(state)
        for step in range(position, position + 3):
            assert [number for each in ranks for number in next(each)] == expected[step]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(buffer_rows=64), "a stream with buffer_rows 96, and this one has 64"),
        (dict(readers=8), "a stream with readers 16, and this one has 8"),
        (dict(shuffle=False), "a stream with shuffle True, and this one has False"),
    ],
)
def test_a_position_of_another_order_is_refused(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        stream(folder, **changes).load_state_dict(stream(folder).state_dict())


def test_a_position_in_other_data_is_refused(folder, tmp_path):
    pq.write_table(table_of(range(ROWS)), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a stream with data [0-9a-f]{16}, values .* and this one has"):
        stream(tmp_path).load_state_dict(stream(folder).state_dict())


def test_a_rank_reads_its_share_of_the_bytes(tmp_path):
    random = np.random.default_rng(3)
    for file in range(32):
        columns = {"x": np.arange(1000) + 1000 * file, "y": random.integers(0, 2**62, 1000)}
        pq.write_table(pa.table(columns), tmp_path / f"{file:02}.parquet", row_group_size=250)
    read = []
    for world_size in (1, 2, 4):
        ranks = [
            Stream(tmp_path, lambda step, of, table: of.tolist(), 256, 5, rank, world_size, readers=8)
            for rank in range(world_size)
        ]
        for each in ranks:
            for _ in range(each.steps_per_epoch):
                next(each)
        read.append([each.counts.bytes for each in ranks])
    (whole,), halves, quarters = read
    assert all(abs(part / whole - 1 / 2) < 1e-3 for part in halves)
    assert all(abs(part / whole - 1 / 4) < 1e-3 for part in quarters)
    sizes = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 0.9 * sizes < whole <= sizes


def test_a_stream_counts_what_it_reads_itself(folder):
    made = stream(folder, 0, 2)
    next(made)
    read = vars(made.counts).copy()
    assert read["bytes"] > 0
    other = made.of_rank(1, 2)
    assert not any(vars(other.counts).values())
    next(other)
    made.global_batch(0)
    assert vars(made.counts) == read and vars(other.counts)["bytes"] > 0


def test_only_the_columns_that_are_named_are_read(folder):
    rows = ParquetRows(folder, ["x"])
    made = Stream(rows, lambda step, of, table: table.column_names, 32, 7)
    assert next(made) == ["x"]


@pytest.mark.parametrize("kind", ["glob", "uri", "fsspec", "fsspec object", "arrow object"])
def test_a_dataset_may_be_anywhere(folder, expected, kind):
    import fsspec

    place, filesystem = str(folder), None
    if kind == "glob":
        place = f"{folder}/day=*/p?rt.parquet"
    elif kind == "uri":
        place = f"file://{folder}"
    elif kind.startswith("fsspec"):
        memory = fsspec.filesystem("memory")
        memory.put(str(folder), f"/{kind}/shards", recursive=True)
        place = f"memory://{kind}/shards" if kind == "fsspec" else f"{kind}/shards"
        filesystem = None if kind == "fsspec" else memory
    elif kind == "arrow object":
        place, filesystem = folder.name, pafs.SubTreeFileSystem(str(folder.parent), pafs.LocalFileSystem())
    made = stream(ParquetRows(place, filesystem=filesystem))
    assert [next(made) for _ in range(3)] == expected[:3]
    assert made.state_dict() == {**stream(folder).state_dict(), "step": 3}


def test_reading_decoding_and_collating_are_slices(folder):
    made = stream(folder)
    with collected() as slices:
        next(made)
    times = {name: [each[1:] for each in slices if each[0] == name] for name, *_ in slices}
    assert set(times) == {"read", "decode", "collate"} and len(times["collate"]) == 1
    inside = [any(a <= start and end <= b for a, b in times["decode"]) for start, end in times["read"]]
    assert any(inside)


def test_a_reader_goes_on_in_a_row_group_and_back(folder):
    rows = ParquetRows(folder)
    reader = RowReader(rows)
    assert reader.read(Stretch(0, 3, 5), Stretch(0, 5, 9))["x"].to_pylist() == [3, 4, 5, 6, 7, 8]
    decoded = reader.counts.rows
    assert reader.read(Stretch(0, 9, 17))["x"].to_pylist() == list(range(9, 17))
    assert reader.counts.rows == decoded
    assert reader.read(Stretch(0, 0, 1), Stretch(2, 0, 2))["x"].to_pylist() == [0, 34, 35]


def test_a_row_group_that_ends_early_is_named(folder, monkeypatch):
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_, **__: iter(()))
    with pytest.raises(ValueError, match=r"\.parquet: row group 0 cannot be read: it ends before row 5$"):
        RowReader(ParquetRows(folder)).read(Stretch(0, 3, 5))


def test_fewer_rows_than_readers_leave_ranks_empty(tmp_path):
    pq.write_table(table_of(range(3)), tmp_path / "a.parquet")
    ranks = [stream(tmp_path, rank, 16) for rank in range(16)]
    assert ranks[0].steps_per_epoch == 1
    for _ in range(3):
        batches = [next(each) for each in ranks]
        assert sorted(number for batch in batches for number in batch) == [0, 1, 2]
        assert [] in batches


def test_bad_datasets_are_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or folder"):
        ParquetRows(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no Parquet file"):
        ParquetRows(tmp_path)
    with pytest.raises(ValueError, match="holds no Parquet file"):
        ParquetRows(f"{folder}/day=*/*.csv")
    with pytest.raises(ValueError, match=r"part\.parquet: no column 'y'; found x, bags"):
        ParquetRows(folder, ["x", "y"])
    with pytest.raises(ValueError, match="nothing://a"):
        ParquetRows("nothing://a")
    pq.write_table(table_of([]), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="the dataset holds no rows"):
        ParquetRows(tmp_path)
    pq.write_table(pa.table({"x": [1.5], "bags": [[1]]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet: column 'x' is double, but int64 in .*a\.parquet"):
        ParquetRows(tmp_path)
    (tmp_path / "c.parquet").write_bytes(b"PAR1 and then nothing of the kind")
    with pytest.raises(ValueError, match=r"not a Parquet dataset: .*c\.parquet"):
        ParquetRows(tmp_path)


def test_a_name_of_a_column_that_is_no_text_is_refused(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"numbers": [1]}), file)
    file.write_bytes(file.read_bytes().replace(b"numbers", b"\xf4umbers", 1))
    for read in (ParquetRows, lambda path: schema_of(str(path))):
        with pytest.raises(ValueError, match=r"a\.parquet: .*'utf-8' codec"):
            read(tmp_path)


def test_a_shard_that_is_damaged_later_is_named(tmp_path):
    pq.write_table(table_of(range(200)), tmp_path / "a.parquet", row_group_size=50)
    made = stream(tmp_path)
    raw = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(raw[:40] + bytes(len(raw) - 400) + raw[-360:])
    with pytest.raises(ValueError, match=r"a\.parquet: row group \d cannot be read"):
        next(made)


def test_a_page_of_a_shard_is_checked_where_its_writer_left_a_checksum(tmp_path):
    """A damaged page without compression is numbers as any other."""
    path, plain = tmp_path / "a.parquet", {"compression": "none", "use_dictionary": False}
    pq.write_table(table_of(range(200)), path, write_page_checksum=True, **plain)
    raw = bytearray(path.read_bytes())
    raw[1000] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"a\.parquet: row group 0 cannot be read: .*checksum"):
        next(stream(tmp_path))


def test_an_error_while_collating_can_be_repeated(folder, expected):
    failures = [True]

    def collate(step, sample_ids, table):
        if step == 1 and failures.pop():
            raise OSError("a full disk")
        return sample_ids.tolist()

    failures.append(True)
    made = Stream(folder, collate, 32, 7, buffer_rows=96, readers=16)
    next(made)
    with pytest.raises(OSError, match="a full disk"):
        next(made)
    failures[:] = [False]
    assert next(made) == expected[1]
