"""Promise: replicas of the tables are exact where their gradients are added up, and equal once averaged."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fake_accelerator import FakeAccelerator
from hypothesis import given
from hypothesis import strategies as st
from speeds import slow_except
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from trainer_parts import JOB

from tritonrec.distributed import Communicators, RankPool
from tritonrec.embedding import Eviction, HashTableCollection, Placement, RowOptimizer, TablePolicy
from tritonrec.harness.job import Job
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.pipeline import (
    NESTPIPE,
    ExchangeConfig,
    LookupCounts,
    Trainer,
    WindowConfig,
    schedule_of,
    with_replicas,
)
from tritonrec.pipeline.dense import DenseModel
from tritonrec.pipeline.places import Routes
from tritonrec.pipeline.recipe import recipe_of, require_same
from tritonrec.pipeline.reduce_scatter import plan_replica_reductions
from tritonrec.pipeline.replicas import ReplicaAverage
from tritonrec.pipeline.stage import Read
from tritonrec.trace import Recorder


def where(communicators):
    c = communicators
    return c.rank, c.world_size, c.shard, c.shards, c.replica.rank, c.replicas, c.saves


def gathered(communicators):
    """Ranks of this rank's sharding and replica groups."""
    mine = torch.tensor([communicators.rank])
    lanes = (communicators.routing, communicators.shard_control, communicators.replica, communicators.control)
    return [torch.cat(lane.all_gather(mine)).tolist() for lane in lanes]


def train(communicators, window, steps, sync=False, job=JOB, late=None):
    """`late`: an accelerator made of threads, whose lane of that name is slow."""
    model, tables, optimizer = job.build("adam")
    loader = job.loader(communicators.rank, communicators.world_size)
    streams = None if late is None else FakeAccelerator(communicators.rank, slow=late)
    with Trainer(model, tables, optimizer, communicators, "nestpipe", window, streams=streams) as trainer:
        list(trainer.run(loader.batch(step) for step in range(steps)))
        if sync:
            trainer.sync()
        ids, rows = tables.export()["item"]
        dense = {name: each.clone() for name, each in trainer.dense.tensors().items()}
        return ids, rows, dense, trainer.counts.row_bytes


def test_groups_are_those_of_the_source(pool):
    assert pool.run(where, 4, replicas=2) == [
        (0, 4, 0, 2, 0, 2, True),
        (1, 4, 0, 2, 1, 2, False),
        (2, 4, 1, 2, 0, 2, True),
        (3, 4, 1, 2, 1, 2, False),
    ]
    found = pool.run(gathered, 4, replicas=2)
    assert found[0] == [[0, 2], [0, 2], [0, 1], [0, 1, 2, 3]]
    assert found[3] == [[1, 3], [1, 3], [2, 3], [0, 1, 2, 3]]
    assert pool.run(gathered, 2)[1] == [[0, 1], [0, 1], [1], [0, 1]]


def test_a_mesh_that_was_not_asked_for_and_replicas_that_do_not_divide_are_refused(pool):
    with pytest.raises(ValueError, match=r"not \(3, 3, 1\)"):
        pool.run(where, 3, replicas=3)
    with pytest.raises(ValueError, match="3 replicas do not divide 4 ranks"):
        Communicators.over(range(4), replicas=3)


@pytest.mark.slow
def test_replicas_stay_equal_and_send_less_between_owners(pool):
    window = WindowConfig(2, seed=4)
    flat = pool.run(train, 2, window, 4)
    for world, replicas in ((2, 2), (4, 2), (4, 4)):
        ranks = pool.run(train, world, window, 4, replicas=replicas)
        for place, (ids, rows, dense, _sent) in enumerate(ranks):
            first = ranks[place - place % replicas]
            assert torch.equal(ids, first[0]) and torch.equal(rows, first[1])
            assert all(torch.equal(dense[name], flat[0][2][name]) for name in dense)
    together = torch.cat([flat[0][0], flat[1][0]]).sort().values
    assert torch.equal(pool.run(train, 2, window, 4, replicas=2)[0][0], together)


