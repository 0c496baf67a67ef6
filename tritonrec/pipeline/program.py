"""What one rank does in each stage of a window (NestPipe, sections IV.A and V).

Keys, embeddings and gradients travel grouped by rank and, inside a rank's part, by micro-batch:

    routed keys, W = 2, M = 2     | to rank 0          | to rank 1          |
                                  | mb 0     | mb 1    | mb 0   | mb 1      |
"""

from __future__ import annotations

import torch

from .. import ops
from ..data import Batch, split
from ..distributed import Communicators
from ..embedding import DenseOptimizer, HashTableCollection, TableGroup
from ..nn import attach_grids, detach_grids
from .window import TableWindow, Window, WindowConfig

DROPOUT_STREAM = 0x64726F70  # one Philox stream for dropout seeds


class WindowProgram:
    """The stages of a rank, by name: ``actions[stage](window, micro_batch)``.

    Args:
        model: dense model, the same on every rank.
        tables: this rank's shard; an id belongs to ``ops.owner_of(id, world_size)``.
        dense: optimizer of the model's parameters.
        communicators: one for each lane that communicates.
        config: see `WindowConfig`.
        device: where samples and buffers go.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tables: HashTableCollection,
        dense: DenseOptimizer,
        communicators: Communicators,
        config: WindowConfig,
        device: str | torch.device = "cpu",
    ):
        self.model, self.tables, self.dense = model, tables, dense
        self.communicators, self.config, self.device = communicators, config, torch.device(device)
        self.exact = config.consistency == "batch"
        if self.exact:
            attach_grids(model, config.grid_bits)
        else:
            detach_grids(model)
        self._buffers: list[Window | None] = [None, None]
        self.actions = {
            name: getattr(self, name)
            for name in (
                "prefetch", "h2d", "route", "retrieve", "synchronise", "exchange", "compute",
                "gradient_exchange", "dense_reduce", "sparse_update", "dense_update", "write_back",
            )
        }  # fmt: skip

    # Lookup: from samples to rows in the prefetch buffer.

    def prefetch(self, window: Window, _micro_batch: int | None = None) -> None:
        """Cut this rank's samples into micro-batches (stage 1, section V.C)."""
        for batch in window.batches:
            batch.validate()
            parts = split(batch, self.config.micro_batches, self.config.clustering)
            window.micro_batches += [batch.select(part) for part in parts]
        missing = self.config.window_micro_batches - len(window.micro_batches)  # a run's last window
        nothing = window.batches[-1].select(torch.arange(0))
        window.micro_batches += [nothing] * missing

    def h2d(self, window: Window, _micro_batch: int | None = None) -> None:
        """Move the micro-batches to the device (stage 2)."""
        window.micro_batches = [part.to(self.device, non_blocking=True) for part in window.micro_batches]

    def route(self, window: Window, _micro_batch: int | None = None) -> None:
        """Deduplicate each micro-batch's keys and send them to their owners (stage 3)."""
        world, groups = self.communicators.world_size, self.tables.groups
        window.tables = [TableWindow() for _ in groups]
        by_owner: list[list[list[torch.Tensor]]] = [[[] for _ in range(world)] for _ in groups]
        for part in window.micro_batches:
            asked = self.tables.keys(part.lookups())
            for group, table, keys, buckets in zip(groups, window.tables, asked, by_owner, strict=True):
                self._bucket(group, table, keys, buckets)
                window.counts.occurrences += len(keys)
        # One row for each rank: keys of every table and micro-batch, and this rank's terms of the loss.
        counts = torch.tensor([table.send for table in window.tables], dtype=torch.int64)  # (G, M, W)
        terms = torch.full((world, 1), sum(batch.loss_terms for batch in window.batches))
        answer = self.communicators.routing.all_to_all_equal(
            torch.cat([counts.permute(2, 0, 1).flatten(1), terms], 1)
        )
        window.terms = int(answer[:, -1].sum())
        received = answer[:, :-1].view(world, *counts.shape[:2]).permute(1, 2, 0).tolist()
        for table, receive, buckets in zip(window.tables, received, by_owner, strict=True):
            table.receive = receive
            keys = torch.cat([bucket for owned in buckets for bucket in owned])
            send = [sum(column) for column in zip(*table.send, strict=True)]
            table.received_keys = self.communicators.routing.all_to_all(
                keys, send, [sum(column) for column in zip(*receive, strict=True)]
            )
            window.counts.exchanged += len(keys)
            window.counts.key_bytes += 8 * (len(keys) - send[self.communicators.rank])

    def _bucket(
        self, group: TableGroup, table: TableWindow, keys: torch.Tensor, buckets: list[list[torch.Tensor]]
    ) -> None:
        """Add one micro-batch's keys to each owner's bucket; remember where each occurrence's row will be."""
        inverse = torch.arange(len(keys), device=keys.device)
        if self.config.dedup in ("exchange", "both"):
            keys, inverse, _counts = ops.unique(keys)
        _members, ids = group.layout.unpack(keys)
        permutation, counts = ops.bucketize(ids, self.communicators.world_size)
        place = torch.empty_like(permutation)
        place[permutation] = torch.arange(len(permutation), device=place.device)
        table.inverse.append(place[inverse])
        table.send.append(counts.tolist())
        for owner, bucket in enumerate(torch.split(keys[permutation], table.send[-1])):
            buckets[owner].append(bucket)

    def retrieve(self, window: Window, _micro_batch: int | None = None) -> None:
        """Deduplicate again, find or add the keys, copy their rows into the prefetch buffer (stage 4).

        What is due in the tables at this update happens first: eviction, demotion. It leaves alone the keys
        of this window and of the last one, whose rows lie in the two buffers.
        """
        world, count = self.communicators.world_size, self.config.window_micro_batches
        dtype = torch.int64 if self.exact else torch.float32
        for group, table in zip(self.tables.groups, window.tables, strict=True):
            table.keys, inverse, _counts = ops.unique(table.received_keys)
            found = group.table.lookup(table.keys, window.update, self._sum_over_ranks)
            if self.config.dedup in ("lookup", "both"):
                rows = group.table.read(found.rows, table.keys)
                window.counts.read += len(table.keys)
            else:
                # A row is read for every key received; those of one key are the same.
                rows = group.table.read(found.rows[inverse], table.received_keys)
                rows = ops.gather_rows(rows, _first_occurrences(inverse, len(table.keys)))
                window.counts.read += len(table.received_keys)
            window.counts.lookups += 1
            window.counts.received += len(table.received_keys)
            absent = found.rows < 0
            if bool(absent.any()):
                table.admitted = (~absent).nonzero().squeeze(1)
            table.cold = found.cold
            table.buffer = rows.to(self.device)
            lengths = [table.receive[i][r] for r in range(world) for i in range(count)]
            pieces = torch.split(inverse, lengths)
            table.wanted = [torch.cat(pieces[i::count]) for i in range(count)]
            table.row_gradient = torch.zeros(
                len(table.keys), group.table.dim, dtype=dtype, device=self.device
            )
        self._buffers[window.number % 2] = window

    def synchronise(self, window: Window, _micro_batch: int | None = None) -> None:
        """Copy the rows of K(t-1) & K(t) from the active into the prefetch buffer (section IV.B)."""
        active = self._buffers[(window.number - 1) % 2]
        if active is None:
            return
        for before, table in zip(active.tables, window.tables, strict=True):
            here, there = ops.intersect(before.keys, table.keys)
            ops.scatter_rows(table.buffer, there, ops.gather_rows(before.buffer, here))

    # The window: rows are frozen until `sparse_update`.

    def exchange(self, window: Window, micro_batch: int | None) -> None:
        """Send the rows that other ranks' micro-batch wants, receive those of this rank's."""
        i = _index(micro_batch)
        window.sent_bytes = 0
        for group, table in zip(self.tables.groups, window.tables, strict=True):
            weights = ops.gather_rows(table.buffer[:, : group.table.dim], table.wanted[i])
            table.embeddings[i] = self._travel(window, weights, table.receive[i], table.send[i])

    def compute(self, window: Window, micro_batch: int | None) -> None:
        """Forward and backward of one micro-batch."""
        i = _index(micro_batch)
        part = window.micro_batches[i]
        embeddings = [table.embeddings.pop(i) for table in window.tables]
        rows = [
            ops.gather_rows(values, table.inverse[i]).requires_grad_()
            for values, table in zip(embeddings, window.tables, strict=True)
        ]
        seed = ops.derive_seed(self.config.seed, DROPOUT_STREAM, part.step)
        losses = self.model(part, self.tables.by_feature(rows, part.lookups()), seed)
        window.losses[i] = losses.detach()
        if part.loss_terms:
            losses.sum().backward()
        for values, leaf, table in zip(embeddings, rows, window.tables, strict=True):
            gradient = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
            table.gradients[i] = self._sum_rows(gradient, table.inverse[i], len(values), "embedding gradient")

    def gradient_exchange(self, window: Window, micro_batch: int | None) -> None:
        """Send gradient rows to their owners and add them up there."""
        i = _index(micro_batch)
        window.sent_bytes = 0
        for table in window.tables:
            gradients = self._travel(window, table.gradients.pop(i), table.send[i], table.receive[i])
            assert table.row_gradient is not None
            self._sum_rows(
                gradients, table.wanted[i], len(table.keys), "embedding gradient", out=table.row_gradient
            )

    # The end of the window: one update from complete sums.

    def dense_reduce(self, window: Window, _micro_batch: int | None = None) -> None:
        """Sum the dense gradients over the ranks, as one flat message."""
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        parts = [self._take_gradient(name, p) for name, p in zip(names, parameters, strict=True)]
        flat = torch.cat([part.reshape(-1) for part in parts])
        flat = self.communicators.reduce.all_reduce(flat, "dense gradients")
        pieces = torch.split(flat, [part.numel() for part in parts])
        for name, piece, parameter in zip(names, pieces, parameters, strict=True):
            window.dense[name] = self._mean(piece, window, name).view_as(parameter)

    def sparse_update(self, window: Window, _micro_batch: int | None = None) -> None:
        """Apply the rows' gradients to the active buffer, once per window.

        The row of a key that is not admitted stays as it began. Rows kept in half precision are rounded to it
        here, so that storing and reading them changes nothing.
        """
        for group, table in zip(self.tables.groups, window.tables, strict=True):
            assert table.row_gradient is not None
            gradient = self._mean(table.row_gradient, window, "embedding gradient")
            indices = torch.arange(len(table.keys), device=self.device)
            if table.admitted is not None:
                indices = table.admitted.to(self.device)
                gradient = ops.gather_rows(gradient, indices)
            group.optimizer.update(table.buffer, indices, gradient, window.update + 1)
            if table.cold is not None:
                group.table.round_cold(table.buffer, table.cold)
            table.row_gradient = None

    def dense_update(self, window: Window, _micro_batch: int | None = None) -> None:
        """Apply the dense gradients."""
        self.dense.step(window.dense, window.update + 1)
        window.dense = {}

    def write_back(self, window: Window, _micro_batch: int | None = None) -> None:
        """Copy the updated rows home to the tables."""
        for group, table in zip(self.tables.groups, window.tables, strict=True):
            keys, rows = table.keys, table.buffer.cpu()
            if table.admitted is not None:
                keys, rows = keys[table.admitted], ops.gather_rows(rows, table.admitted)
            group.table.write(keys, rows)

    # Sums. The grid makes them independent of order; the window level fixes the order instead.

    def _sum_rows(
        self,
        values: torch.Tensor,
        rows: torch.Tensor,
        count: int,
        name: str,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        level = self.config.consistency
        return ops.segment_sum(
            values, rows, count, level=level, out=out, bits=self.config.grid_bits, name=name
        )

    def _sum_over_ranks(self, counts: torch.Tensor) -> torch.Tensor:
        return self.communicators.retrieval.all_reduce(counts, "table sizes")

    def _take_gradient(self, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The parameter's summed gradient of this rank; leaves none behind."""
        if not self.exact:
            gradient, parameter.grad = parameter.grad, None
            return torch.zeros_like(parameter) if gradient is None else gradient
        return take_grid(name, parameter)

    def _mean(self, sums: torch.Tensor, window: Window, name: str) -> torch.Tensor:
        """Sums over samples to the gradient of the mean loss per term, all ranks and batches together."""
        terms = float(max(window.terms, 1))
        if self.exact:
            return ops.from_grid(sums, terms, self.config.grid_bits)
        finite = torch.isfinite(sums)
        if not bool(finite.all()):
            index = tuple((~finite).nonzero()[0].tolist())
            raise FloatingPointError(f"{name}: gradient sum at {index} is {float(sums[index])}")
        return sums / terms

    def _travel(
        self, window: Window, values: torch.Tensor, send: list[int], receive: list[int]
    ) -> torch.Tensor:
        here = self.communicators.rank
        sent = (sum(send) - send[here]) * values.shape[1] * values.element_size()
        window.sent_bytes += sent
        window.counts.row_bytes += sent
        return self.communicators.communication.all_to_all(values, send, receive)

    def losses_of(self, window: Window) -> list[tuple[Batch, torch.Tensor, torch.Tensor]]:
        """For each batch itself, and in its micro-batches' order sample ids (B,) and losses (B,) float32."""
        count, found = self.config.micro_batches, []
        for place, batch in enumerate(window.batches):
            part = range(place * count, (place + 1) * count)
            ids = torch.cat([window.micro_batches[i].sample_ids for i in part])
            found.append((batch, ids, torch.cat([window.losses[i] for i in part])))
        return found


def take_grid(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    """The parameter's gradient sum on the grid; its grid is zero afterwards."""
    if parameter.grad is not None:
        raise TypeError(
            f"parameter {name} got an ordinary float32 gradient, whose sum depends on the batch's cut; "
            "batch consistency needs it from a module of tritonrec.nn, or use consistency='window'"
        )
    grid: torch.Tensor = parameter.grid  # type: ignore[attr-defined]
    sums = grid.clone()
    grid.zero_()
    return sums


def _first_occurrences(inverse: torch.Tensor, count: int) -> torch.Tensor:
    """(count,) the first place of each number in `inverse`."""
    first = torch.full((count,), len(inverse), dtype=torch.int64, device=inverse.device)
    return first.scatter_reduce_(0, inverse, torch.arange(len(inverse), device=inverse.device), "amin")


def _index(micro_batch: int | None) -> int:
    assert micro_batch is not None
    return micro_batch
