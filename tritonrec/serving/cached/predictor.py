"""`CachedPredictor`: users' histories, and their scores from cached keys and values.

Dimensions: B users, L events, I items, d model dimension.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from ...data.jagged import offsets_of
from ...files.places import Place
from ...kernels.autocast import DTYPES
from ...nn import HSTU
from ...settings import bytes_of
from ..histories import Ids, array_of, times_of, told
from ..predictor import Predictor, UnknownIds
from ..programs import NEXT_ITEM
from .encoder import Step, check_equal, encode_new, give_weights
from .pages import Cached, Pages, pages_of

GROUP_TOKENS = 16384
"""Tokens of the users that are computed together, at most, unless one has more."""
User = Hashable


@dataclass(frozen=True)
class History:
    """Of one user, oldest first: ids and timestamps (L,) int64, cut to what a model takes.

    words: they were given as words. timed: with timestamps. cut: there were older events.
    """

    ids: Tensor
    timestamps: Tensor
    words: bool
    timed: bool
    cut: bool

    def last(self, longest: int) -> History:
        """The last events."""
        if len(self.ids) <= longest:
            return self
        ids, times = self.ids[-longest:].clone(), self.timestamps[-longest:].clone()
        return History(ids, times, self.words, self.timed, True)


@dataclass(frozen=True)
class CacheStats:
    """Counts of a `CachedPredictor` since it was loaded, and its memory now.

    Args:
        users: with a history. cached: with keys and values. pages, page_bytes, pages_used: of the cache.
        history_bytes: of ids and timestamps. computed, reused: tokens whose keys and values were computed, or
            were there. evicted: users who lost their pages to others. restarted: histories that had to be
            computed from their first event although some were cached, since they were cut or replaced.
    """

    users: int
    cached: int
    pages: int
    page_bytes: int
    pages_used: int
    history_bytes: int
    computed: int
    reused: int
    evicted: int
    restarted: int


class CachedPredictor:
    """An exported HSTU on the CPU that computes new events alone; make one by `load`.

    Scores equal those of a `Predictor` for the last ``max_seq_len`` events of each user in every bit. Calls
    may come from several threads; one computes at a time.

    Attributes:
        predictor: of the export, which computes all. version: the manifest's checksum.
    """

    def __init__(self, predictor: Predictor, model: HSTU, memory: int | str = "2GiB"):
        self._lock = RLock()
        self._memory = bytes_of(memory)
        self._histories: dict[User, History] = {}
        self._computed = self._reused = self._restarted = self._evicted = 0
        self._use(predictor, model)

    @classmethod
    def load(
        cls,
        path: Place | str,
        model: HSTU,
        *,
        memory: int | str = "2GiB",
        unknown: UnknownIds = "initial",
    ) -> CachedPredictor:
        """Load a folder of `export`, as `Predictor.load` does.

        Args:
            model: an `HSTU` of the trained configuration; its values do not matter, a copy gets those of the
                export. memory: of keys and values, in bytes or such as ``"512MiB"``.

        Raises:
            TypeError: another model than `HSTU`, whose attention has no cache here.
            ValueError: as `Predictor.load`; the export is of another model, or configuration.
            CacheMemoryError: `memory` is less than one user of ``max_seq_len`` events needs.
        """
        return cls(Predictor.load(path, unknown=unknown), model, memory)

    def reload(self, path: Place | str, model: HSTU | None = None, unknown: UnknownIds = "initial") -> None:
        """Go on with another export. Histories stay, nothing else: every key and value is computed again.

        Args:
            model: of the other configuration, where it is another one.

        Raises as `load`, and ValueError where the histories here are not those that the export needs: cut
        shorter than it takes, without timestamps, or of words with other ids. The old version stays then.
        """
        predictor = Predictor.load(path, unknown=unknown)
        with self._lock:
            self._check_histories(predictor)
            evicted = self._pages.evicted
            self._use(predictor, self._model if model is None else model)
            self._evicted += evicted
            self._histories = {user: each.last(self._longest) for user, each in self._histories.items()}

    def _use(self, predictor: Predictor, model: HSTU) -> None:
        if type(model) is not HSTU:
            raise TypeError(
                f"{type(model).__name__} has no cached inference, only tritonrec.nn.HSTU has: take Predictor"
            )
        dense, config = predictor.dense_of(NEXT_ITEM, "cached inference"), model.config
        if config.max_seq_len != dense["max_seq_len"]:
            raise ValueError(
                f"the export takes {dense['max_seq_len']} events, the model {config.max_seq_len}"
            )
        model = copy.deepcopy(model).cpu().eval().requires_grad_(False)
        give_weights(model, predictor.program)
        precision = dense.get("precision", "float32")
        check_equal(model, precision, predictor.program, config.dim)
        width = config.heads * (config.qk_dim + config.v_dim)
        pages = Pages(self._memory, config.layers, width, DTYPES[precision], config.max_seq_len)
        self.predictor, self._model, self._precision = predictor, model, precision
        self._longest, self._timed = config.max_seq_len, bool(dense["timestamps"])
        self._pages: Pages = pages
        self.version: str = predictor.manifest["manifest_sha256"]

    def _check_histories(self, predictor: Predictor) -> None:
        dense = predictor.dense_of(NEXT_ITEM, "cached inference")
        before, now = (each.vocabularies.get("item") for each in (self.predictor, predictor))
        if before is not None and self._histories:
            if now is None:
                raise ValueError("the histories here were numbered by words, and the export has none")
            now.check_extends(before, "item")
        for user, history in self._histories.items():
            if history.cut and dense["max_seq_len"] > self._longest:
                raise ValueError(
                    f"the history of user {user!r} was cut to {self._longest} events, and the export takes "
                    f"{dense['max_seq_len']}: load it anew, and replace() the histories"
                )
            if dense["timestamps"] and not history.timed:
                raise ValueError(f"the export goes by times, and user {user!r} has events without timestamps")

    def append(self, user: User, items: Any, timestamps: Any = None) -> None:
        """Add events behind those of a user, if there are any. Nothing is computed.

        Args:
            items: (n,) int64, or words. timestamps: (n,) int64, for a model with times; they may not go back.

        Raises ValueError for what `Predictor.encode` refuses, and for an event before the user's last one:
        `replace` puts it in its place. Nothing is added then.
        """
        _check_user(user)
        with self._lock:
            before = self._histories.get(user)
            new = self._history(items, timestamps)
            timed = new.timed if before is None else new.timed and before.timed
            if timed:
                times = (
                    new.timestamps if before is None else torch.cat([before.timestamps[-1:], new.timestamps])
                )
                if bool((back := times.diff() < 0).any()):
                    at = int(back.nonzero()[0])
                    raise ValueError(
                        f"an event of user {user!r} at {int(times[at + 1])} is before one at "
                        f"{int(times[at])}: give the whole history to replace()"
                    )
            if before is not None:
                new = History(
                    torch.cat([before.ids, new.ids]), torch.cat([before.timestamps, new.timestamps]),
                    before.words or new.words, timed, before.cut,
                )  # fmt: skip
            self._put(user, new)

    def replace(self, user: User, history: Any, timestamps: Any = None) -> None:
        """Make this a user's history, which may begin as the old one: what is equal so far stays cached.

        Arguments and errors as those of `append`; timestamps may go back, as those of `Predictor.encode`.
        """
        _check_user(user)
        with self._lock:
            self._put(user, self._history(history, timestamps))

    def _put(self, user: User, whole: History) -> None:
        """Keep the last events of a history, and of what is cached what they leave as it is."""
        before, now = self._histories.get(user), whole.last(self._longest)
        self._histories[user] = now
        cached = self._pages.find(user)
        if before is None or cached is None:
            return
        alike = _common(before, now, self._timed)
        if alike == len(before.ids) == len(now.ids):
            return
        cached.vector = None
        known = min(cached.known, max(alike - self._timed, 0))  # the last token asks at the next one's time
        self._restarted += cached.known > 0 and known == 0
        cached.known = known

    def _history(self, items: Any, timestamps: Any) -> History:
        if isinstance(items, (int, float)):
            raise ValueError(f"items must be (n,), got {told(items)}: give a list")
        ids, words = array_of(items, "history", self.predictor.vocabularies.get("item"))
        times = times_of(timestamps, items, ids, self._timed)
        return History(ids.clone(), times.clone(), words, times_given(timestamps, items), False)

    def history(self, user: User) -> tuple[Tensor, Tensor]:
        """Ids and timestamps (L,) int64 of a user, at most ``max_seq_len``; KeyError for an unknown one."""
        with self._lock:
            found = self._of(user)
            return found.ids.clone(), found.timestamps.clone()

    def forget(self, user: User) -> None:
        """Remove a user's history, keys and values; an unknown one is no error."""
        with self._lock:
            self._histories.pop(user, None)
            self._pages.drop(user)

    def encode(self, users: Sequence[User]) -> Tensor:
        """User vectors (B, d) float32, each user as often as named; computes what is missing, and caches it.

        Raises KeyError for a user without a history, and ValueError for one without events.
        """
        with self._lock:
            return self._encode(_listed(users))

    def scores(self, users: Sequence[User], items: Tensor | None = None) -> Tensor:
        """(B, I) float32, as `Predictor.scores`; of candidates `items` (I,) int64, or of all items."""
        with self._lock:
            return self.predictor.scores_of(self._encode(_listed(users)), items)

    def retrieve(self, users: Sequence[User], k: int, exclude: Any = "history") -> tuple[Any, Tensor]:
        """The k items of the highest scores, as `Predictor.retrieve`: ids (B, k) int64 and scores (B, k).

        Items of the history are left out, which is cut to ``max_seq_len``: `exclude` names older ones.
        """
        with self._lock:
            users = _listed(users)
            histories = [self._of(user) for user in users]
            none = torch.empty(0, dtype=torch.int64)
            lengths = torch.tensor([len(each.ids) for each in histories], dtype=torch.int64)
            ids = torch.cat([none, *(each.ids for each in histories)])
            given = Ids(ids, offsets_of(lengths), any(each.words for each in histories))
            return self.predictor.best_of(self._encode(users), k, exclude, given)

    def stats(self) -> CacheStats:
        """See `CacheStats`."""
        with self._lock:
            pages = self._pages
            of_histories = sum(each.ids.nbytes + each.timestamps.nbytes for each in self._histories.values())
            return CacheStats(
                len(self._histories), len(pages), pages.count, pages.page_bytes, pages.used, of_histories,
                self._computed, self._reused, self._evicted + pages.evicted, self._restarted,
            )  # fmt: skip

    def _of(self, user: User) -> History:
        _check_user(user)
        if user not in self._histories:
            raise KeyError(f"user {user!r} has no history here: append() or replace() it")
        return self._histories[user]

    def _encode(self, users: Sequence[User]) -> Tensor:
        lengths = {user: len(self._of(user).ids) for user in users}
        for user, length in lengths.items():
            if not length:
                raise ValueError(
                    f"the history of user {user!r} has 0 items, the model takes 1 to {self._longest}"
                )
        vectors: dict[User, Tensor] = {}
        for group in self._groups(lengths):
            vectors |= self._vectors(group)
        none = torch.empty(0, self._model.config.dim, dtype=torch.float32)
        return torch.stack([vectors[user] for user in users]) if users else none

    def _groups(self, lengths: dict[User, int]) -> Iterator[list[User]]:
        """Users whose pages fit into the memory together."""
        group: list[User] = []
        tokens = pages = 0
        for user, length in lengths.items():
            cached = self._pages.find(user)
            own = max(pages_of(length), 0 if cached is None else len(cached.pages))
            if group and (tokens + length > GROUP_TOKENS or pages + own > self._pages.count):
                yield group
                group, tokens, pages = [], 0, 0
            group.append(user)
            tokens, pages = tokens + length, pages + own
        if group:
            yield group

    def _vectors(self, group: list[User]) -> dict[User, Tensor]:
        """The vectors of users of one group."""
        spared = frozenset(group)
        entries = {user: self._pages.take(user, len(self._histories[user].ids), spared) for user in group}
        missing = {user: entry for user, entry in entries.items() if entry.vector is None}
        self._reused += sum(len(self._histories[user].ids) for user in group if user not in missing)
        if missing:
            self._compute(missing)
        return {user: entry.vector for user, entry in entries.items() if entry.vector is not None}

    def _compute(self, entries: dict[User, Cached]) -> None:
        """Compute the missing tokens of each user, one at least."""
        histories = [self._histories[user] for user in entries]
        lengths = [len(each.ids) for each in histories]
        known = [min(entry.known, n - 1) for entry, n in zip(entries.values(), lengths, strict=True)]
        places = [self._pages.rows(entry, n) for entry, n in zip(entries.values(), lengths, strict=True)]
        step = Step(
            torch.tensor(lengths, dtype=torch.int64), torch.tensor(known, dtype=torch.int64),
            torch.cat([each.timestamps for each in histories]), torch.cat(places),
        )  # fmt: skip
        new = torch.cat([each.ids[first:] for each, first in zip(histories, known, strict=True)])
        rows = self.predictor.rows("item", new)
        vectors = encode_new(self._model, self._precision, rows, step, self._pages.store)
        for entry, length, vector in zip(entries.values(), lengths, vectors, strict=True):
            entry.known, entry.vector = length, vector.clone()
        self._computed += len(new)
        self._reused += sum(known)


def times_given(timestamps: Any, items: Any) -> bool:
    """Whether a history was given with timestamps."""
    return timestamps is not None or getattr(items, "timestamps", None) is not None


def _common(before: History, now: History, timed: bool) -> int:
    """How many first events two histories share."""
    count = min(len(before.ids), len(now.ids))
    differ = before.ids[:count] != now.ids[:count]
    if timed:
        differ |= before.timestamps[:count] != now.timestamps[:count]
    return int(differ.int().argmax()) if bool(differ.any()) else count


def _check_user(user: Any) -> None:
    if isinstance(user, Tensor) or not isinstance(user, Hashable):
        raise ValueError(f"a user is named by a number or a text, got {type(user).__name__}")


def _listed(users: Any) -> list[User]:
    """The users of a call."""
    if isinstance(users, Tensor) and users.dim() == 1:
        return users.tolist()
    if not isinstance(users, (list, tuple, range)):
        raise ValueError(f"users must be a list, got {type(users).__name__}: [user] is one")
    for user in users:
        _check_user(user)
    return list(users)
