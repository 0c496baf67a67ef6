"""Promise: an exported GRM gives the probabilities of the trainer's in every bit, at any lengths."""

from dataclasses import replace

import pytest
import torch
from speeds import slow_except
from test_exporter import DIM, Trained

from tritonrec.data import ImpressionLoader, KeyedJaggedTensor, Lookup, load
from tritonrec.data.interactions import UserFeatures
from tritonrec.embedding import FeatureConfig
from tritonrec.nn import GRM, GRMConfig, MMoE
from tritonrec.serving import Predictor, export, programs

USERS, HISTORY, SHOWN = 24, 5, 3


def loader(context=("age",)):
    log = load(f"zipf:users={USERS},items=40,ratings=1,seed=3")
    users = log.sequences.user_ids
    features = UserFeatures(users, {name: users % 5 + 1 for name in context})
    return ImpressionLoader(replace(log, user_features=features), 8, HISTORY, SHOWN, seed=0)


def with_genres(batch):
    """Bags of 0, 1 and 2 genres in turn."""
    items = len(batch.timestamps)
    lengths = torch.arange(items) % 3
    genre = Lookup(
        torch.arange(int(lengths.sum())) % 4, torch.cat([torch.zeros(1).long(), lengths.cumsum(0)])
    )
    return replace(batch, genres=KeyedJaggedTensor.from_dict({"genre": genre}))


def model_of(source, genres=False, **options):
    room = HISTORY + SHOWN + len(source.context)
    sizes = {"dim": DIM, "layers": 1, "heads": 2, "qk_dim": 4, "v_dim": 4, "context_dim": 4}
    return GRM(GRMConfig(**sizes, max_seq_len=room, context=source.context, genres=genres, **options))


def trained_on(folder, source, genres=False, **options):
    torch.manual_seed(1)
    features = [FeatureConfig(name, DIM) for name in ("item", "action")]
    features += [FeatureConfig(name, 4) for name in source.context]
    features += [FeatureConfig("genre", DIM, pooling="mean")] * genres
    batches = [source.batch(step) for step in range(3)]
    batches = [with_genres(batch) if genres else batch for batch in batches]
    return Trained(folder, model_of(source, genres, **options), features, [batches])


CASES = {
    "plain": {},
    "genres": {"genres": True},
    "biased": {"relative_bias": True},
    "every_expert": {"experts": 3, "top_k": 3},
    "one_expert": {"experts": 3, "top_k": 1},
}


@pytest.mark.if_changed
@pytest.mark.parametrize("name", slow_except(["genres"], CASES))
def test_a_predictor_gives_the_probabilities_of_the_trainer(tmp_path, name):
    source, genres = loader(), CASES[name].get("genres", False)
    trained = trained_on(tmp_path / "c", source, **CASES[name])
    manifest = export(tmp_path / "c", tmp_path / "out", trained.model)
    assert manifest["dense"]["kind"] == "impression" and manifest["dense"]["tasks"] == ["click", "conversion"]
    predictor = Predictor.load(tmp_path / "out")
    batches = [batch for size in (1, 7, USERS) for batch in source.evaluation_batches(size)]
    batches += [source.batch(step) for step in range(3)]  # histories of none among them
    batches.append(batches[-1].select(torch.empty(0, dtype=torch.int64)))
    assert min(int(batch.history_offsets.diff().min()) for batch in batches[:-1]) == 0
    for batch in batches:
        batch = with_genres(batch) if genres else batch
        want = trained.model.predict(batch, trained.tables.peek(batch.lookups()))
        assert torch.equal(predictor.predict(batch), want) and want.shape == batch.labels.shape


@pytest.mark.if_changed
def test_bad_batches_are_named(tmp_path):
    source = loader()
    trained = trained_on(tmp_path / "c", source)
    export(tmp_path / "c", tmp_path / "out", trained.model)
    predictor = Predictor.load(tmp_path / "out")
    without = ImpressionLoader(load("zipf:users=24,items=40,ratings=1,seed=3"), 8, HISTORY, SHOWN, seed=0)
    with pytest.raises(ValueError, match="the batch has no feature 'age', but item, action, user_id"):
        predictor.predict(without.batch(0))
    longer = ImpressionLoader(load("zipf:users=24,items=40,ratings=1,seed=3"), 8, 30, 9, seed=0)
    with pytest.raises(ValueError, match=r"sample \d+ has \d+ tokens, the model takes 10"):
        batch = longer.batch(0)
        columns = {name: batch.features[name] for name in batch.features.keys}
        columns["age"] = columns["user_id"]
        predictor.predict(replace(batch, features=KeyedJaggedTensor.from_dict(columns)))
    with pytest.raises(
        ValueError, match="encode needs a dense model of kind next_item, and this one is of kind impression"
    ):
        predictor.encode(torch.tensor([1, 2]))


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_every_expert_on_every_row_gives_the_bits_of_the_chosen_ones(top_k, rows, monkeypatch):
    torch.manual_seed(rows)
    head, x = MMoE(8, 2, 4, top_k), torch.randn(rows, 8) * 3
    offsets = torch.tensor([0, rows // 2, rows])
    want = head(x, offsets)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    with torch.no_grad():
        assert torch.equal(head(x, offsets), want)


def test_a_grm_without_context_is_traced():
    model = GRM(GRMConfig(dim=8, layers=1, heads=2, qk_dim=4, v_dim=4, max_seq_len=6)).eval()
    scorer = programs.scorer_of(model, 8)
    exported = torch.export.export(scorer.program(), scorer.examples[0])
    assert torch.equal(exported.module()(*scorer.examples[0]), scorer.program()(*scorer.examples[0]))
