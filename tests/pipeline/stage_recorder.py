"""Places handed out through recorders: a stage that goes beyond its declaration fails.

- A read place is unchanged after the stage, bit for bit, and of a written one only the declared rows and
  micro-batches have changed.
- Rows and micro-batches that a stage does not declare to read are poisoned: whatever it computes from them
  shows in the result.
- `Recorder.touched` has every declared access that happened.
"""

import functools
import threading
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace

import torch

from tritonrec.distributed import Communicator
from tritonrec.pipeline.places import (
    Buffer,
    Context,
    Dense,
    DenseGradient,
    Embeddings,
    Gradients,
    KeptRows,
    Losses,
    MeanGradient,
    Outputs,
    OwnedRows,
    Relayed,
    RelaySums,
    Routes,
    RowGradient,
    Tables,
)
from tritonrec.pipeline.stage import signature_of

POISON = {torch.float32: float("nan"), torch.int64: 2**62}
COLLECTIVES = ("all_to_all", "all_to_all_equal", "all_reduce", "all_gather")
METHODS = {"idle": "lookup", "new": "bring"}
"""What an update of these of the tables' rows may call; a read calls gather, a write update."""
STATIC = ("dim", "device", "padded", "admits_all", "requires_grad")
"""What no stage changes about a table."""


class Recorder:
    """Records the accesses of a program's stages.

    Attributes:
        touched: (form of the stage, access) of every access that happened.
    """

    def __init__(self, program):
        self.touched = set()
        self._here = threading.local()
        for stage in program.schedule.stages:
            action = program.bind(self._recorded(stage), stage.name, stage.touches)
            program.actions[stage.name] = functools.partial(self._run, action)

    def _run(self, action, places, micro_batch=None):
        self._here.places = places
        action(places, micro_batch)

    def _recorded(self, stage):
        declared = {each.name: each for each in signature_of(stage.function).parameters}
        returned = signature_of(stage.function).returns

        @functools.wraps(stage.function)
        def function(**given):
            places, micro_batch = self._here.places, given.get("micro_batch")
            handed, before, own = {}, {}, {}
            for name, value in given.items():
                access = declared[name].access
                if isinstance(value, Context):
                    value = replace(value, tables=layout_of(value.tables))
                if access is None or value is None:
                    handed[name] = value
                    continue

                def touch(access=access):
                    self.touched.add((stage.function.__name__, access))

                kind = declared[name].kind
                if kind is Tables:
                    handed[name] = [Table(each, access, n, places, touch) for n, each in enumerate(value)]
                    continue
                if isinstance(value, Communicator):
                    handed[name] = Group(value, touch)
                    continue
                before[name], own[name] = snapshot(value), value
                if access.mode == "read":
                    value = poisoned(kind, access, value, places, micro_batch)
                handed[name] = Value(value, touch)
            result = stage.function(**handed)
            for name, value in own.items():
                each = declared[name]
                what = f"{stage.function.__name__}, which declares {name} as {each.access.mode},"
                if each.access.mode == "read":
                    rows = allowed_rows(each.kind, each.access, places, micro_batch)
                    got = handed[name]
                    unchanged = rows is not None or not changed(before[name], snapshot(value))
                    # Other lanes may write other rows meanwhile: the copy that was handed out shows a write.
                    unchanged &= not changed(got._began, snapshot(got._value))
                    assert unchanged, f"{what} has changed it"
                elif wrong := changed_elsewhere(each, before[name], value, places, micro_batch):
                    raise AssertionError(f"{what} has changed {', '.join(wrong)}")
                elif changed(before[name], snapshot(value)):
                    self.touched.add((stage.function.__name__, each.access))
            values = result if len(returned) > 1 else (result,)
            for each, value in zip(returned, values, strict=False):
                if value is not None:
                    self.touched.add((stage.function.__name__, each.access))
            return result

        return function


class Value:
    """A place's value; whoever looks into it touches it."""

    def __init__(self, value, touch):
        self.__dict__.update(_value=value, _touch=touch, _began=snapshot(value))

    def __getattr__(self, name):
        self._touch()
        return getattr(self._value, name)

    def __getitem__(self, key):
        self._touch()
        return self._value[key]

    def __setitem__(self, key, value):
        self._value[key] = value

    def __iter__(self):
        self._touch()
        return iter(self._value)

    def __len__(self):
        return len(self._value)


class Group:
    """A process group; a collective touches it."""

    def __init__(self, group, touch):
        self._group, self._touch = group, touch

    def __getattr__(self, name):
        if name in COLLECTIVES:
            self._touch()
        return getattr(self._group, name)


class Table:
    """A table's rows for one access: another method than its own is refused, and so are other rows."""

    def __init__(self, table, access, number, places, touch):
        self._table, self._access, self._number = table, access, number
        self._places, self._touch = places, touch
        for name in STATIC:
            setattr(self, name, getattr(table, name))

    def __getattr__(self, name):
        mode = self._access.mode
        own = METHODS[self._access.rows] if mode == "update" else {"read": "gather", "write": "update"}[mode]
        assert name == own, f"{name} of the tables is no {mode}"
        self._touch()
        method = getattr(self._table, name)

        def checked(first, *rest, **options):
            self._check(first, *rest)
            return method(first, *rest, **options)

        return checked

    def _check(self, first, *rest):
        places, rows = self._places, self._access.rows
        before = None if places.previous is None else places.previous.get(OwnedRows)
        if rows == "new" and self._access.mode == "read" and before is not None:
            assert not torch.isin(rest[0][first >= 0], before.tables[self._number].keys).any(), (
                "reads rows that are kept"
            )
        if rows == "dropped":
            here = places[KeptRows][self._number].trimmed().before
            kept = before.tables[self._number].handles[here]
            assert not torch.isin(first[first >= 0], kept).any(), "writes rows that are kept"
        if self._access.mode == "write" and rows == "batch":
            assert torch.isin(first[first >= 0], places[OwnedRows].tables[self._number].handles).all()


