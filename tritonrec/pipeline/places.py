"""The places of a run: what its stages share, one type each.

    W ranks   M micro-batches   S rows that this rank looks up   K rows of this shard in the window

Per run there are the tables, the dense parameters with their gradients, and the process groups. A batch has
its samples, its routes, the rows it owns and a buffer. Micro-batches fill embeddings, gradients and losses.
Everything that is listed by table has an entry for each group of `HashTableCollection.groups`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NewType, TypeVar

import torch

from ..data import Batch
from ..distributed import Communicator
from ..embedding import HashTableCollection
from ..embedding.selection import trimmed
from ..embedding.table import DynamicTable
from ..kernels.deferred import DeferredErrors
from .dense import DenseModel
from .dist_plan import InputDist, RowDist, Splits
from .exchange_groups import ExchangeGroups
from .flight import Flight
from .model_call import Represented
from .reduce_scatter import ReplicaReduction
from .relays import Relay
from .run_agreement import RunAgreement
from .stage import filled_places, place
from .sums import Sums
from .window import LookupCounts, Window, WindowConfig
from .window_loss import WindowLoss

T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """What every stage may use, because no stage changes it.

    Args:
        config: see `WindowConfig`. device: of samples and buffers.
        tables: their layout: keys of lookups, dimensions, optimizers. Their rows are the place `Tables`.
        sums: how gradients are added up.
        replicated: gradients are added up over replicas of the tables in every update.
        replica: which of them this rank is.
        rank: of this process among all. stop: set where it was asked to stop.
        groups: of micro-batches that share an exchange. agreement: of several ranks, about their runs.
        copies: over whose number Adagrad's moments are taken.
    """

    config: WindowConfig
    device: torch.device
    tables: HashTableCollection
    sums: Sums
    replicated: bool
    replica: int
    rank: int
    stop: threading.Event
    groups: ExchangeGroups
    agreement: RunAgreement | None = None
    copies: int = 1


# Per run.


@place("run")
@dataclass(frozen=True)
class Dense:
    """The dense model with its optimizer, and the guard under which it computes."""

    flight: Flight
    model: DenseModel

    def update(self, gradients: torch.Tensor) -> None:
        """Update the model from the gradients (S,) of all parameters; see `DenseMeans`."""
        self.model.step(self.flight.views(gradients))


@place("run")
@dataclass(frozen=True)
class DenseGradient:
    """The sums of the dense gradients that backward passes leave in the accumulator of the flight."""

    flight: Flight

    def take(self) -> torch.Tensor:
        """(S,) the sums of all parameters but sharded and early ones; they start from zero again."""
        names = self.flight.early.others if self.flight.early.buckets else self.flight.replicated
        return self.flight.accumulator.take_flat(names)

    def reduce_scatter_mean(self, sums: Sums, over: Communicator, normalizer: int) -> torch.Tensor:
        """(S_r,) float32, the mean gradients of this rank's shards; their sums start from zero again."""
        shards, accumulator = self.flight.dense.shards, self.flight.accumulator
        if shards is None:
            return torch.zeros(0, dtype=torch.float32, device="cpu")
        return shards.reduce_scatter_mean(sums, over, accumulator, normalizer)

    def name_at(self, position: int) -> str:
        """The parameter, and the index in it, of a position in `DenseMeans.gradients`."""
        return self.flight.name_at(position)


@place("bucket")
@dataclass(frozen=True)
class EarlyGradient:
    """The sums of the gradients that backward completes first; see `EarlyDense`."""

    flight: Flight

    def take(self, bucket: int) -> torch.Tensor:
        """(S,) the sums of a bucket, which start from zero again; backward may go on to others."""
        return self.flight.accumulator.take_flat(self.flight.early.buckets[bucket], over=False)


Tables = NewType("Tables", list[DynamicTable])
RoutingGroup = NewType("RoutingGroup", Communicator)
ReplicaRoutingGroup = NewType("ReplicaRoutingGroup", Communicator)
RetrievalGroup = NewType("RetrievalGroup", Communicator)
CommunicationGroup = NewType("CommunicationGroup", Communicator)
ReplicaGroup = NewType("ReplicaGroup", Communicator)
ReduceGroup = NewType("ReduceGroup", Communicator)
NodeRoutingGroup = NewType("NodeRoutingGroup", Communicator)
RailRoutingGroup = NewType("RailRoutingGroup", Communicator)
NodeGroup = NewType("NodeGroup", Communicator)
RailGroup = NewType("RailGroup", Communicator)
Buffer = NewType("Buffer", list[torch.Tensor])
"""By table (K, row width) float32, the rows of a window. Windows alternate between the two buffers."""

place("run", has_rows=True)(Tables)
for group in (
    RoutingGroup, ReplicaRoutingGroup, CommunicationGroup, ReplicaGroup, ReduceGroup,
    NodeRoutingGroup, RailRoutingGroup, NodeGroup, RailGroup,
):  # fmt: skip
    place("run", group="device")(group)
