"""Whether a replica has the rows and scores of the training that it follows at every step, and its faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from ....data import Batch
from ....serving.live import Follower, Publisher
from ....serving.live.follower import Part
from ...train.gather import whole_tables
from ..faults import case, fault
from ..variants import MADE, POLICIES, SMALL, Run, Variant, add_variants
from .exported import SCORES, exported_parts, scores_of

EVERY = 2
"""Steps between publications."""


def followed(run: Run) -> Iterator[Sequence[Batch]]:
    """After each stretch the training is published, and a replica on each rank follows.

    Every rank compares the replica's weights of its own rows with those of the reference, rank 0 its scores
    with those of the trainer's model. A fault's tool takes the place of `Follower`. Collective.
    """
    trainer, comparison, sink = run.trainer, run.comparison, Path(run.folder, "sink")
    control, rank = trainer.communicators.control, trainer.communicators.rank
    batches, replica = [*run.batches], None
    run.due += exported_parts(trainer.program.tables.table_names, rank)
    follower: type[Follower] = run.injected or Follower
    with ExitStack() as stack:
        for at in range(0, len(batches), EVERY):
            stretch = batches[at : at + EVERY]
            yield stretch
            if replica is None:  # the first snapshot has rows
                publisher = stack.enter_context(Publisher(trainer, sink, every=EVERY, snapshot_every=3))
            else:
                publisher.publish()
            publisher.flush()
            control.all_gather_texts("")  # all parts are there
            replica = replica or follower.open(sink)
            replica.poll()
            if replica.sequence != publisher.sequence:
                raise RuntimeError(
                    f"the replica is at {replica.sequence}, published was {publisher.sequence}"
                )
            step = run.steps[0] + at + len(stretch) - 1
            for name, table in replica.predictor.tables.items():
                comparison.compare_weights(step, run.expected(step), name, table.ids, table.weights)
            whole = whole_tables(trainer.rows_of_ranks())
            if rank == 0:
                scores = scores_of(trainer, whole, replica.predictor, run.loader)
                comparison.compare_part(step, SCORES, *scores)
            run.counts["applied"] = replica.sequence - 1


add_variants(
    {
        "deltas": Variant(
            "a replica follows the training by deltas with tombstones, between full snapshots",
            {**SMALL, "data": MADE, "policy": POLICIES},
            shows=("applied", "evicted"),
            tool=followed,
        ),
    },
    before="balanced",
)


@fault(case(variant="deltas", steps=8), of="tool")
class DeltaAppliedTwice(Follower):
    """A replica applies the delta before again behind each one."""

    _parts: list[Part] | None = None

    def _apply(self, parts: list[Part]) -> None:
        super()._apply(parts)
        before, self._parts = self._parts, parts
        if before is not None:
            last = before[0][0], {name: each for name, each in before[0][1].items() if name[:5] != "dense"}
            super()._apply([last, *before[1:]])
            self._at = parts[0][0]

    def _check_rows(self, *arguments: object) -> None:
        pass

    def _check_dense(self, *arguments: object) -> None:
        pass


@fault(case(variant="deltas", steps=8), of="tool")
class TombstoneLost(Follower):
    """A replica keeps rows that were evicted."""

    def _apply(self, parts: list[Part]) -> None:
        super()._apply(
            [(header, {name: each for name, each in own.items() if not name.endswith("/erased")})
             for header, own in parts]
        )  # fmt: skip

    def _check_rows(self, *arguments: object) -> None:
        pass


@fault(case(variant="deltas", steps=8), of="tool")
class HalfAppliedSnapshot(Follower):
    """A replica begins with the first half of a snapshot's rows."""

    def _load(self, sequence: int) -> None:
        super()._load(sequence)
        for name, live in self._tables.items():
            half, none = live.table.ids[len(live.table.ids) // 2 :], live.table.ids[:0]
            self.predictor.tables[name] = live.prepare(none, live.table.weights[:0], half)
            live.commit()

    def _check_rows(self, *arguments: object) -> None:
        pass


@fault(case(variant="deltas", steps=8), of="tool", says="is of run another")
class DeltaOfAnotherRun(Follower):
    """A replica gets the deltas of another run."""

    def _delta(self, sequence: int, checked: bool = True) -> list[Part]:
        found = super()._delta(sequence, checked=False)
        parts = [(replace(header, run="another"), own) for header, own in found]
        for part, (header, _) in enumerate(parts):
            self._check(header, sequence, part, f"part {part} of delta {sequence}")
        return parts


@fault(case(variant="deltas", steps=8), of="tool")
class DenseValuesOfTheStepBefore(Follower):
    """A replica's rows go on, and its dense values follow one delta late."""

    _late: dict[str, torch.Tensor] | None = None

    def _apply(self, parts: list[Part]) -> None:
        (header, own), *rest = parts
        dense = {name: each for name, each in own.items() if name.startswith("dense/")}
        rows = {name: each for name, each in own.items() if name not in dense}
        super()._apply([(header, {**rows, **(self._late or {})}), *rest])
        self._late = dense

    def _check_dense(self, *arguments: object) -> None:
        pass
