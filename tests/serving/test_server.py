"""Promise: the server's answers are a Predictor's in every bit, whatever else comes at the time; it refuses
by name what is too much, too slow or too strange, and serves one version whole, also after a reload.
"""

from __future__ import annotations

import copy
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from live_parts import until
from served_models import LONGEST, SIZES, export_dlrm, export_hstu

from tritonrec.nn import HSTU
from tritonrec.serving import Predictor, predictor
from tritonrec.serving.server import ServerConfig
from tritonrec.serving.server.app import create_app
from tritonrec.serving.server.batching import Batcher
from tritonrec.serving.server.bodies import Clicks, Retrieve
from tritonrec.serving.server.errors import STATUS, ServerError
from tritonrec.serving.server.follow import Following
from tritonrec.serving.server.model import Served, Version
from tritonrec.serving.server.settings import token_of

JSON = {"content-type": "application/json"}
DEEP = b'{"histories": ' + b"[" * 100_000


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two versions on ids, two on words, and clicks, each loaded once."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "ids").mkdir()
    (folder / "words").mkdir()
    ids, words = export_hstu(folder / "ids"), export_hstu(folder / "words", words=True)
    clicks, loader = export_dlrm(folder)
    full = {path: Predictor.load(path) for path in (*ids, *words, clicks)}
    return SimpleNamespace(ids=ids, words=words, clicks=clicks, loader=loader, full=full)


@contextmanager
def client(open, config=None, token=None, **more):
    app = create_app(open, config or ServerConfig(), token, **more)
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as found:
        yield found


def plain(made, path=None, model=None):
    path = path or made.ids[0]
    return lambda: Served(lambda: made.full[path], model, "8MiB")


def float32(values):
    return torch.from_numpy(np.array(values, np.float64)).to(torch.float32)


def error_of(answer):
    body = answer.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"name", "message"}, body
    assert answer.status_code == STATUS[body["error"]["name"]]
    return body["error"]["name"]


def asked(seed, count, items=60):
    """Requests of all kinds, and what a Predictor is called with."""
    draw = np.random.default_rng(seed)

    def history():
        return draw.choice(items, draw.integers(1, LONGEST + 1), replace=False).tolist()

    for _ in range(count):
        histories = [history() for _ in range(draw.integers(1, 4))]
        if draw.random() < 0.3:
            candidates = draw.integers(0, 90, draw.integers(1, 9)).tolist()  # some without a row
            yield "/score", {"histories": histories, "items": candidates}
            continue
        exclude = ["history", None, [history() for _ in histories]][draw.integers(3)]
        yield "/retrieve", {"histories": histories, "k": int(draw.integers(1, 20)), "exclude": exclude}


def wanted(full, path, body):
    if path == "/score":
        return {"scores": full.scores(body["histories"], torch.tensor(body["items"]))}
    items, scores = full.retrieve(body["histories"], body["k"], exclude=body["exclude"])
    return {"items": items if isinstance(items, list) else items.tolist(), "scores": scores}


def check(answer, want, step):
    assert answer["step"] == step
    assert answer.get("items") == want.get("items")
    assert torch.equal(float32(answer["scores"]), want["scores"])


@pytest.mark.if_changed
@pytest.mark.parametrize(("batch", "latency"), [(1, 0.0), (7, 5.0), (64, 20.0)])
def test_answers_under_load_have_the_bits_of_a_predictor(made, batch, latency):
    full, requests = made.full[made.ids[0]], [*asked(batch, 60)]
    want = [wanted(full, *each) for each in requests]
    sizes = []
    with client(plain(made), ServerConfig(batch=batch, latency=latency)) as there:
        observe = there.app.state.batcher._observe
        there.app.state.batcher._observe = lambda users: sizes.append(users) or observe(users)
        with ThreadPoolExecutor(12) as pool:
            answers = [*pool.map(lambda each: there.post(each[0], json=each[1]), requests)]
    for answer, each in zip(answers, want, strict=True):
        assert answer.status_code == 200, answer.text
        check(answer.json(), each, full.step)
    assert max(sizes) <= max(batch, 3) and (batch == 1 or max(sizes) > 3)


