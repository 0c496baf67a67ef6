"""An exported model of any kind with the rows of its tables spread over processes, also one that is followed.

Each rank holds the rows of every table whose ids have its number as remainder. This process has all ids and
the dense model: it asks the ranks for the rows of a batch, and for the best of their items, which it merges::

    front  ids, program   -- ids 4, 7, 9 -->      rank 0  rows of 0, 2, 4 ...    -- row of 4 -->        front
                                                  rank 1  rows of 1, 3, 5 ...    -- rows of 7, 9 -->

Rows and searches have a version, so that a batch is answered by one step whole: ranks make the next version
beside the one that is served, on a thread, and the front goes over to it when all have it.

Dimensions: B users, I items, d columns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import ops
from ..distributed import Communicators
from ..distributed.communicator import TIMEOUT
from ..files.places import Place
from .exported_table import ExportedTable, Share
from .live import Follower
from .live.wire import LiveError
from .predictor import Predictor
from .retrieval import best_of_each
from .spread import Ranks

Arrays = dict[str, np.ndarray]
NO_WEIGHTS = Share(None, 1)
TRIES = 10
"""Tries to bring all ranks to one publication while later ones come."""
AT_ONCE = 0.005
"""Seconds that requests wait for a rank's next version, at most; then they and it take turns."""


