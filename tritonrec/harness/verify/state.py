"""Everything training has changed, and the first place where two runs part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ... import ops
from ...data import Lookup
from ...embedding import HashTableCollection, TableGroup
from ...pipeline import DenseModel

State = dict[str, torch.Tensor]
"""``loss/ids`` (B,), ``loss/values`` (B,), ``dense/NAME`` a parameter, ``dense/NAME/exp_avg`` and so on its
optimizer's state (`DenseModel.tensors`), and for each logical table ``table/NAME/ids`` (n,) ascending,
``table/NAME/rows`` (n, width), and in a reference whose tables evict or admit ``table/NAME/used`` (u,), the
ids that the step looked up."""


def loss_state(sample_ids: torch.Tensor, losses: torch.Tensor) -> State:
    """Losses of a step, by sample id."""
    ids, order = torch.sort(sample_ids)
    return {"loss/ids": ids.cpu(), "loss/values": losses[order].cpu()}


def dense_state(dense: DenseModel) -> State:
    """Dense parameters and their optimizer's state, copied to the host."""
    return {
        f"dense/{name}": values.clone(memory_format=torch.contiguous_format).cpu()
        for name, values in dense.whole_tensors().items()
    }


def table_state(tables: HashTableCollection) -> State:
    """Ids of every logical table in ascending order and their rows, copied to the host."""
    state = {}
    for name, (ids, rows) in tables.export().items():
        state[f"table/{name}/ids"], state[f"table/{name}/rows"] = ids.cpu(), rows.cpu()
    return state


def overlay(state: State, group: TableGroup, keys: torch.Tensor, rows: torch.Tensor) -> None:
    """Put `rows` (n, width) of `keys` (n,) in the place of those that `state` holds; others stay away."""
    members, ids = group.layout.unpack(keys)
    for member, name in enumerate(group.layout.names):
        known, held = state[f"table/{name}/ids"], state[f"table/{name}/rows"]
        mine = (members == member) & torch.isin(ids, known)
        held[torch.searchsorted(known, ids[mine])] = rows[mine]


def used_state(tables: HashTableCollection, lookups: list[dict[str, Lookup]]) -> State:
    """Distinct ids of every logical table that an update's batches look up."""
    used: dict[str, list[torch.Tensor]] = {name: [] for name in tables.table_names}
    for each in lookups:
        for name, lookup in each.items():
            used[tables.features[name].table or name].append(lookup.ids)
    return {f"table/{name}/used": torch.cat(ids).unique() for name, ids in used.items()}


@dataclass(frozen=True)
class Difference:
    """The first value that differs: where, what was expected, what was found, how far apart.

    `ulps` counts the float32 values between the two; None where it has no meaning (a missing key, a NaN).
    """

    step: int
    tensor: str
    index: list[int]
    expected: float | int | str
    got: float | int | str
    ulps: int | None

    def __str__(self) -> str:
        apart = "" if self.ulps is None else f", {self.ulps} ulps apart"
        place = ", ".join(map(str, self.index))
        return (
            f"step {self.step}, {self.tensor}[{place}]: expected {self.expected!r}, got {self.got!r}{apart}"
        )


_ORDER = ("loss", "dense", "table")


