"""Injected faults: each breaks the promise in one place, and `tritonrec verify --inject-faults` must notice.

A fault in the schedule is run with the check switched off, so that its effect must show in the bits; whether
the check alone would have refused it is reported beside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...pipeline import Edge
from . import cached, deltas, disk, in_batch, injections, kept_state, server
from .cases import Case
from .injections import Injection
from .variants import IN_BATCH, LOST_RANK, OWN_LOOP, RESTART, STREAM


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


def _case(mode="nestpipe", world_size=2, micro_batches=3, optimizer="adam", consistency="batch") -> Case:
    return Case(mode, consistency, world_size, micro_batches, False, optimizer, steps=5)


def _disk() -> Case:
    return replace(_case(), storage="disk", steps=8)


FAULTS = [
    Fault(
        "no-copy-of-kept-rows",
        "rows of K(t-1) & K(t) are not copied into the prefetch buffer",
        _case(),
        Injection(injections.no_copy_of_kept_rows, delay=injections.slow("write_back")),
    ),
    Fault(
        "copy-of-wrong-rows",
        "the copied rows land at other keys",
        _case(),
        Injection(injections.wrong_rows),
    ),
    Fault(
        "read-before-write-back",
        "retrieval of batch t does not wait for the write-back of batch t-2",
        _case(),
        Injection(
            schedule=lambda schedule: schedule.without_edge("retrieve", Edge("write_back", batch=2)),
            delay=injections.slow("write_back"),
        ),
    ),
    Fault(
        "copy-before-update",
        "kept rows are copied without waiting for the update of batch t-1",
        _case(),
        Injection(
            schedule=lambda schedule: schedule.without_edge("copy_kept_rows", Edge("sparse_update", batch=1)),
            delay=injections.slow("sparse_update"),
        ),
    ),
    Fault(
        "reduce-before-last-micro-batch",
        "dense gradients are reduced before the window's computation has ended",
        _case(),
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
        _case(mode="fwp", optimizer="sgd"),
        Injection(injections.lost_gradient, alone=True),
    ),
    Fault(
        "gradient-added-twice",
        "embedding gradients of micro-batch 1 count twice",
        _case(mode="dbp", optimizer="rowwise_adagrad"),
        Injection(injections.gradient_twice, alone=True),
    ),
    Fault(
        "update-inside-window",
        "rows are updated after the first micro-batch instead of once per window",
        _case(mode="dbp", optimizer="sgd"),
        Injection(injections.update_inside_window, alone=True),
    ),
    Fault(
        "float-sums",
        "contributions are added in float32 and rounded to fixed point afterwards",
        _case(micro_batches=2),
        Injection(injections.float_sums),
    ),
    Fault(
        "sums-of-four-bytes",
        "gradient sums are sent as int32 instead of in the bytes they need",
        _case(),
        Injection(injections.sums_of_four_bytes),
    ),
    Fault(
        "initial-value-by-arrival",
        "initial rows depend on the order of arrival instead of the key",
        _case(),
        Injection(kept_state.initial_by_arrival),
    ),
    Fault(
        "stale-dense-parameter",
        "rank 1 misses one update of one parameter",
        _case(),
        Injection(injections.stale_dense_parameter),
    ),
    Fault(
        "parameters-of-the-last-window",
        "sharded parameters are not gathered again after an update",
        replace(_case(), variant="fsdp"),
        Injection(injections.parameters_of_the_last_window),
    ),
    Fault(
        "local-token-count",
        "gradients are divided by this rank's tokens instead of the global batch's",
        _case(),
        Injection(injections.local_token_count),
    ),
    Fault(
        "bias-correction-per-micro-batch",
        "Adam counts micro-batches instead of steps",
        _case(),
        Injection(injections.correction_per_micro_batch),
    ),
    Fault(
        "schedule-per-micro-batch",
        "the learning rate goes by micro-batches instead of updates",
        replace(_case(optimizer="sgd"), variant="weight-decay"),
        Injection(injections.correction_per_micro_batch),
    ),
    Fault(
        "norm-of-one-rank",
        "each rank clips by the norm of its own rows",
        replace(_case(), variant="recipe"),
        Injection(injections.norm_of_one_rank),
    ),
    Fault(
        "overflow-of-one-rank",
        "each rank leaves an update out, and moves the scale of its loss, by its own gradients",
        replace(_case(), variant="fp16", steps=8),
        Injection(injections.norm_of_one_rank),
    ),
    Fault(
        "own-rows-not-rounded",
        "rows for a rank's own samples stay float32 where others get them in bfloat16",
        replace(_case(), variant="exchange-bf16"),
        Injection(injections.own_rows_not_rounded),
    ),
    Fault(
        "whole-sums-rounded",
        "sums that are sent whole are rounded to float32 on their way",
        replace(_case(), variant="whole-sums"),
        Injection(injections.whole_sums_rounded),
    ),
    Fault(
        "restart-without-loss-scale",
        "the scale of the loss begins anew after a restart",
        replace(_case(), variant="fp16", steps=8, restart=1),
        Injection(kept_state.restart_without_loss_scale),
    ),
    Fault(
        "missed-decay-forgotten",
        "a row that missed updates decays once when it is updated again",
        replace(_case(), variant="lazy-decay", steps=8),
        Injection(injections.missed_decay_forgotten),
    ),
    Fault(
        "states-of-other-rows",
        "each row is updated with the optimizer state of the row before it",
        _case(optimizer="rowwise_adam"),
        Injection(injections.states_of_other_rows),
    ),
    Fault(
        "one-buffer",
        "rows of batch t are loaded over those batch t-1 is training on",
        _case(),
        Injection(injections.one_buffer, delay=injections.slow("compute")),
    ),
    Fault(
        "dropout-by-place",
        "the dropout mask goes by a sample's place in its micro-batch instead of by the sample",
        _case(),
        Injection(injections.dropout_by_position),
    ),
    Fault(
        "plan-of-the-first-window",
        "a model called without its modules draws the dropout of the first window again",
        _case(),
        Injection(injections.plan_of_the_first_window),
    ),
    Fault(
        "merged-tables-share-ids",
        "equal ids of two merged tables share a row",
        replace(_case(), variant="merged"),
        Injection(kept_state.merged_tables_share_ids),
    ),
    Fault(
        "rows-handed-out-in-reverse",
        "after dedup the rows go back to the occurrences in the wrong order",
        replace(_case(), variant="dedup-exchange"),
        Injection(injections.rows_in_reverse),
    ),
    Fault(
        "evicts-rows-in-a-buffer",
        "eviction takes rows that the window before still trains on",
        replace(_case(), variant="lfu", steps=8),
        Injection(kept_state.evicts_rows_in_a_buffer),
    ),
    Fault(
        "evicts-by-the-pass-before",
        "a device's table evicts as many rows as were too many one pass earlier",
        replace(_case(), variant="lru", steps=8, storage="device"),
        Injection(kept_state.evicts_by_the_pass_before),
    ),
    Fault(
        "low-precision-rows-not-rounded",
        "rows in low precision stay float32 in the buffers",
        replace(_case(), variant="precision-tiers"),
        Injection(kept_state.low_precision_not_rounded),
    ),
    Fault(
        "accumulation-divides-by-one-batch",
        "accumulated gradients are divided by the loss count of one batch",
        replace(_case(), variant="accumulate", steps=6),
        Injection(injections.mean_over_one_batch),
    ),
    Fault(
        "restart-without-scores",
        "scores and access counts start from zero after a restart",
        replace(_case(), variant=RESTART, steps=8, restart=1),
        Injection(kept_state.restart_without_scores),
    ),
    Fault(
        "shard-read-by-two-ranks",
        "rank 1 also streams the rows of the first reader of rank 0",
        replace(_case(), variant=STREAM),
        Injection(loader=kept_state.shard_read_by_two_ranks),
        says="ranks 0 and 1 both train sample",
    ),
    Fault(
        "window-read-by-two-ranks",
        "rank 1 also streams the windows of GRM that the first reader of rank 0 has",
        replace(_case(), variant="stream-grm"),
        Injection(loader=kept_state.shard_read_by_two_ranks),
        says="ranks 0 and 1 both train sample",
    ),
    Fault(
        "position-one-batch-late",
        "after a restart a stream goes on one batch late",
        replace(_case(), variant=STREAM, steps=8, restart=1),
        Injection(loader=kept_state.position_one_batch_late),
    ),
    Fault(
        "gradients-leave-at-first-use",
        "gradients leave with the first micro-batch that uses a row, and miss what later ones add",
        replace(_case(), variant="first-use"),
        Injection(injections.gradients_leave_at_first_use, delay=injections.slow("compute"), alone=True),
    ),
    Fault(
        "last-rows-stay-in-the-buffer",
        "rows that stayed in a buffer are not written back when the pipeline drains",
        replace(_case(), variant="skip-fetch"),
        Injection(kept_state.last_rows_stay_in_the_buffer),
    ),
    Fault(
        "dropped-rows-not-written-back",
        "rows that a batch drops are taken for kept ones and never written back",
        replace(_case(), variant="scale", steps=8),
        Injection(kept_state.dropped_rows_not_written_back),
    ),
    Fault(
        "fetch-before-dropped-rows-are-written",
        "retrieval of batch t does not wait until batch t-1 has written back the rows that it drops",
        replace(_case(), variant="scale", steps=12),
        Injection(
            schedule=lambda schedule: schedule.without_edge("retrieve", Edge("write_back", batch=1)),
            delay=injections.slow("write_back"),
        ),
    ),
    Fault(
        "replicas-keep-their-gradients",
        "gradients are not added up over the replicas of a part",
        replace(_case(), replicas=2),
        Injection(injections.replicas_keep_their_gradients),
    ),
    Fault(
        "replicas-in-different-orders",
        "replicas hold the same rows in different orders when their gradients are added up",
        replace(_case(), replicas=2),
        Injection(injections.replicas_in_different_orders),
    ),
    Fault(
        "update-before-replica-reduction",
        "rows are updated without waiting for the gradients of other replicas",
        replace(_case(), replicas=2),
        Injection(
            injections.means_begin_at_zero,
            schedule=lambda schedule: schedule.without_edge("sparse_update", Edge("replica_reduce", "all")),
            delay=injections.slow("replica_reduce"),
        ),
    ),
    Fault(
        "replica-reduction-after-the-first-use",
        "gradients are added up over the replicas before the last micro-batch that uses their rows",
        replace(_case(), variant="scale", replicas=2),
        Injection(
            injections.replica_reduction_after_the_first_use, delay=injections.slow("gradient_exchange")
        ),
    ),
    Fault(
        "replica-reduction-before-the-gradients",
        "replicas do not wait for the gradients of the micro-batch after which they are reduced",
        replace(_case(), variant="scale", replicas=2),
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
        replace(_case(world_size=4), nodes=2),
        Injection(injections.relay_in_reverse),
    ),
    Fault(
        "relay-adds-to-another-row",
        "a relay adds the gradients of one rank of its node to one row",
        replace(_case(world_size=4), nodes=2),
        Injection(injections.relay_adds_to_another_row),
    ),
    Fault(
        "sums-of-a-node-rounded",
        "sums that wait in a relay for a later micro-batch are rounded to float32",
        replace(_case(world_size=4), variant="first-use", nodes=2),
        Injection(injections.node_sums_rounded),
    ),
    Fault(
        "export-of-a-stale-row",
        "a row is exported from the step of an earlier checkpoint",
        replace(_case(), variant="export", steps=8),
        Injection(kept_state.stale_row_in_changes),
    ),
    Fault(
        "export-in-another-precision",
        "a model trained in bfloat16 is exported in float32",
        replace(_case(), variant="export-bf16"),
        Injection(export=kept_state.exported_in_float32),
    ),
    Fault(
        "export-with-an-expert-less",
        "an exported GRM mixes one expert less",
        replace(_case(), variant="export-grm"),
        Injection(export=kept_state.exported_with_an_expert_less),
    ),
    Fault(
        "one-buffer-for-all-lags",
        "all exchanges in flight arrive in one buffer, and a batch is served with the rows of the newest",
        replace(_case(), variant="bounded-lag"),
        Injection(exchange=injections.OneBufferForAll),
    ),
    Fault(
        "page-reused-early",
        "a page of cached keys and values goes to another user while its user still reads it",
        replace(_case(), variant="cached", steps=8),
        Injection(cached=cached.PageReusedEarly),
    ),
    Fault(
        "cache-of-the-old-version",
        "keys and values of the model before are used with a new one",
        replace(_case(), variant="cached", steps=8),
        Injection(cached=cached.OldVersionUsed),
    ),
    Fault(
        "append-lost",
        "a user's cached vector stays when events come",
        replace(_case(), variant="cached", steps=8),
        Injection(cached=cached.AppendLost),
    ),
    Fault(
        "cached-position-off-by-one",
        "tokens behind cached ones stand one place late",
        replace(_case(), variant="cached", steps=8),
        Injection(cached=cached.PositionOffByOne),
    ),
    Fault(
        "last-time-forgotten",
        "the last cached token goes on asking at its own time when the next one's is known",
        replace(_case(), variant="cached", steps=8),
        Injection(cached=cached.LastTimeForgotten),
    ),
    Fault(
        "delta-applied-twice",
        "a replica applies the delta before again behind each one",
        replace(_case(), variant="deltas", steps=8),
        Injection(follower=deltas.AppliedTwice),
    ),
    Fault(
        "tombstone-lost",
        "a replica keeps rows that were evicted",
        replace(_case(), variant="deltas", steps=8),
        Injection(follower=deltas.TombstoneLost),
    ),
    Fault(
        "half-applied-snapshot",
        "a replica begins with the first half of a snapshot's rows",
        replace(_case(), variant="deltas", steps=8),
        Injection(follower=deltas.HalfSnapshot),
    ),
    Fault(
        "delta-of-another-run",
        "a replica gets the deltas of another run",
        replace(_case(), variant="deltas", steps=8),
        Injection(follower=deltas.OfAnotherRun),
        says="is of run another",
    ),
    Fault(
        "dense-values-of-the-step-before",
        "a replica's rows go on, and its dense values follow one delta late",
        replace(_case(), variant="deltas", steps=8),
        Injection(follower=deltas.DenseOfTheStepBefore),
    ),
    Fault(
        "answer-of-another-request",
        "the server gives each answer of a batch to the request before",
        replace(_case(), variant="served"),
        Injection(answers=server.to_the_next_request),
    ),
    Fault(
        "answers-of-the-old-version",
        "the server keeps answers, and gives them when another version is served",
        replace(_case(), variant="served"),
        Injection(answers=server.answers_kept),
    ),
    Fault(
        "history-not-left-out",
        "the server finds items of the history among the best",
        replace(_case(), variant="served"),
        Injection(answers=server.history_not_left_out),
    ),
    Fault(
        "norm-before-the-gate",
        "the layers of GRM norm attention alone, before the gate multiplies it",
        replace(_case(), variant="grm-product"),
        Injection(injections.norm_before_the_gate),
    ),
    Fault(
        "rms-of-a-micro-batch",
        "FuXi norms rows by the mean square of their micro-batch",
        replace(_case(), variant="fuxi-rms"),
        Injection(injections.rms_of_a_micro_batch),
    ),
    Fault(
        "padded-to-the-longest",
        "a converted model's micro-batch is padded to its longest sample",
        replace(_case(), variant="converted"),
        Injection(injections.padded_to_the_longest),
    ),
    Fault(
        "weights-of-other-ids",
        "in a micro-batch the weights of bags are one id late",
        replace(_case(), variant="weighted-bags"),
        Injection(injections.weights_of_other_ids),
    ),
    *(
        Fault(name, what, replace(_case(), variant=IN_BATCH), Injection(program), says)
        for name, what, program, says in in_batch.FAULTS
    ),
    Fault(
        "gradients-of-the-last-pass",
        "in a loop of one's own the rows forget the gradients of earlier backward passes of the step",
        replace(_case(mode="sequential"), variant=OWN_LOOP),
        Injection(loop=injections.gradients_of_the_last_pass),
    ),
    Fault(
        "bit-of-a-row-at-rest",
        "a bit of one of rank 1's rows flips in its table",
        replace(_case(), variant="replay", steps=8),
        Injection(kept_state.bit_of_a_row_at_rest),
        says="on rank 1 has other bits than when it was written",
    ),
    Fault(
        "bit-of-a-message",
        "a bit of the rows that rank 0 sends to rank 1 flips on the way, again and again",
        replace(_case(), variant="replay", steps=12),
        Injection(injections.bit_of_a_message),
        says="a message from rank 0 has other bits at rank 1",
    ),
    Fault(
        "bit-of-a-message-between-nodes",
        "a bit of the rows that rank 1 sends to rank 3, of another node, flips on the way",
        replace(_case(world_size=4), variant="replay", steps=8, nodes=2),
        Injection(injections.bit_of_a_message),
        says="a message from rank 1 has other bits at rank 3",
    ),
    Fault(
        "bit-of-a-gradient",
        "rank 1 computes a bit of its gradients wrongly",
        replace(_case(world_size=3), variant="replay", steps=8),
        Injection(injections.bit_of_a_gradient),
        says="rank 1 has other bits of the gradient of",
    ),
    Fault(
        "disk-stale-page",
        "some rows are read from disk as they were at the write before the last one",
        _disk(),
        Injection(disk.stale_page),
    ),
    Fault(
        "disk-torn-write",
        "a row is written to disk but for its second half",
        _disk(),
        Injection(disk.torn_write),
    ),
    Fault(
        "disk-lost-write-back",
        "a row leaves memory and is not written to disk",
        _disk(),
        Injection(disk.lost_write_back),
    ),
    Fault(
        "disk-wrong-offset",
        "rows are read from disk one row too far",
        _disk(),
        Injection(disk.wrong_offset),
    ),
    Fault(
        "disk-torn-write-at-rest",
        "as above, with checksums of rows",
        replace(_disk(), variant="replay"),
        Injection(disk.torn_write),
        says="has other bits than when it was written",
    ),
    Fault(
        "copy-one-keep-late",
        "after the loss of a rank, rows come from the copy before the newest",
        replace(_case(world_size=3), variant=LOST_RANK, steps=6),
        Injection(copies=kept_state.copy_one_keep_late),
    ),
    Fault(
        "copy-of-the-wrong-rank",
        "a copy has the keys of the neighbour's shard and rows of the rank's own",
        replace(_case(world_size=3), variant=LOST_RANK, steps=6),
        Injection(copies=kept_state.copy_of_the_wrong_rank),
    ),
    Fault(
        "copy-without-a-key",
        "the first row of a shard is missing in a copy",
        replace(_case(world_size=3), variant=LOST_RANK, steps=6),
        Injection(copies=kept_state.copy_without_a_key),
    ),
    Fault(
        "lost-gradient-at-window-consistency",
        "as above, where the reference is the same cut run sequentially",
        _case(mode="fwp", optimizer="sgd", consistency="window"),
        Injection(injections.lost_gradient, alone=True),
    ),
]
FAULTS = [fault for fault in FAULTS if not (server.ABSENT and fault.case.answers)]