@pytest.mark.if_changed
def test_words_come_back_as_words(made):
    full = made.full[made.words[0]]
    known = full.vocabularies["item"].words.to_pylist()
    with client(plain(made, made.words[0])) as there:
        body = {"histories": [known[3:7], known[:2]], "k": 4}
        check(
            there.post("/retrieve", json=body).json(),
            wanted(full, "/retrieve", {**body, "exclude": "history"}),
            1,
        )
        ids = full.vocabularies["item"].encode(known[5:9]).tolist()
        answer = there.post("/score", json={"histories": [ids], "items": known[:3]}).json()
        candidates = torch.from_numpy(full.vocabularies["item"].encode(known[:3]))
        assert torch.equal(float32(answer["scores"]), full.scores(ids, candidates))
        assert error_of(there.post("/retrieve", json={"histories": [["never"]]})) == "invalid"
        assert error_of(there.post("/retrieve", json={"histories": [[known[0], 3]]})) == "invalid"


@pytest.mark.parametrize("cached", [False, True])
def test_events_of_users_are_served_in_the_order_in_which_they_came(made, cached):
    full = made.full[made.ids[0]]
    with client(plain(made, model=HSTU(SIZES) if cached else None)) as there:

        def told(user, k=5):
            return there.post("/retrieve", json={"users": [user], "k": k})

        assert error_of(told("ann")) == "unknown_user"
        assert there.post("/user/ann/events", json={"items": [3, 7, 12]}).json()["events"] == 3
        check(
            told("ann").json(),
            wanted(full, "/retrieve", {"histories": [[3, 7, 12]], "k": 5, "exclude": "history"}),
            1,
        )
        there.post("/user/ann/events", json={"items": [9]})
        there.post("/user/b%20ob/events", json={"items": list(range(20))})
        both = there.post("/score", json={"users": ["ann", "b ob"], "items": [1, 2]}).json()
        last = [[3, 7, 12, 9], [*range(20)][-LONGEST:]]
        assert torch.equal(float32(both["scores"]), full.scores(last, torch.tensor([1, 2])))
        assert there.put("/user/ann/events", json={"items": [8]}).json()["events"] == 1
        check(
            told("ann").json(),
            wanted(full, "/retrieve", {"histories": [[8]], "k": 5, "exclude": "history"}),
            1,
        )
        assert there.delete("/user/ann/events").json()["events"] == 0
        assert error_of(told("ann")) == "unknown_user"
        there.put("/user/ann/events", json={"items": []})
        assert error_of(told("ann")) == "invalid"


def test_a_change_stands_between_the_reads_of_its_user(made):
    """In one batch, which only `Version` sees whole."""
    from tritonrec.serving.server.bodies import Retrieve
    from tritonrec.serving.server.model import Change
    from tritonrec.serving.users import UserHistories

    full = made.full[made.ids[0]]
    version = Version(full, UserHistories(full), 2)
    read = [Retrieve(users=[user], k=3) for user in ("ann", "bob")]
    answers = version.answer(
        [
            read[0],
            Change("ann", [5]),
            read[0],
            Change("bob", [2]),
            Change("ann", [6]),
            *read,
            Change("eve", [1]),
        ]
    )
    assert isinstance(answers[0], KeyError) and answers[-1].name == "too_many_users"
    for at, history in ((2, [5]), (5, [5, 6]), (6, [2])):
        assert answers[at]["items"] == full.retrieve(history, 3)[0].tolist()


def test_one_bad_request_of_a_batch_fails_alone(made):
    from tritonrec.serving.server.bodies import Retrieve

    full = made.full[made.ids[0]]
    answers = Version(full, None, 0).answer(
        [
            Retrieve(histories=[[1]], k=2),
            Retrieve(histories=[[*range(LONGEST + 1)]]),
            Retrieve(histories=[[2]], k=61),
        ]
    )
    assert answers[0]["items"] == full.retrieve([1], 2)[0].tolist()
    assert "the model takes 1 to 12" in str(answers[1]) and "k must be" in str(answers[2])


def test_a_batch_that_fails_is_computed_one_by_one(made, monkeypatch):
    from tritonrec.serving.server.bodies import Retrieve

    full, best = made.full[made.ids[0]], Predictor.best_without
    monkeypatch.setattr(
        Predictor, "best_without",
        lambda self, vectors, k, *seen: best(self, vectors, k, *seen) if len(vectors) == 1 else 1 / 0,
    )  # fmt: skip
    answers = Version(full, None, 0).answer(
        [Retrieve(histories=[[n]], k=2) for n in (1, 2)] + [Retrieve(histories=[[1], [2]])]
    )
    assert [answers[n]["items"] for n in (0, 1)] == [full.retrieve([n + 1], 2)[0].tolist() for n in (0, 1)]
    assert isinstance(answers[2], ZeroDivisionError)


