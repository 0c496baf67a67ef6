"""Promise: a model trained in 16 bits is exported with the bits of its evaluation in that precision."""

import json

import pytest
import torch
from speeds import slow_except
from test_export_grm import loader as impressions
from test_export_grm import model_of
from test_exporter import DIM, FEATURES, MODELS, clicks, loader
from trainer_parts import adam_trainer

from tritonrec import checkpoint
from tritonrec.embedding import FeatureConfig
from tritonrec.nn import DLRM, DLRMConfig
from tritonrec.pipeline import WindowConfig, next_item_scores
from tritonrec.serving import Predictor, export


def trained(folder, model, names, batches, precision):
    """Trained and saved in a precision; with the tables, and what is around the model in training."""
    with adam_trainer(model, names, config=WindowConfig(2, precision=precision)) as trainer:
        list(trainer.run(batches))
        trainer.save(folder)
    return trainer.tables, trainer.autocast


EVERY = [(name, precision) for name in MODELS for precision in ("bf16", "fp16")]


@pytest.mark.if_changed
@pytest.mark.parametrize(("name", "precision"), slow_except([("biased", "bf16")], EVERY))
def test_next_item_scores_have_the_bits_of_the_evaluation(tmp_path, name, precision):
    torch.manual_seed(1)
    model, log = MODELS[name](), loader()
    item = [FeatureConfig("item", DIM)]
    tables, _ = trained(tmp_path / "c", model, item, [log.batch(step) for step in range(3)], precision)
    manifest = export(tmp_path / "c", tmp_path / "out", model)
    assert manifest["dense"]["precision"] == precision
    export(tmp_path / "c", tmp_path / "wide", model, precision="float32")
    low, wide = Predictor.load(tmp_path / "out"), Predictor.load(tmp_path / "wide")
    scores = {
        kind: next_item_scores(model.eval(), tables, log.catalogue, kind) for kind in (precision, "float32")
    }
    for size in (1, 7, 24):
        for batch in log.evaluation_batches(size):
            want = scores[precision](batch.history)
            assert torch.equal(low.scores(batch.history, log.catalogue), want)
            assert torch.equal(wide.scores(batch.history, log.catalogue), scores["float32"](batch.history))
            assert not torch.equal(want, scores["float32"](batch.history))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["clicks", "impressions"])
def test_probabilities_have_the_bits_of_the_evaluation(tmp_path, kind, precision):
    torch.manual_seed(1)
    if kind == "clicks":
        model = DLRM(DLRMConfig(FEATURES, 2, DIM, (6,), (7,)))
        sizes = dict.fromkeys(FEATURES, DIM)
        batches, asked = [*clicks()], clicks((1, 2, 17, 64))
    else:
        source = impressions()
        model = model_of(source, relative_bias=True)
        sizes = {"item": DIM, "action": DIM, **dict.fromkeys(source.context, 4)}
        batches = [source.batch(step) for step in range(3)]
        asked = [*source.evaluation_batches(7), *batches]
    features = [FeatureConfig(*each) for each in sizes.items()]
    tables, autocast = trained(tmp_path / "c", model, features, batches, precision)
    export(tmp_path / "c", tmp_path / "out", model)
    predictor = Predictor.load(tmp_path / "out")
    for batch in asked:
        with autocast():
            want = model.predict(batch, tables.peek(batch.lookups()))
        assert torch.equal(predictor.predict(batch), want)


def test_a_checkpoint_that_does_not_tell_its_precision_is_exported_in_float32(tmp_path):
    model, log = MODELS["hstu"](), loader()
    trained(tmp_path / "c", model, [FeatureConfig("item", DIM)], [log.batch(0)], "bf16")
    saved = checkpoint.CheckpointStream(tmp_path / "c")
    meta = {name: value for name, value in saved.meta.items() if name != "dense_precision"}
    columns = list(saved.rows("item"))
    rows = {name: torch.cat([part[name] for part in columns]) for name in columns[0]}
    checkpoint.save(tmp_path / "old", 1, saved.dense(), {"item": rows}, meta)
    assert export(tmp_path / "old", tmp_path / "out", model)["dense"]["precision"] == "float32"
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["dense"]["precision"] == "float32"


def test_an_unknown_precision_is_refused(tmp_path):
    with pytest.raises(ValueError, match="precision must be float32, bf16, fp16, got 'int8'"):
        export(tmp_path, tmp_path / "out", precision="int8")
