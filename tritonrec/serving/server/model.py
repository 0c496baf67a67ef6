"""A version of a model, which answers batches of requests, and the one that is served now.

Dimensions: B users, L events, d model dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...data import ImpressionBatch, Lookup
from ...data.jagged import offsets_of
from ...nn import NextItemModel
from ..cached import CachedPredictor
from ..device import on_device
from ..histories import Ids, array_of
from ..impressions import impressions_of
from ..predictor import Predictor
from ..programs import CLICK, IMPRESSION, NEXT_ITEM
from ..users import UserHistories
from .bodies import Clicks, Impressions, Retrieve, Score
from .errors import ServerError


@dataclass(frozen=True)
class Change:
    """Of one user's history: `items` are added, or are all where `whole`; None removes the user."""

    user: str
    items: Sequence[Any] | None = None
    timestamps: Sequence[int] | None = None
    whole: bool = False


@dataclass
class Read:
    """A request that changes nothing, and what a batch needs of it.

    given, times: histories. seen: `Predictor.left_out` of a retrieval, or (items,) of scores.
    clicks: dense features and ids of each feature.
    """

    request: Any
    given: Ids | None = None
    times: Tensor | None = None
    seen: tuple[Tensor, ...] = ()
    clicks: tuple[Tensor, dict[str, Tensor | Lookup]] | None = None
    vectors: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.float32, device="cpu"))


