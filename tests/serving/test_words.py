"""Promise: words stay with the ids of their rows: saved, extended by the next log, exported, answered in."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from trainer_parts import adam_trainer

from tritonrec import FeatureConfig, Trainer, checkpoint
from tritonrec.data import Interactions, NextItemLoader, Vocabulary
from tritonrec.nn import HSTU, HSTUConfig
from tritonrec.pipeline import saved_vocabularies
from tritonrec.serving import Predictor, export
from tritonrec.serving.manifest import MANIFEST

SIZES = HSTUConfig(dim=8, layers=1, heads=2, qk_dim=4, v_dim=4, max_seq_len=6)


def log(words: dict[str, Vocabulary], seed: int, items: int) -> Interactions:
    """A log of words without repeats in a user's history, as a reader makes it."""
    rng = np.random.default_rng(seed)
    users = [f"user {i}" for i in rng.permutation(30)]
    events = [(user, f"B{item:03}X") for user in users for item in rng.choice(items, 7, replace=False)]
    users, items = map(list, zip(*events, strict=True))
    user, item = words["user"].encode(users, extend=True), words["item"].encode(items, extend=True)
    return Interactions(user, item, np.arange(len(user), dtype=np.int64))


def vocabularies() -> dict[str, Vocabulary]:
    return {"user": Vocabulary(), "item": Vocabulary()}


def trainer() -> Trainer:
    torch.manual_seed(4)
    model = HSTU(SIZES)
    return adam_trainer(model, [FeatureConfig("item", 8)], 0.02, "fwp", seed=3)


