"""Injected faults: each breaks the promise in one place, and `tritonrec verify --inject-faults` must notice.

A fault in the schedule is run with the check switched off, so that its effect must show in the bits; whether
the check alone would have refused it is reported beside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...pipeline import Edge
from . import in_batch, injections, kept_state
from .cases import Case
from .injections import Injection
from .variants import IN_BATCH, OWN_LOOP, RESTART, STREAM


@dataclass(frozen=True)
class Fault:
    """An injected fault and the case in which it must show.

    Args:
        says: the fault ends in an error with these words; empty: the run goes on to other bits. Nothing else
            catches it: an error of another kind is an accident, which says nothing of what was broken.
    """

    name: str
    description: str
    case: Case
    injection: Injection
    says: str = ""


def case(**changes: Any) -> Case:
    """The case in which a fault must show: where not said otherwise, two ranks, three micro-batches, Adam."""
    return replace(Case("nestpipe", "batch", 2, 3, False, "adam", steps=5), **changes)


ON_DISK = case(storage="disk", steps=8)


FAULTS = [
    Fault(
        "no-copy-of-kept-rows",
        "rows of K(t-1) & K(t) are not copied into the prefetch buffer",
        case(),
        Injection(injections.no_copy_of_kept_rows, delay=injections.slow("write_back")),
    ),
    Fault(
        "copy-of-wrong-rows",
        "the copied rows land at other keys",
        case(),
        Injection(injections.wrong_rows),
    ),
    Fault(
        "read-before-write-back",
        "retrieval of batch t does not wait for the write-back of batch t-2",
        case(),
        Injection(
            schedule=lambda schedule: schedule.without_edge("retrieve", Edge("write_back", batch=2)),
            delay=injections.slow("write_back"),
        ),
    ),
    Fault(
        "copy-before-update",
        "kept rows are copied without waiting for the update of batch t-1",
        case(),
        Injection(
            schedule=lambda schedule: schedule.without_edge("copy_kept_rows", Edge("sparse_update", batch=1)),
            delay=injections.slow("sparse_update"),
        ),
    ),
    Fault(
        "reduce-before-last-micro-batch",
        "dense gradients are reduced before the window's computation has ended",
        case(),
        Injection(
            injections.losses_begin_at_zero,
            schedule=lambda schedule: schedule.without_edge(
                "dense_reduce", Edge("compute", "all")
            ).with_edges("dense_reduce", Edge("route")),
            delay=injections.slow("compute", 2),
        ),
    ),
    Fault(
        "lost-micro-batch-gradient",
        "embedding gradients of the last micro-batch are dropped",
        case(mode="fwp", optimizer="sgd"),
        Injection(injections.lost_gradient, alone=True),
    ),
    Fault(
        "gradient-added-twice",
        "embedding gradients of micro-batch 1 count twice",
        case(mode="dbp", optimizer="rowwise_adagrad"),
        Injection(injections.gradient_twice, alone=True),
    ),
    Fault(
        "update-inside-window",
        "rows are updated after the first micro-batch instead of once per window",
        case(mode="dbp", optimizer="sgd"),
        Injection(injections.update_inside_window, alone=True),
    ),
    Fault(
        "float-sums",
        "contributions are added in float32 and rounded to fixed point afterwards",
        case(micro_batches=2),
        Injection(injections.float_sums),
    ),
    Fault(
        "sums-of-four-bytes",
        "gradient sums are sent as int32 instead of in the bytes they need",
        case(),
        Injection(injections.sums_of_four_bytes),
    ),
    Fault(
        "initial-value-by-arrival",
        "initial rows depend on the order of arrival instead of the key",
        case(),
        Injection(kept_state.initial_by_arrival),
    ),
    Fault(
        "stale-dense-parameter",
        "rank 1 misses one update of one parameter",
        case(),
        Injection(injections.stale_dense_parameter),
    ),
    Fault(
        "parameters-of-the-last-window",
        "sharded parameters are not gathered again after an update",
        case(variant="fsdp"),
        Injection(injections.parameters_of_the_last_window),
    ),
    Fault(
        "local-token-count",
        "gradients are divided by this rank's tokens instead of the global batch's",
        case(),
        Injection(injections.local_token_count),
    ),
    Fault(
        "bias-correction-per-micro-batch",
        "Adam counts micro-batches instead of steps",
        case(),
        Injection(injections.correction_per_micro_batch),
    ),
    Fault(
        "schedule-per-micro-batch",
        "the learning rate goes by micro-batches instead of updates",
        case(optimizer="sgd", variant="weight-decay"),
        Injection(injections.correction_per_micro_batch),
    ),
    Fault(
        "norm-of-one-rank",
        "each rank clips by the norm of its own rows",
        case(variant="recipe"),
        Injection(injections.norm_of_one_rank),
    ),
    Fault(
        "overflow-of-one-rank",
        "each rank leaves an update out, and moves the scale of its loss, by its own gradients",
        case(variant="fp16", steps=8),
        Injection(injections.norm_of_one_rank),
    ),
    Fault(
        "own-rows-not-rounded",
        "rows for a rank's own samples stay float32 where others get them in bfloat16",
        case(variant="exchange-bf16"),
        Injection(injections.own_rows_not_rounded),
    ),
    Fault(
        "whole-sums-rounded",
        "sums that are sent whole are rounded to float32 on their way",
        case(variant="whole-sums"),
        Injection(injections.whole_sums_rounded),
    ),
    Fault(
        "restart-without-loss-scale",
        "the scale of the loss begins anew after a restart",
        case(variant="fp16", steps=8, restart=1),
        Injection(kept_state.restart_without_loss_scale),
    ),
    Fault(
        "missed-decay-forgotten",
        "a row that missed updates decays once when it is updated again",
        case(variant="lazy-decay", steps=8),
        Injection(injections.missed_decay_forgotten),
    ),
    Fault(
        "states-of-other-rows",
        "each row is updated with the optimizer state of the row before it",
        case(optimizer="rowwise_adam"),
        Injection(injections.states_of_other_rows),
    ),
    Fault(
        "one-buffer",
        "rows of batch t are loaded over those batch t-1 is training on",
        case(),
        Injection(injections.one_buffer, delay=injections.slow("compute")),
    ),
    Fault(
        "dropout-by-place",
        "the dropout mask goes by a sample's place in its micro-batch instead of by the sample",
        case(),
        Injection(injections.dropout_by_position),
    ),
    Fault(
        "plan-of-the-first-window",
        "a model called without its modules draws the dropout of the first window again",
        case(),
        Injection(injections.plan_of_the_first_window),
    ),
    Fault(
        "merged-tables-share-ids",
        "equal ids of two merged tables share a row",
        case(variant="merged"),
        Injection(kept_state.merged_tables_share_ids),
    ),
    Fault(
        "rows-handed-out-in-reverse",
        "after dedup the rows go back to the occurrences in the wrong order",
        case(variant="dedup-exchange"),
        Injection(injections.rows_in_reverse),
    ),
    Fault(
        "evicts-rows-in-a-buffer",
        "eviction takes rows that the window before still trains on",
        case(variant="lfu", steps=8),
        Injection(kept_state.evicts_rows_in_a_buffer),
    ),
    Fault(
        "evicts-by-the-pass-before",
        "a device's table evicts as many rows as were too many one pass earlier",
        case(variant="lru", steps=8, storage="device"),
        Injection(kept_state.evicts_by_the_pass_before),
    ),
    Fault(
        "low-precision-rows-not-rounded",
        "rows in low precision stay float32 in the buffers",
        case(variant="precision-tiers"),
        Injection(kept_state.low_precision_not_rounded),
    ),
    Fault(
        "accumulation-divides-by-one-batch",
        "accumulated gradients are divided by the loss count of one batch",
        case(variant="accumulate", steps=6),
        Injection(injections.mean_over_one_batch),
    ),
    Fault(
        "restart-without-scores",
        "scores and access counts start from zero after a restart",
        case(variant=RESTART, steps=8, restart=1),
        Injection(kept_state.restart_without_scores),
    ),
    Fault(
        "shard-read-by-two-ranks",
        "rank 1 also streams the rows of the first reader of rank 0",
        case(variant=STREAM),
        Injection(loader=kept_state.shard_read_by_two_ranks),
        says="ranks 0 and 1 both train sample",
    ),
    Fault(
        "window-read-by-two-ranks",
        "rank 1 also streams the windows of GRM that the first reader of rank 0 has",
        case(variant="stream-grm"),
        Injection(loader=kept_state.shard_read_by_two_ranks),
        says="ranks 0 and 1 both train sample",
    ),
    Fault(
        "position-one-batch-late",
        "after a restart a stream goes on one batch late",
        case(variant=STREAM, steps=8, restart=1),
        Injection(loader=kept_state.position_one_batch_late),
    ),
    Fault(
        "gradients-leave-at-first-use",
        "gradients leave with the first micro-batch that uses a row, and miss what later ones add",
        case(variant="first-use"),
        Injection(injections.gradients_leave_at_first_use, delay=injections.slow("compute"), alone=True),
    ),
    Fault(
        "last-rows-stay-in-the-buffer",
        "rows that stayed in a buffer are not written back when the pipeline drains",
        case(variant="skip-fetch"),
        Injection(kept_state.last_rows_stay_in_the_buffer),
    ),
    Fault(
        "dropped-rows-not-written-back",
        "rows that a batch drops are taken for kept ones and never written back",
        case(variant="scale", steps=8),
        Injection(kept_state.dropped_rows_not_written_back),
    ),
    Fault(
        "fetch-before-dropped-rows-are-written",
        "retrieval of batch t does not wait until batch t-1 has written back the rows that it drops",
        case(variant="scale", steps=12),
        Injection(
            schedule=lambda schedule: schedule.without_edge("retrieve", Edge("write_back", batch=1)),
            delay=injections.slow("write_back"),
        ),
    ),
    Fault(
        "replicas-keep-their-gradients",
        "gradients are not added up over the replicas of a part",
        case(replicas=2),
        Injection(injections.replicas_keep_their_gradients),
    ),
    Fault(
        "replicas-in-different-orders",
        "replicas hold the same rows in different orders when their gradients are added up",
        case(replicas=2),
        Injection(injections.replicas_in_different_orders),
    ),
    Fault(
        "update-before-replica-reduction",
        "rows are updated without waiting for the gradients of other replicas",
        case(replicas=2),
        Injection(
            injections.means_begin_at_zero,
            schedule=lambda schedule: schedule.without_edge("sparse_update", Edge("replica_reduce", "all")),
            delay=injections.slow("replica_reduce"),
        ),
    ),
    Fault(
        "replica-reduction-after-the-first-use",
        "gradients are added up over the replicas before the last micro-batch that uses their rows",
        case(variant="scale", replicas=2),
        Injection(
            injections.replica_reduction_after_the_first_use, delay=injections.slow("gradient_exchange")
        ),
    ),
    Fault(
        "replica-reduction-before-the-gradients",
        "replicas do not wait for the gradients of the micro-batch after which they are reduced",
        case(variant="scale", replicas=2),
        Injection(
            # The rows are there to be reduced; only their gradients are not.
            schedule=lambda schedule: schedule.without_edge(
                "replica_reduce", Edge("gradient_exchange", "same")
            ).with_edges("replica_reduce", Edge("compute", "same")),
            delay=injections.slow("gradient_exchange"),
        ),
    ),
    Fault(
        "relay-hands-on-in-reverse",
        "a relay hands the rows of its node on in the wrong order",
        case(world_size=4, nodes=2),
        Injection(injections.relay_in_reverse),
    ),
    Fault(
        "relay-adds-to-another-row",
        "a relay adds the gradients of one rank of its node to one row",
        case(world_size=4, nodes=2),
        Injection(injections.relay_adds_to_another_row),
    ),
    Fault(
        "sums-of-a-node-rounded",
        "sums that wait in a relay for a later micro-batch are rounded to float32",
        case(world_size=4, variant="first-use", nodes=2),
        Injection(injections.node_sums_rounded),
    ),
    Fault(
        "norm-before-the-gate",
        "the layers of GRM norm attention alone, before the gate multiplies it",
        case(variant="grm-product"),
        Injection(injections.norm_before_the_gate),
    ),
    Fault(
        "rms-of-a-micro-batch",
        "FuXi norms rows by the mean square of their micro-batch",
        case(variant="fuxi-rms"),
        Injection(injections.rms_of_a_micro_batch),
    ),
    Fault(
        "padded-to-the-longest",
        "a converted model's micro-batch is padded to its longest sample",
        case(variant="converted"),
        Injection(injections.padded_to_the_longest),
    ),
    Fault(
        "weights-of-other-ids",
        "in a micro-batch the weights of bags are one id late",
        case(variant="weighted-bags"),
        Injection(injections.weights_of_other_ids),
    ),
    *(
        Fault(name, what, case(variant=IN_BATCH), Injection(program), says)
        for name, what, program, says in in_batch.FAULTS
    ),
    Fault(
        "gradients-of-the-last-pass",
        "in a loop of one's own the rows forget the gradients of earlier backward passes of the step",
        case(mode="sequential", variant=OWN_LOOP),
        Injection(loop=injections.gradients_of_the_last_pass),
    ),
    Fault(
        "disk-stale-page",
        "some rows are read from disk as they were at the write before the last one",
        ON_DISK,
        Injection(kept_state.stale_page),
    ),
    Fault(
        "disk-torn-write",
        "a row is written to disk but for its second half",
        ON_DISK,
        Injection(kept_state.torn_write),
    ),
    Fault(
        "disk-lost-write-back",
        "a row leaves memory and is not written to disk",
        ON_DISK,
        Injection(kept_state.lost_write_back),
    ),
    Fault(
        "disk-wrong-offset",
        "rows are read from disk one row too far",
        ON_DISK,
        Injection(kept_state.wrong_offset),
    ),
    Fault(
        "lost-gradient-at-window-consistency",
        "as above, where the reference is the same cut run sequentially",
        case(mode="fwp", optimizer="sgd", consistency="window"),
        Injection(injections.lost_gradient, alone=True),
    ),
]


_OF_TOOLS: dict[str, list[Fault]] = {}


def add_faults(*faults: Fault, before: str) -> None:
    """Those of a tool, put before the core's of that name."""
    _OF_TOOLS.setdefault(before, []).extend(faults)


def every_fault() -> list[Fault]:
    """Those of the core and of the tools that are loaded, in the order of the report."""
    return [each for fault in FAULTS for each in (*_OF_TOOLS.get(fault.name, ()), fault)]
