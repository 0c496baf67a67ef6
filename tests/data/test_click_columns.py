"""Promise: clicks in plain columns are read by their types, whole or streamed, and a bad value is named."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from test_ali_ccp import COMMON, SKELETON
from test_ali_ccp import write as write_ali_ccp

from tritonrec.data import ClickBatch, ClickLoader, ClickStream, LogFormat, load
from tritonrec.data.grouped import clicks_of

ROWS = 37


def columns(rows=ROWS, seed=0):
    """Labels between others, every kind of integer and floating number, both ends of int64."""
    random = np.random.default_rng(seed)
    ids = random.integers(-(2**63), 2**63 - 1, rows)
    ids[:2] = -(2**63), 2**63 - 1
    return {
        "site": ids,
        "age": random.normal(size=rows).astype(np.float32),
        "label": random.integers(0, 2, rows).astype(np.uint8),
        "price": random.normal(size=rows) * 1e30,
        "device": random.integers(0, 2**63, rows).astype(np.uint64),
        "hour": random.integers(-128, 128, rows).astype(np.int8),
        "rate": random.normal(size=rows).astype(np.float16),
    }


def write(folder, made, rows_per_group=5):
    folder.mkdir()
    table = pa.table(made)
    for number, rows in enumerate((table.slice(0, 20), table.slice(20))):
        pq.write_table(rows, folder / f"{number}.parquet", row_group_size=rows_per_group)
    return folder


def test_floating_columns_are_dense_and_integers_categories(tmp_path):
    made = columns()
    log = load(f"clicks:{write(tmp_path / 'days', made)}")
    assert log.features == ("site", "device", "hour") and log.trained == ROWS - 4
    np.testing.assert_array_equal(log.labels, made["label"])
    expected = np.stack([made[name].astype(np.float32) for name in ("age", "price", "rate")], 1)
    np.testing.assert_array_equal(log.dense, expected)
    ids = np.stack([made[name].astype(np.int64) for name in log.features], 1)
    np.testing.assert_array_equal(log.categories, ids)


@pytest.mark.parametrize("dense", [True, False])
def test_a_stream_has_the_samples_of_the_log(tmp_path, dense):
    made = columns() | {"label": columns()["label"].astype(bool)}
    if not dense:
        made = {name: made[name] for name in ("hour", "label", "site")}
    folder = write(tmp_path / "days", made)
    stream, loader = ClickStream(folder, 8, seed=1), ClickLoader(load(f"clicks:{folder}"), 8, seed=1)
    assert (stream.features, stream.num_dense) == (loader.features, loader.num_dense)
    assert stream.num_samples == loader.num_samples == 33 and stream.click_rate == loader.click_rate
    for ours, theirs in (
        ([stream.batch(step) for step in range(stream.steps_per_epoch)],
         [loader.batch(step) for step in range(loader.steps_per_epoch)]),
        (stream.evaluation_batches(3), loader.evaluation_batches()),
    ):  # fmt: skip
        whole = [ClickBatch.concat([replace(each, step=0) for each in batches]) for batches in (ours, theirs)]
        one, other = (batch.select(torch.argsort(batch.sample_ids)).validate() for batch in whole)
        assert torch.equal(one.sample_ids, other.sample_ids) and torch.equal(one.labels, other.labels)
        assert torch.equal(one.dense, other.dense)
        assert torch.equal(one.features.values, other.features.values)


def changed(**others):
    return {name: each for name, each in (columns() | others).items() if each is not None}


def with_value(name, row, value):
    values = columns()[name].tolist()
    values[row] = value
    return {name: pa.array(values, pa.from_numpy_dtype(columns()[name].dtype))}


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"label": None}, "need a column 'label' and columns of integers, found site, age"),
        (dict.fromkeys(["site", "device", "hour"]), "need a column 'label' and columns of integers"),
        ({"hour": ["noon"] * ROWS}, "column 'hour' is of type string, expected integers"),
        ({"age": np.zeros(ROWS, bool)}, "column 'age' is of type bool, expected"),
        (with_value("label", 23, 2), "column label has 2, expected 0 or 1"),
        (with_value("label", 23, None), "column label has an empty field, expected 0 or 1"),
        (with_value("site", 23, None), "column site has an empty field, expected an int64"),
        (with_value("device", 23, 2**63), f"column device has {2**63}, expected an int64"),
        (with_value("price", 23, 1e300), "column price has 1e.300, expected a finite number of float32"),
        (with_value("age", 23, None), "column age has an empty field, expected a finite number"),
    ],
)
def test_a_bad_column_is_named_and_a_bad_value_by_its_row(tmp_path, others, message):
    folder = write(tmp_path / "days", changed(**others))
    row = "row 3: " if "23" in str(message) or "has" in message else ""
    with pytest.raises(ValueError, match=row + message):
        load(f"clicks:{folder}")
    row = row and "row 23: "
    with pytest.raises(ValueError, match=row + message):
        stream = ClickStream(folder, 8, seed=0)
        for step in range(stream.steps_per_epoch):
            stream.batch(step)


@pytest.mark.if_changed
@pytest.mark.parametrize("rows", [30, 90, 1 << 14])
def test_ali_ccp_is_written_in_plain_columns_once(tmp_path, monkeypatch, rows):
    monkeypatch.setattr("tritonrec.data.text_tables.BLOCK_BYTES", rows)
    monkeypatch.setenv("TRITONREC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "days").mkdir()
    source = f"ali-ccp:{write_ali_ccp(tmp_path / 'days', SKELETON * 3)}"
    log, seen = load(source), []
    folder = clicks_of(source, seen.append)
    again = load(f"clicks:{folder}")
    assert again.features == log.features and again.trained == log.trained == 10 and sum(seen) == 12
    for name in ("labels", "dense", "categories"):
        np.testing.assert_array_equal(getattr(again, name), getattr(log, name))
    assert clicks_of(source) == folder
    write_ali_ccp(tmp_path / "days", SKELETON, [*COMMON, "u3,0,"])
    assert clicks_of(source) != folder


def test_a_bad_line_of_ali_ccp_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITONREC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "days").mkdir()
    write_ali_ccp(tmp_path / "days", [*SKELETON, "5,0,0,u9,0,"])
    with pytest.raises(
        ValueError, match="line 5: column common has 'u9', expected one of the common features"
    ):
        clicks_of(f"ali-ccp:{tmp_path}/days")
    assert {path.suffix for path in (tmp_path / "cache" / "clicks").iterdir()} == {".lock"}


def test_a_name_of_a_column_that_is_no_text_is_refused(tmp_path):
    folder = write(tmp_path / "days", columns())
    file = folder / "0.parquet"
    file.write_bytes(file.read_bytes().replace(b"price", b"\xf4rice", 1))
    for read in (lambda: load(f"clicks:{folder}"), lambda: ClickStream(folder, 8, seed=1)):
        with pytest.raises(ValueError, match=r"0\.parquet: .*'utf-8' codec"):
            read()


TEXT = "Click,age,site,word\n1,2.5,3,x\n0,1,4,y\n1,0,5,x\n"


def test_columns_of_text_are_named(tmp_path):
    (tmp_path / "log.csv").write_text(TEXT)
    log = load(tmp_path / "log.csv", LogFormat(label=("click",), dense=("age",), categories=("site",)))
    assert log.features == ("site",) and log.categories[:, 0].tolist() == [3, 4, 5]
    assert log.dense[:, 0].tolist() == [2.5, 1, 0] and log.labels.tolist() == [1, 0, 1]
    words = {}
    log = load(f"{tmp_path}/log.csv?label=click&categories=word&ids=words", words=words)
    assert log.categories[:, 0].tolist() == [0, 1, 0] and words["word"].words.to_pylist() == ["x", "y"]
    log = load(f"clicks:{tmp_path}/log.csv?label=age&label_threshold=1&categories=site")
    assert log.labels.tolist() == [1, 1, 0]
    for spec, message in (
        ("clicks:PATH", "text has no types: name the columns"),
        ("PATH?label=click&categories=word", "line 2: column word has 'x', .*ids=words"),
        ("PATH?label=click&categories=who", "no column 'who'; found Click, age"),
        (
            "PATH?label=age&categories=site",
            "line 2: column age has '2.5', expected 0 or 1; .*label_threshold",
        ),
        ("PATH?categories=site", "one label, and 0 are named"),
    ):
        with pytest.raises(ValueError, match=message):
            load(spec.replace("PATH", f"{tmp_path}/log.csv"))


@pytest.mark.if_changed
def test_frames_are_read_and_streamed():
    import pandas
    import polars

    table = pa.table({name: own for name, own in columns().items() if name != "rate"})
    frame = table.to_pandas()
    frame.index = frame.index * 3 % 7  # an index that is a column of the frame's Arrow form
    expected = [list(ClickStream(table, 8, seed=1).batch(step).features.values) for step in range(5)]
    plain = LogFormat(label=("label",), dense=("age", "price"), categories=("site", "device", "hour"))
    for source in (table, frame, polars.from_arrow(table), pandas.DataFrame(frame)):
        stream = ClickStream(source, 8, seed=1)
        assert stream.features == ("site", "device", "hour")
        assert [list(stream.batch(step).features.values) for step in range(5)] == expected
        np.testing.assert_array_equal(load(source, plain).categories[:, 0], columns()["site"])


def test_shards_of_other_types_are_one_log_whole_and_streamed(tmp_path):
    table = pa.table({name: columns()[name] for name in ("label", "hour")})
    kinds = [pa.int8(), pa.int64(), pa.dictionary(pa.int32(), pa.int8()), pa.decimal128(20, 0), pa.string()]
    for number, kind in enumerate(kinds):
        hour = table["hour"].cast(kind.value_type if pa.types.is_dictionary(kind) else kind)
        hour = hour.dictionary_encode() if pa.types.is_dictionary(kind) else hour
        pq.write_table(table.set_column(1, "hour", hour), tmp_path / f"{number}.parquet")
    format = LogFormat(label=("label",), categories=("hour",))
    log = load(f"parquet:{tmp_path}", format)
    np.testing.assert_array_equal(log.categories[:, 0], np.tile(columns()["hour"], 5))
    stream = ClickStream(tmp_path, 1000, seed=0, shuffle=False, readers=1, columns=format)
    np.testing.assert_array_equal(stream.batch(0).features.values, log.categories[: log.trained, 0])
    pq.write_table(pa.table({"label": [1], "hour": [[1]]}), tmp_path / "5.parquet")
    for read in (
        lambda: load(f"parquet:{tmp_path}", format),
        lambda: ClickStream(tmp_path, 9, 0, columns=format),
    ):
        with pytest.raises(ValueError, match=r"5\.parquet: column 'hour' is list.* but int8 in .*0\.parquet"):
            read()
