"""Promise: a task whose labels are all alike is an error that says how to set the threshold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from test_splits import LOG, plain_clicks

from tritonrec.data import (
    ClickLoader,
    ClickStream,
    ImpressionLoader,
    ImpressionStream,
    Interactions,
    Vocabulary,
    clicks_from_ratings,
    hashed_ids,
)
from tritonrec.data.convert_windows import write_windows
from tritonrec.data.grouped import clicks_of, words_of
from tritonrec.data.labels import check_labels, check_ratings
from tritonrec.data.log_format import LogFormat


def rated(low: float, high: float, step: float = 1.0) -> Interactions:
    rng = np.random.default_rng(6)
    return replace(LOG, rating=rng.choice(np.arange(low, high + step, step, dtype=np.float64), len(LOG)))


SCALES = {
    "0 or 1": (rated(0, 1), r"none of \d+ ratings are at least 4.*from 0 to 1; set label_threshold", 1),
    "0 to 100": (rated(10, 100, 10), r"ratings go up to 100, .*set label_threshold", 60),
    "one value": (rated(3, 3), r"none of \d+ ratings are at least 4", None),
}


@pytest.mark.parametrize("scale", SCALES)
def test_another_scale_of_ratings_needs_a_threshold(scale):
    log, message, threshold = SCALES[scale]
    with pytest.raises(ValueError, match=message):
        clicks_from_ratings(log)
    with pytest.raises(ValueError, match=message):
        ImpressionLoader(log, 8, 4, 3, seed=0)
    if threshold is None:
        return
    clicks = clicks_from_ratings(log, threshold)
    items = dict(zip(log.item.tolist(), (log.rating >= threshold).tolist(), strict=True))
    of_items = clicks.categories[:, clicks.features.index("item")].tolist()
    assert clicks.labels.tolist() == [items[item] for item in of_items]
    loader = ImpressionLoader(log, 500, 4, 3, seed=0, label_threshold=threshold)
    batch = loader.global_batch(0)
    assert loader.tasks == batch.tasks == ("click",)
    assert batch.labels[:, 0].tolist() == [items[item] for item in batch.exposed_items.tolist()]


def test_the_usual_scale_and_its_bits_are_as_they_were():
    clicks = clicks_from_ratings(LOG)
    of_items = clicks.categories[:, clicks.features.index("item")]
    order = np.argsort(LOG.item)
    ratings = LOG.rating[order][np.searchsorted(LOG.item[order], of_items)]
    np.testing.assert_array_equal(clicks.labels, (ratings >= 4).astype(np.int64))
    assert ImpressionLoader(LOG, 8, 4, 3, seed=0).tasks == ("click", "conversion")


@pytest.mark.parametrize("buckets", [1, 40])
def test_a_part_of_a_log_may_have_labels_that_are_all_alike(tmp_path, buckets):
    users = np.repeat(np.arange(40), 6)
    rating = np.where(users % 2 == 0, 5.0, 1.0)  # alike for each user
    log = Interactions(users, np.arange(240) % 13, np.arange(240), rating)
    write_windows([log], tmp_path, 4, 3, rows_per_group=5, buckets=buckets)
    assert ImpressionStream(tmp_path, 8, seed=0).num_samples == ImpressionLoader(log, 8, 4, 3, 0).num_samples
    (tmp_path / "low").mkdir()
    with pytest.raises(ValueError, match="all 240 labels of task 'click' are 0"):
        write_windows(
            [replace(log, rating=np.minimum(rating, 3))], tmp_path / "low", 4, 3, 5, buckets=buckets
        )


def test_a_task_that_is_never_done_is_named(tmp_path):
    rows = len(LOG)
    both, never = np.arange(rows) % 2, np.zeros(rows, dtype=np.int64)
    log = replace(LOG, rating=None, feedback={"like": both, "share": never})
    with pytest.raises(ValueError, match=f"all {rows} labels of task 'share' are 0"):
        ImpressionLoader(log, 8, 4, 3, seed=0)
    with pytest.raises(ValueError, match="labels of task 'share' are 0"):
        write_windows([log], tmp_path, 4, 3, rows_per_group=5)
    (tmp_path / "again").mkdir()
    write_windows([replace(log, feedback={"like": both})], tmp_path / "again", 4, 3, rows_per_group=5)
    with pytest.raises(ValueError, match="no ratings"):
        clicks_from_ratings(log)
    clicks = clicks_from_ratings(replace(log, feedback={"click": both}))
    assert sorted(clicks.labels.tolist()) == sorted(both.tolist())


@pytest.mark.parametrize("label", [0, 1])
def test_clicks_that_are_all_alike_are_refused_whole_and_streamed(label, tmp_path):
    log = plain_clicks()
    alike = np.full(103, label)
    other_in_test, other = alike.copy(), alike.copy()
    other_in_test[102], other[90] = 1 - label, 1 - label
    message = f"all 92 labels of task 'click' are {label}"  # of the rows for training
    for number, labels in enumerate((alike, other_in_test, other)):
        folder = tmp_path / str(number)
        folder.mkdir()
        table = pa.table({"label": labels, "item": log.categories[:, 0]})
        pq.write_table(table, folder / "day.parquet", row_group_size=10)
        if labels is other:
            assert ClickStream(folder, 8, seed=0).num_held_out == 11
            assert ClickLoader(replace(log, labels=labels), 8, 0).num_samples == 92
            continue
        with pytest.raises(ValueError, match=message):
            ClickStream(folder, 8, seed=0)
        with pytest.raises(ValueError, match=message):
            ClickLoader(replace(log, labels=labels), 8, 0)


def test_a_stream_of_clicks_numbers_no_words_by_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITONREC_CACHE", str(tmp_path / "cache"))
    table = pa.table({"label": [0, 1, 0], "item": ["a", "b", "a"]})
    pq.write_table(table, tmp_path / "day.parquet")
    with pytest.raises(ValueError, match=r"clicks_of.*log whole .* or take ids='hashed'"):
        ClickStream(tmp_path, 2, seed=0, columns=LogFormat(ids="words"))
    hashed = ClickStream(tmp_path, 2, seed=0, columns=LogFormat(ids="hashed"))
    found = torch.cat([hashed.batch(step).features["item"].ids for step in range(hashed.steps_per_epoch)])
    assert set(found.tolist()) <= set(hashed_ids(["a", "b"]).tolist())
    words = {"item": Vocabulary(["b"])}
    folder = clicks_of(f"clicks:{tmp_path}/day.parquet?ids=words", words=words)
    assert words == words_of(folder) == {"item": Vocabulary(["b", "a"])}
    assert pq.read_table(folder / "part-00000.parquet")["item"].to_pylist() == [1, 0, 1]


def test_a_missing_rating_is_named():
    rating = LOG.rating.copy()
    rating[7] = np.nan
    with pytest.raises(ValueError, match="row 7 has no rating"):
        clicks_from_ratings(replace(LOG, rating=rating))


def test_a_lone_label_is_no_task_of_one_kind():
    check_labels("like", np.array([1]))
    check_ratings(np.array([1.0]), 4.0)
    for label in (0, 1):
        with pytest.raises(ValueError, match=f"all 2 labels of task 'like' are {label}"):
            check_labels("like", np.full(2, label))
