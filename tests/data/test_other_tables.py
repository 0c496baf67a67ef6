"""Promise: what DuckDB, Iceberg, Delta, Lance and Hugging Face's datasets hold is the log that the same table
of pyarrow is, in types, order and errors; by these packages themselves, and where those of more than 100 MB
are not installed by stand-ins.
"""

# ruff: noqa: E501 - a query and a column are a line

from datetime import UTC, datetime, timedelta, timezone
from types import SimpleNamespace

import datasets
import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pytest
import torch
from pyiceberg.catalog.sql import SqlCatalog
from test_event_log import columns

from tritonrec.data import ClickStream, LogFormat, NextItemLoader, load

COLUMNS = {
    "user": pa.array([7, 9, 7, 8], pa.int32()),
    "item": pa.array(["10", "11", "12", "10"]),
    "timestamp": pa.array([1396867869, 1396867870, 5, 6], pa.timestamp("s", "UTC")).cast(pa.timestamp("us", "UTC")),
    "rating": pa.array([1, 2.5, 3, 4], pa.float32()),
    "bought": pa.array([True, False, True, True]),
    "note": pa.array(["a", None, "b", ""]),
}  # fmt: skip


def relation(table, _folder):
    return duckdb.connect().from_arrow(table)


def iceberg(table, folder):
    folder.mkdir(exist_ok=True)
    catalog = SqlCatalog("a", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/lake")
    catalog.create_namespace("shop")
    made = catalog.create_table("shop.log", table.schema)
    made.append(table)
    return made


def hugging_face(table, _folder):
    return datasets.Dataset(table)


def delta(table, folder):
    deltalake = pytest.importorskip("deltalake", reason="140 MB: pip install 'tritonrec[heavy]'")
    deltalake.write_deltalake(str(folder / "delta"), table)
    return deltalake.DeltaTable(str(folder / "delta"))


def lance(table, folder):
    return pytest.importorskip("lance", reason="220 MB: pip install 'tritonrec[heavy]'").write_dataset(
        table, str(folder / "lance")
    )


SOURCES = {
    "relation of DuckDB": relation,
    "Iceberg": iceberg,
    "scan of Iceberg": lambda table, folder: iceberg(table, folder).scan(),
    "Hugging Face": hugging_face,
    "iterable of Hugging Face": lambda table, folder: datasets.Dataset(table).to_iterable_dataset(),
    "Delta": delta,
    "Lance": lance,
    "scanner of Lance": lambda table, folder: lance(table, folder).scanner(),
    "like Delta": lambda table, _: SimpleNamespace(to_pyarrow_dataset=lambda: pyarrow.dataset.dataset(table)),
    "like Lance": lambda table, _: SimpleNamespace(
        scanner=lambda: SimpleNamespace(to_reader=table.to_reader)
    ),
}
every_source = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)


@every_source
def test_a_log_is_that_of_the_table(make, tmp_path):
    table = pa.table(COLUMNS)
    log = load(make(table, tmp_path))
    assert columns(log) == columns(load(table))
    assert log.timestamp.tolist() == [1396867869, 1396867870, 5, 6] and log.time_unit == "s"
    assert log.feedback["bought"].tolist() == [1, 0, 1, 1] and log.rating.tolist() == [1, 2.5, 3, 4]


@every_source
def test_a_value_that_is_missing_is_named_by_its_row(make, tmp_path):
    table = pa.table(COLUMNS | {"user": pa.array([7, 9, None, 8], pa.int64())})
    with pytest.raises(
        ValueError, match="the table, row 2: column user has an empty field, expected an int64"
    ):
        load(make(table, tmp_path))
    assert load(make(table, tmp_path / "again"), LogFormat(drop_missing=True)).user.tolist() == [7, 9, 8]


@every_source
def test_clicks_are_streamed_from_it(make, tmp_path):
    table = pa.table(COLUMNS | {"label": pa.array([0, 1, 0, 1], pa.int32())})
    format = LogFormat(label=("label",), dense=("rating",), categories=("user",))
    streams = [ClickStream(source, 2, seed=3, columns=format) for source in (make(table, tmp_path), table)]
    for ours, theirs in zip(*(map(next, [stream] * 3) for stream in streams), strict=True):
        assert torch.equal(ours.dense, theirs.dense) and torch.equal(ours.labels, theirs.labels)
        assert torch.equal(ours.features.values, theirs.features.values)