@dataclass
class Comparison:
    """Compares one rank's states with the reference's, step by step, and keeps the first difference.

    Args:
        tables: the rank's shard; its settings say what an untouched row holds.
        rank, world_size: which ids of the reference belong to this shard.

    Attributes:
        steps_seen: (step, part) of all that was compared: "loss", "dense", "table NAME", and what
            `compare_weights` and `compare_part` add.
    """

    tables: HashTableCollection
    rank: int
    world_size: int
    tensors_compared: int = 0
    bytes_compared: int = 0
    steps_seen: set[tuple[int, str]] = field(default_factory=set)
    differences: dict[tuple[int, int], Difference] = field(default_factory=dict)

    @property
    def first(self) -> Difference | None:
        """The earliest difference: by step, then loss before dense before table."""
        return self.differences[min(self.differences)] if self.differences else None

    def compare(self, step: int, expected: Mapping[str, torch.Tensor], got: State, final: bool) -> None:
        """Compare what `got` holds of ``loss``, ``dense`` or ``table`` after `step`.

        Before the `final` step the tables may already hold ids of later batches; their rows must be initial.
        Where tables evict or admit, later batches may have changed them already, and the comparison takes the
        ids that the step itself has used.
        """
        for part in _ORDER:
            if not any(name.startswith(f"{part}/") for name in got):
                continue
            if part == "table":
                found = self._table(step, expected, got, final)
            elif part == "loss":
                found = self._loss(step, expected, got)
            else:
                found = self._dense(step, expected, got)
            self._keep(step, _ORDER.index(part), found)

    def _keep(self, step: int, place: int, found: Difference | None) -> None:
        if found is not None:
            self.differences.setdefault((step, place), found)

    def compare_weights(
        self,
        step: int,
        expected: Mapping[str, torch.Tensor],
        name: str,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Compare an export's ids (n,) and weights (n, dim) of a table, those of this rank, after `step`."""
        mine = ops.owner_of(ids, self.world_size) == self.rank
        rows = expected[f"table/{name}/rows"][:, : weights.shape[1]]
        given = expected[f"table/{name}/ids"], rows
        found = self._one_table(step, name, given, (ids[mine], weights[mine]), final=True)
        self.steps_seen.add((step, f"export of {name}"))
        self._keep(step, len(_ORDER), found and replace(found, tensor=f"{found.tensor}, exported"))

    def compare_part(self, step: int, part: str, expected: torch.Tensor, got: torch.Tensor) -> None:
        """Compare what a tool has made of the state after `step`: scores, predictions, items."""
        self.steps_seen.add((step, part))
        self._keep(step, len(_ORDER), self._values(step, part, expected, got))

    def _loss(self, step: int, expected: Mapping[str, torch.Tensor], got: State) -> Difference | None:
        self.steps_seen.add((step, "loss"))
        # A stream whose epochs have no border may have a sample twice in a step, on one rank or on two.
        ids, known = got["loss/ids"], expected["loss/ids"]
        repeats = torch.arange(len(ids)) - torch.searchsorted(ids, ids)
        at = torch.searchsorted(known, ids) + repeats
        held = at < len(known)
        held[held.clone()] = known[at[held]] == ids[held]
        if not held.all():
            surplus = ids[~held]
            return Difference(step, "loss", [int(surplus[0])], "absent", "present", None)
        return self._values(step, "loss", expected["loss/values"][at], got["loss/values"], ids)

    def _dense(self, step: int, expected: Mapping[str, torch.Tensor], got: State) -> Difference | None:
        for name in sorted({*expected, *got}):
            if not name.startswith("dense/"):
                continue
            tensor = name.removeprefix("dense/")
            if name not in got or name not in expected:
                there, here = ("present" if name in each else "missing" for each in (expected, got))
                return Difference(step, tensor, [], there, here, None)
            self.steps_seen.add((step, "dense"))
            found = self._values(step, tensor, expected[name], got[name])
            if found is not None:
                return found
        return None

    def _table(
        self, step: int, expected: Mapping[str, torch.Tensor], got: State, final: bool
    ) -> Difference | None:
        for name in self.tables.table_names:
            ids, rows = expected[f"table/{name}/ids"], expected[f"table/{name}/rows"]
            got_ids, got_rows = got[f"table/{name}/ids"], got[f"table/{name}/rows"]
            used = expected.get(f"table/{name}/used")
            if used is not None and not final:
                here, there = torch.isin(ids, used), torch.isin(got_ids, used)
                ids, rows, got_ids, got_rows = ids[here], rows[here], got_ids[there], got_rows[there]
            found = self._one_table(step, name, (ids, rows), (got_ids, got_rows), final)
            self.steps_seen.add((step, f"table {name}"))
            if found is not None:
                return found
        return None

    def _one_table(
        self,
        step: int,
        name: str,
        expected: tuple[torch.Tensor, torch.Tensor],
        got: tuple[torch.Tensor, torch.Tensor],
        final: bool,
    ) -> Difference | None:
        (ids, rows), (got_ids, got_rows) = expected, got
        mine = ops.owner_of(ids, self.world_size) == self.rank
        ids, rows = ids[mine], rows[mine]
        known = torch.isin(got_ids, ids)
        if not torch.equal(ids, got_ids[known]) or (final and not bool(known.all())):
            return _keys_differ(step, f"table {name}", ids, got_ids)
        found = self._values(step, f"table {name}", rows, got_rows[known], ids)
        later = got_ids[~known]
        if found is None and later.numel():
            initial = self.tables.initial_rows(name, later)
            found = self._values(step, f"table {name}", initial, got_rows[~known], later)
        return found

    def _values(
        self,
        step: int,
        name: str,
        expected: torch.Tensor,
        got: torch.Tensor,
        labels: torch.Tensor | None = None,
    ) -> Difference | None:
        """First element that differs in its bits; `labels` name the rows (keys, sample ids)."""
        self.tensors_compared += 1
        self.bytes_compared += got.numel() * got.element_size()
        if (expected.shape, expected.dtype) != (got.shape, got.dtype):
            there, here = (f"{each.dtype} {tuple(each.shape)}" for each in (expected, got))
            return Difference(step, name, [], there, here, None)
        same = bits_of(expected) == bits_of(got)
        if bool(same.all()):
            return None
        index = (~same).nonzero()[0].tolist()
        a, b = expected[tuple(index)], got[tuple(index)]
        if labels is not None:
            index = [int(labels[index[0]]), *index[1:]]
        return Difference(step, name, index, a.item(), b.item(), ulps_between(a, b))


def _keys_differ(step: int, name: str, expected: torch.Tensor, got: torch.Tensor) -> Difference:
    missing = expected[~torch.isin(expected, got)]
    if missing.numel():
        return Difference(step, name, [int(missing[0])], "present", "missing", None)
    surplus = got[~torch.isin(got, expected)]
    if surplus.numel():
        return Difference(step, name, [int(surplus[0])], "absent", "present", None)
    return Difference(step, name, [], f"{expected.numel()} distinct ids", f"{got.numel()} with repeats", None)


_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """The values as whole numbers of the same size."""
    return values.contiguous().view(_OF_SIZE[values.element_size()])


def ulps_between(a: torch.Tensor, b: torch.Tensor) -> int | None:
    """Float32 values from one number to the other; None for another dtype and for NaN."""
    if a.dtype != torch.float32 or bool(a.isnan()) or bool(b.isnan()):
        return None
    bits = [int(value.view(torch.int32)) for value in (a, b)]
    ordered = [value if value >= 0 else -(2**31) - value for value in bits]
    return abs(ordered[0] - ordered[1])


def earliest(differences: list[Difference | None]) -> Difference | None:
    """The earliest of several ranks' first differences."""
    found = [difference for difference in differences if difference is not None]

    def order(difference: Difference) -> tuple[int, int]:
        part = difference.tensor.partition(" ")[0]
        return difference.step, _ORDER.index(part if part in ("loss", "table") else "dense")

    return min(found, key=order, default=None)


def as_json(difference: Difference | None) -> dict[str, Any] | None:
    """The JSON form of `tritonrec verify --json`."""
    return None if difference is None else dict(vars(difference))