class Version:
    """A model and the histories of its users; everything of a batch is answered by one.

    Answers have the bits of `Predictor`'s for the request alone, whatever else is in the batch.

    Args:
        users: of a model of the next item; a `CachedPredictor` computes new events alone. most_users: with a
            history. sequence, published_at: of the delta that it holds, where one was followed.
    """

    def __init__(
        self,
        predictor: Predictor,
        users: UserHistories | None,
        most_users: int,
        sequence: int | None = None,
        published_at: float | None = None,
    ):
        self.predictor, self.users, self.most_users = predictor, users, most_users
        self.sequence, self.published_at = sequence, published_at

    @property
    def told(self) -> dict[str, Any]:
        """Step and sequence, which are part of every answer."""
        return {"step": self.predictor.step, "sequence": self.sequence}

    def answer(self, requests: Sequence[Any]) -> list[Any]:
        """An answer or an exception for each request, in their order.

        Reads between two changes are computed together, but for those of a user whom a change between them
        names.
        """
        answers: list[Any] = [None] * len(requests)
        waiting: list[int] = []
        named: set[str] = set()

        def read() -> None:
            found = self._read([requests[at] for at in waiting])
            for at, answer in zip(waiting, found, strict=True):
                answers[at] = answer
            waiting.clear()
            named.clear()

        for at, request in enumerate(requests):
            if isinstance(request, Change):
                if request.user in named:
                    read()
                answers[at] = attempt(self._change, request)
            else:
                waiting.append(at)
                named.update(getattr(request, "users", None) or ())
        read()
        return answers

    def _histories(self) -> UserHistories:
        if self.users is None:
            raise ValueError("this model has no histories of users, only one of the next item has")
        return self.users

    def _change(self, change: Change) -> dict[str, Any]:
        users = self._histories()
        if change.items is None:
            users.forget(change.user)
            return {"user": change.user, "events": 0, **self.told}
        if change.user not in users and len(users) >= self.most_users:
            raise ServerError(
                "too_many_users", f"{len(users)} users have histories here, which is the limit: delete some"
            )
        (users.replace if change.whole else users.append)(change.user, change.items, change.timestamps)
        events = len(users.history(change.user)[0])
        return {"user": change.user, "events": events, **self.told}

    def _read(self, requests: list[Any]) -> list[Any]:
        """Answers of requests that change nothing; where a batch fails, each is computed alone."""
        reads = [attempt(self._prepared, request) for request in requests]
        good = [read for read in reads if isinstance(read, Read)]
        found = attempt(self._computed, good)
        if isinstance(found, Exception):
            alone = [attempt(self._computed, [read]) for read in good]
            found = [each if isinstance(each, Exception) else each[0] for each in alone]
        answers = iter(found)
        return [next(answers) if isinstance(read, Read) else read for read in reads]

    def _prepared(self, request: Any) -> Read:
        if isinstance(request, Clicks):
            return Read(request, clicks=self._clicks(request))
        if isinstance(request, Impressions):
            self._impressions([request])  # what is wrong is said to this request alone
            return Read(request)
        predictor = self.predictor
        if request.users is None:
            given, times = predictor.read(request.histories, request.timestamps)
            read = Read(request, given, times)
        else:
            read = Read(request, self._histories().ids(request.users))
            assert read.given is not None
            if bool((empty := read.given.offsets.diff() == 0).any()):
                user = request.users[int(empty.int().argmax())]
                raise ValueError(f"the history of user {user!r} has no items")
        assert read.given is not None
        if isinstance(request, Retrieve):
            read.seen = predictor.left_out(request.k, request.exclude, read.given)
        else:
            words = predictor.vocabularies.get("item")
            read.seen = (array_of(request.items, "list of candidates", words)[0],)
        return read

    def _clicks(self, request: Clicks) -> tuple[Tensor, dict[str, Tensor | Lookup]]:
        names = self.predictor.dense_of(CLICK, "predict")["features"]
        dense = torch.tensor(request.dense, dtype=torch.float32, device="cpu")
        if not bool(dense.isfinite().all()):
            raise ValueError("dense features must be finite float32")
        if request.features.keys() != set(names):
            raise ValueError(f"features must be {', '.join(names)}, got {', '.join(request.features)}")
        return dense, self.predictor.read_clicks(dense, request.features)

    def _impressions(self, requests: Sequence[Impressions]) -> ImpressionBatch:
        facts, samples = self.predictor.dense_of(IMPRESSION, "impressions"), []
        for request in requests:
            samples += request.samples
        return impressions_of(samples, facts, self.predictor.vocabularies)

    def _computed(self, reads: list[Read]) -> list[dict[str, Any]]:
        """Answers of reads, all computed together."""
        clicks = [read.clicks for read in reads if read.clicks is not None]
        answers: dict[int, dict[str, Any]] = {}
        if clicks:
            features = {name: _together([each[name] for _, each in clicks]) for name in clicks[0][1]}
            found = self.predictor.clicks(torch.cat([dense for dense, _ in clicks]), features)
            given = [read for read in reads if read.clicks is not None]
            for read, part in _parts(given, [len(dense) for dense, _ in clicks]):
                answers[id(read)] = {"probabilities": floats(found[part])}
        if shown := [read for read in reads if isinstance(read.request, Impressions)]:
            batch = self._impressions([read.request for read in shown])
            by_sample = self.predictor.predict(batch).split(batch.exposed_offsets.diff().tolist())
            for read, part in _parts(shown, [len(read.request) for read in shown]):
                judged = [floats(each) for each in by_sample[part]]
                answers[id(read)] = {"tasks": list(batch.tasks), "probabilities": judged}
        for named in (False, True):
            group = [r for r in reads if r.given is not None and (r.request.users is not None) == named]
            vectors = self._vectors(group, named)
            for read, part in _parts(group, [len(read.request) for read in group]):
                read.vectors = vectors[part]
        for read in reads:
            if isinstance(read.request, Score):
                answers[id(read)] = {"scores": floats(self.predictor.scores_of(read.vectors, *read.seen))}
        retrievals = [read for read in reads if isinstance(read.request, Retrieve)]
        for k in {read.request.k for read in retrievals}:
            answers |= self._best([read for read in retrievals if read.request.k == k], k)
        return [answers[id(read)] | self.told for read in reads]

    def _vectors(self, reads: list[Read], named: bool) -> Tensor:
        """(B, d) of histories, or of users with events here."""
        if not reads:
            return torch.empty(0, 0, dtype=torch.float32, device="cpu")
        if named:
            return self._histories().encode([user for read in reads for user in read.request.users])
        given = [(read.given, read.times) for read in reads]
        ids, lengths, times = zip(
            *((g.ids, g.offsets.diff(), t) for g, t in given if g is not None), strict=True
        )
        return self.predictor.vectors(torch.cat(ids), offsets_of(torch.cat(lengths)), torch.cat(times))

    def _best(self, reads: list[Read], k: int) -> dict[int, dict[str, Any]]:
        places = torch.cat([read.seen[0] for read in reads])
        offsets = offsets_of(torch.cat([read.seen[1].diff() for read in reads]))
        vectors = torch.cat([read.vectors for read in reads])
        ids, scores = self.predictor.best_without(vectors, k, places, offsets)
        answers = {}
        for read, part in _parts(reads, [len(read.vectors) for read in reads]):
            words = read.given is not None and read.given.words
            items = self.predictor.words_of(ids[part]) if words else ids[part].tolist()
            answers[id(read)] = {"items": items, "scores": floats(scores[part])}
        return answers


def _together(parts: Sequence[Any]) -> Tensor | Lookup:
    """Ids of one feature, or bags, of several requests."""
    if isinstance(parts[0], Tensor):
        return torch.cat([*parts])
    lengths = torch.cat([bags.offsets.diff() for bags in parts])
    return Lookup(torch.cat([bags.ids for bags in parts]), offsets_of(lengths))