def replica_bytes(communicators, window, steps):
    """What replicas sent each other after each micro-batch, of all steps, and what `train` returns."""
    sent = [0] * window.window_micro_batches
    model, tables, optimizer = JOB.build("adam")
    loader = JOB.loader(communicators.rank, communicators.world_size)
    with Trainer(model, tables, optimizer, communicators, "nestpipe", window) as trainer:

        def add(micro_batch: int, counts: LookupCounts):
            sent[micro_batch] += counts.row_bytes

        trainer.program.after("replica_reduce", add)
        list(trainer.run(loader.batch(step) for step in range(steps)))
        return sent, trainer.counts.row_bytes, tables.export()["item"]


@pytest.mark.parametrize("consistency", slow_except(["batch"], ["batch", "window"]))
def test_with_first_use_replicas_reduce_a_row_as_soon_as_it_has_seen_its_last_micro_batch(pool, consistency):
    plain = WindowConfig(2, seed=4, consistency=consistency, exchange=ExchangeConfig(sharing="joined"))
    first = replace(plain, exchange=replace(plain.exchange, first_use=True))
    for world, replicas in ((2, 2), (4, 2)):
        late = pool.run(replica_bytes, world, plain, 4, replicas=replicas)
        early = pool.run(replica_bytes, world, first, 4, replicas=replicas)
        for (sent, _, rows), (sooner, total, same) in zip(late, early, strict=True):
            assert sent[0] == 0 and min(sooner) > 0
            assert 0.8 < sum(sooner) / sent[1] < 1.2, "packed rows of other groups have other widths"
            assert sum(sooner) == total if world == replicas else sum(sooner) < total
            if consistency == "batch":
                assert torch.equal(rows[0], same[0]) and torch.equal(rows[1], same[1])


@pytest.mark.parametrize("late", slow_except(["replica"], ["communication", "replica"]))
def test_on_an_accelerator_that_is_late_replicas_reduce_all_the_same(pool, late):
    window = WindowConfig(3, seed=4, exchange=ExchangeConfig(first_use=True, skip_fetch=True))
    expected = pool.run(train, 4, window, 4, replicas=2)
    found = pool.run(train, 4, window, 4, False, JOB, late, replicas=2)
    for (ids, rows, dense, sent), same in zip(expected, found, strict=True):
        assert torch.equal(ids, same[0]) and torch.equal(rows, same[1]) and sent == same[3]
        assert all(torch.equal(dense[name], same[2][name]) for name in dense)


def test_averaged_replicas_are_equal_after_each_average_and_differ_from_exact_ones(pool):
    exact = pool.run(train, 2, WindowConfig(2, seed=4), 4, replicas=2)
    every = WindowConfig(2, seed=4, average_every=2)
    averaged = pool.run(train, 2, every, 4, replicas=2)
    assert torch.equal(averaged[0][0], averaged[1][0]) and torch.equal(averaged[0][1], averaged[1][1])
    assert torch.equal(averaged[0][0], exact[0][0])
    far = float((averaged[0][1] - exact[0][1]).abs().max())
    assert 0 < far < 0.5, "approximate, and not nonsense"
    apart = pool.run(train, 2, every, 3, replicas=2)
    assert not all(torch.equal(a, b) for a, b in zip(apart[0][:2], apart[1][:2], strict=True))
    synced = pool.run(train, 2, every, 3, True, replicas=2)
    assert torch.equal(synced[0][1], synced[1][1])
    assert all(torch.equal(synced[0][2][name], synced[1][2][name]) for name in synced[0][2])


