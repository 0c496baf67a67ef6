"""The input dist: keys to their owners (NestPipe, section IV.A, stage 3)."""

from __future__ import annotations

import torch

from ...distributed import Communicator
from ...kernels import launch
from ..dist_plan import InputDist, Splits, column_sums, plan_input_dist
from ..headers import Header, exchange
from ..places import (
    Context,
    DeviceSamples,
    ReceivedKeys,
    ReplicaRoutingGroup,
    Routes,
    RoutingGroup,
)
from ..stage import Edge, Read, Update, stage
from ..window import LookupCounts, Window


@stage(lane="routing", after=(Edge("h2d"),))
def route(
    context: Context,
    window: Window,
    samples: Read[DeviceSamples],
    routing: Update[RoutingGroup],
    replica_routing: Update[ReplicaRoutingGroup],
    counts: LookupCounts,
) -> Routes:
    """Deduplicate each micro-batch's keys and send them to their owners.

    Where gradients are added up over replicas of the tables, all replicas of a shard get the keys that each
    of them received, so that they hold, update and keep the same rows.
    """
    config, world = context.config, routing.world_size
    by_table = zip(*(context.tables.keys(part.lookups()) for part in samples), strict=True)
    tables = []
    for group, keys in zip(context.tables.groups, by_table, strict=True):
        dedup = config.dedup in ("exchange", "both")
        tables.append(plan_input_dist(list(keys), group.layout.ids, world, dedup, config.first_use))
        counts.occurrences += sum(map(len, keys))
        counts.exchanged += tables[-1].num_rows
    splits = torch.tensor([table.splits for table in tables], dtype=torch.int64)  # (tables, M, W)
    header = Header(context.rank, window.step, context.stop.is_set(), loss_terms=window.loss_terms)
    # One row for each rank: splits of every table and micro-batch.
    answers, agreed = exchange(routing, replica_routing, splits.permute(2, 0, 1).flatten(1), header)
    received_splits = answers.view(world, *splits.shape[:2]).permute(1, 2, 0).tolist()
    received = []
    for table, table_splits in zip(tables, received_splits, strict=True):
        each = _send_keys(table, table_splits, routing, counts)
        received.append(_share_with_replicas(each, replica_routing, counts) if context.replicated else each)
    normalizer = agreed.shard_loss_terms if config.average_every else agreed.loss_terms
    return Routes(tables, received, agreed.loss_terms, normalizer, agreed.stop)


def _send_keys(table: InputDist, splits: Splits, routing: Communicator, counts: LookupCounts) -> ReceivedKeys:
    """Send keys, and their last use if it is known, to the owners."""

    def send(values: torch.Tensor) -> torch.Tensor:
        input_splits = table.input_splits
        counts.key_bytes += values.element_size() * (len(values) - input_splits[routing.rank])
        return routing.all_to_all(values, input_splits, column_sums(splits))

    keys = send(table.keys)
    last_use = None if table.last_use is None else send(table.last_use)
    return ReceivedKeys(splits, keys, last_use, [], [])


def _share_with_replicas(
    received: ReceivedKeys, replica_routing: Communicator, counts: LookupCounts
) -> ReceivedKeys:
    """Gather the distinct keys that each replica of this shard received, and their last use if known."""
    others = replica_routing.world_size - 1
    distinct, inverse, _counts = launch.unique(received.keys)
    keys, last_use = replica_routing.all_gather(distinct), []
    counts.key_bytes += 8 * len(distinct) * others
    if received.last_use is not None:
        last = received.last_use.new_zeros(len(distinct))
        last.scatter_reduce_(0, inverse, received.last_use, "amax")
        last_use = replica_routing.all_gather(last)
        counts.key_bytes += len(distinct) * others
    return ReceivedKeys(received.splits, received.keys, received.last_use, keys, last_use)
