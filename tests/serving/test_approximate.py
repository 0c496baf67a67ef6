"""Promise: what an index proposes is scored with the bits of exact retrieval, and its recall is told."""

import logging

import pytest
import torch
from served_models import export_dlrm, export_hstu

from tritonrec.serving import Predictor, recall

pytest.importorskip("faiss", reason="the extra faiss is not installed")

from tritonrec.serving.approximate import INDEXES, ApproximatePredictor
from tritonrec.serving.server.run import Source
from tritonrec.serving.server.settings import ServerConfig


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return export_hstu(tmp_path_factory.mktemp("hstu"))[1]


@pytest.fixture(scope="module")
def exact(path):
    return Predictor.load(path)


def histories(items, users=40):
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 9, (users,), generator=draw).tolist()
    return [items[torch.randint(len(items), (length,), generator=draw)].tolist() for length in lengths]


class Index:
    """Proposes the places of a table; -1 behind them."""

    def __init__(self, *proposed):
        self.proposed = proposed

    def search(self, vectors, most):
        rows = [[*each, *[-1] * most][:most] for each in self.proposed]
        return None, torch.tensor(rows).numpy()


@pytest.mark.if_changed
@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("exclude", ["history", None])
def test_found_items_have_exact_scores_in_exact_order(exact, index, exclude):
    found = ApproximatePredictor(exact, index)
    users = histories(exact.item_ids)
    ids, scores = found.retrieve(users, 5, exclude=exclude)
    best, _ = exact.retrieve(users, 5, exclude=exclude)
    assert recall(ids, best) > 0.5 and 0.5 < found.recall <= 1
    for user, history in enumerate(users):
        assert torch.equal(scores[user], exact.scores([history], ids[user])[0])
        order = sorted(zip((-scores[user]).tolist(), ids[user].tolist(), strict=True))
        assert [item for _, item in order] == ids[user].tolist() and len(set(ids[user].tolist())) == 5
        assert exclude is None or not {*history} & {*ids[user].tolist()}


@pytest.mark.if_changed
def test_a_user_to_whom_too_little_is_proposed_is_searched_exactly(exact):
    found = ApproximatePredictor(exact, "hnsw")
    users = [exact.item_ids[[1, 2]].tolist(), exact.item_ids[[3]].tolist()]
    found._index = Index([1, 2, 5, 7], [9, 8, 7, 6])  # the first user has seen two of four
    ids, scores = found.retrieve(users, 3)
    best, of_best = exact.retrieve(users, 3)
    assert torch.equal(ids[0], best[0]) and torch.equal(scores[0], of_best[0])
    assert {*ids[1].tolist()} <= {*exact.item_ids[[9, 8, 7, 6]].tolist()}


def test_of_equal_scores_the_smaller_id_comes_first(path):
    exact = Predictor.load(path)
    found = ApproximatePredictor(exact, "hnsw")
    found._items().whole[5:9] = found._items().whole[5].clone()
    found._index = Index([8, 6, 7, 5])
    ids, scores = found.retrieve([exact.item_ids[[3]].tolist()], 3)
    assert ids[0].tolist() == exact.item_ids[[5, 6, 7]].tolist() and len(scores.unique()) == 1


def test_recall_is_that_of_what_is_found(exact, monkeypatch):
    class Half(ApproximatePredictor):
        def best_without(self, vectors, k, places, offsets):
            ids, scores = Predictor.best_without(self, vectors, k, places, offsets)
            return torch.cat([ids[:, : k // 2], torch.full((len(ids), k - k // 2), -1)], 1), scores

    k = len(exact.item_ids)  # fewer than are asked for
    assert Half(exact).recall == pytest.approx((k // 2) / k)


def test_a_server_tells_the_recall_and_answers_by_the_index(path, caplog):
    with caplog.at_level(logging.WARNING, "tritonrec.server"):
        served = Source(path, approximate="ivf").open(ServerConfig())
    assert isinstance(served.version.predictor, ApproximatePredictor)
    assert f"ivf finds {served.version.predictor.recall:.4f} of the best 100 items" in caplog.text


@pytest.mark.parametrize("index", ["flat", "", None])
def test_other_words_are_refused(exact, index):
    with pytest.raises(ValueError, match="index must be ivf or hnsw"):
        ApproximatePredictor(exact, index)


def test_a_model_without_retrieval_is_refused(tmp_path):
    folder, _ = export_dlrm(tmp_path)
    with pytest.raises(ValueError, match="needs a dense model of kind next_item"):
        ApproximatePredictor(Predictor.load(folder))