def layout_of(tables):
    """The tables without their rows."""
    groups = []
    for group in tables.groups:
        table = SimpleNamespace(**{name: getattr(group.table, name) for name in STATIC})
        table.round_low_precision = group.table.round_low_precision
        groups.append(
            SimpleNamespace(
                table=table, optimizer=group.optimizer, layout=group.layout, features=group.features
            )
        )
    return SimpleNamespace(groups=groups, keys=tables.keys, by_feature=tables.by_feature, pools=tables.pools)


def bits(values):
    """The values as bytes."""
    return values.contiguous().reshape(-1).view(torch.uint8)


def snapshot(value):
    """Copies of all tensors in a value, by where they are in it."""
    if isinstance(value, torch.Tensor):
        return {"": value.detach().clone()}
    if isinstance(value, Dense):
        return snapshot(value.model.state_dict()["optimizers"] + [value.model.parameters])
    if isinstance(value, DenseGradient):
        accumulator = value.flight.accumulator
        return snapshot([accumulator.sums, [each.grad for each in value.flight.model.parameters()]])
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    elif is_dataclass(value):
        parts = ((each.name, getattr(value, each.name)) for each in fields(value))
    else:
        return {}
    return {f"{key}.{at}": each for key, part in parts for at, each in snapshot(part).items()}


def changed(before, after):
    """Where two snapshots differ, NaN being equal to NaN."""
    both = before.keys() & after.keys()
    return sorted(
        (before.keys() ^ after.keys()) | {at for at in both if not bits(before[at]).equal(bits(after[at]))}
    )


def rows_of(kind, which, places, micro_batch):
    """By table the rows of a place per micro-batch that belong to `which` micro-batches; None for all."""
    count = len(places[Routes].tables[0].splits)
    own = {"own": [micro_batch], "up_to": range(micro_batch + 1), "from": range(micro_batch, count)}[which]
    if kind in (Embeddings, Relayed):
        relays = [relay.dist for relay in places[Routes].relays]
        tables = places[Routes].tables if kind is Embeddings else relays
        slots = [[table.slots(i) for i in own] for table in tables]
        return [torch.cat([torch.arange(s.start, s.stop) for s in each]) for each in slots]
    if kind is Gradients:
        return [torch.cat([table.gradients.rows[i] for i in own]) for table in places[Routes].tables]
    if kind is RelaySums:  # that leave with these micro-batches
        relays = places[Routes].relays
        return [torch.cat([relay.dist.gradients.rows[i] for i in own]) for relay in relays]
    owned = places[OwnedRows].tables
    if kind is MeanGradient:
        return [torch.cat([table.reductions[i].rows for i in own]) for table in owned]
    if kind is RowGradient and which == "own":  # read by the reduction of these rows
        return [torch.cat([table.reductions[i].plan.order for i in own]) for table in owned]
    return [torch.cat([table.gradients.rows[i] for i in own]) for table in owned]


def allowed_rows(kind, access, places, micro_batch):
    """By table the rows that an access may touch; None for all."""
    if kind is Buffer and access.rows in ("kept", "dropped"):
        if places[KeptRows] is None:
            return [torch.empty(0, dtype=torch.int64) for _ in places[Buffer]]
        kept = [each.trimmed() for each in places[KeptRows]]
        kept = [each.before if access.batch else each.now for each in kept]
        if access.rows == "kept":
            return kept
        sizes = [len(rows) for rows in places.previous[Buffer]]
        every = zip(sizes, kept, strict=True)
        return [torch.arange(size)[~torch.isin(torch.arange(size), rows)] for size, rows in every]
    per_rows = kind in (Embeddings, Gradients, Relayed, RelaySums, RowGradient, MeanGradient)
    if per_rows and micro_batch is not None and access.micro_batches != "all":
        return rows_of(kind, access.micro_batches, places, micro_batch)
    return None


def poisoned(kind, access, value, places, micro_batch):
    """A value whose rows beyond the access are poisoned."""
    if (allowed := allowed_rows(kind, access, places, micro_batch)) is None:
        return value
    handed = []
    for tensor, rows in zip(value, allowed, strict=True):
        copy = torch.full_like(tensor, POISON[tensor.dtype])
        copy[rows] = tensor[rows]
        handed.append(copy)
    return handed


def changed_elsewhere(each, before, value, places, micro_batch):
    """What a written place has changed beyond its access."""
    if each.kind in (Losses, Outputs):
        return [at for at in changed(before, snapshot(value)) if not at.startswith(f"{micro_batch}.")]
    allowed = allowed_rows(each.kind, each.access, places, micro_batch)
    if allowed is None or not before:  # the first task has made it
        return []
    wrong = []
    for number, (tensor, rows) in enumerate(zip(value, allowed, strict=True)):
        was = before[f"{number}."]
        differs = (tensor.view(torch.uint8) != was.view(torch.uint8)).view(len(tensor), -1).any(1)
        beyond = differs.nonzero().squeeze(1)
        wrong += [f"row {int(row)} of table {number}" for row in beyond[~torch.isin(beyond, rows)]]
    return wrong