class RowRanks(Ranks):
    """Processes with shares of all rows; `ask` is a call of each, whose errors are raised here."""

    def __init__(self, ranks: int, timeout: timedelta, function: Callable[..., Any], *arguments: Any):
        self._start(ranks)
        try:
            self.ask(function, *arguments)
        except BaseException:
            self.close()
            raise
        self._pool.timeout = timeout  # of requests; loading has the time that training has

    @property
    def count(self) -> int:
        """How many."""
        return self._ranks

    def ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``function(rank, ranks, ...)`` returns on each. Raises the first ValueError or LiveError."""
        found = self._run(_told, function, arguments)
        for rank, each in enumerate(found):
            if isinstance(each, LiveError):
                raise LiveError(f"rank {rank}: {each}") from each
            if isinstance(each, ValueError):
                raise each
        return found


class SpreadRowsPredictor(Predictor):
    """A `Predictor` with `ranks` processes that hold its rows, with the same bits.

    Args:
        front: with all ids and no weights. ranks: that hold version `version`.

    `scores`, `encode`, `retrieve` and `predict` are those of the base. Raises as `Predictor.load`;
    RankDiedError where a rank has ended.
    """

    def __init__(self, front: Predictor, ranks: RowRanks, version: int):
        super().__init__(front.manifest, front.tables, front.program, front.vocabularies)
        self.ranks, self.version = ranks, version

    @classmethod
    def load(cls, path: Place | str, ranks: int, timeout: timedelta = TIMEOUT) -> SpreadRowsPredictor:  # type: ignore[override]
        """Load a folder of `export`; every rank reads the files and keeps its share."""
        front = Predictor.load(path, share=NO_WEIGHTS)
        held = RowRanks(ranks, timeout, _load, str(path), front.manifest)
        return cls(front, held, 0)

    @property
    def failure(self) -> str:
        """As of its base."""
        return self.ranks.failure

    def close(self) -> None:
        """End the processes."""
        self.ranks.close()

    def _looked_up(self, wanted: Mapping[str, tuple[str, Tensor]]) -> dict[str, Tensor]:
        known = {feature: self.tables[table].find(ids)[1] for feature, (table, ids) in wanted.items()}
        asked = {name: (table, ids[known[name]].numpy()) for name, (table, ids) in wanted.items()}
        parts, found = self.ranks.ask(_rows, self.version, asked), {}
        for name, (table, own) in asked.items():
            dim = self.manifest["tables"][table]["dim"]
            rows = np.empty((len(own), dim), np.float32)
            for rank, part in enumerate(parts):
                rows[own % self.ranks.count == rank] = part[name]
            ids = wanted[name][1]
            found[name] = self.tables[table].filled(ids, known[name], torch.from_numpy(rows))
        return found

    def _side_by_side(self, ids: Mapping[str, Tensor]) -> Tensor:
        asked = {name: (self._table_of[name], each) for name, each in ids.items()}
        return torch.stack([*self._looked_up(asked).values()], 1)

    def scores_of(self, vectors: Tensor, items: Tensor | None = None) -> Tensor:
        """As of its base."""
        if items is not None:
            return super().scores_of(vectors, items)
        table, ids = self._item_table, self.item_ids.numpy()
        scores = np.empty((len(vectors), len(ids)), np.float32)
        for rank, part in enumerate(self.ranks.ask(_scores, self.version, table, vectors.numpy())):
            scores[:, ids % self.ranks.count == rank] = part
        return torch.from_numpy(scores)

    def best_without(self, vectors: Tensor, k: int, places: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """As of its base; the best k of each rank are merged."""
        given = vectors.numpy(), k, self.item_ids[places].numpy(), offsets.numpy()
        of_ranks = self.ranks.ask(_search, self.version, self._item_table, *given)
        best = np.empty((len(vectors), k), np.int64), np.empty((len(vectors), k), np.float32)
        for user, parts in enumerate(zip(*of_ranks, strict=True)):
            ids, scores = (np.concatenate([part[at] for part in parts]) for at in (0, 1))
            order = np.lexsort((ids, -scores))[:k]
            best[0][user], best[1][user] = ids[order], scores[order]
        return torch.from_numpy(best[0]), torch.from_numpy(best[1])

    @property
    def _item_table(self) -> str:
        return self.manifest["features"]["item"]["table"]


class SpreadFollower:
    """A `Follower` whose rows are in processes; all are at the publication that is served.

    A rank that has ended is started again, with the others, by the next `poll`.

    Attributes:
        predictor: the newest state, whole.
    """

    def __init__(self, url: str, ranks: int, timeout: timedelta = TIMEOUT):
        self._url, self._count, self._timeout = url, ranks, timeout
        self._front = Follower.open(url, share=NO_WEIGHTS)
        self._ranks: RowRanks | None = None
        self.predictor: SpreadRowsPredictor
        self.sequence, self.published_at = -1, 0.0
        self.poll()

    @property
    def step(self) -> int:
        """Steps of the state that is served."""
        return self.predictor.step

    def lag_seconds(self) -> float:
        """As of `Follower`."""
        return max(0.0, time.time() - self.published_at)

    def close(self) -> None:
        """End the processes."""
        if self._ranks is not None:
            self._ranks.close()

    def poll(self) -> bool:
        """Bring all ranks to what is new, and serve it; whether there was something.

        Raises as `Follower.poll`, also where it happens to a rank; what is served stays whole.
        """
        if self._ranks is not None and self._ranks.failure:
            self._ranks.close()
            self._ranks, self.sequence = None, -1
        self._front.poll()
        if self._front.sequence == self.sequence:
            return False
        if self._ranks is None:
            self._ranks = RowRanks(self._count, self._timeout, _follow, self._url)
        for _ in range(TRIES):
            at, seconds = self._front.sequence, self._timeout.total_seconds()
            limit = time.monotonic() + seconds
            while None in (reached := self._ranks.ask(_advance, at, self.sequence)):
                if time.monotonic() > limit:
                    late = [rank for rank, each in enumerate(reached) if each is None]
                    raise LiveError(
                        f"ranks {late} have not made publication {at} within {seconds:g} s: does their sink "
                        "answer? What is served stays, and the next poll goes on"
                    )
                time.sleep(AT_ONCE)  # requests come between
            if all(sequence == at for sequence, _ in reached):
                self._check(at, [rows for _, rows in reached])
                self.predictor = SpreadRowsPredictor(self._front.predictor, self._ranks, at)
                self.sequence, self.published_at = at, self._front.published_at
                return True
            self._front.poll()  # a rank took a later snapshot
        raise LiveError(
            f"ranks are at publications {sorted({each for each, _ in reached})}, and none is whole"
        )

    def _check(self, at: int, of_ranks: list[dict[str, int]]) -> None:
        for name, table in self._front.predictor.tables.items():
            wanted = torch.bincount(table.ids % self._count, minlength=self._count).tolist()
            got = [rows[name] for rows in of_ranks]
            if got != wanted:
                raise LiveError(
                    f"ranks have {got} rows of {name} at publication {at}, and {wanted} are there"
                )


_versions: dict[int, dict[str, ExportedTable]] = {}
"""Of a rank's process: tables by version."""
_followers: list[Follower] = []
_making: dict[int, Future[bool]] = {}
"""The next version, by its publication."""
_thread = ThreadPoolExecutor(1, "tritonrec next version")