def test_an_average_of_one_update_is_the_mean_of_the_replicas_rows(pool):
    """Against the definition, by hand: rows that a replica has never seen count as they would begin."""
    alone = pool.run(train, 2, WindowConfig(1, seed=4, average_every=100), 1, replicas=2)
    averaged = pool.run(train, 2, WindowConfig(1, seed=4, average_every=1), 1, replicas=2)
    tables = JOB.tables("adam")
    ids, rows = averaged[0][0], averaged[0][1]
    parts = []
    for own_ids, own_rows, *_ in alone:
        whole = torch.zeros_like(rows)
        whole[:, :6] = tables.initial_rows("item", ids)[:, :6]
        whole[torch.searchsorted(ids, own_ids)] = own_rows
        parts.append(whole)
    assert torch.equal(rows, (parts[0] + parts[1]) / 2)


@given(st.integers(0, 20), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32), st.integers(0, 3))
def test_replica_reductions_add_every_sum_to_its_row_once_and_at_its_time(count, copies, times, seed, more):
    generator = torch.Generator().manual_seed(seed)
    uses = torch.randint(2, (copies, count), generator=generator)
    uses[torch.randint(copies, (count,), generator=generator), torch.arange(count)] = 1
    places = [each.nonzero().squeeze(1) for each in uses]
    places = [each[torch.randperm(len(each), generator=generator)] for each in places]
    complete = torch.randint(times, (count,), generator=generator)
    values = [torch.randint(100, (len(each),), generator=generator) for each in places]
    expected = torch.zeros(count, dtype=torch.int64)
    for each, value in zip(places, values, strict=True):
        expected.index_add_(0, each, value)
    # repeated rows have one sum, and rows of padding none
    drawn = [torch.randint(max(len(each), 1), (more * len(each),), generator=generator) for each in places]
    given = [torch.cat([each, each[again]]) for each, again in zip(places, drawn, strict=True)]
    complete_or_padding = torch.cat([complete, torch.full((more,), times)])
    planned = []
    for rank in range(copies):
        plan = plan_replica_reductions(given, complete_or_padding, times, rank, padded=more > 0)
        planned.append(plan.planned(plan.sizes.tolist()))
    for time in range(times):
        now = [each[time] for each in planned]
        assert all(torch.equal(each.rows, (complete == time).nonzero().squeeze(1)) for each in now)
        parts = []
        plans = [each.plan for each in now]
        for rank, plan in enumerate(plans):
            came = [values[g][plans[g].order].split(plans[g].input_splits)[rank] for g in range(copies)]
            assert plan.output_splits == [len(each) for each in came]
            total = torch.zeros(plan.sizes[rank], dtype=torch.int64)
            parts.append(total.index_add_(0, plan.rows, torch.cat(came)))
        assert torch.equal(torch.cat(parts), expected[now[0].rows])


def test_averaging_needs_no_stage():
    assert schedule_of("nestpipe", WindowConfig(average_every=3), 2) is NESTPIPE
    assert schedule_of("nestpipe", WindowConfig(), 2) == with_replicas(NESTPIPE)


def refused(communicators, window, **changes):
    job = Job(**{**vars(JOB), **changes})
    try:
        Trainer(*job.build("adam"), communicators, "nestpipe", window).close()
    except ValueError as error:
        return str(error)


def test_what_replicas_cannot_do_is_refused(pool):
    evicts = TablePolicy(Eviction("lru", capacity=9))
    cases = [
        (
            WindowConfig(exchange=ExchangeConfig(dedup="exchange")),
            {},
            "need dedup before the lookup, got 'exchange'",
        ),
        (WindowConfig(average_every=2), {"policy": evicts}, "table item has a policy"),
        (WindowConfig(average_every=2), {"lazy_weight_decay": True}, "table item has lazy weight decay"),
        (WindowConfig(average_every=2, moment_scaling=True), {}, "and the rows have adam: leave"),
        (WindowConfig(average_every=2, late_states=True), {}, "the rows of table item have adam: leave it"),
    ]
    for window, changes, message in cases:
        assert message in pool.run(partial(refused, **changes), 2, window, replicas=2)[0]
    assert "one copy only" in pool.run(refused, 2, WindowConfig(average_every=2))[0]


