"""How good a next-item model is: a full ranking of every user's held-out item, as the model was trained.

Nobody gathers the tables. A rank ranks among the items that it owns, and the number of items above a user's
is the sum over the ranks:

    rank r   encodes every W-th batch, from rows of all ranks        user vectors, to all
             scores its own items, a block at a time                 items above each user's, to all

A score has the same bits in any block (`ops.linear`), so the result is that of one process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from .. import ops
from ..data import JaggedBatch, Lookup
from ..data.loader import NextItems
from ..data.ranking import RankCounter, checked_ks, ranking_metrics
from ..data.splits import Part
from ..distributed.communicator import Communicator
from ..embedding import HashTableCollection
from ..embedding.features import SupportsLookup
from .precision import Precision, autocast

BLOCK_ITEMS, BLOCK_SCORES = 1 << 13, 1 << 21
"""Items that are scored at a time, and scores, at most: 8 MiB."""


class RowsOfRanks:
    """The rows of all ranks, which these look up together to evaluate a model.

    Args:
        tables: of this rank. over: the ranks that have one shard each; by default this one has all rows.
    """

    def __init__(self, tables: HashTableCollection, over: Communicator | None = None):
        self.tables, self.over = tables, over or Communicator()

    def peek(self, lookups: Mapping[str, SupportsLookup]) -> dict[str, torch.Tensor]:
        """`HashTableCollection.peek` at the owners. Collective: all ranks call it as often, with any ids."""
        return self.tables.peek(lookups, self.over)

    def shares(self, batches: Iterable[Any]) -> Iterator[tuple[list[Any], Any]]:
        """Batches of all ranks, as many as these at a time, and which this rank takes.

        The last ones may be fewer: then ranks take the last of these, too, so that all take part. Raises
        ValueError on all ranks where their batches have other samples.
        """
        rest, more = iter(batches), True
        while more:
            some = list(islice(rest, self.over.world_size))
            self.agree("samples", *(getattr(each, "history", each).sample_ids for each in some))
            if more := bool(some):
                yield some, some[min(self.over.rank, len(some) - 1)]

    def agree(self, what: str, *values: Any) -> None:
        """Raise ValueError on all ranks where `what` they evaluate by differs; of tensors all bytes count."""
        if self.over.world_size == 1:
            return
        found = hashlib.sha256()
        for each in values:
            found.update(each.numpy().tobytes() if isinstance(each, torch.Tensor) else repr(each).encode())
        digests = self.over.all_gather_texts(found.hexdigest())
        for rank, each in enumerate(digests):
            if each != digests[0]:
                raise ValueError(
                    f"rank {rank} evaluates by other {what} than rank 0: ranks evaluate together, so "
                    "give all the same log, split and arguments"
                )

    def scored(
        self, batches: Iterable[Any], score: Callable[[Any], torch.Tensor]
    ) -> Iterator[tuple[Any, torch.Tensor]]:
        """Every batch with its scores on the host, of which each rank computes a share. Collective.

        All ranks give the same batches.
        """
        for some, own in self.shares(batches):
            yield from zip(some, self.over.all_gather(score(own).detach().cpu()), strict=False)


def rank_held_out(
    model: Any,
    rows: RowsOfRanks,
    loader: NextItems,
    ks: Sequence[int] = (10,),
    precision: Precision = "float32",
    part: Part = "test",
    exclude_seen: bool = True,
) -> dict[str, float]:
    """``{"HR@10": ..., "NDCG@10": ...}`` of a full ranking of the held-out items of a part (`data.evaluate`).

    Args:
        model: ``encode(history, rows)`` gives hidden states (L, D) of a `JaggedBatch`, from the rows (L, D)
            of its items. It is in evaluation mode meanwhile.
        rows: of the feature ``item``. All of its ranks call this.
        precision: of the model's arithmetic; scores are float32, of which few are equal.
    """
    ks = checked_ks(ks)
    training = model.training
    model.eval()
    try:
        ranks = _ranks(model, rows, loader, precision, part, exclude_seen)
        return ranking_metrics(ranks, ks, loader.num_items)
    finally:
        model.train(training)


def _ranks(
    model: Any,
    rows: RowsOfRanks,
    loader: NextItems,
    precision: Precision,
    part: Part,
    exclude_seen: bool,
) -> Iterator[torch.Tensor]:
    """Ranks (b,) of held-out items, see `data.ranking.target_ranks`, of some batches after the other."""
    vectors_of, catalogue, over = _user_vectors(model, rows, precision), loader.catalogue, rows.over
    rows.agree("items", catalogue, part, exclude_seen)
    table = rows.tables.features["item"].table or "item"
    own = (ops.owner_of(catalogue, over.world_size) == over.rank).nonzero()[:, 0]
    for batches, mine in rows.shares(loader.evaluation_batches(part=part)):
        vectors = vectors_of(mine.history)
        targets = Lookup(catalogue[mine.targets.clamp(min=0)].to(vectors.device))
        scores = ops.linear(vectors, rows.peek({"item": targets})["item"], None).diagonal()
        sent = over.all_gather(torch.cat([vectors, scores[:, None]], 1).cpu())
        found = torch.cat(sent[: len(batches)])  # a rank without a batch of its own has sent another's
        counter = RankCounter(batches, found[:, -1], loader, exclude_seen)
        users = found[:, :-1].to(vectors.device).contiguous()
        for places in own.split(max(1, min(BLOCK_SCORES // len(users), BLOCK_ITEMS))):
            weights = rows.tables.current_rows(table, catalogue[places])[:, : users.shape[1]]
            weights = weights.to(users.device)
            counter.count(ops.linear(users, weights, None).cpu(), places)
        yield counter.ranks(over.all_gather)


def _user_vectors(
    model: Any, tables: HashTableCollection | RowsOfRanks, precision: Precision
) -> Callable[[JaggedBatch], torch.Tensor]:
    """The vectors (B, D) float32 of histories, on the model's device: the last token stands for the user."""
    device = next((each.device for each in model.parameters()), torch.device("cpu"))

    def vectors(history: JaggedBatch) -> torch.Tensor:
        history = history.to(device)
        rows = tables.peek({"item": Lookup(history.ids)})["item"]
        with torch.no_grad(), autocast(precision, device):
            hidden: torch.Tensor = model.encode(history, rows).to(torch.float32)
        return hidden[history.offsets[1:] - 1]

    return vectors


def next_item_scores(
    model: Any,
    tables: HashTableCollection | RowsOfRanks,
    catalogue: torch.Tensor,
    precision: Precision = "float32",
) -> Callable[[JaggedBatch], torch.Tensor]:
    """The scores (B, I) float32 of items (I,) for each history, of a model as `rank_held_out` takes it.

    They are on the model's device. The linear op scores each user alone.
    """
    vectors_of = _user_vectors(model, tables, precision)
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    items = tables.peek({"item": Lookup(catalogue.to(device))})["item"]
    return lambda history: ops.linear(vectors_of(history), items, None)
