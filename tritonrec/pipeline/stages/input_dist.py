"""The input dist: keys to their owners (NestPipe, section IV.A, stage 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from ...distributed import Communicator
from ...kernels import launch
from ..dist_plan import InputDist, Lookups, Splits, column_sums, plan_lookups, plan_lookups_of_one_rank
from ..headers import Header, Headers, exchange
from ..places import (
    Context,
    DeviceSamples,
    NodeRoutingGroup,
    RailRoutingGroup,
    ReceivedKeys,
    ReplicaRoutingGroup,
    Routes,
    RoutingGroup,
)
from ..relays import plan_relay
from ..stage import Edge, Read, Update, stage
from ..streams import to_host
from ..sums import all_to_all_of_tables
from ..window import LookupCounts, Window

Ids = Callable[[torch.Tensor], torch.Tensor]


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
    world = routing.world_size
    alone = world == 1 and not context.replicated  # nothing travels

    def owner(ids: torch.Tensor) -> torch.Tensor:
        return launch.owner_of(ids, world)

    plans, padded = _planned(context, samples, counts, world, owner, alone)
    # The one wait of the host in a lookup: the split sizes of all tables and micro-batches at once.
    sizes = to_host(torch.stack([plan.sizes for plan in plans]))  # (tables, 1 or 2, M, W)
    tables = _tables(plans, sizes)
    counts.exchanged += sum(table.num_rows for table in tables)
    # Sizes travel with a header (step, stop, loss terms), so the agreement of all ranks costs no message.
    answers, agreed = _agree(context, window, routing, replica_routing, sizes)
    received = _send_keys(tables, answers, routing, counts)
    if context.replicated:
        received = [
            _share_with_replicas(each, replica_routing, counts, pads)
            for each, pads in zip(received, padded, strict=True)
        ]
    normalizer = agreed.shard_loss_terms if context.config.average_every else agreed.loss_terms
    return Routes(tables, received, agreed.loss_terms, normalizer, agreed.stop)


@stage(lane="routing", name="route")  # it waits for what `route` waits for (`over_nodes`)
def route_over_nodes(
    context: Context,
    window: Window,
    samples: Read[DeviceSamples],
    node: Update[NodeRoutingGroup],
    rail: Update[RailRoutingGroup],
    counts: LookupCounts,
) -> Routes:
    """`route` in two steps: to the relays of this node, and from there to the owners (`relays`).

    The host waits for the sizes of both.
    """
    ranks, nodes = node.world_size, rail.world_size

    def owner(ids: torch.Tensor) -> torch.Tensor:
        return launch.owner_of(ids, ranks * nodes)

    # Rank r is number r % ranks of node r // ranks. With 4 ranks a node, rank 0 looks up a key of rank 5:
    #     rail 0    0     4
    #               |                0 to 1 within the node (`node`), 1 to 5 over its rail (`rail`)
    #     rail 1    1 --- 5
    plans, padded = _planned(context, samples, counts, ranks, lambda ids: owner(ids) % ranks)
    sizes = to_host(torch.stack([plan.sizes for plan in plans]))
    tables = _tables(plans, sizes)
    counts.exchanged += sum(table.num_rows for table in tables)
    answers, agreed = _agree(context, window, node, rail, sizes)
    joined = context.groups if context.groups.joined else None
    relays = []
    near_keys = _send_keys(tables, answers, node, counts)
    for group, pads, near in zip(context.tables.groups, padded, near_keys, strict=True):
        owners = partial(_of_ids, lambda ids: owner(ids) // ranks, group.layout.ids)
        relays.append(
            plan_relay(
                near.keys, near.last_use, near.splits, near.gradient_splits,
                owners, nodes, pads, joined,
            )
        )  # fmt: skip
    # So far bytes within the node; those between nodes are added below.
    counts.node_bytes = counts.key_bytes
    sizes = to_host(torch.stack([plan.lookups.sizes for plan in relays]))  # (tables, 1 or 2, M, H)
    planned = [plan.relay(each) for plan, each in zip(relays, sizes.tolist(), strict=True)]
    answers = _by_table(rail.all_to_all_equal(_by_rank(sizes)), sizes)
    received = _send_keys([each.dist for each in planned], answers, rail, counts)
    return Routes(tables, received, agreed.loss_terms, agreed.loss_terms, agreed.stop, planned)


def _dedup(context: Context) -> bool:
    """Whether repeated keys are dropped before they are sent."""
    return context.config.exchange.dedup in ("exchange", "both")


def _planned(
    context: Context,
    samples: DeviceSamples,
    counts: LookupCounts,
    world: int,
    owners: Ids,
    alone: bool = False,
) -> tuple[list[Lookups], list[bool]]:
    """By table the plan of the window's lookups, and whether its host waits for no number of keys.

    Args:
        owners: ids -> the rank, of `world`, that their keys are sent to. alone: there is one rank.
    """
    config, groups = context.config, context.tables.groups
    padded = [context.device.type != "cpu" or group.table.padded for group in groups]
    by_table = zip(*(context.tables.keys(part.lookups()) for part in samples), strict=True)
    plans = []
    # Float32 sums have an order: that of the micro-batches' sums.
    # A single rank may treat the window's lookups as one, so each key is added up once. With exact sums the
    # order does not matter; float32 sums are of micro-batches first, which one list of keys would change.
    at_once = alone and (context.sums.exact or len(samples) == 1)
    at_once &= config.exchange.dedup == "both" and not config.exchange.first_use and not any(padded)
    joined = context.groups if context.groups.joined else None
    for group, pads, keys in zip(groups, padded, by_table, strict=True):
        if at_once:
            plans.append(plan_lookups_of_one_rank(list(keys)))
        else:
            to = partial(_of_ids, owners, group.layout.ids)
            first_use = config.exchange.first_use
            plans.append(plan_lookups(list(keys), to, world, _dedup(context), first_use, pads, joined))
        counts.occurrences += sum(part.shape[0] for part in keys)
    return plans, padded


def _of_ids(owners: Ids, ids_of: Ids, keys: torch.Tensor) -> torch.Tensor:
    return owners(ids_of(keys))


def _tables(plans: list[Lookups], sizes: torch.Tensor) -> list[InputDist]:
    return [plan.input_dist(each) for plan, each in zip(plans, sizes.tolist(), strict=True)]


def _agree(
    context: Context, window: Window, over: Communicator, others: Communicator, sizes: torch.Tensor
) -> tuple[list[list[Splits]], Headers]:
    """Send sizes (tables, 1 or 2, M, W) to the ranks of `over`; by table those received, and all headers."""
    header = Header(context.rank, window.step, context.stop.is_set(), loss_terms=window.loss_terms)
    agreed_by, words = context.agreement, window.words
    if agreed_by is None or words is None:
        answers, agreed = exchange(over, others, _by_rank(sizes), header)
    else:
        trained = torch.cat([batch.sample_ids for batch in window.batches])
        settle = partial(agreed_by.settle, words, window.settings, window.step, trained)
        answers, agreed = exchange(over, others, _by_rank(sizes), header, words, settle)
    return _by_table(answers, sizes), agreed


def _by_rank(sizes: torch.Tensor) -> torch.Tensor:
    """One row for each rank: sizes of every table and micro-batch."""
    return sizes.permute(3, 0, 1, 2).flatten(1)


def _by_table(answers: torch.Tensor, sizes: torch.Tensor) -> list[list[Splits]]:
    """The reverse, of what came from each rank."""
    return answers.view(sizes.shape[3], *sizes.shape[:3]).permute(1, 2, 3, 0).tolist()


def _send_keys(
    tables: list[InputDist], sizes: list[list[Splits]], routing: Communicator, counts: LookupCounts
) -> list[ReceivedKeys]:
    """Send keys, and their last use if it is known, to the owners: those of all tables in one message."""
    send = [table.input_splits for table in tables]
    # One size where gradients leave with the micro-batch whose rows came, two where they may not.
    receive = [column_sums(each[0]) for each in sizes]

    def sent(values: list[torch.Tensor]) -> list[torch.Tensor]:
        for each, splits in zip(values, send, strict=True):
            counts.key_bytes += each.element_size() * (each.shape[0] - splits[routing.rank])
        return all_to_all_of_tables(None, routing, values, send, receive)

    keys = sent([table.keys for table in tables])
    last_uses = [table.last_use for table in tables if table.last_use is not None]
    last = sent(last_uses) if last_uses else [None] * len(tables)
    return [
        ReceivedKeys(each[0], each[-1], own, use, [], [], table.distinct)
        for table, each, own, use in zip(tables, sizes, keys, last, strict=True)
    ]


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
            # A key of several micro-batches is complete after the last of them.
            last = last.new_zeros(len(keys)).scatter_reduce_(0, inverse, last, "amax")
    counts.key_bytes += 8 * len(keys) * others
    last_use = []
    if last is not None:
        last_use = replica_routing.all_gather(last)
        counts.key_bytes += len(last) * others
    return replace(received, replica_keys=replica_routing.all_gather(keys), replica_last_use=last_use)