@pytest.mark.if_changed
def test_clicks(made):
    full = made.full[made.clicks]
    batches = [made.loader.batch(n) for n in range(1, 6)]
    bodies = [
        {
            "dense": b.dense.tolist(),
            "features": {name: each.ids.tolist() for name, each in b.lookups().items()},
        }
        for b in batches
    ]
    with client(plain(made, made.clicks), ServerConfig(latency=30.0, timeout=60.0)) as there:
        with ThreadPoolExecutor(5) as pool:
            answers = [*pool.map(lambda body: there.post("/predict", json=body).json(), bodies)]
        for answer, batch in zip(answers, batches, strict=True):
            assert torch.equal(float32(answer["probabilities"]), full.predict(batch))
        short = {**bodies[0], "features": {k: v[:-1] for k, v in bodies[0]["features"].items()}}
        missing = {**bodies[0], "features": dict([*bodies[0]["features"].items()][1:])}
        huge = {**bodies[0], "dense": [[1e300] * len(row) for row in bodies[0]["dense"]]}
        ragged = {**bodies[0], "dense": [row[:n] for n, row in enumerate(bodies[0]["dense"])]}
        for body in (short, missing, huge, ragged):
            assert error_of(there.post("/predict", json=body)) == "invalid"
        assert error_of(there.post("/retrieve", json={"histories": [[1]]})) == "invalid"
        assert error_of(there.post("/user/ann/events", json={"items": [1]})) == "invalid"


HOSTILE = {
    "nothing": (b"", "invalid"),
    "no json": (b"{", "malformed"),
    "not utf-8": (b'{"histories": [["\xff"]]}', "malformed"),
    "deep": (DEEP, "malformed"),
    "many digits": (b'{"histories": [[' + b"9" * 9000 + b"]]}", "malformed"),
    "nan": (b'{"histories": [[NaN]]}', "invalid"),
    "infinity": (b'{"histories": [[1e999]]}', "invalid"),
    "beyond int64": (b'{"histories": [[9223372036854775808]]}', "invalid"),
    "a float": (b'{"histories": [[1.0]]}', "invalid"),
    "a boolean": (b'{"histories": [[true]]}', "invalid"),
    "a number": (b'{"histories": 3}', "invalid"),
    "no user": (b'{"histories": []}', "invalid"),
    "no event": (b'{"histories": [[]]}', "invalid"),
    "both": (b'{"histories": [[1]], "users": ["a"]}', "invalid"),
    "another field": (b'{"histories": [[1]], "kk": 3}', "invalid"),
    "k of zero": (b'{"histories": [[1]], "k": 0}', "invalid"),
    "k of a text": (b'{"histories": [[1]], "k": "3"}', "invalid"),
    "k of all": (b'{"histories": [[1]], "k": 61}', "invalid"),
    "exclude": (b'{"histories": [[1]], "exclude": "all"}', "invalid"),
    "exclude of others": (b'{"histories": [[1]], "exclude": [[1], [2]]}', "invalid"),
    "times": (b'{"histories": [[1], [2, 3]], "timestamps": [[1, 2], [3]]}', "invalid"),
    "surrogate": (b'{"histories": [["\\ud800"]]}', "invalid"),
    "too many numbers": (b'{"histories": [[1]], "k": 2000000}', "too_large"),
}


def test_hostile_bodies_have_errors_with_names_and_hurt_nobody_else(made):
    full = made.full[made.ids[0]]
    want = wanted(full, "/retrieve", {"histories": [[3, 7]], "k": 5, "exclude": "history"})
    with client(plain(made)) as there:
        for name, (body, error) in HOSTILE.items():
            found = there.post("/retrieve", content=body, headers=JSON)
            assert error_of(found) == error, (name, found.text)
            check(there.post("/retrieve", json={"histories": [[3, 7]], "k": 5}).json(), want, 1)
        assert (
            error_of(there.post("/retrieve", content=b'{"histories": [[1]]}')) == "invalid"
        )  # any page may send it
        assert error_of(there.get("/nowhere")) == "not_found"
        assert error_of(there.get("/retrieve")) == "method_not_allowed"
        assert error_of(there.post(f"/user/{'a' * 300}/events", json={"items": [1]})) == "invalid"
        assert error_of(there.put("/user/%ff/events", json={"items": [1]})) == "malformed"  # nor is it %fe
        assert error_of(there.put("/user//events", json={"items": [1]})) == "invalid"
        assert there.put("/user/a%2Fb/events", json={"items": [3, 7]}).json()["user"] == "a/b"
        check(there.post("/retrieve", json={"users": ["a/b"], "k": 5}).json(), want, 1)
        for path in ("/health", "/ready"):
            found = there.head(path)
            assert found.status_code == 200 and not found.content
        assert "tritonrec_requests_total" in there.get("/metrics").text
        assert (
            'endpoint="other"' in there.get("/metrics").text and "nowhere" not in there.get("/metrics").text
        )


