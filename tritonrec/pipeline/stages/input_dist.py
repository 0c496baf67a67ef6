"""The input dist: keys to their owners (NestPipe, section IV.A, stage 3)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from ...distributed import Communicator
from ...kernels import launch
from ..dist_plan import InputDist, Splits, column_sums, plan_lookups, plan_lookups_of_one_rank
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
from ..streams import to_host
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

    The host waits for the split sizes of the exchange, a batch ahead of their use. Where gradients are added
    up over replicas of the tables, all replicas of a shard get the keys that each of them received, so that
    they hold, update and keep the same rows.
    """
    config, world = context.config, routing.world_size
    groups = context.tables.groups
    padded = [context.device.type != "cpu" or group.table.padded for group in groups]
    by_table = zip(*(context.tables.keys(part.lookups()) for part in samples), strict=True)
    dedup, plans = config.exchange.dedup in ("exchange", "both"), []
    # On one rank nothing travels. Float32 sums have an order: that of the micro-batches' sums.
    alone = world == 1 and not context.replicated and (context.sums.exact or len(samples) == 1)
    at_once = alone and config.exchange.dedup == "both" and not config.exchange.first_use and not any(padded)
    joined = context.groups if context.groups.joined else None
    for group, pads, keys in zip(groups, padded, by_table, strict=True):
        if at_once:
            plans.append(plan_lookups_of_one_rank(list(keys)))
        else:
            ids = group.layout.ids
            plans.append(plan_lookups(list(keys), ids, world, dedup, config.exchange.first_use, pads, joined))
        counts.occurrences += sum(map(len, keys))
    sizes = to_host(torch.stack([plan.sizes for plan in plans]))  # (tables, 1 or 2, M, W)
    tables = [plan.input_dist(each) for plan, each in zip(plans, sizes.tolist(), strict=True)]
    counts.exchanged += sum(table.num_rows for table in tables)
    header = Header(context.rank, window.step, context.stop.is_set(), loss_terms=window.loss_terms)
    # One row for each rank: sizes of every table and micro-batch.
    counted = sizes.permute(3, 0, 1, 2).flatten(1)
    agreed_by, words = context.agreement, window.words
    if agreed_by is None or words is None:
        answers, agreed = exchange(routing, replica_routing, counted, header)
    else:
        trained = torch.cat([batch.sample_ids for batch in window.batches])
        settle = partial(agreed_by.settle, words, window.settings, window.step, trained)
        answers, agreed = exchange(routing, replica_routing, counted, header, words, settle)
    received_sizes = answers.view(world, *sizes.shape[:3]).permute(1, 2, 3, 0).tolist()
    received = []
    for pads, table, table_sizes in zip(padded, tables, received_sizes, strict=True):
        each = _send_keys(table, table_sizes, routing, counts)
        if context.replicated:
            each = _share_with_replicas(each, replica_routing, counts, pads)
        received.append(each)
    normalizer = agreed.shard_loss_terms if config.average_every else agreed.loss_terms
    return Routes(tables, received, agreed.loss_terms, normalizer, agreed.stop)


def _send_keys(
    table: InputDist, sizes: list[Splits], routing: Communicator, counts: LookupCounts
) -> ReceivedKeys:
    """Send keys, and their last use if it is known, to the owners."""
    splits, gradient_splits = sizes[0], sizes[-1]

    def send(values: torch.Tensor) -> torch.Tensor:
        input_splits = table.input_splits
        counts.key_bytes += values.element_size() * (len(values) - input_splits[routing.rank])
        return routing.all_to_all(values, input_splits, column_sums(splits))

    keys = send(table.keys)
    last_use = None if table.last_use is None else send(table.last_use)
    return ReceivedKeys(splits, gradient_splits, keys, last_use, [], [])


def _share_with_replicas(
    received: ReceivedKeys, replica_routing: Communicator, counts: LookupCounts, padded: bool
) -> ReceivedKeys:
    """Gather the keys that each replica of this shard received, and their last use if known.

    Distinct ones, unless `padded`: then the host does not wait for their number, and all are sent.
    """
    others = replica_routing.world_size - 1
    keys, last = received.keys, received.last_use
    if not padded:
        keys, inverse, _counts = launch.unique(keys)
        if last is not None:
            last = last.new_zeros(len(keys)).scatter_reduce_(0, inverse, last, "amax")
    counts.key_bytes += 8 * len(keys) * others
    last_use = []
    if last is not None:
        last_use = replica_routing.all_gather(last)
        counts.key_bytes += len(last) * others
    return replace(received, replica_keys=replica_routing.all_gather(keys), replica_last_use=last_use)
