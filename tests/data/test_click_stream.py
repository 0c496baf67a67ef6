"""Promise: a stream of Criteo's format in Parquet has the samples of the log read whole, at any ranks."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from speeds import slow_except
from test_criteo import as_table, fields

from tritonrec.data import ClickBatch, ClickLoader, ClickStream, evaluate_clicks, load
from tritonrec.data.parquet_rows import ParquetRows
from tritonrec.data.presets import CRITEO

ROWS = 43


@pytest.fixture(scope="module", params=[True, False], ids=["integers", "words"])
def folder(tmp_path_factory, request):
    """Two files, with a row group that is held out in part."""
    path = tmp_path_factory.mktemp("clicks")
    table = as_table(fields(rows=ROWS), request.param)
    for number, rows in enumerate((table.slice(0, 20), table.slice(20))):
        pq.write_table(rows, path / f"{number}.parquet", row_group_size=9)
    return path


def sorted_by_sample(batches):
    whole = ClickBatch.concat([replace(batch, step=0) for batch in batches])
    return whole.select(torch.argsort(whole.sample_ids))


def equal(one, other):
    same = torch.equal(one.sample_ids, other.sample_ids) and torch.equal(one.dense, other.dense)
    return (
        same
        and torch.equal(one.labels, other.labels)
        and torch.equal(one.features.values, other.features.values)
    )


def test_an_epoch_has_the_training_rows_of_the_log_in_memory(folder):
    stream, loader = (
        ClickStream(folder, 8, seed=1, columns=CRITEO),
        ClickLoader(load(f"criteo-parquet:{folder}"), 8, seed=1),
    )
    assert stream.num_samples == loader.num_samples and stream.num_held_out == loader.num_held_out == 5
    steps = range(stream.steps_per_epoch)
    got = sorted_by_sample([stream.batch(step).validate() for step in steps])
    assert equal(got, sorted_by_sample([loader.batch(step) for step in steps]))
    assert stream.features == loader.features and stream.num_dense == loader.num_dense
    assert stream.click_rate == loader.click_rate


@pytest.mark.parametrize("size", [1, 3, 1024])
def test_the_held_out_rows_are_evaluated_in_their_order(folder, size):
    stream, loader = (
        ClickStream(folder, 8, seed=1, columns=CRITEO),
        ClickLoader(load(f"criteo-parquet:{folder}"), 8, seed=1),
    )
    batches = list(stream.evaluation_batches(size))
    assert max(batch.num_samples for batch in batches) <= size
    assert equal(ClickBatch.concat(batches), ClickBatch.concat(list(loader.evaluation_batches())))

    def predict(batch):
        return batch.dense.mean(1).sigmoid()

    assert evaluate_clicks(predict, stream) == evaluate_clicks(predict, loader)


@pytest.mark.if_changed
@pytest.mark.parametrize("world_size", slow_except([3], [2, 3]))
def test_ranks_divide_the_global_batch(folder, world_size):
    alone = ClickStream(folder, 16, seed=3, columns=CRITEO)
    ranks = [ClickStream(folder, 16, 3, rank, world_size, columns=CRITEO) for rank in range(world_size)]
    for step in range(alone.steps_per_epoch + 1):
        parts = [each.batch(step) for each in ranks]
        assert equal(sorted_by_sample(parts), sorted_by_sample([alone.batch(step)]))


def test_a_bad_value_is_named_by_its_row(tmp_path):
    table = as_table(fields(rows=ROWS), False)
    words = table.column("C5").to_pylist()
    words[31] = "xyz"
    at = table.column_names.index("C5")
    pq.write_table(table.set_column(at, "C5", pa.array(words)), tmp_path / "day.parquet", row_group_size=9)
    stream = ClickStream(tmp_path, 8, seed=0, columns=CRITEO)
    with pytest.raises(ValueError, match="row 31: column C5 has 'xyz', expected one to eight hexadecimal"):
        for step in range(stream.steps_per_epoch):
            stream.batch(step)
    pq.write_table(table.drop_columns(["I3"]), tmp_path / "day.parquet")
    with pytest.raises(ValueError, match=r"day\.parquet: no column 'I3'"):
        ClickStream(tmp_path, 8, seed=0, columns=CRITEO)


@pytest.mark.parametrize("rows", [1, 8, 9, 10, 42, 43])
def test_the_first_rows_of_a_dataset_are_a_dataset(folder, rows):
    whole = ParquetRows(folder, ["label"])
    part = whole.first(rows)
    found = list(part.batches(4))
    assert part.group_rows.min() > 0 and part.num_rows == rows == sum(len(table) for _numbers, table in found)
    assert np.array_equal(np.concatenate([numbers for numbers, _table in found]), np.arange(rows))
    rest = [numbers for numbers, _table in whole.batches(4, begin=rows)]
    assert np.array_equal(np.concatenate([[], *rest]), np.arange(rows, ROWS)) and whole.num_rows == ROWS


def test_a_log_of_one_row_has_nothing_held_out_but_it(tmp_path):
    pq.write_table(as_table(fields()[:1], True), tmp_path / "day.parquet")
    stream = ClickStream(tmp_path, 8, seed=0, columns=CRITEO)
    assert stream.num_samples == 1 and stream.num_held_out == 0 and next(stream).num_samples == 1
    with pytest.raises(ValueError, match="no rows held out for test"):
        evaluate_clicks(lambda batch: batch.dense[:, 0], stream)
