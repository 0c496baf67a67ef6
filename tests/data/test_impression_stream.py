"""Promise: a stream of windows has the samples of the log read whole, at any ranks and numbers of buckets."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from speeds import slow_except
from test_impression_loader import loader, plain, rated_log

from tritonrec.data import ImpressionBatch, ImpressionStream
from tritonrec.data.convert_windows import table_of, write_windows
from tritonrec.data.impression_stream import ABOUT_FILE, PART_FILES
from tritonrec.data.parquet import table_of as table_of_log
from tritonrec.data.parquet import write_features
from tritonrec.data.parquet_rows import ParquetRows
from tritonrec.data.sources import source_of

LOG = rated_log()


@pytest.fixture
def folder(tmp_path):
    """A log of events with features, in two files."""
    table = table_of_log(LOG)
    (tmp_path / "log").mkdir()
    pq.write_table(table.slice(0, 150), tmp_path / "log" / "0.parquet", row_group_size=60)
    pq.write_table(table.slice(150), tmp_path / "log" / "1.parquet")
    write_features(LOG, tmp_path / "log")
    return tmp_path / "log"


def windows(folder, out, buckets=1, max_exposed=3):
    out.mkdir()
    write_windows(
        source_of(f"parquet:{folder}").events().parts(),
        out,
        5,
        max_exposed,
        10,
        buckets=buckets,
        users=LOG.user_features,
        genres=LOG.genres,
    )
    return out


def samples_of(batches):
    """All samples but for their ids, in an order of their own."""
    return sorted(repr({**sample, "id": None}) for batch in batches for sample in plain(batch))


@pytest.mark.parametrize("buckets", slow_except([4], [1, 4]))
def test_an_epoch_and_the_held_out_windows_are_those_of_the_log_in_memory(folder, tmp_path, buckets):
    stream = ImpressionStream(windows(folder, tmp_path / "out", buckets), 7, seed=2)
    whole = loader(LOG)
    assert stream.num_samples == whole.num_samples and stream.has_genres
    assert (stream.context, stream.tasks) == (whole.context, whole.tasks)
    steps = range(stream.steps_per_epoch)
    assert samples_of(map(stream.batch, steps)) == samples_of(map(whole.batch, steps))
    assert samples_of(stream.evaluation_batches(6)) == samples_of(whole.evaluation_batches())


@pytest.mark.parametrize("world_size", slow_except([2], [2, 3]))
def test_ranks_divide_the_global_batch(folder, tmp_path, world_size):
    out = windows(folder, tmp_path / "out")
    alone = ImpressionStream(out, 16, seed=3)
    ranks = [ImpressionStream(out, 16, 3, rank, world_size) for rank in range(world_size)]
    for step in range(alone.steps_per_epoch + 1):
        assert samples_of(each.batch(step) for each in ranks) == samples_of([alone.batch(step)])


def test_a_batch_becomes_rows_and_a_batch_again(folder, tmp_path):
    out = windows(folder, tmp_path / "out")
    stream = ImpressionStream(out, 7, seed=2)
    for size in (1, 7, 0):
        batch = stream.batch(0).select(torch.arange(size))
        again = stream.collate(0, batch.sample_ids, table_of(batch))
        assert plain(again) == plain(batch) and isinstance(again, ImpressionBatch)


def test_what_has_no_windows_is_named(folder, tmp_path):
    with pytest.raises(ValueError, match="none of the users has more than max_exposed = 1000 events"):
        windows(folder, tmp_path / "out", max_exposed=1000)
    with pytest.raises(ValueError, match="log has no windows of impressions"):
        ImpressionStream(folder, 7, seed=0)
    unrated = table_of_log(LOG).drop_columns(["rating"])
    (tmp_path / "unrated").mkdir()
    pq.write_table(unrated, tmp_path / "unrated" / "0.parquet")
    with pytest.raises(ValueError, match="the log has neither ratings nor feedback"):
        windows(tmp_path / "unrated", tmp_path / "none")


def test_the_held_out_windows_are_no_shard(folder, tmp_path):
    out = windows(folder, tmp_path / "out")
    assert [file.rpartition("/")[2] for file in ParquetRows(out).files] == ["part-00000.parquet"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"context": ["user_id"', "cannot be read: JSONDecodeError"),
        ("[" * 100_000, "cannot be read: RecursionError"),
        ('{"context": ["user_id"]}', "cannot be read: KeyError: 'tasks'"),
        ("[1]", "cannot be read: TypeError"),
        ('{"context": ["user_id"], "tasks": "like"}', "must be lists of texts, got 'like'"),
        ('{"context": [1], "tasks": ["like"]}', r"must be lists of texts, got \[1\]"),
        ('{"context": ["nobody"], "tasks": ["like"]}', "no column 'context_nobody'"),
        ('{"context": [], "tasks": []}', r"a row has \d values in 'label', expected 0"),
    ],
)
def test_damaged_names_are_refused_by_their_file(folder, tmp_path, text, message):
    out = windows(folder, tmp_path / "out")
    (out / ABOUT_FILE).write_text(text)
    with pytest.raises(ValueError, match=f"{out}.*{message}"):
        next(ImpressionStream(out, 7, seed=2))


def replaced(table, name, values):
    return table.set_column(table.column_names.index(name), name, values)


LISTS = pa.large_list(pa.int64())
WRONG = {
    "no column 'action'": lambda table: table.drop_columns(["action"]),
    "column 'shown' must hold lists of integers.*write_windows": lambda table: replaced(
        table, "shown", pa.array([[1.5]] * len(table))
    ),
    r"row \d+: column context_user_id has 'me', expected an int64": lambda table: replaced(
        table, "context_user_id", pa.array(["me"] * len(table))
    ),
    r"row \d+: column context_user_id has an empty field": lambda table: replaced(
        table, "context_user_id", pa.array([None] * len(table), pa.int64())
    ),
    r"row \d+: column item has an empty field": lambda table: replaced(
        table, "item", pa.array([[None]] * len(table), LISTS)
    ),
    r"row \d+: column timestamp has 9223372036854775808": lambda table: replaced(
        table, "timestamp", pa.array([[2**63]] * len(table), pa.large_list(pa.uint64()))
    ),
    r"row \d+: a row has 9 values in 'action', expected \d": lambda table: replaced(
        table, "action", pa.array([[1] * 9] * len(table), LISTS)
    ),
    r"row \d+: a row has 9 values in 'shown_timestamp', expected \d": lambda table: replaced(
        table, "shown_timestamp", pa.array([[1] * 9] * len(table), LISTS)
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_columns_that_do_not_fit_are_named(folder, tmp_path, message):
    out = windows(folder, tmp_path / "out")
    for name in ("part-00000.parquet", PART_FILES["test"]):
        whole = (out / name).read_bytes()
        pq.write_table(WRONG[message](pq.read_table(out / name)), out / name)
        with pytest.raises(ValueError, match=f"{out}.*{message}"):
            stream = ImpressionStream(out, 7, seed=2)
            _ = next(stream), list(stream.evaluation_batches(6))
        (out / name).write_bytes(whole)
