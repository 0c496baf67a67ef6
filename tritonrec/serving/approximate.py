"""Approximate retrieval by faiss: which items are looked at is approximate, their scores are not.

The index proposes items of each user by the inner product. Their scores are computed anew by `ops.linear`, so
each has the bits of exact retrieval, and so has their order.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .. import ops
from ..optional import require
from .predictor import Predictor
from .programs import NEXT_ITEM
from .retrieval import recall, top_k

Index = Literal["ivf", "hnsw"]
INDEXES: tuple[Index, ...] = get_args(Index)
USERS, WANTED, SEED = 256, 100, 0
"""Of the recall that is measured: drawn histories, items of each."""


class ApproximatePredictor(Predictor):
    """A `Predictor` whose `retrieve` looks at the items that an index proposes; all else is as before.

    Attributes:
        recall: the share of the exact best items that were found, over `USERS` drawn histories.
    """

    def __init__(self, exact: Predictor, index: Index = "hnsw"):
        """Build an index: ``"hnsw"``, or ``"ivf"``, of the root of the items as cells, of which
        an eighth is searched.

        Raises ValueError for another word, and for a model that is not of the next item.
        `MissingPackageError` without faiss.
        """
        if index not in INDEXES:
            raise ValueError(f"index must be {' or '.join(INDEXES)}, got {index!r}")
        exact.dense_of(NEXT_ITEM, "an approximate retrieval")
        super().__init__(exact.manifest, exact.tables, exact.program, exact.vocabularies)
        self._index = _built(self._items().whole, index)
        self.recall = self._measured(exact)

    def best_without(self, vectors: Tensor, k: int, places: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """As of its base, among what the index proposes; exact for a user to whom it proposes too little."""
        table, counts = self._items(), offsets.diff()
        most = min(len(table.ids), 2 * k + int(counts.max()) if len(counts) else k)
        proposed = torch.from_numpy(self._index.search(vectors.numpy(), most)[1])
        ids = torch.empty(len(vectors), k, dtype=torch.int64, device="cpu")
        scores = torch.empty(len(vectors), k, dtype=torch.float32, device="cpu")
        for user in range(len(vectors)):
            seen = places[offsets[user] : offsets[user + 1]]
            own = proposed[user].sort().values  # ascending: of equal scores the smaller id comes first
            own = own[(own >= 0) & ~torch.isin(own, seen)]
            one = vectors[user : user + 1]
            if len(own) < k:
                alone = torch.tensor([0, len(seen)], dtype=torch.int64, device="cpu")
                ids[user : user + 1], scores[user : user + 1] = super().best_without(one, k, seen, alone)
                continue
            best, scores[user : user + 1] = top_k(ops.linear(one, table.whole[own], None), k)
            ids[user] = table.ids[own[best[0]]]
        return ids, scores

    def _measured(self, exact: Predictor) -> float:
        draw = torch.Generator().manual_seed(SEED)
        longest = self.manifest["dense"]["max_seq_len"]
        lengths = torch.randint(1, longest + 1, (USERS,), generator=draw, device="cpu").tolist()
        drawn = torch.randint(len(self.item_ids), (sum(lengths),), generator=draw, device="cpu")
        histories = list(self.item_ids[drawn].split(lengths))
        times = (
            [torch.arange(length, device="cpu") for length in lengths]
            if self.manifest["dense"]["timestamps"]
            else None
        )
        k = min(WANTED, len(self.item_ids))
        found, wanted = (each.retrieve(histories, k, times, exclude=None)[0] for each in (self, exact))
        return recall(found, wanted)


def _built(items: Tensor, index: Index) -> Any:
    require("faiss", "an approximate retrieval")
    import faiss

    cells = max(1, int(len(items) ** 0.5))
    name = f"IVF{cells},Flat" if index == "ivf" else "HNSW32"
    made: Any = faiss.index_factory(items.shape[1], name, faiss.METRIC_INNER_PRODUCT)
    made.train(items.numpy())
    made.add(items.numpy())
    if index == "ivf":
        made.nprobe = max(1, cells // 8)
    else:
        made.hnsw.efSearch = 2 * WANTED
    return made