place("run", group="host")(RetrievalGroup)  # it counts the rows of tables
place("run", has_rows=True)(Buffer)

# Per batch.

Samples = NewType("Samples", list[Batch])
"""[M] micro-batches in host memory."""
DeviceSamples = NewType("DeviceSamples", list[Batch])
"""[M] micro-batches on the device."""


@dataclass(frozen=True)
class Common:
    """Rows of one table that two windows share.

    Args:
        before, now: (n,) int64, rows of the last window's buffer and of this one's.
        count: () int64, the number of valid ones, behind which both are -1; None: all.
    """

    before: torch.Tensor
    now: torch.Tensor
    count: torch.Tensor | None

    def trimmed(self) -> Common:
        """The valid ones; waits for their number."""
        return Common(trimmed(self.before, self.count), trimmed(self.now, self.count), None)


KeptRows = NewType("KeptRows", list[Common])
"""By table the rows of K(t-1) & K(t)."""
EarlyMeans = NewType("EarlyMeans", list[tuple[torch.Tensor, torch.Tensor]])
"""By bucket of `EarlyDense` its gradients (S,) float32, as `DenseMeans`, and this rank's sums."""
place("batch", make=list)(EarlyMeans)
for kind in (Samples, DeviceSamples, KeptRows):
    place("batch")(kind)


@dataclass(frozen=True)
class ReceivedKeys:
    """The keys of one table that the input dist brought to their owner.

    Args:
        splits: [i][r] keys of micro-batch i from rank r.
        gradient_splits: [i][r] gradients that come back with micro-batch i from rank r.
        keys: (R,) int64 grouped by rank, distinct per rank and micro-batch after dedup.
        last_use: (R,) uint8 beside them, if known.
        replica_keys: [g] keys that replica g of this shard received, distinct ones where the host knows how
            many they are; [] without replicas.
        replica_last_use: [g] uint8 beside them, if known.
        distinct: whether no key is there twice (`InputDist`).
    """

    splits: Splits
    gradient_splits: Splits
    keys: torch.Tensor
    last_use: torch.Tensor | None
    replica_keys: list[torch.Tensor]
    replica_last_use: list[torch.Tensor]
    distinct: bool = False


@place("batch")
@dataclass(frozen=True)
class Routes:
    """The input dist of a window: which keys every rank sent to which owner, and the ranks' agreement.

    Args:
        tables: this rank's lookups. received: the keys that it owns, of all ranks.
        loss_normalizer: terms of the loss, every rank's samples together.
        row_normalizer: what gradients of rows are divided by: the same, unless replicas train on their own.
        stop: a rank was asked to stop before its keys were routed.
        relays: by table what this rank hands on to its node; [] where lookups go in one step.
    """

    tables: list[InputDist]
    received: list[ReceivedKeys]
    loss_normalizer: int
    row_normalizer: int
    stop: bool
    relays: list[Relay] = field(default_factory=list)


@dataclass(frozen=True)
class TableRows:
    """The rows of one table in a window, on their owner.

    Args:
        keys: (K,) int64, distinct. handles: (K,) of the rows in the table; -1: not admitted.
        count: () int64, the number of valid keys, behind which handles are -1; None: all of them.
        low_precision: (K,) bool, rows stored in 16 bits; None: none.
        sent: buffer rows that the output dist sends with each micro-batch.
        gradients: rows of the gradient sums that receive gradients with each micro-batch.
        replicas: [g] which of the keys replica g received, in the order of `ReceivedKeys.replica_keys`.
        reductions: [M] rows whose replicas' sums are complete after each micro-batch; [] without replicas.
    """

    keys: torch.Tensor
    handles: torch.Tensor
    count: torch.Tensor | None
    low_precision: torch.Tensor | None
    sent: RowDist
    gradients: RowDist
    replicas: list[torch.Tensor]
    reductions: list[ReplicaReduction]


@place("batch")
@dataclass(frozen=True)
class OwnedRows:
    """Which rows of this shard a window uses, by table, and which of them are sent where."""

    tables: list[TableRows]

    @property
    def most_keys(self) -> int:
        """Keys of all tables; with those that only padding makes, where a device knows the number."""
        return sum(table.keys.shape[0] for table in self.tables)


@place("batch")
@dataclass(frozen=True)
class DenseMeans:
    """What all ranks add up once in a window.

    Args:
        gradients: (S,) float32 of the mean loss, of all parameters; those of this rank's shards come first.
        loss: (1,) the mean loss.
        sums: this rank's; queued work may still read them.
        sharded: how many of the gradients are of this rank's shards.
    """

    gradients: torch.Tensor
    loss: torch.Tensor
    sums: torch.Tensor
    sharded: int = 0

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of this rank's shards, and those that every rank has."""
        return self.gradients[: self.sharded], self.gradients[self.sharded :]