def train_adagrad(communicators, window, scaled_by_hand):
    factor = math.sqrt(2) if scaled_by_hand else 1.0
    model, _, optimizer = JOB.build("rowwise_adagrad")
    rule = RowOptimizer("rowwise_adagrad", factor * 0.05, factor * 1e-3)
    tables = HashTableCollection(JOB.features(), rule, seed=JOB.seed, slots=8)
    loader = JOB.loader(communicators.rank, communicators.world_size)
    with Trainer(model, tables, optimizer, communicators, "nestpipe", window) as trainer:
        list(trainer.run(map(loader.batch, range(4))))
        trainer.sync()
    return tables.export()["item"]


def test_moment_scaling_takes_adagrads_moment_over_the_replicas(pool):
    plain = WindowConfig(2, seed=4, average_every=2)
    scaled = pool.run(train_adagrad, 2, replace(plain, moment_scaling=True), False, replicas=2)
    by_hand = pool.run(train_adagrad, 2, plain, True, replicas=2)
    for (ids, rows), (others, expected) in zip(scaled, by_hand, strict=True):
        assert torch.equal(ids, others) and torch.equal(rows, expected)
    assert not torch.equal(scaled[0][1], pool.run(train_adagrad, 2, plain, False, replicas=2)[0][1])


def after_late_averages(communicators, widths):
    """By average the rows of keys 1, 2, 3 of which copies 0 and 1 have used others in between."""
    tables = JOB.build("adagrad")[1]
    table, keys = tables.groups[0].table, torch.tensor([1, 2, 3])
    average = ReplicaAverage(tables, communicators.replica, late_states=True)
    generator = torch.Generator().manual_seed(communicators.rank)
    found, states = [], []
    table.load(keys, torch.zeros(3, 2 * widths))
    used_then = [([1, 2], [2, 3]), ([1], []), ([], []), ([2], [2])]
    for used, whole in zip(used_then, (False, False, False, True), strict=True):
        mine = torch.tensor(used[communicators.rank], dtype=torch.int64)
        rows = table.gather(table.find(mine), mine)
        rows[:, :widths] = torch.randn(len(mine), widths, generator=generator)
        rows[:, widths:] += torch.rand(len(mine), widths, generator=generator)
        table.load(mine, rows)
        average._used[0] = mine
        states.append(table.gather(table.find(keys), keys))
        average.average(whole)
        found.append(table.gather(table.find(keys), keys))
    return states, found


def test_late_states_come_with_the_next_average():
    """By hand: weights are the means at once, states those of the average before and a copy's own since."""
    dim = JOB.sizes.dim
    (before, first), (other, second) = run_ranks(2, partial(after_late_averages, widths=dim), replicas=2)
    for here, there, after, same in zip(before, other, first, second, strict=True):
        assert torch.equal(after[:, :dim], (here[:, :dim] + there[:, :dim]) / 2)
        assert torch.equal(after[:, :dim], same[:, :dim])
    a, b = ([rows[:, dim:] for rows in each] for each in (first, second))
    assert torch.equal(a[0], before[0][:, dim:]) and torch.equal(b[0], other[0][:, dim:])
    mean = (a[0] + b[0]) / 2
    # Copy 0 has used key 1 since; nobody the others, which have the very means now.
    since = before[1][0, dim:] - a[0][0]
    assert torch.allclose(a[1][0], mean[0] + since) and float(since.min()) > 0
    assert torch.equal(b[1][0], mean[0]) and not torch.equal(a[1][0], b[1][0])
    assert torch.equal(a[1][1:], mean[1:]) and torch.equal(b[1][1:], mean[1:])
    assert torch.equal(a[2], b[2]) and torch.equal(a[2][0], (a[1][0] + b[1][0]) / 2)
    assert torch.equal(a[3], b[3]) and not torch.equal(a[3][1], a[2][1])  # the last one is whole


