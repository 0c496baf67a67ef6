"""Promise: exact search has one answer, also where scores are equal; a predictor names what is wrong."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonrec import checkpoint, ops
from tritonrec.data import JaggedBatch, KeyedJaggedTensor, Lookup, WeightedLookup
from tritonrec.serving import ExportedTable, Predictor, export, numba_retrieval, recall, top_k
from tritonrec.serving.retrieval import best_items, seen_places

IDS = torch.tensor([-(2**63), -4, 0, 3, 8, 2**63 - 1])


@given(st.integers(0, 4), st.integers(1, 12), st.data())
def test_top_k_is_a_stable_sort(rows, items, data):
    values = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=rows * items, max_size=rows * items)
    scores = torch.tensor(data.draw(values), dtype=torch.float32).view(rows, items)
    k = data.draw(st.integers(1, items))
    want = scores.sort(dim=1, descending=True, stable=True)
    places, best = top_k(scores, k)
    assert torch.equal(places, want.indices[:, :k]) and torch.equal(best, want.values[:, :k])


def test_recall_counts_what_was_found():
    wanted = torch.tensor([[1, 2], [3, 4]])
    assert recall(wanted, wanted) == 1.0
    assert recall(torch.tensor([[2, 9, 1], [5, 6, 3]]), wanted) == 0.75
    assert recall(torch.empty(0, 3), torch.empty(0, 2)) == 1.0


@pytest.mark.parametrize(
    ("scores", "k", "message"),
    [
        (torch.zeros(3), 1, r"scores must be \(B, I\), got \(3,\)"),
        (torch.zeros(2, 3), 4, r"k must be in \[1, 3\]"),
        (torch.zeros(2, 3), 0, r"k must be in \[1, 3\]"),
        (torch.tensor([[0.0, float("nan")]]), 1, "the score of row 0 for item 1 is NaN"),
    ],
)
def test_what_top_k_refuses(scores, k, message):
    with pytest.raises(ValueError, match=message):
        top_k(scores, k)


def test_a_whole_number_of_numpy_is_one():
    scores = torch.tensor([[3.0, 1.0, 2.0]])
    assert all(map(torch.equal, top_k(scores, np.int64(2)), top_k(scores, 2)))
    for other in (True, 2.0, np.float32(2), np.True_):
        with pytest.raises((TypeError, ValueError), match=r"k must be (a whole number|of type int)"):
            top_k(scores, other)


def make(dense=None, pooling="none"):
    """A predictor whose user vector is the row of the last item."""
    weights = torch.randn(len(IDS), 4, generator=torch.Generator().manual_seed(1))
    table = ExportedTable(IDS, weights, 5, 6, 0.5, "initial")
    manifest = {
        "step": 3,
        "features": {"item": {"table": "items", "pooling": pooling}},
        "dense": dense or {"kind": "next_item", "max_seq_len": 3, "timestamps": False},
    }
    return Predictor(manifest, {"items": table}, lambda rows, offsets, times: rows[offsets[1:] - 1])


HISTORY = JaggedBatch.from_sequences(
    0, torch.arange(3), torch.tensor([0, 2, 3, 6]), torch.tensor([3, 8, -4, 0, 77, 77]), torch.arange(6),
    torch.zeros(6, dtype=torch.int64), torch.zeros(6, 1, dtype=torch.int64),
)  # fmt: skip


def test_rows_of_unknown_ids_are_those_of_training_or_zeros():
    table = make().tables["items"]
    ids = torch.tensor([2**63 - 1, 7, -(2**63), 3, 3, 9])
    found = table.rows(ids)
    assert torch.equal(found[[0, 2, 3, 4]], table.weights[[5, 0, 3, 3]])
    assert torch.equal(found[[1, 5]], ops.initial_rows(5, 6, torch.tensor([7, 9]), 4, 0.5))
    zeros = ExportedTable(table.ids, table.weights, 5, 6, 0.5, "zeros").rows(ids)
    assert not zeros[[1, 5]].any() and torch.equal(zeros[:1], found[:1])
    assert table.rows(ids[:0]).shape == (0, 4)
    assert torch.equal(table.rows(ids.repeat_interleave(2)[::2]), found)


def test_every_form_of_a_history_gives_the_same_vectors(monkeypatch):
    predictor = make()
    want = predictor.encode(HISTORY)
    assert torch.equal(want[2], ops.initial_rows(5, 6, torch.tensor([77]), 4, 0.5)[0])
    ids, offsets = HISTORY.ids, HISTORY.offsets
    forms = [{"item": (ids, offsets)}, {"item": Lookup(ids, offsets)}, HISTORY.features]
    for form in [*forms, KeyedJaggedTensor(("item",), ids, offsets)]:
        assert torch.equal(predictor.encode(form), want)
    assert torch.equal(predictor.encode(ids[:2]), want[:1])
    lists = [ids[a:b] for a, b in pairwise(offsets.tolist())]
    for form in (lists, tuple(lists), [each.tolist() for each in lists], [each.numpy() for each in lists]):
        assert torch.equal(predictor.encode(form), want)
    assert torch.equal(predictor.encode(ids[:2].tolist()), want[:1])
    whole = predictor.retrieve(HISTORY, 4, exclude=None)
    assert torch.equal(whole[0], predictor.item_ids[top_k(predictor.scores(HISTORY), 4)[0]])
    monkeypatch.setattr(numba_retrieval, "USERS", 2)
    assert all(map(torch.equal, predictor.retrieve(lists, 4, exclude=None), whole))
    items = torch.tensor([8, 5])
    assert torch.equal(predictor.scores(HISTORY, items)[:, 0], predictor.scores(HISTORY)[:, 4])


WEIGHTED = WeightedLookup(HISTORY.ids, HISTORY.offsets, torch.ones(6))


@pytest.mark.parametrize(
    ("history", "message"),
    [
        (
            {"item": (HISTORY.ids, torch.tensor([0, 0, 3, 6]))},
            "history 0 has 0 items, the model takes 1 to 3",
        ),
        ({"item": (HISTORY.ids, torch.tensor([0, 2, 6]))}, "history 1 has 4 items, the model takes 1 to 3"),
        ({"item": (HISTORY.ids, torch.tensor([0, 2]))}, "must end at the number of ids"),
        ({"user": (HISTORY.ids, HISTORY.offsets)}, "has features .'user'., and the model needs 'item'"),
        ({"item": WEIGHTED}, "the history 'item' has weights, which this model does not take"),
        (
            {"item": [3, 7, 12]},
            "the history 'item' must be a Lookup of ids and offsets, got list: give a list",
        ),
        ({"item": [3, 7]}, "the history 'item' must be a Lookup of ids and offsets, got list"),
        (KeyedJaggedTensor(("item",), *WEIGHTED), "the history 'item' has weights"),
        (HISTORY.ids[:2].int(), r"ids of the history must be \(n,\) int64, got \(2,\) torch.int32"),
        ([HISTORY.ids[:2], HISTORY.ids[:1].int()], r"ids of the history must be .* got \(1,\) torch.int32"),
        (HISTORY.ids.view(2, 3), r"ids of the history must be \(n,\) int64, got \(2, 3\)"),
        ({"item": (HISTORY.ids, HISTORY.offsets.int())}, r"offsets of the history must be \(n,\) int64"),
        ([0.5, 1.5], "must be int64 or words, got float64"),
        (["a", "b"], "the history has words, and the export has no vocabulary of 'item'"),
        (HISTORY.ids.view(2, 3).numpy(), r"must be int64 or words, got int64 \(2, 3\)"),
        ([2**63], r"must be int64 or words, got uint64 \(1,\)"),
        ({1, 2}, "must be int64 or words, got set"),
        ("a", "is one word, 'a': give a list of words"),
    ],
)
def test_a_wrong_history_is_named(history, message):
    with pytest.raises(ValueError, match=message):
        make().encode(history)


def test_what_a_model_cannot_do_is_one_sentence():
    timed = make({"kind": "next_item", "max_seq_len": 3, "timestamps": True})
    assert timed.encode(HISTORY).shape == (3, 4)
    with pytest.raises(ValueError, match="goes by times: give timestamps"):
        timed.encode(HISTORY.ids[:2])
    with pytest.raises(ValueError, match=r"timestamps must be \(2,\) int64, got \(3,\) torch.int64"):
        timed.encode(HISTORY.ids[:2], torch.arange(3))
    with pytest.raises(
        ValueError, match="predict needs a dense model of kind click, and this one is of kind next_item"
    ):
        make().predict(HISTORY)
    click = make({"kind": "click", "features": ["item", "ad"], "dense": 3})
    with pytest.raises(ValueError, match="give the ids of features item, ad"):
        click.predict(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"dense features must be \(B, 3\), got \(2, 4\)"):
        click.predict(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"ids of feature 'ad' are missing, there are .'item'."):
        click.predict(torch.zeros(2, 3), {"item": torch.tensor([1, 2])})
    with pytest.raises(ValueError, match=r"ids of feature 'item' must be \(2,\) like the dense features"):
        click.predict(torch.zeros(2, 3), {"item": torch.tensor([1])})
    with pytest.raises(ValueError, match="there is no feature 'ad', but item"):
        make().rows("ad", IDS)
    with pytest.raises(ValueError, match=r"must be \(n,\) int64, got \(6,\) torch.float32"):
        make().rows("item", IDS.float())
    with pytest.raises(ValueError, match="pooled: give the offsets"):
        make(pooling="sum").rows("item", IDS)


def test_tables_alone_have_no_scores(tmp_path):
    described = {"tables": {"items": {"dim": 4, "seed": 5, "table_id": 6, "scale": 0.5}}}
    described["features"] = {"item": {"table": "items", "pooling": "none"}}
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    rows = {"keys": IDS[order], "rows": make().tables["items"].weights[order]}
    checkpoint.save(tmp_path / "c", 1, {}, {"items": rows}, {"embedding": described})
    export(tmp_path / "c", tmp_path / "out", shard_rows=4)
    predictor = Predictor.load(tmp_path / "out")
    assert torch.equal(predictor.tables["items"].ids, IDS)
    assert torch.equal(predictor.rows("item", IDS), make().rows("item", IDS))
    with pytest.raises(ValueError, match="encode needs a dense model, and the tables were exported alone"):
        predictor.encode(HISTORY)
    with pytest.raises(ValueError, match="unknown must be one of initial, zeros, got 'zero'"):
        Predictor.load(tmp_path / "out", unknown="zero")


SEEN = [[3, 8, 77], [], [0, -4, 3, 3, 2**63 - 1]]


@pytest.mark.parametrize("users", [1, 2, 64])
def test_what_a_user_has_seen_is_left_out(users, monkeypatch):
    monkeypatch.setattr(numba_retrieval, "USERS", users)
    predictor, histories = make(), [[3, 8], [-4], [0, 77, 77]]
    every = predictor.retrieve(HISTORY, 6, exclude=None)
    for exclude, seen in (("history", histories), (SEEN, SEEN)):
        k = 6 - max(len({*each} & {*IDS.tolist()}) for each in seen)
        ids, scores = predictor.retrieve(HISTORY, k, exclude=exclude)
        assert scores.isfinite().all()
        for user, own in enumerate(seen):
            kept = [at for at, item in enumerate(every[0][user].tolist()) if item not in own][:k]
            assert torch.equal(ids[user], every[0][user][kept])
            assert torch.equal(scores[user], every[1][user][kept])


def test_times_come_in_the_form_of_the_histories():
    timed = make({"kind": "next_item", "max_seq_len": 3, "timestamps": True})
    timed.program = lambda rows, offsets, times: rows[offsets[1:] - 1] * times[offsets[1:] - 1][:, None]
    want = timed.encode(HISTORY)
    histories = [part.tolist() for part in HISTORY.ids.tensor_split(HISTORY.offsets[1:-1])]
    times = [part.tolist() for part in HISTORY.timestamps.tensor_split(HISTORY.offsets[1:-1])]
    for form in (times, [np.array(each) for each in times], [torch.tensor(each) for each in times]):
        assert torch.equal(timed.encode(histories, form), want)
    assert torch.equal(timed.encode(histories, HISTORY.timestamps), want)
    assert torch.equal(timed.encode(pa.array(histories), HISTORY.timestamps), want)
    with pytest.raises(ValueError, match="timestamps must be integers, got float64"):
        timed.encode(histories[0], [0.5, 1.5])


def test_too_few_items_left_are_an_error_and_so_is_another_number_of_users():
    with pytest.raises(ValueError, match=r"k = 3 items are wanted, and user 2 has 2 of 6 left"):
        make().retrieve(HISTORY, 3, exclude=SEEN)
    with pytest.raises(ValueError, match="exclude has items of 2 users, and the history 3"):
        make().retrieve(HISTORY, 3, exclude=SEEN[:2])
    with pytest.raises(ValueError, match="exclude must be 'history', None or the items"):
        make().retrieve(HISTORY, 3, exclude="seen")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("items", "users", "k"),
    [(700, 1, 5), (257, 3, 257), (3000, 70, 100), (20_000, 5, 1), (20_000, 33, 9_000)],
)
def test_search_is_a_stable_sort_of_all_scores(items, users, k):
    """Products of few whole numbers, so that many scores are equal, in and across blocks and threads."""
    draw = torch.Generator().manual_seed(items + users)
    dim = 32 if users == 1 else 24  # of one user sixteen items are scored at a time
    weights = torch.randint(-2, 3, (items, dim), generator=draw).float()
    vectors = torch.randint(-1, 2, (users, dim), generator=draw).float()
    vectors[1:2] = 0
    known = torch.arange(items) * 2
    seen = torch.randint(0, 2 * items, (users * 40,), generator=draw) if k < items else torch.empty(0).long()
    offsets = torch.linspace(0, len(seen), users + 1).long()
    scores = ops.linear(vectors, weights, None)
    for user, ids in enumerate(seen.tensor_split(offsets[1:-1])):
        scores[user, ids[ids % 2 == 0] // 2] = -torch.inf
    before, want = torch.get_num_threads(), top_k(scores, k)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found = best_items(vectors, weights, k, *seen_places(known, seen, offsets, k))
            assert all(map(torch.equal, found, want))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("row", [0, 63, 64, 70, 129])
def test_a_row_of_many_whose_score_is_nan_has_the_number_that_the_caller_knows(row):
    """Users are searched 64 at a time, which is nobody else's business."""
    vectors, weights = torch.randn(130, 3), torch.randn(9, 3)
    vectors[row, 1] = torch.nan
    none = torch.empty(0, dtype=torch.int64), torch.zeros(131, dtype=torch.int64)
    with pytest.raises(ValueError, match=rf"the score of row {row} for item 0 is NaN"):
        best_items(vectors, weights, 2, *none)


def test_a_score_that_is_nan_is_named():
    predictor = make()
    predictor.tables["items"].weights[5, 1] = torch.nan
    with pytest.raises(ValueError, match="the score of row 0 for item 5 is NaN"):
        predictor.retrieve(HISTORY, 1, exclude=None)
    with pytest.raises(ValueError, match=r"k must be in \[1, 6\]"):
        make().retrieve(HISTORY, 7, exclude=None)
