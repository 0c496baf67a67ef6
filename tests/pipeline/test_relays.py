"""Promise: lookups in two steps have the bits of one step, and a row crosses to a node once."""

import pytest
import torch
from fake_accelerator import FakeAccelerator
from hypothesis import given
from hypothesis import strategies as st
from planned_exchange import exchange, micro_batches
from speeds import slow_except
from trainer_parts import batches, parts, same, state, trainer

from tritonrec import ops
from tritonrec.distributed import Communicators
from tritonrec.embedding import Eviction, TablePolicy
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.pipeline import NESTPIPE, Trainer, WindowConfig, over_nodes, schedule_of
from tritonrec.pipeline.dist_plan import plan_lookups, plan_output_dist
from tritonrec.pipeline.exchange_groups import joined_groups
from tritonrec.pipeline.relays import plan_relay
from tritonrec.settings import with_values

KEYS = st.integers(-6, 6)


def planned(keys, owners, world, how, groups):
    lookups = plan_lookups(keys, owners, world, *how, False, groups)
    return lookups.input_dist(lookups.sizes.tolist())


class TwoSteps:
    """The plans of all ranks: `near` towards the relays, `relays`, and what their owners send and receive."""

    def __init__(self, ranks, nodes, how, groups):
        self.world, self.nodes, self.count = len(ranks), nodes, len(ranks[0])
        self.size = self.world // nodes
        self.near = [
            planned(keys, lambda k: self.owner(k) % self.size, self.size, how, groups) for keys in ranks
        ]
        self.relays, self.owners = [None] * self.world, [None] * self.world
        for node in range(nodes):
            own = self.near[node * self.size : (node + 1) * self.size]
            for number, (keys, last_use, splits, back) in enumerate(exchange(own)):
                plan = plan_relay(
                    keys, last_use, splits, back,
                    lambda k: self.owner(k) // self.size, nodes, False, groups,
                )  # fmt: skip
                self.relays[node * self.size + number] = plan.relay(plan.lookups.sizes.tolist())
        for number in range(self.size):
            rail = [self.relays[node * self.size + number].dist for node in range(nodes)]
            for node, (keys, last_use, splits, back) in enumerate(exchange(rail)):
                sent = plan_output_dist(torch.arange(len(keys)), splits, last_use, back)
                self.owners[node * self.size + number] = (keys, *sent)

    def owner(self, keys):
        return ops.owner_of(keys, self.world)

    def rows(self, micro_batch, values, of, ranks, plans):
        """What each of `ranks` sends a receiver: by receiver, the values in the order of senders."""
        parts = []
        for rank in ranks:
            plan = plans[rank]
            parts.append(values[rank][plan.rows[micro_batch]].split(plan.splits[micro_batch]))
        return torch.cat([part[of] for part in parts])

    def on_rail(self, rank):
        return range(rank % self.size, self.world, self.size)

    def on_node(self, rank):
        first = rank - rank % self.size
        return range(first, first + self.size)


@st.composite
def lookups(draw):
    nodes, size = draw(st.sampled_from([(2, 2), (2, 3), (3, 2), (2, 1), (1, 2)]))
    count = draw(st.integers(1, 5))
    part = st.lists(KEYS, max_size=7)
    keys = draw(
        st.lists(st.lists(part, min_size=count, max_size=count), min_size=nodes * size, max_size=nodes * size)
    )
    return nodes, [micro_batches(parts) for parts in keys]


