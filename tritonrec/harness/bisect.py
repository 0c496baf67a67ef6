"""The first difference of two runs: by step, tensor or table, key and column, with both values.

A run is a directory of checkpoints, of any world size, or a log of `tritonrec train --json-lines`. Tables are
read in parts (`CheckpointStream`), so two large checkpoints need little memory.
"""

from __future__ import annotations

import json
import operator
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import checkpoint
from ..checkpoint import CheckpointStream
from ..files.places import Place, place_of, read_document
from .train.config import CONFIG, flat
from .verify.state import bits_of, ulps_between

MEASURED = ("seconds", "per_second")
"""Ends of the names of logged values that no promise is about."""


@dataclass(frozen=True)
class Part:
    """What differs in one tensor, table or logged value.

    Args:
        name: such as ``dense/model/norm.weight`` or ``table item``. count, of: how many elements, rows or
            values differ, and of how many.
        place: of the first one: index, or key and column. values: of both runs; "missing" for a row that one
            of them lacks. ulps: float32 values between them; None where that has no meaning.
    """

    name: str
    count: int
    of: int
    place: tuple[int | str, ...]
    values: tuple[Any, Any]
    ulps: int | None = None

    def __str__(self) -> str:
        place = f"[{', '.join(map(str, self.place))}]" if self.place else ""
        apart = "" if self.ulps is None else f", {self.ulps:,} ulps apart"
        some = f"{self.count:,} of {self.of:,} differ; first " if self.of > 1 else ""
        return (
            f"{self.name}: {some}{place}{' ' * bool(place)}{self.values[0]!r} and {self.values[1]!r}{apart}"
        )


@dataclass
class Bisection:
    """What two runs have in common.

    Args:
        equal: steps at which both have the same bits, up to the first other one. step: that one; None for no
            difference. parts: what differs there, in order: dense before tables.
        settings: of the runs that differ, by name, with both values.
    """

    equal: list[int] = field(default_factory=list)
    step: int | None = None
    parts: list[Part] = field(default_factory=list)
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**vars(self), "parts": [vars(part) for part in self.parts]}


def bisect(a: Place | str, b: Place | str) -> Bisection:
    """Compare two runs at the steps that both have, up to the first at which a bit differs.

    Raises ValueError where one is a log and the other is not, or there is no common step; CheckpointError for
    a damaged checkpoint; OSError for a file that cannot be read.
    """
    left, right = place_of(a), place_of(b)
    if left.is_dir() != right.is_dir():
        raise ValueError(f"{left} and {right} must both be directories of checkpoints, or both logs")
    result = Bisection()
    logs: list[dict[int, dict[str, Any]]] = []
    if left.is_dir():
        steps = [checkpoint.steps(each) for each in (left, right)]
        if all(steps):
            result.settings = _settings(left, right)
    else:
        logs = [_log(each) for each in (left, right)]
        steps = [sorted(log) for log in logs]
    common = sorted({*steps[0]} & {*steps[1]})
    if not common:
        had = [f"{path} has {_listed(each)}" for path, each in zip((left, right), steps, strict=True)]
        raise ValueError(f"the runs have no step in common: {', and '.join(had)}")
    for step in common:
        result.parts = (
            _named_values(*(log[step] for log in logs)) if logs else _checkpoints(left, right, step)
        )
        if result.parts:
            result.step = step
            break
        result.equal.append(step)
    return result


def _listed(steps: list[int]) -> str:
    return f"steps {', '.join(map(str, steps[-5:]))}" if steps else "none"


def _checkpoints(left: Place, right: Place, step: int) -> list[Part]:
    """What differs in two checkpoints of a step."""
    both = CheckpointStream(left, step), CheckpointStream(right, step)
    found = list(_tensors(*(stream.dense() for stream in both)))
    plain = [dict(_leaves(stream.meta.get("dense"), "dense")) for stream in both]
    found += _named_values(*plain)
    columns = [stream.columns for stream in both]
    for name in sorted({*columns[0], *columns[1]}):
        kinds = [each.get(name, "missing") for each in columns]
        if kinds[0] != kinds[1]:
            found.append(Part(f"columns of table {name}", 1, 1, (), (kinds[0], kinds[1])))
        else:
            found += _tables(both, name)
    return found


