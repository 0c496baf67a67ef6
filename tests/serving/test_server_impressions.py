"""Promise: a served GRM has the bits of its Predictor in every batch; what is wrong is named."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fastapi.testclient import TestClient
from test_export_grm import HISTORY, loader, trained_on, with_genres

from tritonrec.data import Vocabulary
from tritonrec.serving import Predictor, export
from tritonrec.serving.server import ServerConfig
from tritonrec.serving.server.app import create_app
from tritonrec.serving.server.model import Served


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "genres"])
def served(request, tmp_path_factory):
    """A model, whether it has genres, and batches for it."""
    folder, source = tmp_path_factory.mktemp("grm"), loader(("age", "city"))
    trained = trained_on(folder / "c", source, request.param)
    export(folder / "c", folder / "out", trained.model)
    batches = [source.batch(step) for step in range(3)]
    batches = [with_genres(batch) if request.param else batch for batch in batches]
    return Predictor.load(folder / "out"), request.param, batches


def client(predictor, **settings):
    return TestClient(
        create_app(lambda: Served(lambda: predictor), ServerConfig(**settings)), base_url="http://localhost"
    )


def test_a_version_is_made_before_it_is_served(served, monkeypatch):
    full, computed, own = served[0], [], Predictor.predict
    monkeypatch.setattr(Predictor, "predict", lambda *given: computed.append(own(*given)) or computed[-1])
    Served(lambda: full)
    [found] = computed
    assert found.shape == (1, len(full.manifest["dense"]["tasks"])) and bool(found.isfinite().all())


def samples_of(batch, item=int):
    """The batch as JSON, sample by sample; without the samples that show nothing."""
    bags = [[]] * len(batch.timestamps)
    if batch.genres is not None:
        bags = [each.tolist() for each in batch.genres.values.split(batch.genres.lengths[0].tolist())]
    split, found = len(batch.history_actions), []
    times = batch.timestamps.tolist()
    shown = [
        {"item": item(i), "timestamp": times[split + n], "genres": bags[split + n]}
        for n, i in enumerate(batch.exposed_items.tolist())
    ]
    past = [
        {"item": item(i), "timestamp": times[n], "genres": bags[n], "action": int(batch.history_actions[n])}
        for n, i in enumerate(batch.history_items.tolist())
    ]
    ends = batch.history_offsets.tolist(), batch.exposed_offsets.tolist()
    for n in range(batch.num_samples):
        context = {name: int(batch.features[name].ids[n]) for name in batch.context}
        now = shown[ends[1][n] : ends[1][n + 1]]
        found.append({"context": context, "history": past[ends[0][n] : ends[0][n + 1]], "exposed": now})
    return [each for each in found if each["exposed"]]


def float32(answers):
    """(Le, T) of an answer's probabilities."""
    return torch.tensor([shown for sample in answers for shown in sample], dtype=torch.float32)


@pytest.mark.if_changed
def test_answers_have_the_bits_of_the_predictor_whatever_is_asked_beside(served):
    predictor, _, batches = served
    bodies = [{"samples": samples_of(batch)} for batch in batches]
    alone = [{"samples": [sample]} for sample in bodies[0]["samples"]]
    with client(predictor, latency=30.0) as there, ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda body: there.post("/impressions", json=body).json(), [*bodies, *alone])]
    for answer, batch in zip(answers, batches, strict=False):
        assert answer["tasks"] == list(batch.tasks) and answer["step"] == predictor.step
        assert torch.equal(float32(answer["probabilities"]), predictor.predict(batch))
    assert [sample for each in answers[3:] for sample in each["probabilities"]] == answers[0]["probabilities"]


@pytest.mark.if_changed
def test_words_are_items(served):
    predictor, _, batches = served
    words = {"item": Vocabulary(f"film {n}" for n in range(40))}
    told = Predictor(predictor.manifest, predictor.tables, predictor.program, words)
    with client(told) as there:
        body = {"samples": samples_of(batches[0], lambda item: f"film {item}")}
        found = there.post("/impressions", json=body).json()["probabilities"]
        assert torch.equal(float32(found), predictor.predict(batches[0]))
        body["samples"][0]["exposed"][0]["item"] = "film 99"
        assert "film 99" in there.post("/impressions", json=body).json()["error"]["message"]


def test_what_is_wrong_with_a_sample_is_named(served):
    predictor, genres, batches = served
    first = samples_of(batches[0])[0]
    event = {"item": 1, "timestamp": 5, "action": 1}
    wrong = {
        "context of sample 0 must be age, city, user_id, got age": first | {"context": {"age": 1}},
        "context of sample 0 must be age, city, user_id, got nothing": first | {"context": {}},
        "tokens, the model takes": first | {"history": [event] * (HISTORY + 9)},
        "exposed": first | {"exposed": []},
        "action": first | {"history": [{"item": 1, "timestamp": 5}]},
        "timestamp": first | {"exposed": [{"item": 1}]},
        "price": first | {"exposed": [{"item": 1, "timestamp": 5, "price": 3}]},
        "words": first | {"exposed": [{"item": "film", "timestamp": 5}]},
    }
    if not genres:
        wrong["has genres"] = first | {"exposed": [{"item": 1, "timestamp": 5, "genres": [1]}]}
    with client(predictor) as there:
        for message, sample in wrong.items():
            answer = there.post("/impressions", json={"samples": [sample]})
            assert answer.status_code == 422 and message in answer.json()["error"]["message"], message
        assert there.post("/impressions", json={"samples": []}).status_code == 422
        assert there.post("/predict", json={"dense": [[1.0]], "features": {}}).status_code == 422
        assert there.post("/impressions", json={"samples": [first]}).status_code == 200


def test_one_bad_request_leaves_the_others_of_its_batch(served):
    predictor, _, batches = served
    good = {"samples": samples_of(batches[1])}
    bad = {"samples": [good["samples"][0] | {"context": {}}]}
    with client(predictor, latency=30.0) as there, ThreadPoolExecutor(3) as pool:
        answers = [*pool.map(lambda body: there.post("/impressions", json=body), [good, bad, good])]
    assert [answer.status_code for answer in answers] == [200, 422, 200]
    assert torch.equal(float32(answers[2].json()["probabilities"]), predictor.predict(batches[1]))
