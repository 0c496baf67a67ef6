"""Replay beside a trainer: bits that flip in memory, on a link or in arithmetic are found, and their rank.

    compute           the input and the gradients of a micro-batch that is due are copied
    sparse_update     the input and the result of the rows that are due are copied
    dense_update      before it the next rank computes both again; checksums of both results and of the dense
                      state are compared over all ranks
    retrieve          rows read from a table are compared with the checksums they were written with
    all-to-alls       of one in 16, checksums at both ends (`Ledger`)

Dense parameters are frozen from `compute` to `dense_update`, so all ranks have those that the micro-batch was
computed with. Nothing else of a step changes: replay reads, and computes beside it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from ...distributed import Communicator, CorruptionError, Ledger, check_ranks_agree
from ...kernels.checksums import checksum
from ...pipeline.model_call import sees_window
from ...pipeline.places import (
    Buffer,
    Context,
    Dense,
    DeviceSamples,
    Embeddings,
    GradientNorm,
    Gradients,
    KeptRows,
    Losses,
    MeanGradient,
    OwnedRows,
    ReduceGroup,
    Routes,
    RowGradient,
)
from ...pipeline.stage import Read, Update
from ...pipeline.trainer import Trainer
from ...pipeline.window import Window
from ...settings import typed
from .messages import pack, unpack
from .plan import Plan
from .work import (
    MicroBatch,
    RowUpdate,
    Work,
    checksums,
    compute_again,
    names_of_micro_batch,
    update_again,
)

ONE_IN, LEDGER = 16, 8
"""All-to-alls of a group of which one at least is looked at, and how many of these are compared together."""
LEAST_SHARE = 1e-9
MOVING = (
    "routing", "replica_routing", "communication", "replica", "reduce",
    "node_routing", "rail_routing", "node", "rail",
)  # fmt: skip
"""Groups that move keys, rows and gradients."""

ADVICE = "check processor and memory there, and go on from a checkpoint before this step"

Again = Callable[[list[torch.Tensor]], list[torch.Tensor]]


@typed
class Replay:
    """Finds bits that flip while a `Trainer` trains; changes none itself.

    A `CorruptionError`, the cause of the trainer's `StageFailedError`, names the rank: with three ranks or
    more that which the two others outvote, with two "one of both", and a single rank computes everything
    twice. The update in which it is raised is not applied to the tables.

    Args:
        share: of micro-batches and of updated rows that are computed again, in [1e-9, 1]. The same share of
            messages is looked at, or one in 16 where that is more.

    Attributes:
        plan: when; None before `attach`.
        counts: of this rank: ``replayed_micro_batches`` and ``replayed_rows`` that others computed again,
            ``states_compared``, ``rows_checked`` as they were read, ``replay_bytes`` sent, and the
            microseconds of its threads' processor time, ``replay_microseconds`` and ``check_microseconds``.

    Raises ValueError for another share.

    Example::

        with Replay(share=0.0025) as replay:
            replay.attach(trainer)
            results = list(trainer.run(batches))
    """

    def __init__(self, share: float = 0.0025):
        if not LEAST_SHARE <= share <= 1:
            raise ValueError(f"share of the work to replay must lie in [{LEAST_SHARE}, 1], got {share}")
        self.share = share
        self.plan: Plan | None = None
        self.counts: Counter[str] = Counter()
        self._rank: int
        self._world: int
        self._ledgers: list[Communicator] = []
        self._begun: MicroBatch | None = None
        self._work: dict[int, Work] = {}  # by micro-batch
        self._update: RowUpdate | None = None

    def attach(self, trainer: Trainer) -> None:
        """Follow the trainer's stages from its next step on, while no batch is in flight. Collective.

        Tables then keep a checksum of each row, 8 bytes. Raises ValueError for mode ``"reference"``, which
        has no stages, and for parameters that `fully_shard` has sharded; `RanksDisagreeError` where ranks
        have other shares.
        """
        if trainer.mode == "reference":
            raise ValueError("replay follows the stages of a rank: mode 'reference' has none")
        if sees_window(trainer.dense.model):
            raise ValueError("replay computes a micro-batch alone: not that of a model with a window_loss")
        if trainer.dense.shards is not None:
            raise ValueError("replay needs whole parameters on every rank: leave out fully_shard")
        program = trainer.program
        groups, config = program.communicators, trainer.config
        self._rank, self._world = groups.rank, groups.world_size
        check_ranks_agree(groups.control, {"share of replay": self.share})
        exact = config.consistency == "batch"
        self.plan = Plan(self.share, self._world, config.window_micro_batches, first_only=not exact)
        self._update_stage = program.schedule["sparse_update"]
        for group in trainer.tables.groups:
            group.table.keep_checksums(self._rank)
        for over in (getattr(groups, name) for name in MOVING):
            over.ledger = Ledger(min(ONE_IN, self.plan.period), LEDGER)
            self._ledgers.append(over)
        program.after("retrieve", self._read)
        program.before("compute", self._before_compute)
        program.after("compute", self._after_compute)
        program.before("sparse_update", self._before_update)
        program.before("dense_update", self._check)

    def close(self) -> None:
        """No longer look at the messages of the trainer's groups, which other trainers may have next."""
        for over in self._ledgers:
            over.ledger = None
        self._ledgers.clear()

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(
        self, owned: Read[OwnedRows], buffer: Read[Buffer], kept: Read[KeptRows] | None, context: Context
    ) -> None:
        """Rows that were read are those that were written; kept ones may be stale, and are overwritten."""
        started = time.thread_time_ns()
        parts = zip(context.tables.groups, owned.tables, buffer, kept or [None] * len(buffer), strict=True)
        for group, own, rows, common in parts:
            group.table.validate_rows(own.handles, own.keys, rows, None if common is None else common.now)
            self.counts["rows_checked"] += len(own.handles)
        self.counts["check_microseconds"] += (time.thread_time_ns() - started) // 1000

    def _is_due(self, window: Window, micro_batch: int) -> bool:
        assert self.plan is not None
        return (self._rank, micro_batch) in self.plan.units(window.update)

    def _before_compute(
        self,
        micro_batch: int,
        window: Window,
        routes: Read[Routes],
        gradients: Read[Gradients],
        embeddings: Read[Embeddings],
        dense: Read[Dense],
    ) -> None:
        if self._is_due(window, micro_batch):
            with self._timed():
                self._begun = MicroBatch(micro_batch, routes, gradients, embeddings, dense)
            dense.flight.early.waits = True  # sums that have left are none that `MicroBatch` finds after it

    def _after_compute(
        self,
        micro_batch: int,
        samples: Read[DeviceSamples],
        losses: Read[Losses],
        dense: Read[Dense],
    ) -> None:
        if self._begun is not None:
            with self._timed():
                self._work[micro_batch] = self._begun.done(samples[micro_batch], losses, dense)
                self._begun = None
            dense.flight.early.waits = False

    def _before_update(
        self,
        window: Window,
        routes: Read[Routes],
        owned: Read[OwnedRows],
        row_gradient: Read[RowGradient],
        mean_gradient: Read[MeanGradient],
        norm: Read[GradientNorm] | None,
        buffer: Read[Buffer],
    ) -> None:
        assert self.plan is not None
        if (rows := self.plan.rows(window.update)) is not None:
            with self._timed():
                self._update = RowUpdate(
                    self._update_stage, *rows, routes, owned, row_gradient, mean_gradient, norm, buffer
                )

    def _check(
        self,
        context: Context,
        window: Window,
        samples: Read[DeviceSamples],
        routes: Read[Routes],
        owned: Read[OwnedRows],
        dense: Read[Dense],
        reduce: Update[ReduceGroup],
    ) -> None:
        """Collective, in the updates that the plan has."""
        assert self.plan is not None
        units = self.plan.units(window.update)
        if not units:
            return
        with self._timed():
            names = names_of_micro_batch(context, dense)
            for rank, micro_batch in units:
                like = samples[micro_batch]

                def compute(inputs: list[torch.Tensor], like=like) -> list[torch.Tensor]:
                    return compute_again(inputs, like, context, window, routes, dense)

                work = self._work.pop(micro_batch) if rank == self._rank else None
                where = f"step {window.step}, micro-batch {micro_batch}"
                self.counts["replayed_micro_batches"] += work is not None
                self._confirm(reduce, [rank], work, names, compute, where, context.device)
            assert self._update is not None
            work, self._update = self._update.done(), None
            self.counts["replayed_rows"] += sum(map(len, work.results))
            tables = [f"the update of the rows of {group.layout}" for group in context.tables.groups]

            def update(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
                return update_again(inputs, self._update_stage, context, window, owned)

            everyone, where = range(self._world), f"step {window.step}"
            self._confirm(reduce, everyone, work, tables, update, where, context.device)
            self._compare_states(reduce, dense, window.step)

    def _confirm(
        self,
        over: Communicator,
        ranks: Sequence[int],
        work: Work | None,
        names: list[str],
        again: Again,
        where: str,
        device: torch.device,
    ) -> None:
        """The next rank computes the `work` of `ranks` again; where it differs, so does the one after it."""
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        message = empty if work is None else pack(work.inputs, device)
        nothing = torch.zeros(len(names), dtype=torch.int64, device="cpu")

        def by(shift: int) -> torch.Tensor:
            sender = (self._rank - shift) % self._world
            received = over.ring_shift(message, shift)
            self.counts["replay_bytes"] += 0 if self._world == 1 else len(message)
            # Nothing was due at the sender, whose own checksums are zeros as well.
            if not len(received):
                return nothing
            return checksums(again(unpack(received, sender, self._rank)))

        mine = nothing if work is None else work.checksums
        first, second = self._gathered(over, torch.cat([mine, by(1)]), device).split(len(names), 1)
        # first[r]: what rank r computed; second[r]: what it made
        # of the input of rank r - 1; third[r]: of rank r - 2.
        # All ranks have gathered the same values: all go on, or all enter the next exchange.
        differ = [rank for rank in ranks if not torch.equal(first[rank], second[(rank + 1) % self._world])]
        if not differ:
            return
        third = self._gathered(over, by(2), device) if self._world > 2 else None
        rank = differ[0]
        next_, after = (rank + 1) % self._world, (rank + 2) % self._world
        name = names[int((first[rank] != second[next_]).nonzero()[0])]
        if self._world == 1:
            raise CorruptionError(
                f"rank 0 computed {name} twice from the same input, with other bits ({where}): {ADVICE}", (0,)
            )
        suspects: tuple[int, ...] = (rank, next_)
        if third is not None:
            outvoted = [
                suspect
                # The third vote equals one of the two: the other one is at fault.
                for suspect, other in ((rank, second[next_]), (next_, first[rank]))
                if torch.equal(third[after], other)
            ]
            suspects = tuple(outvoted) or (rank, next_, after)
        raise CorruptionError(_disagreement(suspects, self._world, name, where), suspects)

    def _compare_states(self, over: Communicator, dense: Dense, step: int) -> None:
        """Dense parameters and the states of their optimizers are the same on all ranks."""
        if self._world == 1 or not (tensors := dense.model.tensors()):
            return
        mine = torch.stack([checksum(each).cpu() for each in tensors.values()])
        everyone = self._gathered(over, mine, next(iter(tensors.values())).device)
        self.counts["states_compared"] += len(tensors)
        differ = (everyone != everyone[0]).any(0)
        if not bool(differ.any()):
            return
        at = int(differ.nonzero()[0])
        values = everyone[:, at].tolist()
        common, votes = Counter(values).most_common(1)[0]
        # Without a majority every rank is suspect.
        split = 2 * votes <= len(values)
        suspects = tuple(rank for rank, value in enumerate(values) if split or value != common)
        where = f"before the update of step {step}"
        raise CorruptionError(_disagreement(suspects, self._world, list(tensors)[at], where), suspects)

    def _gathered(self, over: Communicator, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        """(W, n) int64 on the host, of every rank's (n,)."""
        self.counts["replay_bytes"] += 8 * len(values) * (self._world - 1)
        everyone = values.to(device).expand(self._world, -1).contiguous()
        return over.all_to_all_equal(everyone).cpu()

    def _timed(self) -> _Timed:
        return _Timed(self.counts)


class _Timed:
    """Adds a block's processor time on this thread."""

    def __init__(self, counts: Counter[str]):
        self._counts = counts

    def __enter__(self) -> None:
        self._started = time.thread_time_ns()

    def __exit__(self, *exc: object) -> None:
        self._counts["replay_microseconds"] += (time.thread_time_ns() - self._started) // 1000


def _disagreement(suspects: Sequence[int], world_size: int, name: str, where: str) -> str:
    """The message where ranks have other bits of the same thing."""
    if len(suspects) == 1:
        others = f"the {world_size - 1} others"
        return f"rank {suspects[0]} has other bits of {name} than {others} ({where}): {ADVICE}"
    ranks = " and ".join(map(str, suspects))
    return f"ranks {ranks} have different bits of {name} ({where}), and one of them is wrong: {ADVICE}"