@given(
    lookups(),
    st.sampled_from([(True, False), (True, True)]),
    st.sampled_from([None, (False, False), (True, False)]),
)
def test_rows_come_before_use_and_every_gradient_is_added_up_once(drawn, how, joined):
    nodes, ranks = drawn
    count = len(ranks[0])
    plan = TwoSteps(ranks, nodes, how, None if joined is None else joined_groups(count, *joined))
    every = range(plan.world)
    keys = [owned[0] for owned in plan.owners]
    assert all(bool((plan.owner(each) == rank).all()) for rank, each in enumerate(keys))
    relayed = [torch.full((plan.relays[rank].dist.num_rows,), 99, dtype=torch.int64) for rank in every]
    stored = [torch.full((plan.near[rank].num_rows,), 99, dtype=torch.int64) for rank in every]
    for i in range(count):  # rows: owners, relays, ranks
        for rank in every:
            came = plan.rows(
                i, keys, rank // plan.size, plan.on_rail(rank), [each[1] for each in plan.owners]
            )
            relayed[rank][plan.relays[rank].dist.slots(i)] = came
        for rank in every:
            sent = [each.sent for each in plan.relays]
            stored[rank][plan.near[rank].slots(i)] = plan.rows(
                i, relayed, rank % plan.size, plan.on_node(rank), sent
            )
        for rank in every:
            assert torch.equal(stored[rank][plan.near[rank].inverse[i]], ranks[rank][i])
    sums = [torch.zeros_like(each) for each in stored]
    waiting, complete = (
        [torch.zeros_like(each) for each in relayed],
        [torch.zeros_like(each) for each in keys],
    )
    for i in range(count):  # gradients, here the number of uses: ranks, relays, owners
        for rank in every:
            sums[rank].index_add_(0, plan.near[rank].inverse[i], torch.ones_like(plan.near[rank].inverse[i]))
        for rank in every:
            gradients = [each.gradients for each in plan.near]
            came = plan.rows(i, sums, rank % plan.size, plan.on_node(rank), gradients)
            waiting[rank].index_add_(0, plan.relays[rank].gradients.rows[i], came)
        for rank in every:
            gradients = [each.dist.gradients for each in plan.relays]
            came = plan.rows(i, waiting, rank // plan.size, plan.on_rail(rank), gradients)
            complete[rank].index_add_(0, plan.owners[rank][2].rows[i], came)
    looked_up = torch.cat([part for parts in ranks for part in parts])
    for key in looked_up.unique():
        found = sum(int(sums[own == key].sum()) for own, sums in zip(keys, complete, strict=True))
        assert found == int((looked_up == key).sum())


@given(lookups(), st.booleans())
def test_between_nodes_goes_what_the_node_looks_up(drawn, first_use):
    nodes, ranks = drawn
    plan = TwoSteps(ranks, nodes, (True, first_use), None)
    for node in range(nodes):
        members = range(node * plan.size, (node + 1) * plan.size)
        by_micro_batch = [torch.cat([ranks[rank][i] for rank in members]) for i in range(plan.count)]
        lists = [torch.cat(by_micro_batch)] if first_use else by_micro_batch
        assert sum(plan.relays[rank].dist.num_rows for rank in members) == sum(
            len(each.unique()) for each in lists
        )
    for rank in range(plan.world):
        assert sum(map(len, plan.relays[rank].dist.gradients.rows)) == plan.relays[rank].dist.num_rows


def test_the_drawing_of_the_docstring():
    ids = torch.arange(200)
    a, b, c = ids[ops.owner_of(ids, 4) == 3][:3].tolist()
    keys = [micro_batches([part]) for part in ([a, b], [b, c], [], [])]
    plan = TwoSteps(keys, 2, (True, False), None)
    assert plan.relays[1].dist.keys.tolist() == [a, b, c] and plan.relays[0].dist.num_rows == 0
    assert plan.owners[3][0].tolist() == [a, b, c]


WINDOWS = [
    {},
    {"first_use": True, "micro_batches": 5},
    {"exchanges": "each"},
    {"exchanges": "joined", "micro_batches": 8},
    {"dedup": "exchange", "exchange_sums": "packed"},
    {"skip_fetch": True, "first_use": True, "accumulate": 2},
    {"max_grad_norm": 0.02, "exchange_precision": "bf16"},
]
POLICY = TablePolicy(Eviction("lru", capacity=40, every=2), admission=2)


def ran(communicators, mode, window, policy=None, late=None):
    """`late`: an accelerator made of threads, whose lane of that name is slow."""
    made = parts(policy=policy)
    own = {"rank": communicators.rank, "world_size": communicators.world_size}
    config = with_values(WindowConfig(3, seed=4), window)
    streams = None if late is None else FakeAccelerator(communicators.rank, slow=late)
    with Trainer(*made, communicators, mode, config, streams=streams) as training:
        losses = [result.loss for result in training.run(batches(6, 9, **own))]
        return state(made), losses, training.counts


@pytest.mark.if_changed
@pytest.mark.parametrize("policy", [None, POLICY], ids=["plain", "policy"])
@pytest.mark.parametrize("window", slow_except(WINDOWS[3:6:2], WINDOWS), ids=str)
@pytest.mark.parametrize("mode", slow_except(["nestpipe"], ["sequential", "fwp", "dbp", "nestpipe"]))
def test_two_steps_have_the_bits_of_one(mode, window, policy):
    if mode in ("sequential", "fwp") and "skip_fetch" in window:
        return
    one = run_ranks(4, lambda ranks: ran(ranks, mode, window, policy))
    for nodes in (2, 4):
        two = run_ranks(4, lambda ranks: ran(ranks, mode, window, policy), nodes=nodes)
        for (expected, losses, plain), (got, own_losses, counts) in zip(one, two, strict=True):
            assert same(got, expected) and own_losses == losses
            assert plain.node_bytes == 0 and (counts.node_bytes > 0) == (nodes == 2)
            if nodes == 4:  # a relay of one rank hands nothing on
                assert counts.key_bytes == plain.key_bytes and counts.rows == plain.rows


@pytest.mark.if_changed
@pytest.mark.parametrize("late", ["communication", "routing", "compute"])
def test_on_an_accelerator_whose_lanes_run_late_nothing_is_used_before_it_is_there(late):
    window = {"first_use": True, "skip_fetch": True}
    one = run_ranks(4, lambda ranks: ran(ranks, "nestpipe", window))
    two = run_ranks(4, lambda ranks: ran(ranks, "nestpipe", window, late=late), nodes=2)
    for (expected, losses, _), (got, own_losses, _) in zip(one, two, strict=True):
        assert same(got, expected) and own_losses == losses


def sent_between_nodes(counts):
    return sum(each.key_bytes + each.row_bytes - each.node_bytes for each in counts)


def test_ranks_that_look_up_the_same_rows_send_them_between_nodes_once():
    def alike(communicators):
        made, shared = parts(), {"rank": 0, "world_size": 1}
        with trainer(made, communicators=communicators, exchange_sums="whole") as training:
            for batch in batches(3, 7, **shared):
                batch.sample_ids.add_(1000 * communicators.rank)
                training.step(batch)
            return training.counts

    one, two = (run_ranks(6, alike, nodes=nodes) for nodes in (1, 2))
    # In one step each of three ranks of a node gets them from the three of the other one.
    assert sent_between_nodes(two) < 0.45 * sent_between_nodes(one)


def groups_of(communicators):
    mine = torch.tensor([communicators.rank])
    lanes = communicators.node_routing, communicators.node, communicators.rail_routing, communicators.rail
    return [torch.cat(each.all_gather(mine)).tolist() for each in lanes]


@pytest.mark.if_changed
def test_nodes_and_rails_are_those_of_the_source(pool):
    found = pool.run(groups_of, 4, nodes=2)
    assert found[1] == [[0, 1], [0, 1], [1, 3], [1, 3]]
    assert found[2] == [[2, 3], [2, 3], [0, 2], [0, 2]]
    assert pool.run(groups_of, 2)[1] == [[1]] * 4


@pytest.mark.if_changed
@pytest.mark.multi_rank
def test_processes_have_the_bits_of_threads(pool):
    window = {"first_use": True, "exchange_sums": "packed"}
    threads = run_ranks(4, lambda ranks: ran(ranks, "nestpipe", window))
    processes = pool.run(ran, 4, "nestpipe", window, nodes=2)
    for (expected, losses, _), (got, own_losses, _) in zip(threads, processes, strict=True):
        assert same(got, expected) and own_losses == losses


def test_what_two_steps_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"consistency 'window', would have other bits.*nodes=1"):
        schedule_of("nestpipe", WindowConfig(consistency="window"), nodes=2)
    for dedup in ("none", "lookup"):
        window = with_values(WindowConfig(), {"dedup": dedup})
        with pytest.raises(ValueError, match=f"need dedup before the exchange, got '{dedup}'"):
            schedule_of("nestpipe", window, nodes=2)
    with pytest.raises(ValueError, match="2 replicas of the tables and 2 nodes"):
        schedule_of("nestpipe", WindowConfig(), 2, 2)
    with pytest.raises(ValueError, match="2 replicas of the tables and 2 nodes"):
        Communicators.over(range(4), replicas=2, nodes=2)
    for nodes in (0, 3):
        with pytest.raises(ValueError, match=f"{nodes} nodes do not divide 4 ranks"):
            Communicators.over(range(4), nodes=nodes)
    with pytest.raises(ValueError, match=r"relays: True.*1 nodes"):
        Trainer(*parts(), Communicators.local(), "nestpipe", schedule=over_nodes(NESTPIPE))


def test_a_rank_whose_batches_end_is_named_on_every_node():
    def early(communicators):
        own = {"rank": communicators.rank, "world_size": 4}
        with trainer(parts(), communicators=communicators) as training:
            list(training.run(batches(6 - (communicators.rank == 3), 9, **own)))

    with pytest.raises(Exception, match=r"rank 3 ended after 5 batches and rank 0 goes on with step 5"):
        run_ranks(4, early, nodes=2)
