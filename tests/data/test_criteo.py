"""Clicks: Criteo's formats read as they were meant, batches that can be cut, made logs that can be learnt."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tritonrec.data import ClickLoader, ClickLog, auc, evaluate_clicks, load, load_clicks, load_interactions
from tritonrec.data.click_columns import MISSING
from tritonrec.data.presets import CRITEO_CATEGORIES, CRITEO_COUNTS
from tritonrec.data.synthetic_clicks import (
    SyntheticClickOptions,
    generate,
)

COLUMNS = ("label", *CRITEO_COUNTS, *CRITEO_CATEGORIES)


def read_tsv(path):
    return load(f"criteo-tsv:{path}")


def read_parquet(path):
    return load(f"criteo-parquet:{path}")


def fields(seed=0, rows=30):
    """Lines of 40 fields, missing ones among them, and every kind of value."""
    random = np.random.default_rng(seed)
    lines = []
    for row in range(rows):
        counts = ["" if random.random() < 0.2 else str(random.integers(-3, 3000)) for _ in range(13)]
        words = ["" if random.random() < 0.2 else f"{random.integers(0, 2**32):08x}" for _ in range(26)]
        lines.append([str(row % 3 % 2), *counts, *words])
    lines[1][14], lines[2][14], lines[3][14], lines[4][14] = "0", "FFFFFFFF", "00000000", ""
    lines[5][1:14] = ["-1", "0", "", "999999999999999999", *[""] * 9]
    return lines


def write(path, lines, end="\n"):
    path.write_bytes("".join("\t".join(line) + end for line in lines).encode())
    return path


def expected(lines):
    counts = [[math.log1p(max(int(v), 0)) if v else 0.0 for v in line[1:14]] for line in lines]
    ids = [[int(v, 16) if v else 2**32 for v in line[14:]] for line in lines]
    return np.array(counts, dtype=np.float32), np.array(ids), np.array([int(line[0]) for line in lines])


@pytest.mark.parametrize("rows", [1, 30])
def test_text_is_read_field_by_field(tmp_path, rows):
    lines = fields()[:rows]
    log = read_tsv(write(tmp_path / "day", lines))
    dense, ids, labels = expected(lines)
    np.testing.assert_array_equal(log.categories, ids)
    np.testing.assert_array_equal(log.labels, labels)
    np.testing.assert_allclose(log.dense, dense, rtol=1e-6)
    assert log.trained == max(1, rows - math.ceil(rows / 10)) and log.features == COLUMNS[14:]


def as_table(lines, integers):
    """Parquet columns: counts as numbers, categories as numbers or words, in another order, one beside."""
    columns = {"day": pa.array([1] * len(lines))}
    for at, name in reversed([*enumerate(COLUMNS)]):
        values = [line[at] or None for line in lines]
        if at < 14:
            columns[name] = pa.array([None if v is None else int(v) for v in values], pa.int64())
        elif integers:
            columns[name] = pa.array([None if v is None else int(v, 16) for v in values], pa.int64())
        else:
            columns[name] = pa.array(values, pa.string())
    return pa.table(columns)


@pytest.mark.parametrize("integers", [False, True])
def test_parquet_gives_what_text_gives_in_the_order_of_the_files(tmp_path, integers):
    lines = fields()
    (tmp_path / "part").mkdir()
    for name, part in (("b", lines[17:]), ("a", lines[:17])):
        pq.write_table(as_table(part, integers), tmp_path / "part" / f"{name}.parquet", row_group_size=5)
    log, text = read_parquet(tmp_path / "part"), read_tsv(write(tmp_path / "day", lines))
    for name in ("dense", "categories", "labels"):
        np.testing.assert_array_equal(getattr(log, name), getattr(text, name), err_msg=name)
    assert load(f"criteo-parquet:{tmp_path / 'part'}").trained == text.trained
    assert (log.categories == MISSING).any()


@pytest.mark.parametrize(
    ("row", "column", "value", "message"),
    [
        (3, 0, "2", "line 4: column label has '2', expected 0 or 1"),
        (3, 0, "", "line 4: column label has an empty field, expected 0 or 1"),
        (7, 5, "1.5", "line 8: column I5 has '1.5', expected an integer or nothing"),
        (0, 13, "x", "line 1: column I13 has 'x', expected an integer or nothing"),
        (29, 39, "68fd1e6g", "line 30: column C26 has '68fd1e6g', expected one to eight hexadecimal digits"),
        (2, 14, "068fd1e64", "line 3: column C1 has '068fd1e64', expected one to eight hexadecimal digits"),
    ],
)
def test_a_bad_field_is_named(tmp_path, row, column, value, message):
    lines = fields()
    lines[row][column] = value
    with pytest.raises(ValueError, match=f"day, {message}"):
        read_tsv(write(tmp_path / "day", lines))


def test_a_line_of_another_length_and_other_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"day, line 2: 39 columns, but 40 are expected"):
        read_tsv(write(tmp_path / "day", [fields()[0], fields()[1][:-1]]))
    with pytest.raises(ValueError, match="empty: the file is empty"):
        read_tsv(write(tmp_path / "empty", []))
    with pytest.raises(FileNotFoundError, match="nowhere: no such file"):
        read_tsv(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or folder"):
        read_parquet(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="day: not a Parquet file"):
        read_parquet(tmp_path / "day")


def test_a_bad_parquet_column_is_named(tmp_path):
    table, path = as_table(fields(), False), tmp_path / "p.parquet"

    def check(changed, message):
        pq.write_table(changed, path)
        with pytest.raises(ValueError, match=message):
            read_parquet(path)

    def put(name, values):
        return table.set_column(table.column_names.index(name), name, values)

    check(table.drop_columns(["C7"]), "p.parquet: no column 'C7'; found day, C26")
    check(put("I2", pa.array(["1"] * 29 + ["y"])), "p.parquet, row 29: column I2 has 'y'")
    check(put("I2", pa.array([1.0] * 29 + [math.inf])), "p.parquet, row 29: column I2 has inf")
    check(put("I2", pa.array([[1]] * 30)), "p.parquet: column 'I2' is of type large_list")
    check(
        put("C9", pa.array([5] * 12 + [-5] * 18)), "p.parquet, row 12: column C9 has -5, expected an integer"
    )
    check(put("C9", pa.array([0.5] * 30)), "p.parquet: column 'C9' is of type double")
    check(put("label", pa.array([None] * 30, pa.int8())), "row 0: column label has an empty field")
    pq.write_table(put("label", pa.array([True] * 10 + [False] * 20)), path)
    assert read_parquet(path).labels.tolist() == [1] * 10 + [0] * 20


LOG = generate("avazu", SyntheticClickOptions(samples=120, seed=3))


def loader(**changes):
    return ClickLoader(LOG, **(dict(batch_size=25, seed=8) | changes))


def test_an_epoch_has_every_trained_row_once_and_ranks_share_it():
    one, two = loader(), loader(rank=1, world_size=3)
    assert one.num_samples == 108 and one.steps_per_epoch == 5
    for epoch in range(2):
        rows = torch.cat([one.batch(5 * epoch + step).sample_ids for step in range(5)])
        assert sorted(rows.tolist()) == list(range(108))
    batch = one.batch(6).validate()
    assert batch.labels.tolist() == LOG.labels[batch.sample_ids].tolist()
    assert torch.equal(batch.dense, torch.from_numpy(LOG.dense)[batch.sample_ids])
    assert torch.equal(
        batch.lookups()["site_id"].ids, torch.from_numpy(LOG.categories[:, 2])[batch.sample_ids]
    )
    assert torch.equal(two.batch(6).sample_ids, batch.sample_ids[1::3])
    held = torch.cat([part.sample_ids for part in one.evaluation_batches(5)])
    assert held.tolist() == list(range(108, 120))
    part = loader(rows=(40, 70))
    assert sorted(
        part.global_batch(0).sample_ids.tolist() + part.global_batch(1).sample_ids.tolist()
    ) == list(range(40, 70))
    assert torch.equal(part.categories(), torch.from_numpy(LOG.categories[40:70]))
    with pytest.raises(ValueError, match=r"rows must be a part of \[0, 108\), got \[90, 120\)"):
        loader(rows=(90, 120))


def test_a_log_that_does_not_add_up_is_refused():
    log = dict(
        dense=LOG.dense, categories=LOG.categories, labels=LOG.labels, features=LOG.features, trained=9
    )
    for changes, message in (
        ({"trained": 121}, r"trained must be in \[1, 120\]"),
        ({"labels": LOG.labels - 1}, r"labels must be 0 or 1: row \d+ has -1"),
        ({"dense": LOG.dense + np.float32(np.inf)}, "dense values must be finite: row 0, column 0 has inf"),
        ({"features": ("a", *LOG.features[1:-1], "a")}, "distinct names"),
        ({"categories": LOG.categories[1:]}, r"categories must be int64 of shape \(120, 21\)"),
    ):
        with pytest.raises(ValueError, match=message):
            ClickLog(**(log | changes))


def test_synthetic_labels_follow_from_the_features():
    """Counting clicks by id, feature by feature, foretells later clicks; with labels shuffled it does not."""
    log = generate("criteo", SyntheticClickOptions(samples=20000, seed=2))

    def skill(labels):
        score = np.zeros(len(log) - log.trained)
        for at in range(26):
            ids = log.categories[:, at]
            known, inverse = np.unique(ids, return_inverse=True)
            seen = np.bincount(inverse[: log.trained], minlength=len(known))
            hits = np.bincount(inverse[: log.trained], labels[: log.trained], minlength=len(known))
            rate = (hits + 5 * labels.mean()) / (seen + 5)
            score += np.log(rate / (1 - rate))[inverse[log.trained :]]
        return auc(torch.from_numpy(score), torch.from_numpy(labels[log.trained :]))

    assert skill(log.labels) > 0.61
    assert abs(skill(np.random.default_rng(0).permutation(log.labels)) - 0.5) < 0.04


def test_ratings_become_clicks_and_each_user_s_last_tenth_is_held_out():
    source = load_interactions("zipf:users=40,items=30,ratings=1,seed=2")
    log = load_clicks("zipf:users=40,items=30,ratings=1,seed=2")
    assert log.features == ("item", "user") and len(log) == len(source)
    by_user = {}
    for row in np.argsort(source.timestamp, kind="stable"):
        by_user.setdefault(int(source.user[row]), []).append(row)
    held = {row for rows in by_user.values() for row in rows[len(rows) - len(rows) // 10 :]}
    assert len(held) == len(log) - log.trained > 0
    in_time = np.argsort(source.timestamp, kind="stable")
    order = [row for row in in_time if row not in held] + [row for row in in_time if row in held]
    np.testing.assert_array_equal(log.categories, np.stack([source.item, source.user], 1)[order])
    np.testing.assert_array_equal(log.labels, source.rating[order] >= 4)
    seen_items, seen_users, dense = {}, {}, {}
    for row in in_time:
        item, user = source.item[row], source.user[row]
        dense[row] = [math.log1p(seen_items.get(item, 0)), math.log1p(seen_users.get(user, 0))]
        seen_items[item], seen_users[user] = seen_items.get(item, 0) + 1, seen_users.get(user, 0) + 1
    np.testing.assert_allclose(log.dense, np.array([dense[row] for row in order]), rtol=1e-6)
    with pytest.raises(ValueError, match="no ratings, which are needed as clicks"):
        load_clicks("zipf:users=9")
    with pytest.raises(ValueError, match="avazu is a log of clicks without users' sequences"):
        load_interactions("avazu")


def test_metrics_are_their_definitions():
    held = loader()
    p = {row: (row % 7) / 7 for row in range(108, 120)}
    metrics = evaluate_clicks(lambda batch: torch.tensor([p[int(row)] for row in batch.sample_ids]), held)
    y = LOG.labels[108:]
    sure = np.clip([np.float32(value) for value in p.values()], 1e-7, 1 - 1e-7).astype(np.float64)
    assert metrics["BCE"] == pytest.approx(-np.mean(y * np.log(sure) + (1 - y) * np.log(1 - sure)), rel=1e-6)
    assert metrics["accuracy"] == np.mean((sure >= 0.5) == (y == 1))
    pairs = [(a > b) + (a == b) / 2 for a, i in zip(sure, y, strict=True) if i
             for b, j in zip(sure, y, strict=True) if not j]  # fmt: skip
    assert metrics["AUC"] == pytest.approx(np.mean(pairs))
    with pytest.raises(ValueError, match=r"predictions must be \(12,\), got \(12, 1\)"):
        evaluate_clicks(lambda batch: torch.zeros(batch.num_samples, 1), held)
    alone = ClickLoader(generate("avazu", SyntheticClickOptions(samples=1)), 4, 0)
    with pytest.raises(ValueError, match="no rows held out for test"):
        evaluate_clicks(lambda batch: torch.zeros(batch.num_samples), alone)
