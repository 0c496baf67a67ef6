"""Promise: a log of text, read in parts, is the log read whole, and is written once as shards that say so."""

import bz2
import gzip
import os

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from test_criteo import fields
from test_criteo import write as write_criteo
from test_event_log import BAD, GOOD, STEP, THREE
from test_grouped import sequences_in, sequences_of_log
from test_kuairand import folder  # noqa: F401 - a fixture

from tritonrec.data import LogFormat, load
from tritonrec.data.click_columns import ClickColumns
from tritonrec.data.convert_windows import write_windows
from tritonrec.data.grouped import clicks_of, sequences_of, windows_of
from tritonrec.data.parquet import concat
from tritonrec.data.parquet_rows import ParquetRows
from tritonrec.data.sources import source_of
from tritonrec.data.values import Part
from tritonrec.data.vocabulary import Vocabulary


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITONREC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tritonrec.data.text_tables.BLOCK_BYTES", 600)
    return tmp_path / "cache"


DECIMALS = "user,item,time,rating\n1,10,5.75,1\n2,11,5.25,2\n1,12,-0.5,3\n1,13,5,4\n2,14,5.25,5\n1,15,5.5,1\n"
NUMBERS = "user,item,time\n7,1,1\n8,2,2\n7,2,3\n7,1,4\n9,3,5\n6,1,6\n"
WORDS = "user,item,time\n7,x,1\n8,y,2\n7,y,3\n7,x,4\nann,z,5\n07,x,6\n"


def same_sequences(parts, whole):
    for name in ("user_ids", "offsets", "items", "timestamps"):
        np.testing.assert_array_equal(getattr(parts.sequences, name), getattr(whole.sequences, name))


