"""Planted bugs: each breaks the promise in one place, and `tritonrec verify --mutations` must notice.

A bug in the schedule is run with the check switched off, so that its effect must show in the bits; whether
the check alone would have refused it is reported beside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..pipeline import Edge
from . import plants
from .cases import Case
from .plants import Plant
from .variants import RESTART


@dataclass(frozen=True)
class Mutation:
    """A planted bug and the case in which it must show."""

    name: str
    description: str
    case: Case
    plant: Plant


def plant(name: str) -> Plant:
    """The plant of the mutation called `name`."""
    return next(mutation.plant for mutation in MUTATIONS if mutation.name == name)


def _case(mode="nestpipe", world_size=2, micro_batches=3, optimizer="adam", consistency="batch") -> Case:
    return Case(mode, consistency, world_size, micro_batches, False, optimizer, steps=5)


MUTATIONS = [
    Mutation(
        "no-buffer-synchronisation",
        "rows of K(t-1) & K(t) are not copied into the prefetch buffer",
        _case(),
        Plant(plants.no_synchronisation),
    ),
    Mutation(
        "synchronisation-of-wrong-rows",
        "the copied rows land at other keys",
        _case(),
        Plant(plants.wrong_rows),
    ),
    Mutation(
        "read-before-write-back",
        "retrieval of batch t does not wait for the write-back of batch t-2",
        _case(),
        Plant(
            schedule=lambda schedule: schedule.without_edge("retrieve", Edge("write_back", batch=2)),
            delay=plants.slow("write_back"),
        ),
    ),
    Mutation(
        "synchronise-before-update",
        "the buffers are synchronised without waiting for the update of batch t-1",
        _case(),
        Plant(
            schedule=lambda schedule: schedule.without_edge("synchronise", Edge("sparse_update", batch=1)),
            delay=plants.slow("sparse_update"),
        ),
    ),
    Mutation(
        "reduce-before-last-micro-batch",
        "dense gradients are reduced before the window's computation has ended",
        _case(),
        Plant(
            schedule=lambda schedule: schedule.without_edge("dense_reduce", Edge("compute", "all")),
            delay=plants.slow("compute", 2),
        ),
    ),
    Mutation(
        "lost-micro-batch-gradient",
        "embedding gradients of the last micro-batch are dropped",
        _case(mode="fwp", optimizer="sgd"),
        Plant(plants.lost_gradient),
    ),
    Mutation(
        "gradient-added-twice",
        "embedding gradients of micro-batch 1 count twice",
        _case(mode="dbp", optimizer="rowwise_adagrad"),
        Plant(plants.gradient_twice),
    ),
    Mutation(
        "update-inside-window",
        "rows are updated after the first micro-batch instead of once per window",
        _case(mode="dbp", optimizer="sgd"),
        Plant(plants.update_inside_window),
    ),
    Mutation(
        "float-sums",
        "contributions are added in float32 and rounded to the grid afterwards",
        _case(micro_batches=2),
        Plant(plants.float_sums),
    ),
    Mutation(
        "sums-of-four-bytes",
        "gradient sums travel as int32 instead of in the bytes they need",
        _case(),
        Plant(plants.sums_of_four_bytes),
    ),
    Mutation(
        "initial-value-by-arrival",
        "initial rows depend on the order of arrival instead of the key",
        _case(),
        Plant(plants.initial_by_arrival),
    ),
    Mutation(
        "stale-dense-parameter",
        "rank 1 misses one update of one parameter",
        _case(),
        Plant(plants.stale_dense_parameter),
    ),
    Mutation(
        "local-token-count",
        "gradients are divided by this rank's tokens instead of the global batch's",
        _case(),
        Plant(plants.local_token_count),
    ),
    Mutation(
        "bias-correction-per-micro-batch",
        "Adam counts micro-batches instead of steps",
        _case(),
        Plant(plants.correction_per_micro_batch),
    ),
    Mutation(
        "one-buffer",
        "rows of batch t are loaded over those batch t-1 is training on",
        _case(),
        Plant(plants.one_buffer, delay=plants.slow("compute")),
    ),
    Mutation(
        "dropout-by-place",
        "the dropout mask goes by a sample's place in its micro-batch instead of by the sample",
        _case(),
        Plant(plants.dropout_by_position),
    ),
    Mutation(
        "ids-of-merged-tables-meet",
        "equal ids of two merged tables share a row",
        replace(_case(), variant="merged"),
        Plant(plants.ids_of_merged_tables_meet),
    ),
    Mutation(
        "rows-handed-out-in-reverse",
        "after dedup the rows go back to the occurrences in the wrong order",
        replace(_case(), variant="dedup-exchange"),
        Plant(plants.rows_in_reverse),
    ),
    Mutation(
        "evicts-rows-in-a-buffer",
        "eviction takes rows that the window before still trains on",
        replace(_case(), variant="lfu", steps=8),
        Plant(plants.evicts_rows_in_a_buffer),
    ),
    Mutation(
        "cold-rows-not-rounded",
        "rows in low precision stay float32 in the buffers",
        replace(_case(), variant="heat"),
        Plant(plants.low_precision_not_rounded),
    ),
    Mutation(
        "accumulation-divides-by-one-batch",
        "accumulated gradients are divided by the terms of one batch",
        replace(_case(), variant="accumulate", steps=6),
        Plant(plants.mean_over_one_batch),
    ),
    Mutation(
        "restart-without-scores",
        "scores and access counts start from zero after a restart",
        replace(_case(), variant=RESTART, steps=8, restart=1),
        Plant(plants.restart_without_scores),
    ),
    Mutation(
        "gradients-leave-at-first-use",
        "gradients leave with the first micro-batch that uses a row, and miss what later ones add",
        replace(_case(), variant="first-use"),
        Plant(plants.gradients_leave_at_first_use),
    ),
    Mutation(
        "last-rows-stay-in-the-buffer",
        "rows that stayed in a buffer do not come home when the pipeline runs empty",
        replace(_case(), variant="skip-fetch"),
        Plant(plants.last_rows_stay_in_the_buffer),
    ),
    Mutation(
        "dropped-rows-not-written-back",
        "rows that a batch does without are taken for kept ones and never written back",
        replace(_case(), variant="scale", steps=8),
        Plant(plants.dropped_rows_not_written_back),
    ),
    Mutation(
        "fetch-before-dropped-rows-are-home",
        "retrieval of batch t does not wait until batch t-1 has brought home what it does without",
        replace(_case(), variant="scale", steps=12),
        Plant(
            schedule=lambda schedule: schedule.without_edge("retrieve", Edge("write_back", batch=1)),
            delay=plants.slow("write_back"),
        ),
    ),
    Mutation(
        "replicas-keep-their-gradients",
        "gradients are not added up over the replicas of a part",
        replace(_case(), replicas=2),
        Plant(plants.replicas_keep_their_gradients),
    ),
    Mutation(
        "replicas-in-different-orders",
        "replicas hold the same rows in different orders when their gradients are added up",
        replace(_case(), replicas=2),
        Plant(plants.replicas_in_different_orders),
    ),
    Mutation(
        "update-before-replicas-meet",
        "rows are updated without waiting for the gradients of other replicas",
        replace(_case(), replicas=2),
        Plant(
            plants.means_begin_at_zero,
            schedule=lambda schedule: schedule.without_edge("sparse_update", Edge("replica_reduce", "all")),
            delay=plants.slow("replica_reduce"),
        ),
    ),
    Mutation(
        "replicas-meet-after-the-first-use",
        "gradients are added up over the replicas before the last micro-batch that uses their rows",
        replace(_case(), variant="scale", replicas=2),
        Plant(plants.replicas_meet_after_the_first_use),
    ),
    Mutation(
        "replicas-meet-before-gradients-are-here",
        "replicas do not wait for the gradients of the micro-batch after which they meet",
        replace(_case(), variant="scale", replicas=2),
        Plant(
            schedule=lambda schedule: schedule.without_edge(
                "replica_reduce", Edge("gradient_exchange", "same")
            ),
            delay=plants.slow("gradient_exchange"),
        ),
    ),
    Mutation(
        "lost-gradient-at-window-level",
        "as above, where the reference is the same cut run in turn",
        _case(mode="fwp", optimizer="sgd", consistency="window"),
        Plant(plants.lost_gradient),
    ),
]
