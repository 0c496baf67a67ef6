"""An exported DLRM with tables spread over processes, by all-to-alls of a bounded lag (arXiv 2512.19342).

Each rank holds some of the tables, whole. A batch goes to every rank: it looks up all samples in its tables,
sends the rows to the ranks of their samples, and computes the probabilities of its own block of samples
(`TableWiseDLRM`). With two ranks::

    front  -- batch -->  rank 0   tables a, d    rows of samples 2, 3 -->     probabilities of samples 0, 1
                         rank 1   tables b, c    <-- rows of samples 0, 1     probabilities of samples 2, 3

Dimensions: B samples, F dense features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data import ClickBatch, KeyedJaggedTensor, Lookup
from ..distributed import Communicators, RankDiedError, RankPool
from ..distributed.communicator import TIMEOUT
from ..files.places import Place
from ..nn import partition_tables
from .bounded_lag import BoundedLagAllToAll
from .inference import infer
from .predictor import Predictor
from .programs import CLICK
from .tables import TableWiseDLRM

CHUNK, LAG = 256, 2
"""Samples of an exchange at most; of a larger batch, ranks may be so many exchanges apart."""


class Ranks:
    """Processes that hold tables. They end with this one, or by `close`; after a failure of one all end."""

    def _start(self, ranks: int) -> None:
        self._ranks, self._lock, self._failure = ranks, Lock(), ""
        self._pool = RankPool([ranks])

    @property
    def failure(self) -> str:
        """Why they answer nothing any more; a process that has ended is a reason."""
        gone = [rank for rank, each in enumerate(self._pool.processes) if not each.is_alive()]
        return self._failure or (f"rank {gone[0]} has ended, load the model again" if gone else "")

    def close(self) -> None:
        """End the processes."""
        self._failure = self._failure or "it was closed"
        self._pool.close()

    def _run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each rank returns. After the failure of one all end, for they would wait for it."""
        with self._lock:
            if self._failure:
                raise RankDiedError(self._failure)
            try:
                return self._pool.run(function, self._ranks, *arguments)
            except RankDiedError as error:
                self._failure = f"the tables are gone, load the model again: {error}"
                self._pool.close()
                raise RankDiedError(self._failure, error.details) from error


class SpreadPredictor(Ranks, Predictor):
    """A `Predictor` of a DLRM with `ranks` processes that hold its tables; `predict` has the same bits.

    Args:
        path: of the export. ranks: 2 or more; those beyond the number of tables hold none. timeout: for a
            rank that does not answer another one; loading has the time that training has.

    The processes end with this one, or by `close`. Raises ValueError as `Predictor.load`, and for a model
    that is no DLRM or has pooled features; RankDiedError where a rank cannot load its tables, or finds
    another export than this one.
    """

    def __init__(self, path: Place | str, ranks: int, timeout: timedelta = TIMEOUT):
        front = Predictor.load(path, features=())
        facts = front.dense_of(CLICK, "a model whose tables are spread over processes")
        super().__init__(front.manifest, {}, front.program, front.vocabularies)
        features, tables = self.manifest["features"], self.manifest["tables"]
        pooled = [name for name in facts["features"] if features[name]["pooling"] != "none"]
        if pooled:
            raise ValueError(f"feature {pooled[0]!r} is pooled: only rows of single ids are spread")
        sizes = {name: each["rows"] * each["dim"] for name, each in tables.items()}
        of_tables = partition_tables(sizes, ranks)
        owners = {name: of_tables[features[name]["table"]] for name in facts["features"]}
        self._start(ranks)
        self._run(_open, str(path), self.manifest, owners, timeout)

    def rows(self, feature: str, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Refused: the rows are in other processes."""
        raise ValueError("the tables are spread over processes, which give probabilities alone")

    def clicks(self, dense: Tensor, ids: Mapping[str, Tensor | Lookup]) -> Tensor:
        """As of its base; no feature is pooled."""
        given = {name: each.numpy() for name, each in ids.items() if isinstance(each, Tensor)}
        of_ranks = self._run(_clicks, dense.detach().numpy(), given)
        blocks = [block for chunk in zip(*of_ranks, strict=True) for block in chunk]
        return torch.from_numpy(np.concatenate(blocks))


class _Program:
    """An exported program as `TableWiseDLRM` calls a `DLRM`."""

    def __init__(self, program: Any, features: list[str], dim: int):
        self.program, self.config = program, SimpleNamespace(features=tuple(features), dim=dim)

    def bottom_vectors(self, dense: Tensor) -> Tensor:
        return dense

    def top_logits(self, dense: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        if not len(dense):  # of a batch of fewer samples than ranks
            return dense.new_empty(0, 1)
        logits: Tensor = self.program(dense, torch.stack([rows[name] for name in self.config.features], 1))
        return logits


_opened: dict[str, Any] = {}
"""Of a rank's process: its model and its exchange."""


def _open(
    communicators: Communicators,
    path: str,
    manifest: dict[str, Any],
    owners: dict[str, int],
    timeout: timedelta,
) -> None:
    """Load this rank's tables, and meet the other ranks."""
    rank, world_size = communicators.rank, communicators.world_size
    own = [name for name, owner in owners.items() if owner == rank]
    loaded = Predictor.load(path, features=own)
    if loaded.manifest != manifest:
        raise ValueError(f"{path} has become another export while its tables were loaded: load it again")
    names = loaded.dense_of(CLICK, "spread")["features"]
    dim = loaded.manifest["tables"][loaded.manifest["features"][names[0]]["table"]]["dim"]
    program: Any = _Program(loaded.program, names, dim)
    rows = {name: partial(loaded.rows, name) for name in own}
    model = TableWiseDLRM(program, owners, rows, rank, world_size)
    communicators.control.all_gather(
        torch.zeros(1, dtype=torch.int64, device="cpu")
    )  # all have loaded; now a limit holds
    exchange = BoundedLagAllToAll(communicators.control.group, LAG, model.capacity(CHUNK), timeout)
    exchange.connect()
    _opened.update(model=model, exchange=exchange)


def _clicks(_: Communicators, dense: np.ndarray, ids: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Probabilities of this rank's block of each chunk."""
    chunks = [slice(at, at + CHUNK) for at in range(0, max(len(dense), 1), CHUNK)]
    found = infer(_opened["model"], (_batch(dense[each], ids, each) for each in chunks), _opened["exchange"])
    return [each.numpy() for each in found]


def _batch(dense: np.ndarray, ids: dict[str, np.ndarray], chunk: slice) -> ClickBatch:
    features = {name: Lookup(torch.from_numpy(each[chunk])) for name, each in ids.items()}
    none = torch.zeros(len(dense), dtype=torch.int64, device="cpu")
    return ClickBatch(0, none, KeyedJaggedTensor.from_dict(features), torch.from_numpy(dense), none)
