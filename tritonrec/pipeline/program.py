"""What one rank does in each stage of a window (NestPipe, sections IV.A and V)."""

from __future__ import annotations

import torch

from .. import ops
from ..data import split
from ..distributed import Communicators
from ..embedding import DenseOptimizer, HashTableCollection, TableGroup
from .flight import Flight
from .headers import exchange
from .replicas import demand_replicable
from .routes import answer, ask, column_sums
from .shares import Meeting, even_shares, meetings
from .streams import to_device, to_host
from .sums import NAME, Sums, travel
from .window import TableWindow, Window, WindowConfig

DROPOUT_STREAM = 0x64726F70  # one Philox stream for dropout seeds
DENSE_ROW = 64
"""Values of a row of dense gradients, whose width in bytes its largest one decides."""


class WindowProgram:
    """The stages of a rank, by name: ``actions[stage](window, micro_batch)``.

    Args:
        model: dense model, the same on every rank.
        tables: this rank's shard; an id belongs to ``ops.owner_of(id, world_size)``.
        dense: optimizer of the model's parameters.
        communicators: one for each lane that communicates.
        config: see `WindowConfig`.
        flight: guards model, tables and optimizer while the stages run.
        device: where samples and buffers go.
        dual_buffer: the schedule synchronises each buffer with the one before.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tables: HashTableCollection,
        dense: DenseOptimizer,
        communicators: Communicators,
        config: WindowConfig,
        flight: Flight,
        device: str | torch.device = "cpu",
        dual_buffer: bool = False,
    ):
        self.flight = flight
        self.model, self.tables, self.dense = model, tables, dense
        self.communicators, self.config, self.device = communicators, config, torch.device(device)
        self.dual_buffer = dual_buffer
        self.replicated = communicators.replicas > 1 and not config.average_every
        demand_replicable(communicators, config)
        self.sums = Sums(config, self.device)
        self._buffers: list[Window | None] = [None, None]
        self.actions = {
            name: getattr(self, name)
            for name in (
                "prefetch", "h2d", "route", "retrieve", "copy_kept_rows", "exchange", "compute",
                "gradient_exchange", "replica_reduce", "dense_reduce", "sparse_update", "dense_update",
                "write_back",
            )
        }  # fmt: skip

    # Lookup: from samples to rows in the prefetch buffer.

    def prefetch(self, window: Window, _micro_batch: int | None = None) -> None:
        """Cut this rank's samples into micro-batches, in page-locked memory for an accelerator (stage 1)."""
        for batch in window.batches:
            batch.validate()
            parts = split(batch, self.config.micro_batches, self.config.clustering, self.config.taper)
            window.micro_batches += [batch.select(part) for part in parts]
        missing = self.config.window_micro_batches - len(window.micro_batches)  # a run's last window
        nothing = window.batches[-1].select(torch.arange(0))
        window.micro_batches += [nothing] * missing
        if self.device.type != "cpu":
            window.micro_batches = [part.pin_memory() for part in window.micro_batches]

    def h2d(self, window: Window, _micro_batch: int | None = None) -> None:
        """Move the micro-batches to the device (stage 2)."""
        window.micro_batches = [part.to(self.device, non_blocking=True) for part in window.micro_batches]

    def route(self, window: Window, _micro_batch: int | None = None) -> None:
        """Deduplicate each micro-batch's keys and send them to their owners (stage 3)."""
        world, groups, config = self.communicators.shards, self.tables.groups, self.config
        by_table = zip(*(self.tables.keys(part.lookups()) for part in window.micro_batches), strict=True)
        for group, keys in zip(groups, by_table, strict=True):
            dedup = config.dedup in ("exchange", "both")
            asked = ask(list(keys), group.layout.ids, world, dedup, config.first_use)
            window.tables.append(TableWindow(asked))
            window.counts.occurrences += sum(map(len, keys))
        # One row for each rank: keys of every table and micro-batch.
        counts = torch.tensor(
            [table.asked.arriving for table in window.tables], dtype=torch.int64
        )  # (G, M, W)
        terms = sum(batch.loss_terms for batch in window.batches)
        answers, headers = exchange(
            self.communicators, counts.permute(2, 0, 1).flatten(1), window.step, terms
        )
        window.stop, window.terms = headers.stop, headers.terms
        window.row_terms = headers.shard_terms if config.average_every else window.terms
        received = answers.view(world, *counts.shape[:2]).permute(1, 2, 0).tolist()
        for table, receive in zip(window.tables, received, strict=True):
            table.receive = receive
            table.received_keys = self._route(window, table, table.asked.keys)
            if table.asked.last_use is not None:
                table.received_last_use = self._route(window, table, table.asked.last_use)
            window.counts.exchanged += table.asked.rows
            if self.replicated:
                self._tell_replicas(window, table)

    def end_run(self, step: int, batches: int) -> None:
        """Agree with all ranks that the run ends after `step` and so many batches; no stage may be under way.

        Raises `RanksDisagreeError` where another rank goes on, which gets it in its `route`. Collective.
        """
        sizes = len(self.tables.groups) * self.config.window_micro_batches
        nothing = torch.zeros(self.communicators.shards, sizes, dtype=torch.int64)
        exchange(self.communicators, nothing, step, ended=batches)

    def _tell_replicas(self, window: Window, table: TableWindow) -> None:
        """Gather what each replica of this part is asked for: keys, and their last use if it is known."""
        gather, others = self.communicators.replica_routing.gather, self.communicators.replicas - 1
        distinct, inverse, _counts = ops.unique(table.received_keys)
        table.replica_keys = gather(distinct)
        window.counts.key_bytes += 8 * len(distinct) * others
        if table.received_last_use is not None:
            last = table.received_last_use.new_zeros(len(distinct))
            last.scatter_reduce_(0, inverse, table.received_last_use, "amax")
            table.replica_last_use = gather(last)
            window.counts.key_bytes += len(distinct) * others

    def _route(self, window: Window, table: TableWindow, values: torch.Tensor) -> torch.Tensor:
        """Send what goes with each key to the key's owner."""
        send = table.asked.send
        window.counts.key_bytes += values.element_size() * (len(values) - send[self.communicators.shard])
        return self.communicators.routing.all_to_all(values, send, column_sums(table.receive))

    def retrieve(self, window: Window, _micro_batch: int | None = None) -> None:
        """Deduplicate again, find or add the keys, copy their rows into the prefetch buffer (stage 4).

        What is due in the tables at this update happens first: eviction, demotion. It leaves alone the keys
        of this window and of the last one, whose rows lie in the two buffers.
        """
        active = self._before(window)
        for index, (group, table) in enumerate(zip(self.tables.groups, window.tables, strict=True)):
            self._bring_keys(table)
            own, inverse = self._distinct(table)
            found = group.table.lookup(table.keys, window.update, self._sum_over_ranks)
            if active is not None:
                table.kept = ops.intersect(active.tables[index].keys, table.keys)
                window.counts.kept += len(table.kept[0])
            table.handles, table.low_precision = found.handles, found.low_precision
            table.buffer = self._fetch(window, group, table, inverse)
            window.counts.lookups += 1
            window.counts.received += len(table.received_keys)
            legs = answer(inverse, table.receive, table.received_last_use)
            if self.replicated:  # gradients are added up by the keys asked for here, rows lie among all
                mine = table.places[self.communicators.replica.rank]
                legs = answer(mine[inverse], table.receive, None)[0], legs[1]
                table.meetings = self._meetings(table)
                table.mean_gradient = torch.empty(
                    len(table.keys), group.table.dim, dtype=torch.float32, device=self.device
                )
            table.wanted, table.returned = (leg.to(self.device) for leg in legs)
            table.row_gradient = self.sums.zeros(own, group.table.dim)
        self._buffers[window.number % 2] = window

    def _bring_keys(self, table: TableWindow) -> None:
        """Bring what the owner was asked for to the host, where the tables are."""
        table.received_keys = to_host(table.received_keys)
        table.replica_keys = [to_host(keys) for keys in table.replica_keys]
        table.replica_last_use = [to_host(last) for last in table.replica_last_use]
        if table.received_last_use is not None:
            table.received_last_use = to_host(table.received_last_use)

    def _distinct(self, table: TableWindow) -> tuple[int, torch.Tensor]:
        """Set the window's keys; how many were asked of this rank, and which of these each one received is.

        Replicas of a part hold the keys asked of any of them, in one order.
        """
        table.keys, inverse, _counts = ops.unique(table.received_keys)
        own = len(table.keys)
        if self.replicated:
            table.keys, places, _counts = ops.unique(torch.cat(table.replica_keys))
            table.places = list(places.split([len(keys) for keys in table.replica_keys]))
        return own, inverse

    def _meetings(self, table: TableWindow) -> list[Meeting]:
        """After which micro-batch the replicas add up which rows: its last use, or the last micro-batch."""
        count = self.config.window_micro_batches
        complete = torch.full((len(table.keys),), count - 1, dtype=torch.int64)
        if table.replica_last_use:
            complete.zero_()
            for place, last in zip(table.places, table.replica_last_use, strict=True):
                complete[place] = torch.maximum(complete[place], last.long())
        return meetings(table.places, complete, count, self.communicators.replica.rank)

    def _fetch(
        self, window: Window, group: TableGroup, table: TableWindow, inverse: torch.Tensor
    ) -> torch.Tensor:
        """The prefetch buffer (K, row width), of the rows of `table.handles`."""
        handles = table.handles
        if self.config.dedup not in ("lookup", "both"):
            # A row is read for every key received; those of one key are the same.
            window.counts.read += len(inverse)
            values = group.table.gather(handles[inverse], table.received_keys)
            return to_device(ops.gather_rows(values, _first_occurrences(inverse, len(handles))), self.device)
        if table.kept is None or not self.config.skip_fetch:
            window.counts.read += len(handles)
            return to_device(group.table.gather(handles, table.keys), self.device)
        is_new = torch.ones(len(handles), dtype=torch.bool)
        is_new[table.kept[1]] = False
        new = is_new.nonzero().squeeze(1)
        window.counts.read += len(new)
        values = to_device(group.table.gather(handles[new], table.keys[new]), self.device)
        buffer = values.new_empty(len(handles), values.shape[1])  # `copy_kept_rows` fills in the others
        ops.scatter_rows(buffer, to_device(new, self.device), values)
        return buffer

    def buffer_of(self, number: int) -> Window | None:
        """The window of that number, while a buffer holds its rows."""
        window = self._buffers[number % 2]
        return window if window is not None and window.number == number else None

    def _before(self, window: Window) -> Window | None:
        """The window before, where its buffer is the active one."""
        return self.buffer_of(window.number - 1) if self.dual_buffer else None

    def copy_kept_rows(self, window: Window, _micro_batch: int | None = None) -> None:
        """Copy the rows of K(t-1) & K(t) from the active into the prefetch buffer (section IV.B)."""
        active = self._before(window)
        if active is None:
            return
        for before, table in zip(active.tables, window.tables, strict=True):
            assert table.kept is not None
            here, there = (to_device(rows, self.device) for rows in table.kept)
            ops.scatter_rows(table.buffer, there, before.buffer, source=here)

    # The window: rows are frozen until `sparse_update`.

    def exchange(self, window: Window, micro_batch: int | None) -> None:
        """Send the rows that other ranks' micro-batch wants, receive those of this rank's."""
        i = _index(micro_batch)
        sent = window.sending("exchange", i)
        for group, table in zip(self.tables.groups, window.tables, strict=True):
            if table.embeddings is None:
                table.embeddings = table.buffer.new_empty(table.asked.rows, group.table.dim)
            rows = ops.gather_rows(table.buffer[:, : group.table.dim], table.wanted.rows[i])
            slots = table.embeddings[table.asked.slots(i)]
            send, over = table.wanted.counts[i], self.communicators.communication
            travel(sent, over, rows, send, table.asked.arriving[i], out=slots)
            self._count_rows(window, send)

    def compute(self, window: Window, micro_batch: int | None) -> None:
        """Forward and backward of one micro-batch."""
        i = _index(micro_batch)
        part = window.micro_batches[i]
        rows = []
        for table in window.tables:
            assert table.embeddings is not None
            rows.append(ops.gather_rows(table.embeddings, table.asked.inverse[i]).requires_grad_())
        seed = ops.derive_seed(self.config.seed, DROPOUT_STREAM, part.step)
        by_feature = self.tables.by_feature(rows, part.lookups())
        window.losses[i] = self.flight.train_micro_batch(part, by_feature, seed, window.settings)
        for leaf, table in zip(rows, window.tables, strict=True):
            if table.gradients is None:
                table.gradients = self.sums.zeros(table.asked.rows, leaf.shape[1])
            if leaf.grad is not None:
                self.sums.add(leaf.grad, table.asked.inverse[i], table.gradients, NAME)

    def gradient_exchange(self, window: Window, micro_batch: int | None) -> None:
        """Send gradient rows to their owners and add them up there."""
        i = _index(micro_batch)
        sent = window.sending("gradient_exchange", i)
        for table in window.tables:
            assert table.gradients is not None and table.row_gradient is not None
            leaving, returned = table.asked.leaving, table.returned
            self.sums.exchange(
                sent, self.communicators.communication,
                table.gradients, leaving.rows[i], leaving.counts[i],
                table.row_gradient, returned.rows[i], returned.counts[i],
            )  # fmt: skip
            self._count_rows(window, leaving.counts[i])

    def replica_reduce(self, window: Window, micro_batch: int | None) -> None:
        """The mean gradients of the rows whose sums are complete on all replicas; see `Meeting`."""
        i = _index(micro_batch)
        sent = window.sending("replica_reduce", i)
        for table in window.tables:
            meeting = table.meetings[i]
            if len(meeting.rows):
                assert table.row_gradient is not None and table.mean_gradient is not None
                means = self.sums.means(
                    sent, self.communicators.replica, table.row_gradient, meeting.shares, window.row_terms
                )
                ops.scatter_rows(table.mean_gradient, to_device(meeting.rows, self.device), means)

    # The end of the window: one update from complete sums.

    def dense_reduce(self, window: Window, _micro_batch: int | None = None) -> None:
        """The mean dense gradients of all ranks, as one message of rows of `DENSE_ROW` values; and with them
        the mean loss.
        """
        parts = self.flight.accumulator.take()
        losses = torch.cat([window.losses[i] for i in range(self.config.window_micro_batches)])
        window.dense_sums = [*parts.values(), self.sums.total(losses)]
        flat, reduce = torch.cat([part.reshape(-1) for part in window.dense_sums]), self.communicators.reduce
        if reduce.world_size == 1:
            means = self.sums.over(flat, window.terms)
        else:
            rows = torch.nn.functional.pad(flat, (0, -len(flat) % DENSE_ROW)).view(-1, DENSE_ROW)
            shares = even_shares(len(rows), reduce.world_size, reduce.rank)
            means = self.sums.means(None, reduce, rows, shares, window.terms, "dense gradients").view(-1)
        pieces = torch.split(means[: len(flat)], [part.numel() for part in window.dense_sums])
        for piece, (name, part) in zip(pieces, parts.items(), strict=False):
            window.dense[name] = self.sums.finite(piece, name).view_as(part)
        window.loss = pieces[-1]

    def sparse_update(self, window: Window, _micro_batch: int | None = None) -> None:
        """Apply the rows' gradients to the active buffer, once per window.

        The row of a key that is not admitted stays as it began. Rows in low precision are rounded to 16 bits
        here, so that storing and reading them changes nothing.
        """
        for group, table in zip(self.tables.groups, window.tables, strict=True):
            if self.replicated:
                assert table.mean_gradient is not None
                gradient = self.sums.finite(table.mean_gradient, NAME)
            else:
                assert table.row_gradient is not None
                gradient = self.sums.mean(table.row_gradient, window.row_terms)
            indices = torch.arange(len(table.keys), device=self.device)
            admitted = table.handles >= 0
            if not bool(admitted.all()):
                indices = to_device(admitted.nonzero().squeeze(1), self.device)
                gradient = ops.gather_rows(gradient, indices)
            group.optimizer.update(table.buffer, indices, gradient, window.update + 1)
            if table.low_precision is not None:
                group.table.round_low_precision(table.buffer, table.low_precision)

    def dense_update(self, window: Window, _micro_batch: int | None = None) -> None:
        """Apply the dense gradients."""
        self.dense.step(window.dense, window.update + 1)
        window.dense = {}

    def write_back(self, window: Window, _micro_batch: int | None = None) -> None:
        """Copy updated rows home: those of this window, or with ``skip_fetch`` those of the last window that
        this one does without.
        """
        if not self.config.skip_fetch:
            self._bring_home(window, window)
        elif (before := self._before(window)) is not None:
            self._bring_home(before, window, kept_by=window)

    def finish(self, window: Window) -> None:
        """After the last window in the pipeline: bring home what its buffer still holds, and empty both.

        So the next window sees rows that are loaded or erased before it.
        """
        if self.config.skip_fetch:
            self._bring_home(window, window)
        self._buffers = [None, None]

    def _bring_home(self, window: Window, counted: Window, kept_by: Window | None = None) -> None:
        """Write the rows of a window, except those that the next one has taken over."""
        for index, (group, table) in enumerate(zip(self.tables.groups, window.tables, strict=True)):
            handles, rows = table.handles, table.buffer
            goes = handles >= 0
            if kept_by is not None and (kept := kept_by.tables[index].kept) is not None:
                goes[kept[0]] = False
            if not bool(goes.all()):
                going = goes.nonzero().squeeze(1)
                handles, rows = handles[going], ops.gather_rows(rows, to_device(going, rows.device))
            group.table.update(handles, to_host(rows))
            counted.counts.written += len(handles)

    def _sum_over_ranks(self, counts: torch.Tensor) -> torch.Tensor:
        return self.communicators.retrieval.all_reduce(counts, "table sizes")

    def _count_rows(self, window: Window, send: list[int]) -> None:
        window.counts.rows += sum(send) - send[self.communicators.shard]


def _first_occurrences(inverse: torch.Tensor, count: int) -> torch.Tensor:
    """(count,) the first place of each number in `inverse`."""
    first = torch.full((count,), len(inverse), dtype=torch.int64, device=inverse.device)
    return first.scatter_reduce_(0, inverse, torch.arange(len(inverse), device=inverse.device), "amin")


def _index(micro_batch: int | None) -> int:
    assert micro_batch is not None
    return micro_batch