@pytest.mark.parametrize("case", GOOD)
def test_the_parts_of_a_csv_file_are_the_whole(tmp_path, case, monkeypatch):
    monkeypatch.setattr("tritonrec.data.text_tables.BLOCK_BYTES", 16)
    text, format, _columns = GOOD[case]
    (tmp_path / "log.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    parts = list(source_of(tmp_path / "log.csv", format).events().parts())
    same_sequences(concat(parts), load(tmp_path / "log.csv", format))


def test_words_in_parts_are_those_of_the_whole_and_their_vocabulary_is_kept(tmp_path):
    (tmp_path / "log.csv").write_text(WORDS)
    log = load(tmp_path / "log.csv", LogFormat(ids="words"))
    made = sequences_of(f"csv:{tmp_path}/log.csv?ids=words")
    assert sequences_in(made) == sequences_of_log(tmp_path, log)
    for role in ("user", "item"):
        assert Vocabulary.load(made / f"_{role}_words.parquet") == log.words[role]
    before = {"user": Vocabulary(["ann"]), "item": Vocabulary(["z", "y"])}
    again = sequences_of(f"csv:{tmp_path}/log.csv?ids=words", words=before)
    assert again != made and 0 in sequences_in(again) and len(before["item"]) == len(log.words["item"])
    later = {"user": Vocabulary(["ann"]), "item": Vocabulary(["z", "y"])}
    assert sequences_of(f"csv:{tmp_path}/log.csv?ids=words", words=later) == again
    assert later == before and later["item"].words.to_pylist()[:2] == ["z", "y"]


def test_decimals_order_a_users_events_also_where_buckets_divide_them(tmp_path, monkeypatch):
    monkeypatch.setattr("tritonrec.data.convert_sequences.BUCKET_ROWS", 1)
    (tmp_path / "log.csv").write_text(DECIMALS)
    found = sequences_in(sequences_of(f"csv:{tmp_path}/log.csv", format=STEP))
    assert found == {1: [(12, -1), (13, 5), (15, 5), (10, 5)], 2: [(11, 5), (14, 5)]}


@pytest.mark.if_changed
@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_named_and_nothing_is_kept(tmp_path, cache, case):
    content, format, message = BAD[case]
    (tmp_path / "log.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        sequences_of(f"csv:{tmp_path}/log.csv", format=format)
    assert [path.suffix for path in (cache / "sequences").iterdir()] == [".lock"]


@pytest.mark.if_changed
def test_compressed_files_and_urls_are_read_as_plain_ones(tmp_path):
    plain = tmp_path / "log.csv"
    plain.write_text(NUMBERS)
    (tmp_path / "log.csv.gz").write_bytes(gzip.compress(plain.read_bytes()))
    with fsspec.open("memory://logs/log.csv.gz", "wb") as file:
        file.write(gzip.compress(plain.read_bytes()))
    for path in (f"{plain}.gz", "memory://logs/log.csv.gz"):
        same_sequences(load(f"csv:{path}"), load(plain))
        same_sequences(concat(list(source_of(path).events().parts())), load(plain))
        assert sequences_in(sequences_of(f"csv:{path}")) == sequences_in(sequences_of(f"csv:{plain}"))


def test_a_damaged_file_is_named(tmp_path):
    whole = gzip.compress("".join(f"{row},{row * row},3\n" for row in range(9000)).encode())
    (tmp_path / "cut.csv.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "plain.csv.gz").write_text("1,2,3\n")
    clicks = write_criteo(tmp_path / "day", fields()).read_bytes()
    (tmp_path / "cut.gz").write_bytes(gzip.compress(clicks)[:900])
    for name in ("cut.csv.gz", "plain.csv.gz"):
        for use in (lambda path: load(path, THREE), lambda path: sequences_of(path, format=THREE)):
            with pytest.raises(ValueError, match=name):
                use(f"{tmp_path}/{name}")
    for use in (load, clicks_of):
        with pytest.raises(ValueError, match=r"cut\.gz"):
            use(f"criteo-tsv:{tmp_path}/cut.gz")
    with pytest.raises(FileNotFoundError, match=r"none\.csv"):
        sequences_of(f"csv:{tmp_path}/none.csv")


def test_the_windows_of_a_csv_file_are_those_of_the_log_in_memory(tmp_path):
    (tmp_path / "log.csv").write_text(DECIMALS)
    (tmp_path / "whole").mkdir()
    write_windows([load(f"csv:{tmp_path}/log.csv", STEP)], tmp_path / "whole", 3, 1, 512)
    made = windows_of(f"csv:{tmp_path}/log.csv", 3, 1, format=STEP)
    for name in ("part-00000.parquet", "_held_out.parquet", "_windows.json"):
        assert (made / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("packed", [False, True])
def test_kuairand_in_parts_is_the_whole_with_its_features(folder, tmp_path, packed):  # noqa: F811
    log = load(f"kuairand:{folder}")
    if packed:
        for path in (folder / "data").iterdir():
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    source = source_of(f"kuairand:{folder}").events()
    parts = list(source.parts())
    assert len(parts) > 1 and len(source.files) == 4 and source.rows() >= 1
    whole = concat(parts)
    same_sequences(whole, log)
    for name, column in log.feedback.items():
        np.testing.assert_array_equal(whole.feedback[name], column)
    assert sequences_in(sequences_of(f"kuairand:{folder}")) == sequences_of_log(tmp_path, log)
    (tmp_path / "whole").mkdir()
    write_windows([log], tmp_path / "whole", 3, 1, 512, users=log.user_features, genres=log.genres)
    made = windows_of(f"kuairand:{folder}", 3, 1)
    for name in ("part-00000.parquet", "_held_out.parquet", "_items.parquet"):
        assert (made / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_bad_task_is_named_by_its_row_in_the_file(tmp_path):
    lines = [f"{row},{row},{row},1,0" for row in range(200)]
    lines[150] = "150,150,150,3,0"
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["user_id,video_id,time_ms,is_click,is_like", *lines]) + "\n")
    with pytest.raises(ValueError, match=r"log\.csv, line 152: column is_click has '3', expected 0 or 1"):
        list(source_of(f"kuairand:{path}").events().parts())


def test_files_of_features_without_rows_have_no_features(folder):  # noqa: F811
    for path in (folder / "data").glob("[uv]*.csv"):
        path.write_text(path.read_text().splitlines()[0] + "\n")
    log = load(f"kuairand:{folder}")
    assert len(log.user_features.user_ids) == len(log.genres.item_ids) == 0 and len(log) == 5


def test_a_header_alone_is_no_log(tmp_path):
    (tmp_path / "log.csv").write_text("user_id,video_id,time_ms,is_click,is_like\n")
    with pytest.raises(ValueError, match=r"log\.csv"):
        list(source_of(f"kuairand:{tmp_path}/log.csv").events().parts())


def test_clicks_as_text_are_the_rows_of_the_whole_log(tmp_path):
    lines = fields(rows=50)
    (tmp_path / "days").mkdir()
    for day in range(2):
        text = write_criteo(tmp_path / "day", lines[day * 20 : 20 + day * 30]).read_bytes()
        (tmp_path / "days" / f"day_{day}.gz").write_bytes(gzip.compress(text))
    log = load(f"criteo-tsv:{tmp_path}/days")
    assert len(log) == 50
    rows = ParquetRows(clicks_of(f"criteo-tsv:{tmp_path}/days"))
    (table,) = [table for _numbers, table in rows.batches(64)]
    assert rows.group_rows.tolist() == [50]
    columns = ClickColumns.of("here", rows.schema)
    labels, dense, categories = columns.arrays(Part("here", "row", 0), table)
    assert columns.features == log.features
    np.testing.assert_array_equal(labels, log.labels)
    np.testing.assert_array_equal(dense.T, log.dense)
    np.testing.assert_array_equal(categories.T, log.categories)


def test_clicks_are_divided_into_files_and_groups(tmp_path, monkeypatch):
    monkeypatch.setattr("tritonrec.data.grouped.FILE_CLICKS", 8)
    monkeypatch.setattr("tritonrec.data.grouped.GROUP_CLICKS", 2)
    rows = ParquetRows(clicks_of(f"criteo-tsv:{write_criteo(tmp_path / 'day', fields())}"))
    assert rows.num_rows == 30 and rows.group_rows.tolist() == [2] * 15
    assert rows.group_file.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 3


def test_a_bad_click_is_named_by_its_line(tmp_path, cache):
    lines = fields()
    lines[22][20] = "xyz"
    with pytest.raises(ValueError, match=r"day, line 23: column C7 has 'xyz'"):
        clicks_of(f"criteo-tsv:{write_criteo(tmp_path / 'day', lines)}")
    with pytest.raises(ValueError, match=r"empty: the file is empty"):
        clicks_of(f"criteo-tsv:{write_criteo(tmp_path / 'empty', [])}")
    assert {path.suffix for path in (cache / "clicks").iterdir()} == {".lock"}


def test_a_log_that_changes_while_it_is_read_is_refused(tmp_path, cache):
    path = tmp_path / "log.csv"
    path.write_text(NUMBERS)

    def append(rows):
        with path.open("a") as file:
            file.write("9,4,9\n")

    with pytest.raises(ValueError, match="has changed while it was read"):
        sequences_of(f"csv:{path}", append)
    assert [each.suffix for each in (cache / "sequences").iterdir()] == [".lock"]
    first = sequences_of(f"csv:{path}")
    assert sequences_of(f"csv:{path}", append) == first
    os.utime(path, ns=(0, 0))
    assert sequences_of(f"csv:{path}") != first


@pytest.mark.parametrize("way", ["link", "hard link", "folder in itself", "packed"])
def test_events_that_a_folder_holds_twice_are_refused(tmp_path, way):
    """A folder that links to itself is forty folders to a walk."""
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "a.csv").write_text(NUMBERS)
    (logs / "b.csv").write_text(NUMBERS)
    assert len(load(logs, STEP)) == 12
    if way == "packed":
        (logs / "a.csv.gz").write_bytes(gzip.compress(NUMBERS.encode()))
    elif way == "hard link":
        os.link(logs / "a.csv", logs / "c.csv")
    else:
        os.symlink("a.csv" if way == "link" else ".", logs / "c.csv")
    with pytest.raises(ValueError, match=r"a\.csv and .*csv(\.gz)? hold the same events: name one of them"):
        load(logs, STEP)


@pytest.mark.parametrize("end", ["csv", "jsonl"])
def test_a_file_that_is_no_text_is_named_as_what_it_is(tmp_path, end):
    table, written = pa.table({"user": [1], "item": [2]}), pa.BufferOutputStream()
    with pa.ipc.new_stream(written, table.schema) as stream:
        stream.write_table(table)
    for data, kind in (
        (gzip.compress(NUMBERS.encode()), r"gzip.*\.gz"),
        (bz2.compress(NUMBERS.encode()), r"bzip2.*\.bz2"),
        (b"PK\x03\x04" + bytes(40), "zip"),
        (written.getvalue().to_pybytes(), "a stream of Arrow"),
        (b"ARROW1\0\0" + bytes(40), "Arrow"),
        (b"\x89HDF\r\n\x1a\n" + bytes(40), "HDF5"),
    ):
        (tmp_path / f"log.{end}").write_bytes(data)
        with pytest.raises(ValueError, match=rf"log\.{end}: by its first bytes no text but .*{kind}"):
            load(tmp_path / f"log.{end}")
