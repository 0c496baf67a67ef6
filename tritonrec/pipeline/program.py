"""A rank's program: the stages of a schedule, bound to the places of a run.

A stage is passed the places that its schedule grants it and nothing else. Binding reads signatures once, when
the program is made; a task then only looks its arguments up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..distributed import Communicators
from ..embedding import HashTableCollection
from ..kernels.dispatch import usable_device
from ..trace import NullRecorder, SupportsRecording
from . import places as at
from .caller_state import Noted
from .dense import DenseModel
from .early import EarlyDense
from .exchange_groups import ExchangeGroups, each_alone, joined_groups
from .flight import Flight
from .headers import Header, exchange
from .places import Context, WindowPlaces
from .replicas import validate_replicable
from .run_agreement import RunAgreement
from .schedule import Schedule, Task
from .stage import Access, signature_of
from .stages import write_back
from .sums import Sums
from .tasks import Tasks
from .window import LookupCounts, Window, WindowConfig
from .words import words_of_end

Action = Callable[[WindowPlaces, int | None], None]
"""What the executor calls for a task: the places of its window, and its micro-batch."""


def _found(kind: Any, batch: int, optional: bool, places: WindowPlaces, micro_batch: int | None) -> Any:
    return places.find(kind, batch, optional)


def _in_turn(first: Action, then: Action) -> Action:
    def both(places: WindowPlaces, micro_batch: int | None = None) -> None:
        first(places, micro_batch)
        then(places, micro_batch)

    return both


class Program:
    """The stages of a schedule by name: ``actions[stage](places, micro_batch)``.

    Args:
        schedule: says what each stage is passed.
        tables: this rank's shard; an id belongs to ``ops.owner_of(id, world_size)``.
        dense: the dense model and its optimizer, the same on every rank.
        communicators: one for each lane that communicates.
        config: see `WindowConfig`.
        flight: guards model, tables and optimizer while the stages run.
        device: where samples and buffers go. agreement: of several ranks, about their runs.
        recorder: of the trace.
    """

    def __init__(
        self,
        schedule: Schedule,
        tables: HashTableCollection,
        dense: DenseModel,
        communicators: Communicators,
        config: WindowConfig,
        flight: Flight,
        device: str | torch.device = "cpu",
        agreement: RunAgreement | None = None,
        recorder: SupportsRecording | None = None,
    ):
        self._recorder, self._watch = recorder or NullRecorder(), communicators.watch
        self.takes_states = False  # for saves of a run (`step_saves`)
        validate_replicable(tables, communicators, config)
        self.schedule, self.communicators, self.config = schedule, communicators, config
        self.model, self.tables, self.dense = dense.model, tables, dense
        device = usable_device(device)
        self.sums = Sums(config, device, communicators.copies_messages(device))
        groups, reason = self._exchange_groups()
        steps = f", each within a node and between {communicators.nodes} nodes" if schedule.relays else ""
        if (taper := config.exchange.taper) < 1:
            reason += f"; micro-batches have {taper:g} of the samples of their inner neighbours"
        self.exchanges = f"{groups}{steps}: {reason}"
        """How many exchanges a window has, and why, in words."""
        ranks, machines = communicators.shards, communicators.machines
        if not schedule.relays and self.sums.exact and 1 < machines < ranks and ranks % machines == 0:
            self.exchanges += f"; nodes={machines} would send a row once to a machine, and not to each rank"
        if schedule.reduces_early:
            flight.early = EarlyDense(dense, schedule.buckets)
            self.exchanges += f"; dense gradients in {flight.early.words}"
        self.context = Context(
            config, device, tables, self.sums, schedule.replicated,
            communicators.replica.rank, communicators.rank, communicators.stop, groups, agreement,
            communicators.replicas if config.moment_scaling else 1,
        )  # fmt: skip
        self.run_places: Mapping[Any, Any] = {
            at.Tables: [group.table for group in tables.groups],
            at.Dense: at.Dense(flight, dense),
            at.DenseGradient: at.DenseGradient(flight),
            at.EarlyGradient: at.EarlyGradient(flight),
            at.RoutingGroup: communicators.routing,
            at.ReplicaRoutingGroup: communicators.replica_routing,
            at.RetrievalGroup: communicators.retrieval,
            at.CommunicationGroup: communicators.communication,
            at.ReplicaGroup: communicators.replica,
            at.ReduceGroup: communicators.reduce,
            at.NodeRoutingGroup: communicators.node_routing,
            at.RailRoutingGroup: communicators.rail_routing,
            at.NodeGroup: communicators.node,
            at.RailGroup: communicators.rail,
        }
        self.tasks = Tasks(schedule, config.window_micro_batches, groups.doers)
        self.actions: dict[str, Action] = {}
        for stage in schedule.stages:
            assert stage.function is not None, f"stage {stage.name} of {schedule.name} has no function"
            self.actions[stage.name] = self.bind(stage.function, stage.name, stage.touches)
        assert write_back.function is not None
        self._write_back = self.bind(write_back.function, "write_back")

    def _exchange_groups(self) -> tuple[ExchangeGroups, str]:
        """Which micro-batches share an exchange, and why."""
        chosen, count = self.config.exchange.sharing, self.config.window_micro_batches
        if self.communicators.communication.world_size == 1:
            return each_alone(count), "no table has its rows on several ranks, and nothing is sent"
        if chosen == "each":
            return each_alone(count), "exchanges is 'each'"
        # beside a message that processors copy they compute nothing
        once = self.config.exchange.once(self.sums.copied)
        overlap = self.schedule.overlaps_window and not once
        reason = f"exchanges is {chosen!r}"
        if chosen == "auto" and once:
            reason = "the ranks' own processors copy the messages, which would hide behind nothing"
        elif not self.schedule.overlaps_window:
            reason = f"{self.schedule.name} overlaps none with the computation of its window"
        elif chosen == "auto":
            return each_alone(count), "they travel beside the computation"
        return joined_groups(count, overlap, ordered=not self.sums.exact), reason

    def bind(
        self, function: Callable[..., Any], stage: str, granted: tuple[Access, ...] | None = None
    ) -> Action:
        """The action that calls `function` as a task of `stage`, with the places that its signature declares.

        Args:
            granted: accesses; a parameter without one must be optional and is None. By default all.

        Raises TypeError where the function takes something that is no place and nothing a stage may have.
        """
        signature = signature_of(function)
        # Three kinds of arguments, by how often they change:
        # a task looks up the last two alone, without a test.
        fixed: dict[str, Any] = {}  # by name, what every task is passed
        of_window: list[tuple[str, Any]] = []
        of_task: dict[str, Callable[[WindowPlaces, int | None], Any]] = {}
        plain: dict[Any, Callable[[WindowPlaces, int | None], Any]] = {
            Context: lambda places, micro_batch: self.context,
            Window: lambda places, micro_batch: places.window,
            LookupCounts: lambda places, micro_batch: places.counts(stage, micro_batch),
        }
        for each in signature.parameters:
            access = each.access
            if access is None:
                if each.name in ("micro_batch", "bucket"):
                    of_task[each.name] = lambda places, micro_batch: micro_batch
                elif each.kind in plain:
                    of_task[each.name] = plain[each.kind]
                else:
                    raise TypeError(f"{stage}: no stage is passed {each.name} of type {each.kind}")
            elif granted is not None and access not in granted:
                if not access.optional:
                    raise TypeError(f"{stage} needs {access}, which {self.schedule.name} does not grant it")
                fixed[each.name] = None
            elif each.kind in self.run_places:
                fixed[each.name] = self.run_places[each.kind]
            elif access.batch or access.optional:
                of_task[each.name] = partial(_found, each.kind, access.batch, access.optional)
            else:
                of_window.append((each.name, each.kind))
        written = []
        for each in signature.returns:
            allowed = granted is None or each.access in granted
            if not allowed and not (each.access and each.access.optional):
                raise TypeError(
                    f"{stage} returns {each.access}, which {self.schedule.name} does not grant it"
                )
            written.append((each.kind, allowed))

        def action(places: WindowPlaces, micro_batch: int | None = None) -> None:
            # What a kernel finds wrong on a device is noted in the
            # window's places, and raised when the window ends.
            with places.errors.active():
                given = {name: places[kind] for name, kind in of_window}
                for name, value in of_task.items():
                    given[name] = value(places, micro_batch)
                result = function(**fixed, **given)
            if not written:
                return
            for (kind, allowed), value in zip(
                written, result if len(written) > 1 else (result,), strict=True
            ):
                if allowed:
                    places[kind] = value

        return action

    def before(self, stage: str, function: Callable[..., Any]) -> None:
        """Call `function`, which declares what it is passed as a stage does, before each task of `stage`."""
        self.actions[stage] = _in_turn(self.bind(function, stage), self.actions[stage])

    def after(self, stage: str, function: Callable[..., Any]) -> None:
        """Call `function`, which declares what it is passed as a stage does, after each task of `stage`."""
        self.actions[stage] = _in_turn(self.actions[stage], self.bind(function, stage))

    def replace(self, stage: str, function: Callable[..., Any]) -> None:
        """Call `function`, which declares what it is passed as a stage does, in place of `stage`."""
        self.actions[stage] = self.bind(function, stage)

    @contextmanager
    def span(self, lane: str, task: Task, places: WindowPlaces) -> Iterator[None]:
        """Around a stage: its slice in the trace, with the bytes it sent or the keys it found."""
        step, micro_batch = places.window.step, task.micro_batch
        span = self._recorder.span(lane, task.stage, batch=step, micro_batch=micro_batch)
        with self._watch.doing(task), span as args:
            yield
            if task.stage in ("exchange", "gradient_exchange", "replica_reduce"):
                args["bytes"] = places.counts(task.stage, micro_batch).row_bytes
            elif task.stage == "retrieve":
                owned = places.get(at.OwnedRows)
                args["keys"] = 0 if owned is None else owned.most_keys

    def finish(self, places: WindowPlaces) -> None:
        """After the last window in the pipeline: write the rows back that stay in its buffer.

        So the next window sees rows that are loaded or erased before it.
        """
        if self.schedule.keeps_rows:
            self._write_back(places, None)

    def end_run(self, step: int, batches: int, rates: Noted) -> None:
        """Agree with all ranks that the run ends after `step` and so many batches; no stage may be under way.

        Raises `RanksDisagreeError` where another rank goes on, which gets it in its `route`, and where the
        `rates` of the last updates differ. Collective.
        """
        groups, each = self.communicators, self.context
        # A rank that goes on receives this message in its `route`, as sizes
        # of keys (W, tables x kinds x M) with a header: shape and groups have
        # to be those that `route` uses, or both ranks would wait for ever.
        kinds = 2 if self.config.exchange.first_use or each.groups.joined else 1
        sizes = len(self.tables.groups) * kinds * self.config.window_micro_batches
        over, others = groups.routing, groups.replica_routing
        if self.schedule.relays:
            over, others = groups.node_routing, groups.rail_routing
        nothing = torch.zeros(over.world_size, sizes, dtype=torch.int64, device="cpu")
        header = Header(each.rank, step, each.stop.is_set(), ended=batches)
        agreement, words = each.agreement, words_of_end(rates)
        if agreement is None:
            exchange(over, others, nothing, header)
            return
        settle = partial(agreement.settle, words, None, step, nothing)
        exchange(over, others, nothing, header, words, settle)