def test_a_trainer_averages_over_the_holders_if_it_is_told_to(pool):
    window = WindowConfig(2, seed=4, average_every=1)
    (ids, plain), (others, held) = (
        pool.run(train_adagrad, 2, each, False, replicas=2)[0]
        for each in (window, replace(window, average_holders=True))
    )
    assert torch.equal(ids, others) and not torch.equal(plain, held)


def after_an_average(communicators, late, holders):
    """Rows of keys 1, 2, 3 before and after two averages; copy 0 has 1 and 2, copy 1 has 2 and 3."""
    table, keys = (tables := JOB.build("adagrad")[1]).groups[0].table, torch.tensor([1, 2, 3])
    average = ReplicaAverage(tables, communicators.replica, late, holders)
    generator, found = torch.Generator().manual_seed(communicators.rank), []
    mine = keys[:2] if communicators.rank == 0 else keys[1:]
    for whole in (False, True):
        table.load(mine, torch.rand(2, table.row_width, generator=generator))
        average._used[0] = mine
        for _ in range(2):
            found.append(table.gather(table.find(keys), keys))
            if len(found) % 2:
                average.average(whole)
    return found


@pytest.mark.parametrize("late", [False, True])
def test_a_rows_mean_is_over_the_copies_that_hold_it(late):
    """By hand. Once averaged, all copies hold a row, and it counts everywhere."""
    dim = JOB.sizes.dim
    a, b = run_ranks(2, partial(after_an_average, late=late, holders=True), replicas=2)
    of_all = run_ranks(2, partial(after_an_average, late=late, holders=False), replicas=2)[0]
    mean = (a[0] + b[0]) / 2
    assert torch.equal(a[1][1, :dim], mean[1, :dim]) and torch.equal(a[1][:, :dim], b[1][:, :dim])
    assert torch.equal(a[1][0, :dim], a[0][0, :dim]) and torch.equal(a[1][2, :dim], b[0][2, :dim])
    assert torch.equal(of_all[1][:, :dim], mean[:, :dim]) and not torch.equal(a[1][0], of_all[1][0])
    assert torch.equal(a[3], b[3]) and torch.equal(a[3][:, :dim], (a[2][:, :dim] + b[2][:, :dim]) / 2)
    if not late:
        assert torch.equal(a[1], b[1]) and torch.equal(a[1][0], a[0][0]) and torch.equal(a[1][2], b[0][2])


def apart(communicators, folder, late):
    """What saving and evaluating between averages says, and rows after going back to a checkpoint."""
    window = WindowConfig(2, seed=4, average_every=2, late_states=late)
    model, tables, optimizer = JOB.build("adagrad")
    loader = JOB.loader(communicators.rank, communicators.world_size)
    with Trainer(model, tables, optimizer, communicators, "nestpipe", window) as trainer:
        list(trainer.run(map(loader.batch, range(2))))
        trainer.sync()
        trainer.save(folder)
        saved = tables.export()["item"]
        list(trainer.run(map(loader.batch, range(2, 4 if late else 3))))
        said = []
        for act in (lambda: trainer.save(folder), trainer.rows_of_ranks):
            with pytest.raises(RuntimeError) as error:
                act()
            said.append(str(error.value))
        trainer.load(folder)
        trainer.sync()  # adds nothing of what was undone
        trainer.rows_of_ranks()
        return said, saved, tables.export()["item"]


@pytest.mark.parametrize("late", [False, True])
def test_copies_that_trained_apart_are_neither_saved_nor_evaluated_and_a_load_forgets_it(
    pool, late, tmp_path
):
    for said, before, after in pool.run(apart, 2, tmp_path, late, replicas=2):
        assert all(
            "replicas of the tables trained apart since they were averaged: call Trainer.sync() first" in each
            for each in said
        )
        assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])