def test_sizes_are_limited(made):
    with client(plain(made), ServerConfig(max_body=100, max_values=30, queue=3)) as there:
        assert error_of(there.post("/retrieve", content=b" " * 101, headers=JSON)) == "body_too_large"
        endless = (b" " * 10 for _ in range(1000))
        assert error_of(there.post("/retrieve", content=endless, headers=JSON)) == "body_too_large"
        assert error_of(there.post("/retrieve", json={"histories": [[1]], "k": 31})) == "too_large"
        assert error_of(there.post("/retrieve", json={"histories": [[1]] * 4, "k": 1})) == "too_large"
        assert there.post("/retrieve", json={"histories": [[1]] * 3, "k": 10}).status_code == 200


class Slow(Served):
    """Waits in each batch until it may go on."""

    def __init__(self, *given):
        super().__init__(*given)
        self.began, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def answer(self, requests):
        self.began.release()
        assert self.go.acquire(timeout=60)
        return super().answer(requests)


@pytest.mark.parametrize(
    "dense, found", [(None, "tables alone"), ({"kind": "scorer"}, "a model of kind scorer")]
)
def test_an_export_that_no_request_can_be_answered_by_is_not_served(made, dense, found):
    served, other = plain(made)(), copy.copy(made.full[made.clicks])
    before, other.manifest = served.version, {**other.manifest, "dense": dense}
    for use in (served.use, lambda other: Served(lambda: other)):
        with pytest.raises(ValueError, match=f"{found}, and a server takes one of next_item, click"):
            use(other)
    assert served.version is before


def test_a_full_queue_refuses_and_a_late_answer_is_given_up(made):
    slow = Slow(lambda: made.full[made.ids[0]])
    body = {"histories": [[3]], "k": 2}
    with (
        client(lambda: slow, ServerConfig(queue=2, batch=1, timeout=1.0)) as there,
        ThreadPoolExecutor(4) as pool,
    ):
        first = pool.submit(there.post, "/retrieve", json=body)
        assert slow.began.acquire(timeout=60)
        waiting = [pool.submit(there.post, "/retrieve", json=body) for _ in range(2)]
        while there.app.state.batcher.waiting < 2:
            time.sleep(0.01)
        refused = there.post("/retrieve", json=body)
        assert error_of(refused) == "queue_full" and refused.headers["retry-after"] == "1"
        assert {error_of(each.result()) for each in (first, *waiting)} == {"timeout"}
        for _ in range(9):
            slow.go.release()
        until(lambda: there.app.state.batcher.waiting == 0)
        assert there.post("/retrieve", json=body).status_code == 200
        assert there.get("/health").status_code == 200


def test_a_closed_batcher_answers_what_it_has_and_refuses_more():
    begin, order = threading.Event(), []

    def compute(batch):
        begin.wait(60)
        order.extend(batch)
        return batch

    batcher = Batcher(compute, 4, 0.0, 100)
    jobs = [batcher.submit(n, 1 + n % 3) for n in range(20)]
    assert jobs[7].cancel()
    end = threading.Thread(target=batcher.close)
    end.start()
    begin.set()
    end.join(60)
    assert (
        [job.result(60) for job in jobs if not job.cancelled()] == order == [n for n in range(20) if n != 7]
    )
    assert batcher.waiting == 0  # users, not requests
    with pytest.raises(ServerError, match="takes no more"):
        batcher.submit(1)


def test_a_batch_that_raises_fails_its_requests_alone():
    batcher = Batcher(lambda batch: [1 / n if n else sys.exit() for n in batch], 1, 0.0, 100)
    ends, bad, good = batcher.submit(0), batcher.submit("x"), batcher.submit(4)
    assert good.result(60) == 0.25 and isinstance(bad.exception(60), TypeError)
    assert isinstance(ends.exception(60), SystemExit)
    batcher.close()


