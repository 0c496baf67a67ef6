"""A trainer that begins with what another training has learned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import checkpoint
from ..checkpoint import unflatten
from ..checkpoint.writer import columns_of
from ..distributed import Communicators
from ..embedding import HashTableCollection
from ..embedding.state_check import check_description
from ..embedding.warm_start import Choice, WarmStart, check_renames, choose_dense, choose_tables, tables_of
from ..files.places import Place
from ..kernels import launch
from .dense import DenseModel
from .saver import DENSE, EMBEDDING, whole_or_nothing


def warm_start(
    communicators: Communicators,
    tables: HashTableCollection,
    dense: DenseModel,
    source: str | Place | Mapping[str, Any],
    choice: Choice,
    step: int | None = None,
) -> WarmStart:
    """See `Trainer.warm_start`."""
    report = WarmStart()
    load: Callable[[], None]
    with whole_or_nothing(communicators) as checked:
        dense.check_idle("a warm start")
        if isinstance(source, Mapping):
            found, (there, values) = "", tables_of(source)
        else:
            found, there, values = _of_checkpoint(communicators, source, step)

        def owns(ids: torch.Tensor) -> torch.Tensor:
            return launch.owner_of(ids, communicators.shards) == communicators.shard

        load = choose_tables(tables, there, values, choice, report, owns)
        checked["digest"] = found
    with whole_or_nothing(communicators) as checked:  # of its own: sharded parameters are gathered in it
        own = dense.state_dict()["model"]
        taken = choose_dense(own, values, choice, report)
        check_renames(choice.rename, report)
        checked["digest"] = found
    load()
    dense.load_parameters(taken)
    return report


def _of_checkpoint(
    communicators: Communicators, directory: str | Place, step: int | None
) -> tuple[str, dict[str, Any], dict[str, torch.Tensor]]:
    """Its digest, tables, of the rows that this rank owns, and the dense tensors of a checkpoint."""
    loaded = checkpoint.load(directory, step, rank=communicators.shard, world_size=communicators.shards)
    plain, described = loaded.meta.get(DENSE), loaded.meta.get(EMBEDDING)
    if plain is None or described is None:
        raise ValueError(f"the checkpoint in {directory} was not saved by a Trainer of this version")
    check_description(described, columns_of(loaded.tables))
    tables = {}
    for name, table in described["tables"].items():
        columns = loaded.tables[name]
        tables[name] = columns["keys"], columns["rows"][:, : table["dim"]].contiguous()
    state = unflatten(plain, {f"{DENSE}/{name}": values for name, values in loaded.dense.items()})
    found = state.get("model") if isinstance(state, dict) else None
    if not isinstance(found, dict) or not all(isinstance(each, torch.Tensor) for each in found.values()):
        raise ValueError(f"the checkpoint in {directory} has no model")
    return loaded.digest, tables, found