def train(made: Trainer, loader: NextItemLoader, steps: int) -> None:
    for step in range(made.next_step, made.next_step + steps):
        made.step(loader.batch(step))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of the first day, its words and its evaluation."""
    folder, words = tmp_path_factory.mktemp("words"), vocabularies()
    with trainer() as made:
        loader = NextItemLoader(log(words, 1, 40), 8, 6, 3, seed=0)
        made.vocabularies = words
        train(made, loader, 12)
        made.save(folder / "run")
        metrics = made.evaluate(loader, ks=(1, 5))
        export(folder / "run", folder / "out", made.dense.model)
    return folder, words, loader, metrics


def test_the_next_day_finds_its_words_again_and_trains_the_same_rows(saved, tmp_path):
    folder, words, *_ = saved
    again = saved_vocabularies(folder / "run")
    assert again == words
    second = log(again, 2, 60)
    assert again["item"].words.to_pylist()[: len(words["item"])] == words["item"].words.to_pylist()
    assert len(again["item"]) > len(words["item"])
    with trainer() as made:
        made.vocabularies = again
        assert made.load(folder / "run") == 12
        before = made.tables.weights()["item"][0]
        train(made, NextItemLoader(second, 8, 6, 3, seed=0), 4)
        after = made.tables.weights()["item"][0]
        assert set(before.tolist()) <= set(after.tolist()) and int(after.max()) >= len(words["item"])
        made.save(tmp_path)
    assert saved_vocabularies(tmp_path) == again


def test_without_the_saved_words_the_next_day_is_refused_and_nothing_changes(saved):
    folder, words, *_ = saved
    other = vocabularies()
    log(other, 2, 60)
    with trainer() as made:
        made.vocabularies = other
        first = {name: value.clone() for name, value in made.dense.model.state_dict().items()}
        with pytest.raises(ValueError, match=r"vocabulary 'item' has other ids .* id 0 is 'B\d+X' there"):
            made.load(folder / "run")
        assert made.next_step == 0 and not len(made.tables.weights()["item"][0])
        assert all(torch.equal(value, first[name]) for name, value in made.dense.model.state_dict().items())
    shorter = {name: Vocabulary(each.words[:-1]) for name, each in words.items()}
    with trainer() as made, pytest.raises(ValueError, match="and is none here"):
        made.vocabularies = shorter
        made.load(folder / "run")


def test_words_that_nobody_gave_are_kept_for_the_next_save(saved, tmp_path):
    folder, words, *_ = saved
    with trainer() as made:
        made.load(folder / "run")
        assert made.vocabularies == words
        made.save(tmp_path)
    assert saved_vocabularies(tmp_path) == words
    with trainer() as made:
        made.save(tmp_path / "none")
    assert saved_vocabularies(tmp_path / "none") == {}


@pytest.mark.parametrize("k", [1, 5])
def test_retrieval_finds_what_the_evaluation_finds(saved, k):
    folder, words, loader, metrics = saved
    predictor = Predictor.load(folder / "out")
    (batch,) = loader.evaluation_batches()
    users = batch.history.offsets.tolist()
    histories = [batch.history.ids[a:b] for a, b in pairwise(users)]
    assert torch.equal(predictor.item_ids, loader.catalogue)
    targets = torch.where(batch.targets >= 0, loader.catalogue[batch.targets], -1)
    found, _ = predictor.retrieve(histories, k)
    assert int((found == targets[:, None]).any(1).sum()) / len(found) == metrics[f"HR@{k}"]
    with_seen, _ = predictor.retrieve(histories, k, exclude=None)
    assert not torch.equal(with_seen, found)
    in_words, _ = predictor.retrieve([words["item"].decode(each).to_pylist() for each in histories], k)
    assert in_words == [words["item"].decode(row).to_pylist() for row in found]


def test_columns_of_frames_are_histories_and_unknown_words_are_named(saved):
    import pandas
    import polars

    predictor, item = Predictor.load(saved[0] / "out"), saved[1]["item"].words.to_pylist()
    histories = [item[3:5], item[:1]]
    expected, _ = predictor.retrieve(histories, 3)
    for several in (pandas.Series(histories), polars.Series(histories)):
        assert predictor.retrieve(several, 3)[0] == expected
    for one in (pandas.Series(histories[0]), polars.Series(histories[0])):
        assert predictor.retrieve(one, 3)[0] == expected[:1]
    known, _ = predictor.retrieve(histories, 3, exclude=[[item[7]], []])
    assert predictor.retrieve(histories, 3, exclude=[[item[7], "nope"], ["nope"]])[0] == known
    with pytest.raises(
        ValueError, match=r"the history has 'nope' in row 1, which is not among the \d+ words .*unknown=-1"
    ):
        predictor.retrieve([item[0], "nope"], 3)
    with pytest.raises(ValueError, match="ids of the history must all be int64, or all words, got 5"):
        predictor.retrieve([item[0], 5], 3)
    with pytest.raises(ValueError, match=r"k must be a whole number, got 3\.0"):
        predictor.retrieve([item[0]], 3.0)


def test_rows_are_those_of_words(saved):
    predictor, words = Predictor.load(saved[0] / "out"), saved[1]["item"]
    known = predictor.item_ids[[5, 2]]
    named = words.decode(known).to_pylist()
    assert torch.equal(predictor.rows("item", named), predictor.rows("item", known))
    with pytest.raises(ValueError, match=r"^the feature 'item' has 'nope' in row 1"):
        predictor.rows("item", [named[0], "nope"])


def test_a_log_with_repeats_is_compared_without_leaving_out(tmp_path):
    rng = np.random.default_rng(5)
    events = np.arange(400, dtype=np.int64)
    repeats = Interactions(rng.integers(0, 40, 400), rng.integers(0, 12, 400), events)
    with trainer() as made:
        loader = NextItemLoader(repeats, 8, 6, 3, seed=0)
        train(made, loader, 8)
        made.save(tmp_path / "run")
        export(tmp_path / "run", tmp_path / "out", made.dense.model)
        metrics = made.evaluate(loader, ks=(3,), exclude_seen=False)
        assert metrics != made.evaluate(loader, ks=(3,))
    predictor = Predictor.load(tmp_path / "out")
    assert torch.equal(predictor.item_ids, loader.catalogue)
    (batch,) = loader.evaluation_batches()
    found, _ = predictor.retrieve(batch.history, 3, exclude=None)
    hits = (found == loader.catalogue[batch.targets][:, None]).any(1)
    assert int(hits.sum()) / len(hits) == metrics["HR@3"]


def test_a_vocabulary_that_was_changed_is_refused(saved, tmp_path):
    folder, words, *_ = saved
    manifest = json.loads((folder / "out" / MANIFEST).read_text())
    assert manifest["vocabularies"]["item"]["words"] == len(words["item"])
    with trainer() as made:
        made.load(folder / "run")
        export(folder / "run", tmp_path / "out", made.dense.model)
    Vocabulary([f"other {i}" for i in range(len(words["item"]))]).save(
        tmp_path / "out" / "words-item.parquet"
    )
    with pytest.raises(ValueError, match=r"words-item.parquet was altered"):
        Predictor.load(tmp_path / "out")


def test_incremental_checkpoints_have_them_too(tmp_path):
    words = vocabularies()
    with trainer() as made:
        loader = NextItemLoader(log(words, 1, 40), 8, 6, 3, seed=0)
        made.vocabularies = words
        with made.saver(tmp_path, full_every=2) as saver:
            for count in range(3):
                train(made, loader, 2)
                saver.save(made.next_step)
                words["item"].encode([f"new {count}"], extend=True)
    assert checkpoint.steps(tmp_path) == [4, 6]
    found = [saved_vocabularies(tmp_path, step)["item"].words.to_pylist()[-1] for step in (4, 6)]
    assert found == ["new 0", "new 1"]