def test_types_of_duckdb_mean_what_they_say():
    con = duckdb.connect()
    con.sql("set TimeZone = 'Asia/Tokyo'")
    log = load(
        con.sql("""select sum(i)::hugeint as user, ['b', 'a', 'b'][i]::enum('a', 'b') as item,
                   to_timestamp(1396867869 + i) as time from range(1, 4) t(i) group by i order by i"""),
        LogFormat(ids="words"),
    )
    assert log.words["user"].words.to_pylist() == ["1", "2", "3"] and log.item.tolist() == [0, 1, 0]
    assert log.words["item"].words.to_pylist() == ["b", "a"]
    assert log.timestamp.tolist() == [1396867870, 1396867871, 1396867872]


def test_a_query_that_fails_while_it_is_read_says_so():
    rows = "select i as user, case when i < 200000 then '1' else 'x' end::int as item, i as time from range(200001) t(i)"
    with pytest.raises(
        ValueError, match="the table cannot be read: Conversion Error: Could not convert string 'x'"
    ):
        load(duckdb.sql(rows))


def test_rows_of_hugging_face_are_those_that_were_selected_and_labels_are_their_numbers():
    """The table below a dataset has all rows, in the order of the file."""
    features = datasets.Features(
        {
            "user": datasets.Value("int32"),
            "item": datasets.ClassLabel(names=["x", "y"]),
            "time": datasets.Value("int64"),
        }
    )
    whole = datasets.Dataset.from_dict(
        {"user": [1, 2, 3], "item": ["y", "x", "y"], "time": [3, 2, 1]}, features
    )
    assert columns(load(whole.select([2, 0]))) == columns(
        load({"user": [3, 1], "item": [1, 1], "time": [1, 3]})
    )
    shuffled = whole.shuffle(seed=5)
    assert load(shuffled).user.tolist() == shuffled["user"][:]
    drawn = datasets.IterableDataset.from_generator(lambda: iter(whole.to_list()))
    assert drawn.features is None and columns(load(drawn)) == columns(load(whole))
    with pytest.raises(ValueError, match="the datasets train, test are a log each: take one of them"):
        load(datasets.DatasetDict({"train": whole, "test": whole}))
    with pytest.raises(ValueError, match="holds no interactions"):
        load(whole.select([]))


def test_a_model_trains_on_a_query():
    rows = "select i % 40 as user, (i * 7919) % 60 as item, 1396867869 + i as time from range(400) t(i) order by i"
    loader = NextItemLoader(load(duckdb.sql(rows)), 8, max_seq_len=5, num_negatives=2, seed=1)
    assert loader.batch(0).num_samples == 8


def test_what_leads_to_no_stream_is_named():
    lazy = SimpleNamespace(collect=lambda: [(1, 2)])  # as a frame of Spark
    with pytest.raises(ValueError, match=r"expected a path or a table .*, got SimpleNamespace"):
        load(lazy)


ZONED = datetime(2024, 5, 1, 12, tzinfo=timezone(timedelta(hours=2)))


@pytest.mark.parametrize("times", [[ZONED, datetime(2024, 5, 1, 12)], [datetime(2024, 5, 1, 12), ZONED]])
@pytest.mark.parametrize("kind", [dict, pd.DataFrame])
def test_times_with_a_zone_and_without_one_in_a_column_are_refused(kind, times):
    """Arrow takes the one for UTC, and pandas refuses to convert them."""
    own = pd.Series(times, dtype=object) if kind is pd.DataFrame else times
    with pytest.raises(ValueError, match="'timestamp' has times with a zone and times without one"):
        load(kind({"user": [1, 2], "item": [3, 4], "timestamp": own}))


def test_times_of_several_zones_and_missing_ones_are_no_mixture():
    other = datetime(2024, 5, 1, 11, tzinfo=UTC)
    times = pd.Series([ZONED, other, pd.NaT], dtype=object)
    frame = pd.DataFrame({"user": [1, 2, 3], "item": [3, 4, 5], "timestamp": times})
    assert load(frame[:2]).timestamp.tolist() == [int(ZONED.timestamp()), int(other.timestamp())]
    with pytest.raises(ValueError, match="row 2: column timestamp has an empty field"):
        load(frame)