def test_a_token_is_asked_where_there_is_one(made):
    body = {"histories": [[1]]}
    with client(plain(made), token="sesame") as there:
        assert [there.get(path).status_code for path in ("/health", "/ready", "/")] == [200] * 3
        for headers in (
            {},
            {"authorization": "Bearer sesam"},
            {"authorization": "sesame"},
            {"authorization": "Bearer s\xe9"},
        ):
            given = [(b"authorization", v.encode("latin-1")) for v in headers.values()]
            assert error_of(there.post("/retrieve", json=body, headers=given)) == "unauthorized"
            assert error_of(there.get("/metrics", headers=given)) == "unauthorized"
            assert error_of(there.post("/reload", headers=given)) == "unauthorized"
        there.headers["authorization"] = "Bearer sesame"
        assert there.post("/retrieve", json=body).status_code == 200
    with client(plain(made)) as there:
        assert error_of(there.post("/reload")) == "no_token"
        assert (
            error_of(there.post("/retrieve", json=body, headers={"host": "evil.example"})) == "unknown_host"
        )


def test_tokens(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITONREC_TOKEN", raising=False)
    assert token_of(None) is None
    (tmp_path / "token").write_text(" sesame\n")
    assert token_of(tmp_path / "token") == "sesame"
    monkeypatch.setenv("TRITONREC_TOKEN", "other")
    assert token_of(None) == "other"
    for text in ("", "two words", "s\xe9same"):
        (tmp_path / "token").write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match="token"):
            token_of(tmp_path / "token")


@pytest.mark.parametrize("cached", [False, True])
def test_reload_is_whole_or_nothing(made, cached):
    now = [made.ids[0]]

    def load():
        if now[0] is None:
            raise ValueError("a file is missing")
        return made.full[now[0]]

    def told():
        return [there.post("/retrieve", json={key: value, "k": 5}).json()
                for key, value in (("histories", [[3, 7]]), ("users", ["ann"]))]  # fmt: skip

    def check_all(version):
        full = made.full[made.ids[version]]
        for answer in told():
            check(
                answer,
                wanted(full, "/retrieve", {"histories": [[3, 7]], "k": 5, "exclude": "history"}),
                full.step,
            )

    served = Served(load, HSTU(SIZES) if cached else None, "8MiB")
    with client(lambda: served, token="t") as there:
        there.headers["authorization"] = "Bearer t"
        there.post("/user/ann/events", json={"items": [3, 7]})
        check_all(0)
        now[0] = None
        assert error_of(there.post("/reload")) == "reload_failed"
        check_all(0)
        now[0] = made.clicks  # of another kind: the histories could not go on
        assert error_of(there.post("/reload")) == "reload_failed"
        check_all(0)
        now[0] = made.ids[1]
        assert there.post("/reload").json() == {"step": 2, "sequence": None}
        check_all(1)
        text = there.get("/metrics").text
        assert 'tritonrec_reloads_total{result="failed"} 2.0' in text and "tritonrec_step 2.0" in text


def test_requests_see_one_version_while_others_take_its_place(made):
    full = {made.full[path].step: made.full[path] for path in made.ids}
    served = Served(lambda: made.full[made.ids[0]])
    body = {"histories": [[3, 7], [1], [2, 9, 4]], "k": 6, "exclude": "history"}
    want = {step: wanted(each, "/retrieve", body) for step, each in full.items()}
    stop, steps = threading.Event(), set()

    def turn():
        while not stop.wait(0.002):
            served.use(full[3 - served.version.predictor.step])

    with client(lambda: served, ServerConfig(latency=1.0)) as there, ThreadPoolExecutor(7) as pool:
        turning = pool.submit(turn)
        until = time.monotonic() + 60
        while len(steps) < 2 and time.monotonic() < until:
            for answer in pool.map(lambda _: there.post("/retrieve", json=body).json(), range(24)):
                check(answer, want[answer["step"]], answer["step"])
                steps.add(answer["step"])
        stop.set()
        turning.result()
    assert steps == set(full)