def test_late_states_end_equal_with_a_whole_average_and_differ_from_states_at_once(pool):
    plain = WindowConfig(2, seed=4, average_every=2)
    late = pool.run(train_adagrad, 2, replace(plain, late_states=True), False, replicas=2)
    at_once = pool.run(train_adagrad, 2, plain, False, replicas=2)
    assert torch.equal(late[0][1], late[1][1])
    assert torch.equal(late[0][0], at_once[0][0]) and not torch.equal(late[0][1], at_once[0][1])


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", ["moment_scaling", "late_states", "average_holders"])
def test_a_state_of_another_mean_of_copies_is_refused(name, before):
    model, tables, optimizer = JOB.build("rowwise_adagrad")
    dense = DenseModel(model, optimizer)
    saved, here = (
        recipe_of(tables, dense, WindowConfig(2, average_every=2, **{name: value}))
        for value in (before, not before)
    )
    require_same(saved, saved)
    with pytest.raises(ValueError, match=f"{name} is {before} in the checkpoint and {not before} here"):
        require_same(saved, here)


@pytest.mark.parametrize("rule", ["adagrad", "rowwise_adagrad", "rowwise_adagradw"])
def test_a_rule_over_copies_divides_the_moment(rule):
    """Against the formula in float64; decoupled decay is that of one table."""
    generator = torch.Generator().manual_seed(3)
    decay = 0.4 if rule == "rowwise_adagradw" else 0.0
    plain = RowOptimizer(rule, lr=lambda update: 0.1 / update, eps=0.02, weight_decay=decay)
    rows = torch.rand(5, plain.row_width(4), generator=generator)
    gradient = torch.randn(5, 4, generator=generator)
    squares = gradient.double() ** 2
    moment = rows[:, 4:].double() + (squares if rule == "adagrad" else squares.mean(1, keepdim=True))
    expected = (1 - 0.1 / 2 * decay) * rows[:, :4] - 0.1 / 2 * gradient.double() / (
        (moment / 3).sqrt() + 0.02
    )
    plain.over_copies(3).update(rows, torch.arange(5), gradient, 2)
    torch.testing.assert_close(rows[:, :4].double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rows[:, 4:].double(), moment, rtol=1e-6, atol=1e-6)


def sync_now(communicators):
    with Trainer(*JOB.build("adam"), communicators, "nestpipe") as trainer:
        try:
            trainer.sync()
        except ValueError as error:
            return str(error)


def test_syncing_exact_replicas_is_refused(pool):
    assert "nothing to average" in pool.run(sync_now, 2, replicas=2)[0]


def mesh_refused(communicators):
    mesh = DeviceMesh("cpu", torch.tensor([[0, 3], [2, 1]]), mesh_dim_names=("shard", "replicate"))
    try:
        Communicators.on(mesh)
    except ValueError as error:
        return str(error)


def on_mesh(communicators):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    return where(Communicators.on(mesh)), where(Communicators.on(mesh, backend="cpu:gloo"))


def on_a_device_nobody_serves(communicators):
    model, tables, optimizer = JOB.build("adam")
    try:
        Trainer(model.to("meta"), tables, optimizer, communicators, "nestpipe", device="meta")
    except ValueError as error:
        return str(error)


def test_ranks_whose_groups_cannot_reach_the_device_are_refused(pool):
    for said in pool.run(on_a_device_nobody_serves, 2):
        assert said.startswith("the ranks' groups cannot exchange tensors on meta: ")
        assert said.endswith("such as 'cpu:gloo,cuda:nccl'")


@pytest.mark.slow
def test_a_device_mesh_makes_the_same_groups_and_ranks_must_ascend_in_it():
    with RankPool([(4, 2)]) as own:
        expected = own.run(where, 4, replicas=2)
        assert own.run(on_mesh, 4, replicas=2) == [(each, each) for each in expected]
        assert all("ranks must ascend" in message for message in own.run(mesh_refused, 4, replicas=2))


