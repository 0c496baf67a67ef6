"""`CachedPredictor`: users' histories, and their scores from cached keys and values.

Dimensions: B users, L events, I items, d model dimension.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...files.places import Place
from ...kernels.autocast import DTYPES
from ...nn import NextItemModel
from ...settings import bytes_of
from ..device import DevicePredictor, on_device
from ..encoder import Step, check_equal, encode_new, give_weights
from ..predictor import Predictor, UnknownIds
from ..programs import NEXT_ITEM
from ..users import History, User, UserHistories, listed
from ..whole import encoder_of
from .pages import Cached, Pages, pages_of

GROUP_TOKENS = 16384
"""Tokens of the users that are computed together, at most, unless one has more."""


@dataclass(frozen=True)
class CacheStats:
    """Counts of a `CachedPredictor` since it was loaded, and its memory now.

    Args:
        users: with a history. cached: with keys and values. pages, page_bytes, pages_used: of the cache.
        history_bytes: of ids and timestamps. computed, reused: tokens whose keys and values were computed, or
            were there. evicted: users who lost their pages to others. restarted: histories that had to be
            computed from their first event although some were cached, since they were cut or replaced.
            host_pages_used: of the pages behind a device's.
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
    host_pages_used: int


class CachedPredictor(UserHistories):
    """An exported HSTU or SASRec that computes new events alone; make one by `load`.

    Scores equal those of its `predictor` for the last ``max_seq_len`` events of each user in every bit. Calls
    may come from several threads; one computes at a time.

    Attributes:
        predictor: of the export, which computes all. version: the manifest's checksum.
    """

    _what = "cached inference"

    def __init__(
        self,
        predictor: Predictor,
        model: NextItemModel,
        memory: int | str = "2GiB",
        host_memory: int | str = 0,
    ):
        super().__init__(predictor)
        self._memory, self._host_memory = bytes_of(memory), bytes_of(host_memory, "host_memory")
        self._computed = self._reused = self._restarted = self._evicted = 0
        self._use(predictor, model)

    @classmethod
    def load(
        cls,
        path: Place | str,
        model: NextItemModel,
        *,
        memory: int | str = "2GiB",
        unknown: UnknownIds = "initial",
        device: torch.device | str = "cpu",
        host_memory: int | str = 0,
    ) -> CachedPredictor:
        """Load a folder of `export`, as `Predictor.load` does.

        Args:
            model: an `HSTU` or `SASRec` of the trained configuration, or a model of yours whose layers have
                a method ``over`` (`nn.hstu_layer.hstu_layer_over`); its values do not matter, a copy gets
                those of the export. memory: of keys and values, in bytes or such as ``"512MiB"``.
            device: that computes, and has the pages (`DevicePredictor`). host_memory: of pages of the host
                behind those of a device, which take what these lose.

        Raises:
            TypeError: a model whose layers do not say what they keep of past tokens.
            ValueError: as `Predictor.load`; the export is of another model, or configuration; `host_memory`
                without a device.
            CacheMemoryError: `memory` is less than one user of ``max_seq_len`` events needs.
        """
        return cls(on_device(Predictor.load(path, unknown=unknown), device), model, memory, host_memory)

    def reload(
        self, path: Place | str, model: NextItemModel | None = None, unknown: UnknownIds = "initial"
    ) -> None:
        """Go on with another export. Histories stay, nothing else: every key and value is computed again.

        Args:
            model: of the other configuration, where it is another one.

        Raises as `load`, and ValueError where the histories here are not those that the export needs: cut
        shorter than it takes, without timestamps, or of words with other ids. The old version stays then.
        """
        self.use(Predictor.load(path, unknown=unknown), model)

    def use(self, predictor: Predictor, model: NextItemModel | None = None) -> None:
        """`reload` of an export that is in memory, such as the ``predictor`` of a `live.Follower`."""
        with self._lock:
            if isinstance(self.predictor, DevicePredictor) and not isinstance(predictor, DevicePredictor):
                predictor = DevicePredictor(predictor, self.predictor.device)
            self._check_histories(predictor)
            evicted = self._pages.evicted
            self._use(predictor, self._model if model is None else model)
            self._evicted += evicted
            self._histories = {user: each.last(self._longest) for user, each in self._histories.items()}

    def _use(self, predictor: Predictor, model: NextItemModel) -> None:
        if not isinstance(model, NextItemModel) or not hasattr(model.layer, "over"):
            raise TypeError(
                f"{type(model).__name__} has no cached inference: its layers do not say which keys and "
                "values of past tokens they read, as those of tritonrec.nn.HSTU and SASRec do; a model whose "
                "tokens see later ones (BERT4Rec) can have none. Take Predictor"
            )
        dense, config = predictor.dense_of(NEXT_ITEM, "cached inference"), model.config
        if config.max_seq_len != dense["max_seq_len"]:
            raise ValueError(
                f"the export takes {dense['max_seq_len']} events, the model {config.max_seq_len}"
            )
        model = copy.deepcopy(model).cpu().eval().requires_grad_(False)
        give_weights(model, predictor.program)
        precision = dense.get("precision", "float32")
        encoder, program = encoder_of(model, precision), predictor.program
        if isinstance(predictor, DevicePredictor):
            model, program = model.to(predictor.device), predictor.recomputed
            encoder = partial(encode_new, model, precision)
        elif self._host_memory:
            raise ValueError("host_memory is of the pages behind a device's: without a device take memory")
        width = config.heads * (config.qk_dim + config.v_dim)
        pages = Pages(
            self._memory, config.layers, width, DTYPES[precision], config.max_seq_len,
            model.positions.weight.device, self._host_memory,
        )  # fmt: skip
        check_equal(model, encoder, program, pages.store, dense["timestamps"])
        self._use_predictor(predictor)
        self._model, self._encoder = model, encoder
        self._pages: Pages = pages
        self.version: str = predictor.manifest["manifest_sha256"]

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

    def forget(self, user: User) -> None:
        """Remove a user's history, keys and values; an unknown one is no error."""
        with self._lock:
            self._histories.pop(user, None)
            self._pages.drop(user)

    def encode(self, users: Sequence[User]) -> Tensor:
        """User vectors (B, d) float32 on the predictor's device, each user as often as named; computes what
        is missing, and caches it.

        Raises KeyError for a user without a history, and ValueError for one without events.
        """
        with self._lock:
            return self._encode(listed(users))

    def scores(self, users: Sequence[User], items: Tensor | None = None) -> Tensor:
        """(B, I) float32, as `Predictor.scores`; of candidates `items` (I,) int64, or of all items."""
        with self._lock:
            return self.predictor.scores_of(self._encode(listed(users)), items)

    def retrieve(self, users: Sequence[User], k: int, exclude: Any = "history") -> tuple[Any, Tensor]:
        """The k items of the highest scores, as `Predictor.retrieve`: ids (B, k) int64 and scores (B, k).

        Items of the history are left out, which is cut to ``max_seq_len``: `exclude` names older ones.
        """
        with self._lock:
            given = self.ids(users)
            return self.predictor.best_of(self._encode(listed(users)), k, exclude, given)

    def stats(self) -> CacheStats:
        """See `CacheStats`."""
        with self._lock:
            pages = self._pages
            of_histories = sum(each.ids.nbytes + each.timestamps.nbytes for each in self._histories.values())
            return CacheStats(
                len(self._histories), len(pages), pages.count, pages.page_bytes, pages.used, of_histories,
                self._computed, self._reused, self._evicted + pages.evicted, self._restarted,
                0 if pages.behind is None else pages.behind.used,
            )  # fmt: skip

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
        none = torch.empty(0, self._model.config.dim, dtype=torch.float32, device=self._pages.store.device)
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
            torch.tensor(lengths, dtype=torch.int64, device="cpu"),
            torch.tensor(known, dtype=torch.int64, device="cpu"),
            torch.cat([each.timestamps for each in histories]), torch.cat(places),
        )  # fmt: skip
        new = torch.cat([each.ids[first:] for each, first in zip(histories, known, strict=True)])
        rows = self.predictor.rows("item", new)
        vectors = self._encoder(rows, step, self._pages.store)
        for entry, length, vector in zip(entries.values(), lengths, vectors, strict=True):
            entry.known, entry.vector = length, vector.clone()
        self._computed += len(new)
        self._reused += sum(known)


def _common(before: History, now: History, timed: bool) -> int:
    """How many first events two histories share."""
    count = min(len(before.ids), len(now.ids))
    differ = before.ids[:count] != now.ids[:count]
    if timed:
        differ |= before.timestamps[:count] != now.timestamps[:count]
    return int(differ.int().argmax()) if bool(differ.any()) else count
