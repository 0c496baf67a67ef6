"""Promise: a DLRM in ONNX gives scores to a stated error, and what it cannot hold is refused."""

import pytest
import torch
from test_exporter import DIM, FEATURES, Trained, clicks, next_item

from tritonrec import nn
from tritonrec.embedding import FeatureConfig
from tritonrec.serving import Predictor, export
from tritonrec.serving import onnx as module
from tritonrec.serving.onnx import LARGEST_ERROR, to_onnx

onnxruntime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
pytest.importorskip("onnxscript", reason="the extra onnx is not installed")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dlrm")
    torch.manual_seed(1)
    model = nn.DLRM(nn.DLRMConfig(FEATURES, 2, DIM, (6,), (7,)))
    Trained(folder / "c", model, [FeatureConfig(name, DIM) for name in FEATURES], [clicks()])
    export(folder / "c", folder / "out", model)
    return folder / "out"


@pytest.mark.if_changed
def test_onnxruntime_gives_the_probabilities_of_the_predictor(exported, tmp_path):
    error = to_onnx(exported, tmp_path / "dense.onnx")
    assert 0 <= error <= LARGEST_ERROR
    predictor, session = Predictor.load(exported), onnxruntime.InferenceSession(tmp_path / "dense.onnx")
    names = [each.name for each in session.get_inputs()]
    for batch in clicks((1, 5, 64)):
        lookups = batch.lookups()
        rows = torch.stack([predictor.rows(name, lookups[name].ids) for name in FEATURES], 1)
        given = dict(zip(names, (batch.dense.numpy(), rows.numpy()), strict=True))
        found = torch.from_numpy(session.run(None, given)[0]).sigmoid().squeeze(1)
        torch.testing.assert_close(found, predictor.predict(batch), rtol=1e-5, atol=1e-6)


@pytest.mark.if_changed
def test_a_graph_that_computes_something_else_is_not_written(exported, tmp_path, monkeypatch):
    linear = module._linear
    monkeypatch.setattr(module, "_linear", lambda x, weight, bias, *rest: linear(x, weight, None))
    with pytest.raises(ValueError, match=r"logits of onnxruntime are .* of the largest off"):
        to_onnx(exported, tmp_path / "dense.onnx")
    assert not list(tmp_path.iterdir())


def test_what_onnx_cannot_hold_is_named(tmp_path):
    trained = next_item(tmp_path / "c")
    export(trained.folder, tmp_path / "model", trained.model)
    export(trained.folder, tmp_path / "tables")
    for folder, kind in (("model", "kind next_item"), ("tables", "tables alone")):
        with pytest.raises(ValueError, match=f"has .*{kind}, and ONNX can hold the dense part of a DLRM"):
            to_onnx(tmp_path / folder, tmp_path / "dense.onnx")
    assert not (tmp_path / "dense.onnx").exists()
