"""Memory that a table takes for more rows, and a model and its tables in all, before they have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..data import Batch
from ..embedding import DynamicTable, HashTableCollection
from ..embedding.key_index import LOAD_FACTOR, SLOT_BYTES, SLOTS_CLEARED_PER_KEY, SLOTS_MOVED_PER_KEY
from ..embedding.policy import ROW_BYTES
from ..embedding.row_file import SPOOLED
from ..embedding.snapshot import COPIED
from ..pipeline.model_call import samples_of
from ..settings import bytes_of, typed

SNAPSHOT_BYTES = 16
"""Of a row while a checkpoint is written: its key, handle and a mark (`tritonrec.embedding.snapshot`)."""

CALLED = SLOTS_CLEARED_PER_KEY * 2 * SLOTS_MOVED_PER_KEY // (SLOTS_CLEARED_PER_KEY + 2 * SLOTS_MOVED_PER_KEY)
"""Slots of a key structure for each key that is looked up until it has the keys of its half."""

METADATA_BYTES = 16
"""Of a row at most for each policy, where the table is small; beyond that it grows as it did."""
WAITING_BYTES, WAITING_SAVED = 48, 54
"""Of a key at most that waits for a row, its slots with columns that double; and more of one in a save."""
LAST_STEPS_BYTES = 16
"""More of a row once lru evicts: rows by their last step, and those that were used again."""
COLUMNS_BYTES = 5
"""Of a row in a save for each policy: its number, and whether a buffer has the row."""
PASS_BYTES, LFU_PASS_BYTES = 60, 80
"""Of a row of the table while a policy chooses among all of them; lru does in its first pass."""


@dataclass(frozen=True)
class Sizes:
    """What a shard of a table has in host memory, bytes, and by what it grows.

    Args:
        rows: of the shard. row_bytes: of a row's float32 values.
        keys: of the key structure; 0 where it is on a device. metadata: of scores, counts and locations.
        policies: that keep metadata. most: of values, where other rows are on disk; None: no bound.
        weight_bytes: of a row's weights; the rest of `row_bytes` are states of the optimizer.
        size: beyond which rows are in 16 bits, with `ROW_BYTES` each; None: `PrecisionTiers` go by no size.
        most_keys: bytes of a key structure in memory, a larger one is on disk; None: no bound.
        low: share of the values that 16 bits save, of tiers that go by use.
        waiting: bytes of keys that wait for a row.
        passing: bytes a row while a policy chooses among all rows; beyond: only in a table of more rows.
        kept: bytes a row that passes keep from then on.
    """

    rows: int
    row_bytes: int
    keys: int
    metadata: int
    policies: int
    most: int | None = None
    weight_bytes: int = 0
    size: int | None = None
    most_keys: int | None = None
    low: float = 0.0
    waiting: int = 0
    passing: int = 0
    beyond: int = 0
    kept: int = 0

    def shard(self, shards: int) -> Sizes:
        """Of one of so many, whose whole table the sizes are of by which policies go."""
        size = None if self.size is None else self.size // shards
        return replace(self, size=size, beyond=self.beyond // shards)

    def saving(self, rows: int) -> int:
        """More bytes of so many rows in a save; those in a large file are put into its order first."""
        ordered = self.most is not None and rows * self.row_bytes > SPOOLED
        return (SNAPSHOT_BYTES + COLUMNS_BYTES * self.policies) * rows + ordered * (3 * COPIED + 9 * rows)

    def values(self, rows: int) -> int:
        """Bytes of the values of so many rows."""
        size = int(rows * self.row_bytes * (1 - self.low))
        if self.size is not None:
            size = min(size, max(self.size - ROW_BYTES * rows, size // 2))
        return size if self.most is None else min(size, self.most)

    def weights(self, rows: int) -> int:
        """Bytes of the weights among `values`."""
        return self.values(rows) * self.weight_bytes // max(self.row_bytes, 1)

    def added(self, rows: int, at_peak: bool = True) -> int:
        """Bytes that `rows` more rows add; a bound from above for rows in two tiers of precision.

        Rows and metadata grow with their number. The key structure doubles where its load passes 0.75, and
        both structures are there until the keys have moved; without `at_peak` the old one is gone.
        """
        then = self.rows + rows
        slots = max(self.keys // SLOT_BYTES, 1)
        before = needed = 1 << (slots.bit_length() - 1)  # while keys move, those of the larger structure
        highest = 0

        def moment(rows: int, *slots: int) -> int:
            """Of values, a pass over all rows, and key structures."""
            passing = self.passing * rows * (rows > self.beyond)
            return self.values(rows) + passing + sum(self._structure(each) for each in slots)

        while self.keys and then > LOAD_FACTOR * needed:
            old, needed = needed, 2 * needed
            highest = max(highest, moment(min(int(LOAD_FACTOR * old) + needed // CALLED, then), old, needed))
        if at_peak:
            added = max(moment(then, needed), highest) - moment(self.rows, before)
        else:
            added = self.values(then) + self._structure(needed)
            added -= self.values(self.rows) + self._structure(before)
        doublings = max((then - 1).bit_length() - max(self.rows - 1, 1).bit_length(), 0)
        by_rows = (self.policies * METADATA_BYTES + self.kept * (then > self.beyond)) * then - self.metadata
        return added + max(self.metadata * (2**doublings - 1), by_rows, 0)

    def _structure(self, slots: int) -> int:
        """Bytes in memory of a key structure."""
        size = SLOT_BYTES * slots
        return size if self.keys and (self.most_keys is None or size <= self.most_keys) else 0


def sizes_of(table: DynamicTable) -> Sizes:
    """Of a shard, with the `size` of the whole table. On a device nothing is in host memory; a ``"cached"``
    table has its rows there, and one on disk those of recent lookups.
    """
    placement, memory = table.placement.chosen(), table.memory()
    storage = placement.storage
    host = storage in ("host", "disk")
    policies = sum(each is not None for each in (table.policy.eviction, table.policy.precision))
    eviction, tiers, size = table.policy.eviction, table.policy.precision, None
    members, row_bytes, kept, low = len(table.layout.names), 4 * table.row_width, 0, 0.0
    passes = [(0, 0)]  # bytes a row, rows beyond which there are any
    if eviction and (capacity := eviction.rows_of(table.row_width)):
        by_age = eviction.policy == "lru"
        passes.append((PASS_BYTES if by_age else LFU_PASS_BYTES, members * capacity))
        kept = LAST_STEPS_BYTES if by_age else 0
    if tiers and isinstance(tiers.threshold, str):
        most = members * bytes_of(tiers.threshold)
        passes.append((PASS_BYTES, most // (row_bytes + ROW_BYTES)))
        size = None if placement.path else most  # a file has 32 bits for each value
    elif tiers:
        passes.append((PASS_BYTES, 0))
        low = memory["saved_by_fp16"] / max(len(table) * row_bytes, 1)
    passing, beyond = max(passes) if host else (0, 0)
    return Sizes(
        len(table),
        0 if storage == "device" else row_bytes,
        memory["key_structure"] if host else 0,
        memory["metadata"] if host else 0,
        policies if host else 0,
        bytes_of(placement.memory) if placement.path else None,
        0 if storage == "device" else 4 * table.dim,
        size,
        bytes_of(placement.index_memory) if placement.index_memory else None,
        low if host else 0.0,
        memory["candidates"] if host else 0,
        passing,
        beyond,
        kept if host else 0,
    )


def tables_added(tables: HashTableCollection, rows: Sequence[int], shards: int = 1) -> int:
    """Bytes that as many more rows of each of ``tables.groups`` add on this rank, one of so many that share
    them, at most at one time.
    """
    pairs = zip(tables.groups, rows, strict=True)
    return sum(sizes_of(group.table).shard(shards).added(count) for group, count in pairs)


@dataclass(frozen=True)
class Foretold:
    """Bytes of a rank's host memory, without what only a trial tells: libraries, windows, backward's own.

    Args:
        dense: parameters and buffers. gradients: theirs. dense_states: of their optimizer.
        rows: weights of rows in memory. states: of their update rule. keys: with scores and counts.
        doubling: of the key structure, for a while. saving: while a checkpoint is written.
        activations: that a micro-batch's forward keeps for its backward, of a `batch` that was given.
    """

    dense: int
    gradients: int
    dense_states: int
    rows: int
    states: int
    keys: int
    doubling: int
    saving: int
    activations: int

    @property
    def total(self) -> int:
        """All of them at one time, which is at most."""
        return sum(vars(self).values())


@typed
def foretell(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tables: HashTableCollection,
    rows: Mapping[str, int],
    world_size: int = 1,
    batch: Batch | None = None,
) -> Foretold:
    """What a rank will have of a model that is nowhere yet.

    Args:
        model: on the device ``"meta"``; it gets gradients there, and the optimizer makes a step.
        optimizer: of its parameters.
        tables: still empty. rows: of each logical table at the end, over all ranks, by its name.
        batch: a micro-batch of a rank; its forward runs on the device ``"meta"``, where nothing is computed.

    Raises ValueError for a model elsewhere, whose weights the step would change, for other tables, and for a
    model whose forward asks for values.
    """
    parameters = [each for each in model.parameters() if each.requires_grad]
    held = [*model.parameters(), *model.buffers()]
    if elsewhere := {str(each.device) for each in held if not each.is_meta}:
        raise ValueError(
            f"the model is on {', '.join(sorted(elsewhere))}: make it and its optimizer under "
            "torch.device('meta'), where nothing is allocated"
        )
    if sorted(rows) != tables.table_names or min(rows.values(), default=0) < 0:
        raise ValueError(f"rows of the tables {tables.table_names} are needed, at least 0, got {dict(rows)}")
    activations = 0 if batch is None else _kept(model, batch.to("meta"), tables)
    for each in parameters:
        each.grad = torch.zeros_like(each)
    optimizer.step()
    states = [each for by in optimizer.state.values() for each in by.values() if torch.is_tensor(each)]
    ends = [
        (
            sizes_of(group.table).shard(world_size),
            -(-sum(rows[name] for name in group.layout.names) // world_size),
        )
        for group in tables.groups
    ]
    values = sum(table.values(count) for table, count in ends)
    weights = sum(table.weights(count) for table, count in ends)
    peak, end = (
        sum(table.keys + table.metadata + table.added(count, at_peak) for table, count in ends)
        for at_peak in (True, False)
    )
    return Foretold(
        dense=sum(each.nbytes for each in held),
        gradients=sum(each.nbytes for each in parameters),
        dense_states=sum(each.nbytes for each in states),
        rows=weights,
        states=values - weights,
        keys=end - values,
        doubling=peak - end,
        saving=sum(table.saving(count) for table, count in ends),
        activations=activations,
    )


def _kept(model: torch.nn.Module, batch: Batch, tables: HashTableCollection) -> int:
    """Bytes that a forward of the batch keeps for its backward beside parameters; all on ``"meta"``."""
    rows = {}
    for name, lookup in batch.lookups().items():
        feature = tables.features[name]
        count = len(lookup.ids)
        if feature.pooling != "none":
            assert lookup.offsets is not None
            count = len(lookup.offsets) - 1
        rows[name] = torch.empty(count, feature.dim, dtype=torch.float32, device="meta", requires_grad=True)
    kept: dict[int, torch.UntypedStorage] = {}  # views share one, and it has one object while that is held

    def keep(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        kept[id(storage)] = storage
        return saved

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved)
    try:
        with hooks, samples_of(model, batch, 0):
            losses = model(batch, rows, 0)
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"the model's forward asks for values, which the device 'meta' does not have ({error}): leave "
            "batch= out, or try a few steps with `tritonrec plan`"
        ) from error
    del losses
    own = {id(each.untyped_storage()) for each in model.parameters()}
    return sum(storage.nbytes() for number, storage in kept.items() if number not in own)