@pytest.mark.parametrize("storage", slow_except(["cached"], ["device", "cached"]))
def test_replicas_of_tables_that_are_elsewhere_have_the_same_bits(pool, storage):
    def tables(ranks, job, **mesh):
        window = WindowConfig(2, depth=3, exchange=ExchangeConfig(first_use=True, skip_fetch=True))
        found = pool.run(train, ranks, window, 6, False, job, **mesh)
        rows = {}  # of each id on every rank that has it
        for ids, values, _dense, _bytes in found:
            for each, row in zip(ids.tolist(), values, strict=True):
                assert torch.equal(rows.setdefault(each, row), row)
        return rows, found[0][2]

    expected, dense = tables(2, JOB)
    got, got_dense = tables(4, replace(JOB, placement=Placement(storage, cache_rows=3)), replicas=2)
    assert got.keys() == expected.keys() and all(torch.equal(got[key], expected[key]) for key in got)
    assert all(torch.equal(got_dense[name], dense[name]) for name in dense)


def test_nothing_is_sent_where_no_row_was_used_and_nothing_averaged_under_way():
    communicators = Communicators.local()
    average = ReplicaAverage(JOB.build("adam")[1], communicators.replica)
    assert average.average() == 0
    with pytest.raises(RuntimeError, match="2 windows are under way: take their results first"):
        Trainer.sync(SimpleNamespace(_average=average, _pending=[0, 1]))


def test_rows_that_were_averaged_are_not_averaged_again():
    communicators, tables = Communicators.local(), JOB.build("adam")[1]
    average, keys = ReplicaAverage(tables, communicators.replica), torch.tensor([1, 2])
    tables.groups[0].table.lookup(keys, 0)
    average._used[0] = keys
    average.average()
    assert not any(map(len, average._used))


def test_bytes_of_averaged_rows_are_counted():
    trainer = SimpleNamespace(
        _average=SimpleNamespace(average=lambda whole: 48),
        _pending=[],
        _finished=3,
        recorder=Recorder(0, 1),
        impl="auto",
        counts=LookupCounts(row_bytes=2),
    )
    Trainer.sync(trainer)
    assert trainer.counts.row_bytes == 50


def test_an_average_counts_the_bytes_of_its_rows():
    rows = torch.ones(2, 3)
    table = SimpleNamespace(
        find=lambda keys: keys, gather=lambda handles, keys: rows, load=lambda *given: None, dim=2
    )
    alone = SimpleNamespace(
        world_size=1,
        all_gather=lambda keys: [keys],
        all_reduce=lambda rows, name: rows,
        all_reduce_bytes=lambda rows: rows.nbytes,
    )
    group = SimpleNamespace(table=table)
    used = [torch.tensor([4, 5]), torch.empty(0, dtype=torch.int64)]
    average = ReplicaAverage(JOB.build("adam")[1], alone)
    average.tables, average._used, average._late = SimpleNamespace(groups=[group, group]), used, [None] * 2
    assert average.average() == rows.nbytes


@pytest.mark.parametrize("every", [0, 2])
def test_gradients_of_rows_are_divided_by_the_terms_of_those_who_add_them_up(every):
    config = WindowConfig(2, seed=4, average_every=every)
    made = [JOB.build("adam") for _ in range(2)]  # by one thread, since torch has one seed
    seen = [[], []]

    def of_rank(communicators):
        def note(routes: Read[Routes]) -> None:
            seen[communicators.rank].append((routes.loss_normalizer, routes.row_normalizer))

        with Trainer(*made[communicators.rank], communicators, "nestpipe", config) as training:
            training.program.after("route", note)
            list(training.run([JOB.loader(communicators.rank, 2).batch(0)]))

    run_ranks(2, of_rank, replicas=2)
    ((terms, own),), ((same, other),) = seen
    assert terms == same and (own + other, min(own, other) > 0) == (terms if every else 2 * terms, True)