class Trainer:
    """A follower's double: versions come one by one, and the sink may fail."""

    def __init__(self, versions):
        self.coming, self.fails, self.sequence, self.published_at = list(versions), False, 0, 0.0
        self._take()

    def _take(self):
        self.predictor = self.coming.pop(0)
        self.step, self.sequence, self.published_at = self.predictor.step, self.sequence + 1, 1.5

    def poll(self):
        if self.fails:
            raise OSError("the sink is down")
        if not self.go.acquire(blocking=False):
            return False
        self._take()
        return True

    def lag_seconds(self):
        return 0.25 if self.coming else 0.0


@pytest.mark.parametrize("kind", ["ids", "clicks"])
def test_a_version_is_made_before_it_is_served(made, monkeypatch, kind):
    """Its layers are compared with the program's bits, for which a request would wait after each delta."""
    path = made.clicks if kind == "clicks" else made.ids[1]
    full, calls = made.full[path], []
    monkeypatch.setattr(predictor, "program_or_whole", lambda *given: calls.append(given) or given[1])
    served = Served(lambda: Predictor(full.manifest, full.tables, full.program, full.vocabularies))
    assert len(calls) == 1
    batch = made.loader.batch(0)
    features = {name: lookup.ids.tolist() for name, lookup in batch.lookups().items()}
    clicks = Clicks(dense=batch.dense.tolist(), features=features)
    [answer] = served.answer([clicks if kind == "clicks" else Retrieve(histories=[[3, 7]], k=2)])
    assert answer["step"] == full.step and len(calls) == 1


def test_a_trainer_is_followed(made):
    trainer = Trainer(made.full[path] for path in made.ids)
    trainer.go = threading.Semaphore(0)
    with client(lambda: Served(None), ServerConfig(max_lag=0.1), follow=lambda: trainer) as there:
        until(lambda: there.app.state.served.version)
        ready = there.get("/ready")
        assert ready.status_code == 503 and ready.json()["status"] == "lagging"
        body = {"histories": [[3, 7]], "k": 5, "exclude": "history"}
        answer = there.post("/retrieve", json=body).json()
        assert answer["sequence"] == 1
        check(answer, wanted(made.full[made.ids[0]], "/retrieve", body), 1)
        trainer.fails = True
        until(lambda: there.get("/ready").json()["follow_error"] == "the sink is down")
        check(there.post("/retrieve", json=body).json(), wanted(made.full[made.ids[0]], "/retrieve", body), 1)
        trainer.fails = False
        trainer.go.release()
        until(lambda: there.app.state.served.version.sequence == 2)
        until(lambda: there.get("/ready").json()["follow_error"] is None)
        found = there.get("/ready").json()
        assert found["status"] == "ready" and found["step"] == 2 and found["lag_seconds"] == 0.0
        assert found["published_at"] == 1.5
        check(there.post("/retrieve", json=body).json(), wanted(made.full[made.ids[1]], "/retrieve", body), 2)
        text = there.get("/metrics").text
        assert "tritonrec_sequence 2.0" in text and "tritonrec_lag_seconds 0.0" in text


def test_a_version_that_could_not_be_taken_over_is_tried_again():
    uses = []

    def use(*given):
        uses.append(given)
        if len(uses) == 1:
            raise ValueError("the new model takes no histories")

    version = SimpleNamespace(sequence=7, predictor=None, published_at=0.0, poll=lambda: False)
    following = Following(SimpleNamespace(use=use), lambda: version, seconds=0.01)
    until(lambda: len(uses) == 2 and following.error is None)
    following.close()


def test_before_the_first_version_it_is_not_ready(made):
    def nothing():
        raise ValueError("nothing was published yet")

    with client(lambda: Served(None), token="t", follow=nothing) as there:
        until(lambda: there.get("/ready").json()["follow_error"])
        assert there.get("/ready").status_code == 503 and there.get("/health").status_code == 200
        there.headers["authorization"] = "Bearer t"
        assert error_of(there.post("/retrieve", json={"histories": [[1]]})) == "not_ready"
        assert error_of(there.post("/reload")) == "following"


def test_the_description_names_every_path(made):
    with client(plain(made)) as there:
        document = there.get("/openapi.json").json()
    paths = {
        "/retrieve",
        "/score",
        "/predict",
        "/impressions",
        "/user/{user}/events",
        "/health",
        "/ready",
        "/metrics",
        "/reload",
    }
    assert set(document["paths"]) == paths
    answers = document["paths"]["/retrieve"]["post"]["responses"]
    assert {"200", "401", "413", "422", "429", "503"} <= set(answers)
