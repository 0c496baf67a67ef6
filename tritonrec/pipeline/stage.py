"""A stage is a function; its signature declares what it reads and writes.

    @stage(lane="copy", after=(Edge("retrieve"), Edge("sparse_update", batch=1)), moves=True)
    def copy_kept_rows(
        kept: Read[KeptRows], active: Read[Kept[Previous[Buffer]]], buffer: Write[Kept[Buffer]]
    ) -> None:

A *place* holds what stages share: a type registered with `place`. A parameter annotated `Read`, `Write` or
`Update` receives the place's value; a place in the return annotation is written by the value returned.
Settings and the counts of one task are passed under their plain types and are no places. A stage with a
parameter ``micro_batch`` runs once per micro-batch, one with a parameter ``bucket`` once per bucket
(`Schedule.buckets`), any other once per batch.

`tritonrec.pipeline.check` proves a schedule from these signatures. The program passes a stage nothing else
(`tritonrec.pipeline.program`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

Which = Literal["none", "same", "previous", "all"]
"""Which micro-batches of the awaited stage: ``none`` (it runs once a batch), ``same`` index, the ``previous``
index (nothing for index 0), or ``all``."""

Per = Literal["run", "batch", "micro_batch", "bucket"]
"""How often a place exists; `bucket`: once for each of them in a run."""

Group = Literal["", "host", "device"]
"""Whether a place is a process group, and where its collectives run."""

Feature = Literal["", "dual_buffer", "replicated", "clips", "sees_window", "early_dense"]
"""What a schedule can do because it has a stage; see the properties of `Schedule`."""

Read = Annotated[T, ("mode", "read")]
Write = Annotated[T, ("mode", "write")]
Update = Annotated[T, ("mode", "update")]

Previous = Annotated[T, ("batch", 1)]
"""The place of the batch before; None for the first batch of a pipeline."""

# Rows of a place that has rows; by default those of the batch's keys K(t). Kept: K(t-1) & K(t).
# New: K(t) - K(t-1). Dropped: K(t-1) - K(t). Idle: rows of neither batch.
# Stale marks a read of values that a later stage overwrites.
Kept = Annotated[T, ("rows", "kept")]
New = Annotated[T, ("rows", "new")]
Dropped = Annotated[T, ("rows", "dropped")]
Idle = Annotated[T, ("rows", "idle")]
Stale = Annotated[T, ("stale", True)]

# Which micro-batches of a place that exists for each; the task's own by default.
UpTo = Annotated[T, ("micro_batches", "up_to")]
From = Annotated[T, ("micro_batches", "from")]


@dataclass(frozen=True)
class Edge:
    """Wait for `stage` of the batch `batch` steps back."""

    stage: str
    micro_batch: Which = "none"
    batch: int = 0


@dataclass(frozen=True)
class Access:
    """A place that a stage reads or writes.

    `place` exists once per ``run``, per ``batch``, per ``micro_batch`` or per ``bucket``; batches alternate
    between the two of the ``buffer``. A process `group` is a place too, with no value and one order of
    collectives on all ranks. Of a place per micro-batch a stage accesses its ``own``, those ``up_to`` its
    own, those ``from`` its own, or ``all``: rows received for a micro-batch serve all later ones, and
    gradients that are sent after a micro-batch are added up in all earlier ones.

    `rows` narrows a place to the rows of the batch's keys K(t), to those ``kept`` from the batch before,
    K(t) & K(t-1), to ``new`` ones that it did not have, to those ``dropped`` since, K(t-1) - K(t), or to
    ``idle`` ones of neither batch. `batch` = 1 names the place of the batch before.

    A ``stale`` read may race with a write to the kept rows, because another stage overwrites them before use;
    the check demands that one does. An ``optional`` access is absent from a schedule in which no stage writes
    the place, or none reads it.
    """

    mode: Literal["read", "write", "update"]
    place: str
    per: Per = "run"
    rows: Literal["none", "batch", "kept", "new", "dropped", "idle"] = "none"
    batch: int = 0
    micro_batches: Literal["own", "up_to", "from", "all"] = "own"
    stale: bool = False
    optional: bool = False
    group: Group = ""


@dataclass(frozen=True)
class Stage:
    """One kind of task; see `stage` for what it declares."""

    name: str
    lane: str
    after: tuple[Edge, ...]
    touches: tuple[Access, ...]
    per_micro_batch: bool = False
    moves: bool = False
    gathers: bool = False
    feature: Feature = ""
    within: str = ""
    per_bucket: bool = False
    function: Callable[..., Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("after", "touches"):  # lists too: a table is hashed
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def launches_collectives(self) -> bool:
        """Whether its work has collectives that run on the device."""
        return self.gathers or any(access.group == "device" for access in self.touches)


class _Place(NamedTuple):
    name: str
    per: Per
    has_rows: bool
    make: Callable[[], Any] | None
    group: Group


_PLACES: dict[Any, _Place] = {}


def place(
    per: Per, has_rows: bool = False, make: Callable[[], Any] | None = None, group: Group = ""
) -> Callable[[T], T]:
    """Register a type as a place; its name is the type's, in lower case.

    Args:
        per: how often it exists.
        has_rows: stages access some of its rows.
        make: makes the empty value that the stages of a window fill; by default a stage returns the value.
        group: it is a process group, whose collectives run there.
    """

    def registered(kind: T) -> T:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()  # type: ignore[attr-defined]
        _PLACES[kind] = _Place(name, per, has_rows, make, group)
        return kind

    return registered


def filled_places() -> Iterator[tuple[Any, Callable[[], Any]]]:
    """(place, what makes its empty value) of every place that the stages of a window fill."""
    return ((kind, each.make) for kind, each in _PLACES.items() if each.make is not None)


class Parameter(NamedTuple):
    """A parameter or a returned value of a stage: its type, and its access if the type is a place."""

    name: str
    kind: Any
    access: Access | None


class Signature(NamedTuple):
    """What a function takes and returns."""

    parameters: tuple[Parameter, ...]
    returns: tuple[Parameter, ...]

    @property
    def accesses(self) -> tuple[Access, ...]:
        return tuple(p.access for p in (*self.parameters, *self.returns) if p.access is not None)


def signature_of(function: Callable[..., Any]) -> Signature:
    """Read a function's annotations.

    Raises TypeError for a place among the parameters without an access, or a returned value that is no place.
    """
    hints = get_type_hints(function, include_extras=True)
    result = hints.pop("return", NoneType)
    per_micro_batch = "micro_batch" in hints
    returned = get_args(result) if get_origin(result) is tuple else (result,)
    parameters = [_parameter(name, hint, per_micro_batch, None) for name, hint in hints.items()]
    returns = [_parameter("", hint, per_micro_batch, "write") for hint in returned if hint is not NoneType]
    for each in parameters:
        if each.kind in _PLACES and each.access is None:
            raise TypeError(f"{function.__name__}: declare {each.name} as Read, Write or Update")
    for each in returns:
        if each.access is None:
            raise TypeError(f"{function.__name__} returns {each.kind}, which is no place")
    return Signature(tuple(parameters), tuple(returns))


def _parameter(name: str, hint: Any, per_micro_batch: bool, mode: str | None) -> Parameter:
    # ``Read[Kept[Previous[Buffer]]] | None`` is optional. Python flattens nested annotations, so that the
    # rest is Buffer with ("batch", 1), ("rows", "kept") and ("mode", "read"): the fields of its `Access`.
    options = [each for each in get_args(hint) if each is not NoneType] if NoneType in get_args(hint) else []
    kind = options[0] if options else hint
    declared: dict[str, Any] = {} if mode is None else {"mode": mode}
    if get_origin(kind) is Annotated:
        kind, *metadata = get_args(kind)
        declared |= dict(metadata)
    if kind not in _PLACES or "mode" not in declared:
        return Parameter(name, kind, None)
    at = _PLACES[kind]
    if at.has_rows:
        declared.setdefault("rows", "batch")
    # A stage of the whole batch sees what all its micro-batches have left.
    if at.per == "micro_batch" and not per_micro_batch:
        declared.setdefault("micro_batches", "all")
    access = Access(place=at.name, per=at.per, optional=bool(options), group=at.group, **declared)
    return Parameter(name, kind, access)


def stage(
    lane: str, after: tuple[Edge, ...] = (), moves: bool = False, gathers: bool = False,
    feature: Feature = "", name: str = "", within: str = "",
) -> Callable[[Callable[..., Any]], Stage]:  # fmt: skip
    """Make a function a stage.

    Args:
        lane: the lane it runs on. after: the stages it waits for, as far as a schedule has them.
        moves: it passes the values of rows on unchanged.
        gathers: it launches collectives of another group than its own: FSDP2's, of sharded parameters.
        feature: a schedule has the stage only with this feature.
        name: of the stage, where another function has the plain name.
        within: the stage whose last task in a window does the work of this one's, bucket after bucket. It is
            next on the lane and waits for the same; it says where a part is done (`Executor.end_part`), at
            its own end at the latest. Nobody calls the function, which declares the part's accesses: the
            other has the rest.
    """

    def declared(function: Callable[..., Any]) -> Stage:
        signature = signature_of(function)
        names = {each.name for each in signature.parameters}
        return Stage(
            name or function.__name__, lane, after, signature.accesses, "micro_batch" in names,
            moves, gathers, feature, within, "bucket" in names, function,
        )  # fmt: skip

    return declared
