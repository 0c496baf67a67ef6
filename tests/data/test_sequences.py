"""Promise: sequences of a log stream as the samples that `NextItemLoader` makes of it."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tritonrec.data import (
    DynamicStream,
    Interactions,
    NextItemLoader,
    NextItemStream,
    evaluate,
    load,
    popularity_scores,
)
from tritonrec.data.convert import convert, write
from tritonrec.data.convert_sequences import write_sequences
from tritonrec.data.parquet_rows import ParquetRows

LENGTH, NEGATIVES = 7, 2


@pytest.fixture(scope="module")
def log():
    made = load("zipf:users=90,items=60,median_length=5,ratings=1,seed=4")
    lone = Interactions(*(np.array(column) for column in ([-5, 2**62], [3, 10**9], [1, 2])))
    columns = [np.concatenate([getattr(made, n), getattr(lone, n)]) for n in ("user", "item", "timestamp")]
    return Interactions(*columns)


@pytest.fixture(scope="module")
def folder(log, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "sequences"
    path.mkdir()
    write_sequences([log], path, rows_per_file=20, rows_per_group=6)
    return path


def stream(path, rank=0, world_size=1, batch_size=16, **options):
    options = {"buffer_rows": 40, "readers": 8, **options}
    return NextItemStream(path, batch_size, LENGTH, NEGATIVES, 5, rank, world_size, **options)


def loader(log):
    return NextItemLoader(log, 1000, LENGTH, NEGATIVES, 5)


def samples(batch):
    """Ids, timestamps and labels by sample."""
    bounds = batch.offsets.tolist()
    return {
        sample: (batch.ids[a:b].tolist(), batch.timestamps[a:b].tolist(), batch.labels[a:b].tolist())
        for sample, a, b in zip(batch.sample_ids.tolist(), bounds, bounds[1:], strict=False)
    }


def users(path):
    return ParquetRows(path, ["user"]).batches(10**6)


def test_an_epoch_has_the_samples_of_the_loader(log, folder):
    made = stream(folder)
    found = {}
    for _ in range(made.steps_per_epoch):
        batch = next(made).validate()
        assert batch.negatives.shape == (batch.num_tokens, NEGATIVES)
        assert bool(torch.isin(batch.negatives, made.catalogue).all())
        found |= samples(batch)
    names = torch.cat([torch.tensor(t["user"].to_pylist()) for _n, t in users(folder)]).tolist()
    by_user = {names[row]: sample for row, sample in found.items()}
    expected = samples(loader(log).batch(0))
    assert {user: sample for user, sample in by_user.items() if sample[0]} == expected
    assert len(found) == len(log.sequences.user_ids) > len(expected)


def test_evaluation_is_that_of_the_loader(log, folder):
    made, known = stream(folder), loader(log)
    assert torch.equal(made.catalogue, known.catalogue) and torch.equal(made.popularity, known.popularity)
    assert evaluate(popularity_scores(made), made) == evaluate(popularity_scores(known), known)
    scores = torch.randn(known.num_items, generator=torch.Generator().manual_seed(3))

    def by_history(history):
        return scores + history.lengths[:, None] * scores.flip(0)

    assert evaluate(by_history, made, batch_size=17) == evaluate(by_history, known)


def test_items_outside_of_the_catalogue_are_neither_seen_nor_targets(log, folder):
    known = loader(log).catalogue
    made, whole = stream(folder, catalogue=known[::3].clone()), stream(folder)
    for few, every in zip(made.evaluation_batches(50), whole.evaluation_batches(50), strict=True):
        pairs = zip(every.seen_users.tolist(), every.seen_items.tolist(), strict=True)
        in_few = [(user, item) for user, item in pairs if item % 3 == 0]
        found = list(zip(few.seen_users.tolist(), (few.seen_items * 3).tolist(), strict=True))
        assert found == in_few and len(found) < len(every.seen_items)
        targets = torch.where(every.targets % 3 == 0, every.targets // 3, -1)
        assert torch.equal(few.targets, torch.where(every.targets < 0, -1, targets))


def test_ranks_have_the_negatives_of_one_rank(folder):
    whole = stream(folder)
    ranks = [stream(folder, rank, 3) for rank in range(3)]
    for _ in range(9):
        one, parts = next(whole), [next(each) for each in ranks]
        joined = type(one).concat(parts)
        for name in ("sample_ids", "labels", "negatives"):
            assert torch.equal(getattr(one, name), getattr(joined, name))


def test_buckets_have_every_user_once(log, folder, tmp_path):
    parts = [
        Interactions(*(getattr(log, name)[at : at + 50] for name in ("user", "item", "timestamp")))
        for at in range(0, len(log), 50)
    ]
    write_sequences(parts, tmp_path, 10**6, 10**6, buckets=7)
    assert len(list(tmp_path.glob("part-*"))) == 7

    def rows(path):
        every = pa.concat_tables([t for _n, t in ParquetRows(path).batches()]).sort_by("user")
        return every.to_pydict()

    assert rows(tmp_path) == rows(folder)
    catalogues = [pq.read_table(path / "_catalogue.parquet").to_pydict() for path in (tmp_path, folder)]
    assert catalogues[0] == catalogues[1]


@pytest.mark.if_changed
def test_the_command_writes_sequences_of_a_log_in_parquet(log, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tritonrec.data.convert_sequences.BUCKET_ROWS", len(log) // 3)
    write(log, tmp_path / "log", partition_by="date", rows_per_group=40)
    arguments = (f"parquet:{tmp_path / 'log'}", tmp_path / "out")
    convert(*arguments, sequences=True)
    assert capsys.readouterr().out.replace("\n", " ").endswith(f"{len(log):,} interactions in 4 files ")
    assert torch.equal(stream(tmp_path / "out").popularity, stream(folder).popularity)
    assert stream(tmp_path / "out").num_samples == stream(folder).num_samples


@pytest.mark.parametrize("world_size", [1, 3])
def test_batches_cut_by_tokens_have_each_sample_once_and_the_position_is_exact(folder, world_size):
    def made(rank):
        return DynamicStream(stream(folder, rank, world_size), 30)

    ranks = [made(rank) for rank in range(world_size)]
    whole = made(0)
    batches = [[next(each) for each in ranks] for _ in range(12)]
    for step, parts in enumerate(batches):
        tokens = [part.num_tokens for part in parts]
        assert all(30 - LENGTH <= count <= 30 + LENGTH for count in tokens)
        assert [part.step for part in parts] == [step] * world_size
        joined = type(parts[0]).concat(parts)
        assert torch.equal(whole.global_batch(step).labels, joined.labels)
    seen = [number for parts in batches for part in parts for number in part.sample_ids.tolist()]
    if world_size == 1:
        rows = [number for step in range(20) for number in stream(folder).batch(step).sample_ids.tolist()]
        assert seen == rows[: len(seen)]
    for rank in range(world_size):
        before, after = made(rank), made(rank)
        for _ in range(5):
            next(before)
        after.load_state_dict(before.state_dict())
        for step in range(5, 12):
            assert torch.equal(next(after).negatives, batches[step][rank].negatives)


def test_a_position_cut_by_tokens_is_one_of_a_rank(folder):
    state = DynamicStream(stream(folder, 1, 2), 30).state_dict()
    for other, message in (
        (DynamicStream(stream(folder, 0, 2), 30), "rank 1, and this one has 0"),
        (DynamicStream(stream(folder, 1, 4), 30), "world_size 2, and this one has 4"),
        (DynamicStream(stream(folder, 1, 2), 31), "target_tokens 30, and this one has 31"),
    ):
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="one after another: 0 is next, not 3"):
        DynamicStream(stream(folder), 30).batch(3)


def written(path, catalogue=True, **columns):
    whole = {"item": [[1, 2, 3], [4]], "timestamp": [[1, 2, 3], [4]]}
    pq.write_table(pa.table(whole | columns), path / "a.parquet")
    if catalogue:
        pq.write_table(pa.table({"item": [1, 2, 4], "count": [1, 1, 1]}), path / "_catalogue.parquet")
    return path


@pytest.mark.parametrize(
    "columns, message",
    [
        (dict(item=[3, 4]), r"column 'item' must hold lists of integers.*got int64: python -m tritonrec"),
        (dict(timestamp=[[1.5], [2.5]]), r"column 'timestamp' must hold lists of integers"),
    ],
)
def test_other_columns_are_refused(tmp_path, columns, message):
    with pytest.raises(ValueError, match=message):
        stream(written(tmp_path, **columns))


@pytest.mark.parametrize(
    "columns, message",
    [
        (dict(item=[[1, 2], [3]]), "a row has 2 values in 'item' and 3 in 'timestamp'"),
        (dict(item=[[1, 2], [3, 4]], timestamp=[[5, 6], [4, 3]]), "the times of a row fall: sort its lists"),
        (dict(item=[[1, 2, None], [3]]), "column item has an empty field, expected an int64"),
        (dict(item=[[1, 2, 3], None]), "column item has an empty field, expected a list"),
        (
            dict(item=pa.array([[1, 2, 2**63], [4]], pa.list_(pa.uint64()))),
            "column item has 9223372036854775808",
        ),
    ],
)
def test_bad_rows_are_refused_when_they_are_read(tmp_path, columns, message):
    with pytest.raises(ValueError, match=f"{tmp_path}.*, row [01]: {message}"):
        stream(written(tmp_path, **columns), readers=1)


def test_a_catalogue_is_needed(tmp_path):
    with pytest.raises(ValueError, match="no catalogue to draw negatives from: give catalogue="):
        stream(written(tmp_path, catalogue=False))
    with pytest.raises(ValueError, match="catalogue must be int64, distinct and ascending"):
        stream(tmp_path, catalogue=torch.tensor([3, 2]))
    assert next(stream(tmp_path, catalogue=torch.tensor([7]))).negatives.unique().tolist() == [7]


def test_a_log_without_tokens_is_refused_and_a_rank_without_any_where_batches_are_cut_by_tokens(tmp_path):
    with pytest.raises(
        ValueError, match=r"none of the 2 sequences has two events for training, .*leave-one-out"
    ):
        stream(written(tmp_path, item=[[1], [2, 3]], timestamp=[[1], [2, 3]]))
    folder = written(tmp_path, item=[[1], [2, 3, 4]], timestamp=[[1], [2, 3, 4]])
    cut = [DynamicStream(stream(folder, rank=rank, world_size=2), 30) for rank in range(2)]
    with pytest.raises(ValueError, match=r"rank [01] has an epoch without tokens"):
        [next(each) for each in cut]


@pytest.mark.if_changed
@pytest.mark.parametrize("place", range(0, 10, 3))
def test_a_stream_goes_on_where_few_rows_have_tokens(tmp_path, place):
    """A position may stand behind an epoch's only row with tokens, and the next epoch may have it last."""
    items = [[1]] * place + [[2, 4, 1]] + [[4]] * (9 - place)
    folder = written(tmp_path, item=items, timestamp=[sorted(own) for own in items])
    whole = DynamicStream(stream(folder, batch_size=2), 1)
    positions, batches = [], []
    for _ in range(12):
        positions.append(whole.state_dict())
        batches.append(next(whole))
    for step, position in enumerate(positions):
        cut = DynamicStream(stream(folder, batch_size=2), 1)
        cut.load_state_dict(position)
        assert torch.equal(next(cut).sample_ids, batches[step].sample_ids)


@pytest.mark.parametrize("kind", ["fixed", "view", "large_view", "text", "dictionary", "dates"])
def test_all_spellings_of_a_list_are_one(kind):
    rows = [[1, 2, 3], [2, 3, 4]]
    kinds = {
        "fixed": pa.list_(pa.int16(), 3),
        "view": pa.list_view(pa.int64()),
        "large_view": pa.large_list_view(pa.uint64()),
    }
    items = pa.array(rows, kinds.get(kind, pa.list_(pa.int64())))
    if kind in ("text", "dictionary"):
        flat = items.flatten().cast(pa.string()) if kind == "text" else items.flatten().dictionary_encode()
        items = pa.ListArray.from_arrays(pa.array([0, 3, 6], pa.int32()), flat)
    times = pa.array(rows, pa.list_(pa.timestamp("s") if kind == "dates" else pa.int32()))
    made = NextItemStream(
        pa.table({"item": items, "timestamp": times}), 2, 5, 0, 0, catalogue=torch.arange(9), shuffle=False
    )
    batch = next(made)
    assert batch.features.values.tolist() == [1, 2] and batch.labels.tolist() == [2, 3]
    assert batch.timestamps.tolist() == [1, 2]