def attempt(function: Callable[[Any], Any], given: Any) -> Any:
    """What the function returns, or the exception that it raises."""
    try:
        return function(given)
    except Exception as error:
        return error


def _first_answer(predictor: Predictor) -> None:
    """Compute something: a first request would wait for layers that are compared, and for kernels."""
    dense, none = predictor.manifest["dense"], torch.zeros(2, dtype=torch.int64, device="cpu")
    if dense["kind"] == NEXT_ITEM:
        ids, one = predictor.item_ids[:1], torch.tensor([0, 1], dtype=torch.int64, device="cpu")
        predictor.best_without(predictor.vectors(ids, one, none[:1]), 1, none[:0], none)
    elif dense["kind"] == CLICK:
        given = torch.zeros(1, dense["dense"], dtype=torch.float32, device="cpu")
        features = predictor.manifest["features"]
        pooled = {name for name in dense["features"] if features[name]["pooling"] != "none"}
        bag = Lookup(none[:0], none)
        predictor.clicks(given, {n: bag if n in pooled else none[:1] for n in dense["features"]})
    else:
        shown = SimpleNamespace(item=0, timestamp=0, genres=[])
        context = dict.fromkeys(dense["context"], 0)
        sample = SimpleNamespace(context=context, history=[], exposed=[shown])
        predictor.predict(impressions_of([sample], dense, {}))


def _parts(reads: Sequence[Read], sizes: Sequence[int]) -> Iterator[tuple[Read, slice]]:
    """Each read with its rows of a batch."""
    for read, (first, last) in zip(reads, pairwise(accumulate(sizes, initial=0)), strict=True):
        yield read, slice(first, last)


def floats(values: Tensor) -> list[Any]:
    """Of float32, as numbers that JSON brings back in every bit; `ServerError` where one is not finite."""
    if not bool(values.isfinite().all()):
        raise ServerError("model_error", "the model gives a score that is not finite")
    return values.tolist()


class Served:
    """The version that is served, and how the next one takes its place: whole, between two batches.

    Args:
        load: reads the model's folder; None where a trainer is followed alone. model: of the trained
            configuration, for cached inference. memory, host_memory, device: see `CachedPredictor.load`.
            users: keep histories of users. most_users: that have one.
    """

    def __init__(
        self,
        load: Callable[[], Predictor] | None,
        model: NextItemModel | None = None,
        memory: int | str = "2GiB",
        host_memory: int | str = 0,
        device: torch.device | str = "cpu",
        users: bool = True,
        most_users: int = 100_000,
    ):
        self._load, self._model, self._memory, self._device = load, model, (memory, host_memory), device
        self._with_users, self._most_users = users, most_users
        self._answering, self._changing = Lock(), Lock()
        self.version: Version | None = None
        if load is not None:
            self.use(load())

    def use(
        self, predictor: Predictor, sequence: int | None = None, published_at: float | None = None
    ) -> Version:
        """Serve this model from the next batch on. Raises ValueError where it cannot take over; the version
        before goes on then.
        """
        with self._changing:
            dense, served = predictor.manifest["dense"], (NEXT_ITEM, CLICK, IMPRESSION)
            if dense is None or dense["kind"] not in served:
                found = "tables alone" if dense is None else f"a model of kind {dense['kind']}"
                raise ValueError(f"the export has {found}, and a server takes one of {', '.join(served)}")
            if self._model is not None:
                predictor.dense_of(NEXT_ITEM, "--cached")
            predictor = on_device(predictor, self._device)
            users: UserHistories | None = None
            if self._with_users and dense["kind"] == NEXT_ITEM:
                if self._model is None:
                    users = UserHistories(predictor)
                else:
                    users = CachedPredictor(predictor, self._model, *self._memory)
            version = Version(predictor, users, self._most_users, sequence, published_at)
            attempt(_first_answer, predictor)
            with self._answering:
                before = self.version
                if before is not None and before.users is not None and len(before.users):
                    if users is None:
                        raise ValueError("users have histories here, and the new model takes none")
                    users.take_histories(before.users)
                self.version = version
            return version

    def reload(self) -> Version:
        """Read the folder again. The version before serves until the new one is whole; on, after an error."""
        if self._load is None:
            raise ServerError("following", "this server follows a trainer, and has no folder to read again")
        return self.use(self._load())

    def answer(self, requests: Sequence[Any]) -> list[Any]:
        """`Version.answer` of the version now."""
        with self._answering:
            if self.version is None:
                return [ServerError("not_ready", "no version of the model is here yet")] * len(requests)
            return self.version.answer(requests)