@place("batch")
@dataclass(frozen=True)
class GradientNorm:
    """The norm of all gradients of an update, and what it does to them.

    Args:
        norm: () float64. scale: () float32, their factor.
    """

    norm: torch.Tensor
    scale: torch.Tensor

    @property
    def infinite(self) -> bool:
        """Whether a gradient is not finite; waits for a device."""
        return math.isinf(self.norm)


# Per micro-batch: a window's tasks fill one value.

Embeddings = NewType("Embeddings", list[torch.Tensor])
"""By table (S, dim), the rows received so far, in the precision of the exchange."""
Gradients = NewType("Gradients", list[torch.Tensor])
"""By table (S, dim), sums of the gradients of these rows, float32 or fixed-point."""
Relayed = NewType("Relayed", list[torch.Tensor])
"""By table, on a relay, the rows of its node received so far, as `Embeddings`."""
RelaySums = NewType("RelaySums", list[torch.Tensor])
"""By table, on a relay, sums of the gradients of these rows over the ranks of its node, in fixed point."""
RowGradient = NewType("RowGradient", list[torch.Tensor])
"""By table (distinct keys received, dim), sums on the owner, float32 or fixed-point."""
MeanGradient = NewType("MeanGradient", list[torch.Tensor])
"""By table (K, dim) float32, the gradients of the mean loss, from the sums of all ranks."""
Losses = NewType("Losses", dict[int, torch.Tensor])
"""By micro-batch (B,) float32, the losses of its samples."""
Outputs = NewType("Outputs", dict[int, dict[str, torch.Tensor]])
"""By micro-batch what the model recorded of its samples (`nn.record`), by name."""
for filled in (Embeddings, Gradients, Relayed, RelaySums, RowGradient, MeanGradient):
    place("micro_batch", make=list)(filled)
Representations = NewType("Representations", dict[int, Represented])
"""By micro-batch what its samples show to the others of the global batch, of a model with a `window_loss`."""
WindowLosses = NewType("WindowLosses", dict[int, WindowLoss])
"""By micro-batch the losses of these, and the gradients from which its backward starts."""
for by_micro_batch in (Losses, Outputs, Representations, WindowLosses):
    place("micro_batch", make=dict)(by_micro_batch)


class WindowPlaces:
    """The places of one window, from its first stage to its last.

    Args:
        window: what it is.
        previous: the places of the window before, while the pipeline has not run empty since.
        drops: errors of arithmetic are dropped (`DeferredErrors`).

    Attributes:
        errors: that its stages found on a device; read once, at the end.
    """

    def __init__(self, window: Window, previous: WindowPlaces | None = None, drops: bool = False):
        self.window, self.previous = window, previous
        # Made at once: tasks of several micro-batches, on several lanes, fill one list.
        self._values: dict[Any, Any] = {kind: make() for kind, make in filled_places()}
        self._counts: dict[tuple[str, int | None], LookupCounts] = {}
        self.errors = DeferredErrors(drops)

    def __getitem__(self, kind: Callable[..., T]) -> T:
        """The value of a place. Raises KeyError where no stage has written it."""
        return self._values[kind]

    def get(self, kind: Callable[..., T]) -> T | None:
        """The value of a place, None where no stage has written it."""
        return self._values.get(kind)

    def find(self, kind: Any, batch: int, optional: bool) -> Any:
        """The value of a place of this window, or with `batch` = 1 of the one before.

        None where an optional place is not written. Raises KeyError where another is not.
        """
        places = self.previous if batch else self
        if optional:
            return None if places is None else places.get(kind)
        assert places is not None
        return places[kind]

    def __setitem__(self, kind: Callable[..., T], value: T) -> None:
        self._values[kind] = value

    def counts(self, stage: str, micro_batch: int | None = None) -> LookupCounts:
        """The counts of one task: each has its own, so that no two lanes write the same."""
        # The `get` spares the making of an object that is there.
        found = self._counts.get((stage, micro_batch))
        return self._counts.setdefault((stage, micro_batch), LookupCounts()) if found is None else found

    def total_counts(self) -> LookupCounts:
        """The counts of all tasks, as numbers; the tasks have ended. Waits for a device, once."""
        total = LookupCounts()
        for counts in self._counts.values():
            total.add(counts)
        there = {name: value for name, value in vars(total).items() if isinstance(value, torch.Tensor)}
        if there:
            total = replace(
                total, **dict(zip(there, torch.stack(list(there.values())).tolist(), strict=True))
            )
        return total

    def retire(self) -> None:
        """After the last stage: keep what the next window reads."""
        # Without this a chain of windows would keep every buffer of the run alive.
        self.previous = None
        kept = {kind: self._values[kind] for kind in (OwnedRows, Buffer) if kind in self._values}
        self._values = kept