def _told(communicators: Communicators, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(Share(communicators.rank, communicators.world_size), *arguments)
    except (ValueError, LiveError) as error:
        return error


def _load(share: Share, path: str, manifest: dict[str, Any]) -> None:
    """Load this rank's rows."""
    loaded = Predictor.load(path, share=share)
    if loaded.manifest != manifest:
        raise ValueError(f"{path} has become another export while its tables were loaded: load it again")
    _versions[0] = loaded.tables


def _follow(share: Share, url: str) -> None:
    """Begin to follow."""
    _followers[:] = [Follower.open(url, share=share)]


def _advance(_: Share, sequence: int, served: int) -> tuple[int, dict[str, int]] | None:
    """Make this rank's version of a publication beside the `served` one; what it came to, and its rows.

    None while it is made: call again.
    """
    (follower,) = _followers
    if sequence not in _making:
        _making.clear()  # of another publication, which nobody waits for any more
        _making[sequence] = _thread.submit(follower.poll, until=sequence)
    if wait([_making[sequence]], AT_ONCE).not_done:
        return None
    made = _making.pop(sequence)
    made.result()  # a failure is tried again by the next call, as what this rank's sink does not show yet
    if follower.sequence == sequence:
        _making[sequence] = made  # while another rank is not ready, this one is called again
    at, tables = follower.sequence, follower.predictor.tables
    for version in {*_versions} - {served}:
        del _versions[version]
    _versions[at] = tables
    return at, {name: len(table.ids) for name, table in tables.items()}


def _table(version: int, name: str) -> ExportedTable:
    if version not in _versions:
        raise ValueError(f"publication {version} is not here any more, but {', '.join(map(str, _versions))}")
    return _versions[version][name]


def _rows(share: Share, version: int, asked: Mapping[str, tuple[str, np.ndarray]]) -> Arrays:
    """This rank's rows of the ids of each feature."""
    return {
        name: _table(version, table).rows(torch.from_numpy(ids[ids % share.ranks == share.rank])).numpy()
        for name, (table, ids) in asked.items()
    }


def _scores(_: Share, version: int, table: str, vectors: np.ndarray) -> np.ndarray:
    """(B, I) of this rank's items."""
    return ops.linear(torch.from_numpy(vectors), _table(version, table).whole, None).numpy()


def _search(
    share: Share, version: int, table: str, vectors: np.ndarray, k: int, seen: np.ndarray, offsets: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids and scores of this rank's best for each user, without what was seen, ids at `offsets` (B + 1,)."""
    held, own = _table(version, table), seen % share.ranks == share.rank
    before = np.concatenate([np.zeros(1, np.int64), own.cumsum()])
    places = torch.searchsorted(held.ids, torch.from_numpy(seen[own]))
    found = best_of_each(torch.from_numpy(vectors), held.whole, k, places, torch.from_numpy(before[offsets]))
    ids = held.ids.numpy()
    return [(ids[at], scores) for at, scores in found]
