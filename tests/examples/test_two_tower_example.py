"""Promise: the two-tower example learns, on one rank and on two in the same bits, with each of its losses."""

import importlib.util
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch

from tritonrec import Communicators
from tritonrec.harness.verify.thread_ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "two_tower.py"
DATA = "zipf:users=60,items=150,median_length=9,seed=1"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("two_tower_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.if_changed
def test_in_batch_negatives_give_the_same_model_for_any_cut_on_one_rank_and_two(example):
    log = example.Log(DATA)
    begun = example.KINDS["InBatch"]()  # ranks that are threads share torch's generator

    def trained(ranks, micro_batches=1):
        return example.train(partial(deepcopy, begun), log, 64, 1, ranks, micro_batches)

    one = trained(Communicators.local())
    assert trained(Communicators.local(), 16) == one
    for micro_batches in (1, 4):
        assert run_ranks(2, lambda ranks, cut=micro_batches: trained(ranks, cut)) == [one, one]


@pytest.mark.if_changed
@pytest.mark.parametrize("kind", ["InBatch", "Uncorrected", "Sampled", "Popular", "PopularUncorrected"])
def test_each_loss_learns(example, kind):
    log = example.Log(DATA)
    make, alone = example.KINDS[kind], Communicators.local()
    _untrained, first, before = example.train(make, log, len(log.train), 1, alone, ks=(20,))
    trained, last, after = example.train(make, log, 64, 3, alone, ks=(20,))
    assert before != after
    assert last < first
    # without log q popular items are pushed down, and are what users take
    assert (trained["HR@20"] > 20 / len(log.catalogue)) == ("Uncorrected" not in kind)


def test_histories_end_before_the_item_and_genres_follow_the_items(example):
    log = example.Log(DATA)
    given = log.batch(0, log.test[:5], 3).validate()
    history, item = given.features["history"], given.features["item"]
    for place, row in enumerate(log.test[:5].tolist()):
        own = log.item[max(row - min(int(log.place[row]), example.HISTORY), 0) : row]
        assert history.ids[history.offsets[place] : history.offsets[place + 1]].tolist() == own.tolist()
        assert (
            item.ids[4 * place] == log.item[row]
            and (log.user[row - int(log.place[row]) : row] == log.user[row]).all()
        )
    assert torch.equal(given.lookups()["genre"].ids, item.ids % 19)


def test_popular_negatives_come_as_often_as_events_have_them(example):
    log = example.Log(DATA)

    def drawn(popular):
        batch = log.batch(0, log.train[:100], 20, popular)
        ids, log_q = batch.features["item"].ids, batch.log_q
        for item, found in zip(ids[:40].tolist(), log_q[:40].tolist(), strict=True):
            share = (log.item[log.train] == item).double().mean()
            assert found == pytest.approx(share.log().item(), rel=1e-6)
        return log_q.view(100, 21)[:, 1:].double().exp()

    share = log.log_q.double().exp()
    # a drawn event's item has the share q with probability q
    assert drawn(True).mean().item() == pytest.approx((share * share).sum().item(), rel=0.1)
    assert drawn(False).mean().item() == pytest.approx(1 / len(share), rel=0.1)
