"""Features, the tables they look up, and the merging of tables (MTGRBoost, section 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from .. import ops
from ..data.jagged import WeightedLookup
from ..distributed.communicator import Communicator
from ..settings import check_number, typed
from .bags import Pooling, Rows, first_columns, parts, pool, weighted_rows
from .change_log import CHECKPOINT
from .key_layout import KeyLayout, part_name
from .policy import DeviceRoom, Placement, TablePolicy
from .row_exchange import rows_of_owners
from .row_optimizer import RowOptimizer
from .snapshot import SnapshotRows
from .state_check import check_numbers, check_state
from .table import DynamicTable, State


class SupportsLookup(Protocol):
    """Lookup of a feature in a batch: ids (n,) int64, and offsets (m + 1,) int64 of m bags, or None."""

    @property
    def ids(self) -> torch.Tensor: ...

    @property
    def offsets(self) -> torch.Tensor | None: ...


@typed
@dataclass(frozen=True)
class FeatureConfig:
    """A feature, its table, and the pooling of its rows.

    Args:
        name: of the feature, in batches and models.
        dim: columns of an embedding.
        table: name of the table, which several features may share; by default the feature's name.
        pooling: ``"none"`` gives a row for every id, ``"sum"`` and ``"mean"`` one for every bag of ids (zeros
            for an empty bag). A `WeightedLookup` needs ``"sum"``.
        scale: initial weights are uniform in [-scale, scale); ``dim ** -0.5`` if left out.
        optimizer: update rule of the rows; by default the collection's.
        policy: eviction, admission and precision tiers.
        placement: where the table is; by default where the collection's are.
        merge: False keeps the table apart; then all 2**64 ids are legal.
    """

    name: str
    dim: int
    table: str = ""
    pooling: Pooling = "none"
    scale: float | None = None
    optimizer: RowOptimizer | None = None
    policy: TablePolicy = field(default_factory=TablePolicy)
    placement: Placement | None = None
    merge: bool = True

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a feature needs a name")
        if self.dim < 1:
            raise ValueError(f"feature {self.name!r}: dim must be at least 1, got {self.dim}")
        check_number(f"feature {self.name!r}: scale", self.scale or 0.0)


@dataclass(frozen=True)
class TableGroup:
    """Logical tables merged into one: a single lookup and a single exchange serve all their features.

    `features` pairs each feature's name with the member number of its table in `layout`.
    """

    table: DynamicTable
    optimizer: RowOptimizer
    layout: KeyLayout
    features: tuple[tuple[str, int], ...]


@typed
class HashTableCollection:
    """The tables of a model, made from its features and merged where possible (MTGRBoost, section 4.2).

    Tables of near dims and of one optimizer, policy and placement become one `DynamicTable`: `KeyLayout`
    keeps their ids apart, and narrower rows have zeros behind them. Merging changes the number of lookups and
    exchanges of a step, and no bit of its results: initial values, eviction and owners depend on table name
    and id only.

    Args:
        features: of the model; their order has no effect.
        optimizer: update rule for features without one of their own.
        merge: False keeps every table apart.
        seed: of the initial values.
        slots, chunk_rows: see `DynamicTable`.
        placement: where tables are whose features do not say; in host memory by default.

    Raises ValueError where features that share a table disagree about it, and for lazy weight decay with
    precision tiers, which would round the numbers of the rows' last updates.
    """

    def __init__(
        self,
        features: Sequence[FeatureConfig],
        optimizer: RowOptimizer | None = None,
        *,
        merge: bool = True,
        seed: int = 0,
        slots: int = 1024,
        chunk_rows: int = 65536,
        placement: Placement | None = None,
    ):
        rule = optimizer or RowOptimizer()
        if isinstance(features, FeatureConfig):
            raise TypeError("features are several: [FeatureConfig(name, dim)]")
        features = list(features)
        if wrong := [each for each in features if not isinstance(each, FeatureConfig)]:
            raise TypeError(f"features are given as FeatureConfig(name, dim), got {wrong[0]!r}")
        self.features = {feature.name: feature for feature in sorted(features, key=lambda f: f.name)}
        if not features or len(self.features) != len(features):
            raise ValueError(f"features need distinct names, got {[feature.name for feature in features]}")
        self.seed, self.merge = seed, merge
        self._arguments: dict[str, Any] = {
            "features": list(features), "optimizer": rule, "merge": merge, "slots": slots,
            "chunk_rows": chunk_rows, "placement": placement,
        }  # fmt: skip
        tables: dict[str, FeatureConfig] = {}
        for feature in self.features.values():
            name = feature.table or feature.name
            own = feature.optimizer or rule
            feature = replace(feature, optimizer=own)
            if own.lazy_weight_decay and feature.policy.precision is not None:
                raise ValueError(
                    f"table {name!r} has lazy weight decay and precision tiers: 16 bits do not hold the "
                    "number of a row's last update; leave out one of them"
                )
            known = tables.setdefault(name, feature)
            if _table_settings(known) != _table_settings(feature):
                raise ValueError(
                    f"features {known.name!r} and {feature.name!r} share table {name!r} but differ in dim, "
                    "scale, optimizer, policy, placement or merge: give both the same"
                )
        members: dict[object, list[str]] = {}
        for name, feature in tables.items():
            alike = _mergeable(feature) if merge and feature.merge else name
            members.setdefault(alike, []).append(name)
        self.groups: list[TableGroup] = []
        room = DeviceRoom()
        self._location: dict[str, tuple[int, int]] = {}  # table name -> group, member
        for names in sorted(sorted(names) for names in members.values()):
            feature, dims = tables[names[0]], tuple(tables[name].dim for name in names)
            layout = KeyLayout(tuple(names), dims)
            own = feature.optimizer or rule
            scales = (tables[name].scale for name in names)
            table = DynamicTable(
                max(dims), own.row_width(max(dims)), layout=layout, seed=seed,
                scale=[dim**-0.5 if some is None else some for dim, some in zip(dims, scales, strict=True)],
                slots=slots, chunk_rows=chunk_rows, policy=feature.policy,
                placement=room.place(
                    feature.placement or placement, feature.policy, own.row_width(max(dims)), len(names)
                ),
            )  # fmt: skip
            for member, name in enumerate(names):
                self._location[name] = len(self.groups), member
            using = tuple(
                (f.name, names.index(f.table or f.name))
                for f in self.features.values()
                if (f.table or f.name) in names
            )
            self.groups.append(TableGroup(table, own, layout, using))
        ids = [table_id for group in self.groups for table_id in group.layout.table_ids]
        if len(set(ids)) != len(ids):
            raise ValueError(f"table names {sorted(tables)} collide in their 32-bit hash; rename one")

    @property
    def table_names(self) -> list[str]:
        """Names of the logical tables, ascending."""
        return sorted(self._location)

    def keys(self, lookups: Mapping[str, SupportsLookup]) -> list[torch.Tensor]:
        """For each group the keys (n,) int64 of its features' ids, one feature after another."""
        if lookups.keys() != self.features.keys():
            raise ValueError(
                f"the batch looks up features {sorted(lookups)}, the tables serve {list(self.features)}"
            )
        found = []
        for group in self.groups:
            names, members = zip(*group.features, strict=True)
            found.append(group.layout.pack_all(members, [lookups[name].ids for name in names], names))
        return found

    def validate(self, lookups: Mapping[str, SupportsLookup]) -> None:
        """Raise ValueError for an id that does not fit into the keys of its table."""
        for group in self.groups:
            for name, _member in group.features:
                group.layout.validate(lookups[name].ids, name)

    def by_feature(
        self,
        rows: Sequence[Rows],
        lookups: Mapping[str, SupportsLookup],
        *,
        indexed: bool = False,
    ) -> dict[str, Any]:
        """Rows by feature, pooled by `FeatureConfig.pooling`: the input of the model.

        Args:
            rows: for each group (n, dim) float32, the rows of `keys`, or `ops.IndexedRows` of them, which
                are pooled where they lie, or their `BagSums`. Differentiable.
            indexed: a feature without pooling that has its table alone gets its `ops.IndexedRows` as they
                are; otherwise they are gathered.

        Raises ValueError for a lookup that does not fit the pooling of its feature.
        """
        found: dict[str, Any] = {}
        for group, group_rows in zip(self.groups, rows, strict=True):
            names = [name for name, _ in group.features]
            for name, part in zip(names, parts(group_rows, [lookups[n] for n in names]), strict=True):
                feature, lookup = self.features[name], lookups[name]
                pooled = feature.pooling != "none"
                keeps = pooled or (indexed and len(names) == 1)
                if isinstance(part, ops.IndexedRows) and (isinstance(lookup, WeightedLookup) or not keeps):
                    part = part.gathered()
                if isinstance(part, torch.Tensor):
                    part = weighted_rows(name, first_columns(part, feature.dim), feature.pooling, lookup)
                if pooled:
                    if lookup.offsets is None:
                        raise ValueError(f"feature {name!r} is pooled, but its lookup has no offsets of bags")
                    part = pool(part, lookup.offsets, feature.pooling)
                found[name] = first_columns(part, feature.dim) if isinstance(part, torch.Tensor) else part
        return found

    def pools(self, group: TableGroup) -> bool:
        """Whether a feature of the group is pooled."""
        return any(self.features[name].pooling != "none" for name, _ in group.features)

    def peek(
        self, lookups: Mapping[str, SupportsLookup], over: Communicator | None = None
    ) -> dict[str, torch.Tensor]:
        """Rows by feature, as from `by_feature`, without side effects: no insert, count or eviction.

        An id without a row reads as its initial values. With `over`, of the ranks that have one shard each,
        ids are looked up at their owners; then it is collective, and each rank asks for what it needs.
        """
        over, keys = over or Communicator(), self.keys(lookups)
        home = keys[0].device
        keys = [each.to(group.table.device) for group, each in zip(self.groups, keys, strict=True)]
        routes, values = rows_of_owners(
            [group.table for group in self.groups], keys, over,
            lambda table, own: table.gather(table.find(own), own)[:, : table.dim],
        )  # fmt: skip
        rows: list[Rows] = []
        for group, route, weights in zip(self.groups, routes, values, strict=True):
            found = ops.IndexedRows(weights.to(home), route.inverse.to(home))
            rows.append(found if self.pools(group) else found.gathered())
        return self.by_feature(rows, lookups)

    def describe(self) -> dict[str, dict[str, dict[str, Any]]]:
        """What a reader of `state` needs, as JSON keeps it.

        ``"tables"``: by logical table its ``dim``, and the ``seed``, ``table_id`` and ``scale`` of the
        initial values (`ops.initial_rows`); ``"features"``: by feature its ``table`` and ``pooling``.
        """
        tables = {}
        for group in self.groups:
            table, layout = group.table, group.layout
            each = zip(layout.names, layout.table_ids, layout.dims, table.scales, strict=True)
            for name, table_id, dim, scale in each:
                tables[name] = {
                    "dim": dim, "seed": table.seed, "table_id": table_id, "scale": scale,
                }  # fmt: skip
        features = {
            name: {"table": each.table or name, "pooling": each.pooling}
            for name, each in self.features.items()
        }
        return {"tables": tables, "features": features}

    def export(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """For each logical table ids (n,) int64 ascending and rows (n, row_width) float32, copied."""
        exported: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for group in self.groups:
            keys, rows = group.table.export()
            of_tables = group.layout.by_table({"rows": {"keys": keys, "rows": rows}})
            exported |= {name: (each["keys"], each["rows"]) for name, each in of_tables.items()}
        return exported

    def load(self, table: str, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Add or overwrite rows (n, row_width) of distinct `ids` (n,) of a logical table."""
        group, member = self._group(table)
        width = group.optimizer.row_width(group.layout.dims[member])
        if rows.shape != (len(ids), width):
            raise ValueError(f"table {table!r} takes rows ({len(ids)}, {width}), got {tuple(rows.shape)}")
        group.table.load(group.layout.pack(member, ids, table), group.layout.widened(member, rows))

    def state(self, optimizer: bool = True) -> dict[str, dict[str, torch.Tensor]]:
        """Complete state by logical table and column, for `load_state` and checkpoints; without `optimizer`
        rows are their weights (n, dim) alone.

        ``"keys"`` (n,) int64 are the ids of the logical table, merged or not. Keys that are not admitted yet
        are in a further table, ``"NAME.candidates"``.
        """
        return self._taken(lambda table: True, None, optimizer=optimizer)[0]

    def snapshot(self, settled: bool = True) -> dict[str, dict[str, torch.Tensor] | SnapshotRows]:
        """`state` of this moment for `checkpoint.save`, which reads the rows while training goes on.

        Only their keys are copied now, unless the table is on a device and not on disk behind it: then its
        `state` is taken. `settled`: as `DynamicTable.snapshot` takes it.
        """
        return self._taken(lambda table: table.padded and not table.placement.path, None, settled)[0]

    def snapshot_of_changes(
        self, reader: str = CHECKPOINT, settled: bool = True
    ) -> tuple[dict[str, dict[str, torch.Tensor] | SnapshotRows], dict[str, torch.Tensor]]:
        """`take_changes` of this moment, whose rows are read while training goes on, as in `snapshot`."""
        return self._taken(lambda table: table.padded, reader, settled)

    def _taken(
        self,
        at_once: Callable[[DynamicTable], bool],
        reader: str | None,
        settled: bool = True,
        optimizer: bool = True,
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """By logical table the state, or its changes for a `reader`, and the erased keys. Rows are a
        `SnapshotRows` but of tables that are read `at_once`.
        """
        tables: dict[str, Any] = {}
        gone: dict[str, torch.Tensor] = {}
        for group in self.groups:
            table, layout = group.table, group.layout
            erased: dict[str, torch.Tensor] = {}
            if at_once(table):
                state, erased = (
                    (table.state(optimizer), erased) if reader is None else table.take_changes(reader)
                )
            else:
                if reader is None:
                    rows, keys, handles, state = table.snapshot(settled)
                else:
                    rows, keys, handles, state, erased = table.snapshot_of_changes(reader, settled)
                tables |= rows.by_table(layout, keys, handles)
            tables |= layout.by_table(state)
            of_tables = layout.by_table({part: {"keys": keys} for part, keys in erased.items()})
            gone |= {name: each["keys"] for name, each in of_tables.items()}
        return tables, gone

    def empty_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """`state` of no rows: the columns that `load_state` takes."""
        tables: State = {}
        for group in self.groups:
            tables |= group.layout.by_table(group.table.empty_state())
        return tables

    def load_state(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Load a `state` of all tables, or the part of it whose keys this rank owns.

        Raises ValueError naming every table and column that differs from these tables, a key given twice, or
        one that does not fit; nothing is loaded then.
        """
        self.prepare_state(state)()

    def prepare_state(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> Callable[[], None]:
        """Check a `state` as `load_state` does, and change nothing; the function returned loads it."""
        check_state(state, self.empty_state())
        prepared: list[tuple[DynamicTable, dict[str, dict[str, torch.Tensor]]]] = []
        for group in self.groups:
            group.table.in_flight.check("load_state")
            columns: dict[str, dict[str, torch.Tensor]] = {}
            for part, empty in group.table.empty_state().items():
                members = []
                for member, name in enumerate(group.layout.names):
                    own, where = state[part_name(name, part)], f"table {part_name(name, part)!r} of the state"
                    check_numbers(own, group.optimizer, group.layout.dims[member], where)
                    members.append(group.layout.merged(member, own, name))
                columns[part] = {
                    name: torch.cat([saved[name] for saved in members])
                    if len(members) > 1
                    else members[0][name].contiguous()
                    for name in empty
                }
            prepared.append((group.table, columns))

        def load() -> None:
            for table, columns in prepared:
                table.load_state(columns)

        return load

    def prepare_parts(
        self,
        columns: Mapping[str, Mapping[str, torch.Tensor]],
        rows: Mapping[str, int],
        parts: Callable[[str], Iterable[Mapping[str, torch.Tensor]]],
    ) -> Callable[[], None]:
        """Read a `state` part by part into new tables; the function returned puts them in place of these.

        Args:
            columns: of no rows, by table of the state. rows: at most how many rows each table has.
            parts: name of a table -> its columns, some keys at a time.

        Raises ValueError as `load_state`.
        """
        check_state(columns, self.empty_state())
        made = []
        for group in self.groups:
            new = group.table.successor(sum(rows[name] for name in group.layout.names))
            for part in group.table.empty_state():
                for member, name in enumerate(group.layout.names):
                    where = f"table {part_name(name, part)!r} of the state"
                    for each in parts(part_name(name, part)):
                        check_numbers(each, group.optimizer, group.layout.dims[member], where)
                        new.add_part({part: group.layout.merged(member, each, name)})
            made.append((group.table, new))

        def load() -> None:
            for table, new in made:
                table.adopt(new)

        return load

    def track_changes(self, reader: str = CHECKPOINT) -> None:
        """Log changes from now on, for `take_changes` of the same `reader`."""
        for group in self.groups:
            group.table.track_changes(reader)

    def forget_changes(self, reader: str) -> None:
        """Log nothing for this `reader` any more."""
        for group in self.groups:
            group.table.forget_changes(reader)

    def take_changes(
        self, reader: str = CHECKPOINT
    ) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        """Changes since the reader's last call: `state` of changed and new keys, and by table erased keys."""
        return self._taken(lambda table: True, reader)

    def weights(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """For each logical table ids (n,) int64 ascending and weights (n, dim), without optimizer state."""
        return {
            name: (ids, rows[:, : self.dim_of(name)].contiguous())
            for name, (ids, rows) in self.export().items()
        }

    def load_weights(self, table: str, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Add or overwrite the weights (n, dim) float32 of distinct `ids` (n,) of a logical table.

        Rows that exist keep their optimizer state; that of new rows is zero.
        """
        dim = self.dim_of(table)
        if weights.shape != (len(ids), dim) or weights.dtype != torch.float32:
            raise ValueError(
                f"table {table!r} takes weights ({len(ids)}, {dim}) float32 for {len(ids)} ids, got "
                f"{tuple(weights.shape)} {weights.dtype}"
            )
        rows = self.current_rows(table, ids)
        rows[:, :dim] = weights.to(rows.device)
        self.load(table, ids, rows)

    def lerp_(self, other: HashTableCollection, weight: float) -> None:
        """Move the weights of these rows to those of the other tables, by `weight` in [0, 1] of the way.

        For averages of rows: ``averaged = copy.deepcopy(tables)``, and after each step, or now and then,
        ``averaged.lerp_(tables, 1 - decay)``. A row that is not here becomes the other's. It takes the time
        of a copy of the tables; each rank averages its own rows.

        Raises ValueError for a table that is not here or has rows of another width, RuntimeError while
        windows are in flight.
        """
        if not 0 <= weight <= 1:
            raise ValueError(f"the weight must lie in [0, 1], got {weight}")
        weights = other.weights()
        for table, (_ids, theirs) in weights.items():
            if theirs.shape[1] != self.dim_of(table):
                raise ValueError(
                    f"table {table!r} has rows of {self.dim_of(table)} weights, the other {theirs.shape[1]}"
                )
        for table, (ids, theirs) in weights.items():
            group, member = self._group(table)
            keys = group.layout.pack(member, ids.to(group.table.device), table)
            theirs = theirs.to(group.table.device)
            known = (group.table.find(keys) >= 0).unsqueeze(1)
            own = torch.lerp(self.current_rows(table, ids)[:, : theirs.shape[1]], theirs, weight)
            self.load_weights(table, ids, torch.where(known, own, theirs))

    def dim_of(self, table: str) -> int:
        """Weights of a row of a logical table."""
        group, member = self._group(table)
        return group.layout.dims[member]

    def current_rows(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows (n, row_width) float32 of `ids` (n,) of a logical table, initial where there is none."""
        group, member = self._group(table)
        keys = group.layout.pack(member, ids.to(group.table.device), table)
        handles = group.table.find(keys)
        rows = group.table.gather(handles, keys)
        group.table.validate_rows(handles, keys, rows)
        return group.layout.narrowed(member, rows)

    def rule_of(self, table: str) -> RowOptimizer:
        """The rule of a table's rows."""
        return self._group(table)[0].optimizer

    def policy_of(self, table: str) -> TablePolicy:
        """Of a logical table."""
        return next(each.policy for each in self.features.values() if (each.table or each.name) == table)

    def check_ids(self, table: str, ids: torch.Tensor) -> None:
        """Raise ValueError naming the first of `ids` (n,) that does not fit into a logical table."""
        group, _ = self._group(table)
        group.layout.validate(ids, table)

    def clear(self) -> None:
        """Erase all rows, and forget the keys that wait for admission."""
        for group in self.groups:
            group.table.adopt(group.table.successor())

    def requires_grad_(self, requires_grad: bool = True, *tables: str) -> HashTableCollection:
        """Freeze rows, or train them again: of `tables`, by default of all. On all ranks alike.

        Rows of frozen tables appear and are evicted as ever, and no update changes them.

        Raises ValueError for a table that is merged with one that is not named, and for lazy weight decay,
        which would make up for the updates left out; RuntimeError while windows are in flight.
        """
        numbers = {self._location[self._named(table)][0] for table in tables or self.table_names}
        for group in (self.groups[number] for number in numbers):
            others = sorted(set(group.layout.names) - set(tables or self.table_names))
            if others:
                raise ValueError(
                    f"table {', '.join(tables)} is merged with {', '.join(others)}: name these too, or keep "
                    "the tables apart with FeatureConfig(merge=False)"
                )
            if group.optimizer.lazy_weight_decay:
                raise ValueError(
                    f"{group.layout} has lazy weight decay, which makes up for updates that a row missed: "
                    "a frozen row would decay later; take weight_decay without lazy_weight_decay"
                )
            group.table.in_flight.check("requires_grad_")
        for number in numbers:
            self.groups[number].table.requires_grad = requires_grad
        return self

    def set_seed(self, seed: int) -> None:
        """Initial values of rows to come are those of `seed`; RuntimeError while windows are in flight."""
        for group in self.groups:
            group.table.in_flight.check("set_seed")
        self.seed = seed
        for group in self.groups:
            group.table.seed = seed

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the arguments and `state`. Counters and logged changes start anew."""
        frozen = [
            name for group in self.groups if not group.table.requires_grad for name in group.layout.names
        ]
        arguments = {**self._arguments, "seed": self.seed}
        return {"arguments": arguments, "state": self.state(), "frozen": frozen}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        arguments = dict(saved["arguments"])
        self.__init__(arguments.pop("features"), arguments.pop("optimizer"), **arguments)  # type: ignore[misc]
        self.load_state(saved["state"])
        if saved.get("frozen"):
            self.requires_grad_(False, *saved["frozen"])

    def initial_rows(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Initial rows (n, row_width) float32 of `ids` (n,) of a logical table."""
        group, member = self._group(table)
        keys = group.layout.pack(member, ids, table)
        return group.layout.narrowed(member, group.table.initial_rows(keys))

    def _group(self, table: str) -> tuple[TableGroup, int]:
        number, member = self._location[self._named(table)]
        return self.groups[number], member

    def _named(self, table: str) -> str:
        if table not in self._location:
            raise ValueError(f"there is no table {table!r}; the tables are {', '.join(self.table_names)}")
        return table


def _mergeable(feature: FeatureConfig) -> FeatureConfig:
    """What tables of one group have in common: of those that may be padded a dim rounded up, else their own.

    Zeros behind a row stay zeros, and change no bit of it, where a rule computes every column on its own. The
    rounding to three bits adds at most a quarter to a row.
    """
    own, policy = feature.optimizer, feature.policy
    assert own is not None
    sizes = policy.eviction and policy.eviction.capacity, policy.precision and policy.precision.threshold
    by_bytes = any(isinstance(each, str) for each in sizes)
    dim = feature.dim
    if own.keeps_zeros and not by_bytes:
        unit = max(1, (1 << dim.bit_length()) // 8)
        dim = -(-dim // unit) * unit
    return replace(_table_settings(feature), dim=dim, scale=None)


def _table_settings(feature: FeatureConfig) -> FeatureConfig:
    """`feature` without the fields that do not concern its table."""
    return replace(feature, name="-", table="", pooling="none")
