"""Whether a replica has the rows and scores of the training that it follows at every step, and its faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from ...data import Batch
from ...pipeline import Trainer
from ...serving.live import Follower, Publisher
from ...serving.live.follower import Part
from ..job import Loader
from .exported import scores_of
from .state import Comparison

EVERY = 2
"""Steps between publications."""


def followed(
    trainer: Trainer,
    loader: Loader,
    comparison: Comparison,
    expected: Callable[[int], Mapping[str, torch.Tensor]],
    batches: Sequence[Batch],
    first: int,
    folder: str,
    follower: type[Follower],
    counts: Counter[str],
) -> Iterator[Sequence[Batch]]:
    """`batches` in stretches; after each the training is published, and a replica on each rank follows.

    Every rank compares the replica's weights of its own rows with those of the reference, rank 0 its scores
    with those of the trainer's model. `follower` is `Follower`, or breaks it. Collective.
    """
    control, sink = trainer.communicators.control, Path(folder, "sink")
    replica: Follower | None = None
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
            step = first + at + len(stretch) - 1
            for name, table in replica.predictor.tables.items():
                comparison.compare_weights(step, expected(step), name, table.ids, table.weights)
            whole = trainer.whole_tables()
            if trainer.communicators.rank == 0:
                comparison.compare_scores(step, *scores_of(trainer, whole, replica.predictor, loader))
            counts["applied"] = replica.sequence - 1


class AppliedTwice(Follower):
    """The delta before is applied again behind each one."""

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


class TombstoneLost(Follower):
    """Erased rows stay."""

    def _apply(self, parts: list[Part]) -> None:
        super()._apply(
            [(header, {name: each for name, each in own.items() if not name.endswith("/erased")})
             for header, own in parts]
        )  # fmt: skip

    def _check_rows(self, *arguments: object) -> None:
        pass


class HalfSnapshot(Follower):
    """Of a snapshot the second half of each table's rows is left out."""

    def _load(self, sequence: int) -> None:
        super()._load(sequence)
        for name, live in self._tables.items():
            half, none = live.table.ids[len(live.table.ids) // 2 :], live.table.ids[:0]
            self.predictor.tables[name] = live.prepare(none, live.table.weights[:0], half)
            live.commit()

    def _check_rows(self, *arguments: object) -> None:
        pass


class OfAnotherRun(Follower):
    """Deltas come from another run of the same training."""

    def _delta(self, sequence: int, checked: bool = True) -> list[Part]:
        found = super()._delta(sequence, checked=False)
        parts = [(replace(header, run="another"), own) for header, own in found]
        for part, (header, _) in enumerate(parts):
            self._check(header, sequence, part, f"part {part} of delta {sequence}")
        return parts


class DenseOfTheStepBefore(Follower):
    """Rows go on, and dense values stay those of the step before."""

    _late: dict[str, torch.Tensor] | None = None

    def _apply(self, parts: list[Part]) -> None:
        (header, own), *rest = parts
        dense = {name: each for name, each in own.items() if name.startswith("dense/")}
        rows = {name: each for name, each in own.items() if name not in dense}
        super()._apply([(header, {**rows, **(self._late or {})}), *rest])
        self._late = dense

    def _check_dense(self, *arguments: object) -> None:
        pass