def _tensors(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Iterator[Part]:
    """Dense tensors that differ: those of the model first."""
    for name in sorted({*left, *right}, key=lambda name: (not name.startswith("model/"), name)):
        pair = left.get(name), right.get(name)
        a, b = pair
        if a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
            kinds = ["missing" if each is None else f"{each.dtype} {tuple(each.shape)}" for each in pair]
            yield Part(f"dense/{name}", 1, 1, (), (kinds[0], kinds[1]))
            continue
        differ = (bits_of(a) != bits_of(b)).nonzero()
        if len(differ):
            place = tuple(differ[0].tolist())
            yield Part(
                f"dense/{name}", len(differ), a.numel(), place, (a[place].item(), b[place].item()),
                ulps_between(a[place], b[place]),
            )  # fmt: skip


def _tables(both: tuple[CheckpointStream, CheckpointStream], name: str) -> list[Part]:
    """The rows of a table that differ; the first is the one of the smallest key."""
    count = max(stream.slices_of(name) for stream in both)
    described = both[0].meta.get("embedding", {}).get("tables", {}).get(name, {})
    total = differing = 0
    first: tuple[int, Part] | None = None
    for left, right in zip(*(stream.rows(name, count) for stream in both), strict=True):
        keys = torch.cat([left["keys"], right["keys"]]).unique()
        total += len(keys)
        for key, place, values, ulps, number in _rows(keys, left, right, described.get("dim")):
            differing += number
            if first is None or key < first[0]:
                first = key, Part("", 0, 0, (key, *place), values, ulps)
    if first is None:
        return []
    part = first[1]
    return [Part(f"table {name}", differing, total, part.place, part.values, part.ulps)]


Found = tuple[int, tuple[str, ...], tuple[Any, Any], int | None, int]


def _rows(
    keys: Tensor, left: Mapping[str, Tensor], right: Mapping[str, Tensor], dim: int | None
) -> Iterator[Found]:
    """First key that one of them lacks, and first that differs: key, column, values, ulps, number of both."""
    known = [torch.isin(keys, each["keys"]) for each in (left, right)]
    alone = keys[known[0] != known[1]]
    if len(alone):
        has = [bool(each[keys == alone[0]]) for each in known]
        values = ("present" if has[0] else "missing", "present" if has[1] else "missing")
        yield int(alone[0]), (), values, None, len(alone)
    shared = keys[known[0] & known[1]]
    orders = [
        each["keys"].argsort()[torch.isin(each["keys"].sort().values, shared)] for each in (left, right)
    ]
    pairs = {name: (left[name][orders[0]], right[name][orders[1]]) for name in left if name != "keys"}
    differ = torch.zeros(len(shared), dtype=torch.bool)
    for a, b in pairs.values():
        differ |= (bits_of(a) != bits_of(b)).flatten(1).any(1) if a.dim() > 1 else bits_of(a) != bits_of(b)
    if not bool(differ.any()):
        return
    row = int(differ.nonzero()[0])
    for name in sorted(pairs, key=lambda name: name != "rows"):
        a, b = (values[row] for values in pairs[name])
        places = (bits_of(a) != bits_of(b)).flatten().nonzero().flatten()
        if len(places):
            at = int(places[0])
            one, other = a.flatten()[at], b.flatten()[at]
            column = _column(name, at, dim)
            number = int(differ.sum())
            yield int(shared[row]), (column,), (one.item(), other.item()), ulps_between(one, other), number
            return


def _column(name: str, at: int, dim: int | None) -> str:
    """The name of a column of a row: weight, optimizer state or metadata."""
    if name != "rows":
        return name
    if dim is None:
        return f"column {at}"
    return f"weight {at}" if at < dim else f"state {at - dim}"


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Values of nested lists and dictionaries by their paths."""
    inner = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if inner is None:
        yield name, value
        return
    for key, each in inner:
        yield from _leaves(each, f"{name}/{key}")


def _named_values(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Part]:
    """Values by name that differ, in the order of the first run."""
    found = []
    for name in [*left, *(name for name in right if name not in left)]:
        a, b = left.get(name, "missing"), right.get(name, "missing")
        if repr(a) != repr(b):  # two NaN are the same, and zeros of two signs are not
            found.append(Part(name, 1, 1, (), (a, b)))
    return found


def _settings(left: Place, right: Place) -> dict[str, tuple[Any, Any]]:
    """Settings of `tritonrec train`, and world sizes, in which the runs' newest checkpoints differ."""
    both = []
    for path in (left, right):
        stream = CheckpointStream(path)
        tables = tomllib.loads(stream.meta.get(CONFIG, ""))
        both.append({**flat(tables), "world_size": stream.world_size})
    names = [*both[0], *(name for name in both[1] if name not in both[0])]
    pairs = {name: (both[0].get(name), both[1].get(name)) for name in names}
    return {name: (a, b) for name, (a, b) in pairs.items() if a != b and name != "checkpoint"}


def _log(path: Place) -> dict[int, dict[str, Any]]:
    """By step the values of a JSON-lines log, those that are measured left out."""
    found: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(read_document(path, "log").splitlines(), 1):
        try:
            entry = json.loads(line)
            step = operator.index(entry.pop("step"))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path}:{number} is no line of a log of tritonrec train --json-lines"
            ) from error
        entry = {name: value for name, value in entry.items() if not name.endswith(MEASURED)}
        values = found.setdefault(step, {})
        if twice := next(
            (name for name in entry.keys() & values if repr(entry[name]) != repr(values[name])), ""
        ):
            raise ValueError(
                f"{path}:{number} has another {twice} of step {step} than a line before: two runs wrote it"
            )
        values |= entry
    return found
