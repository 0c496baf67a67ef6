"""Promise: replay changes no bit of training, and finds a bit that flips and the rank where it did."""

import re
from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import trainer_parts as parts
from hypothesis import given, settings
from hypothesis import strategies as st
from speeds import examples, slow_except

from tritonrec import nn
from tritonrec.data import NextItemLoader, load
from tritonrec.distributed import CorruptionError, Ledger, RanksDisagreeError
from tritonrec.embedding import Eviction, PrecisionTiers, TablePolicy
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.pipeline import StageFailedError, Window
from tritonrec.pipeline.headers import Header
from tritonrec.pipeline.places import Buffer, Context, Dense, Gradients, Losses, Routes
from tritonrec.pipeline.stage import Read, Update
from tritonrec.pipeline.stages.update import sparse_update
from tritonrec.pipeline.words import WIDTH
from tritonrec.resilience import Replay
from tritonrec.resilience.replay import Plan
from tritonrec.resilience.replay import replay as replaying
from tritonrec.resilience.replay.messages import pack, rebuilt, unpack
from tritonrec.resilience.replay.work import RowUpdate

BIT = 1 << 12
MODES = ("sequential", "dbp", "fwp", "nestpipe")
EVERY = list(product((1, 2, 3), MODES, ("batch", "window")))
FEW = [(1, "nestpipe", "window"), (2, "nestpipe", "batch")]


def trained(
    world_size,
    mode="nestpipe",
    consistency="batch",
    share=0.5,
    plant=None,
    steps=6,
    policy=None,
    model=parts.Ranker,
    **window,
):
    """State, replay and results of each rank; `plant` injects a fault into its program."""
    made = [parts.parts(model, policy=policy) for _ in range(world_size)]

    def rank(communicators):
        own = made[communicators.rank]
        with parts.trainer(own, mode, consistency, communicators, **window) as trainer:
            if plant is not None:
                plant(trainer.program)
            with Replay(share or 0.5) as replay:
                if share:
                    replay.attach(trainer)
                batches = parts.batches(steps, 7, communicators.rank, world_size)
                results = list(trainer.run(batches))
        return parts.state(own), replay, results

    return run_ranks(world_size, rank)


def found(world_size, plant, **options):
    """The error that names a fault."""
    with pytest.raises((StageFailedError, CorruptionError)) as raised:
        trained(world_size, plant=plant, **options)
    error = raised.value if isinstance(raised.value, CorruptionError) else raised.value.__cause__
    assert isinstance(error, CorruptionError), raised.value
    return error


@pytest.mark.smoke
@pytest.mark.parametrize(("world_size", "mode", "consistency"), slow_except(FEW, EVERY))
def test_no_bit_of_training_changes(world_size, mode, consistency):
    plain = trained(world_size, mode, consistency, share=0)
    checked = trained(world_size, mode, consistency)
    for (state, _, losses), (other, replay, others) in zip(plain, checked, strict=True):
        assert parts.same(state, other)
        assert all(torch.equal(a.losses, b.losses) for a, b in zip(losses, others, strict=True))
        assert replay.counts["replayed_rows"] and replay.counts["rows_checked"]
        assert replay.counts["check_microseconds"] > 0
    assert sum(replay.counts["replayed_micro_batches"] for _, replay, _ in checked) > 3


@pytest.mark.parametrize(("world_size", "share"), slow_except([(2, 0.3)], product((1, 2), (0.01, 0.3, 1.0))))
def test_every_share_is_that_of_the_work(world_size, share):
    runs = trained(world_size, share=share, steps=4, micro_batches=2)
    due = 4 * 2 * world_size * share
    assert abs(sum(replay.counts["replayed_micro_batches"] for _, replay, _ in runs) - due) < 1
    assert (runs[0][1].counts["replay_bytes"] > 0) == (world_size == 2 and due >= 1)
    assert (runs[0][1].counts["states_compared"] > 0) == (world_size == 2 and due >= 1)


OPTIONS = {
    "first_use": {"first_use": True},
    "skip_fetch": {"skip_fetch": True},
    "accumulate": {"accumulate": 2},
    "clipped": {"max_grad_norm": 0.1},
    "no_dedup": {"dedup": "none"},
    "fp16": {"precision": "fp16"},
    "exchange": {"exchange_precision": "bf16"},
    "policies": {"policy": TablePolicy(Eviction("lru", capacity=30), 2, PrecisionTiers(2, 2))},
    "more_micro_batches_than_samples": {"micro_batches": 9},
}


@pytest.mark.parametrize("name", slow_except(["policies"], OPTIONS))
def test_nothing_is_found_where_nothing_flips(name):
    plain, checked = (trained(2, share=share, **OPTIONS[name]) for share in (0, 1.0))
    assert all(parts.same(a[0], b[0]) for a, b in zip(plain, checked, strict=True))


class TwoLayers(parts.Ranker):
    """Backward completes the gradients of one before it comes to the other."""

    def __init__(self):
        super().__init__()
        del self.mix
        self.first, self.second = nn.Linear(parts.DIM, parts.DIM), nn.Linear(parts.DIM, parts.DIM)
        self.mix = lambda rows, offsets: self.second(torch.sin(self.first(rows, offsets)), offsets)


def test_gradients_that_leave_before_the_end_of_backward_are_no_fault():
    """Nor are they reduced later in a micro-batch that nobody computes again."""
    completed, replayed = [], []

    def plant(program):
        early = program.run_places[Dense].flight.early
        assert program.schedule.reduces_early and early.buckets
        end_part = early.completed
        early.completed = lambda: (completed.append(1), end_part())

    for share in (1, 0.1):
        for _state, replay, _results in trained(
            2, model=TwoLayers, share=share, plant=plant, exchanges="each"
        ):
            replayed.append(replay.counts["replayed_micro_batches"])
        assert bool(completed) == (share < 1)
    assert replayed[:2] == [18, 18] and all(replayed)


def test_a_model_that_draws_random_numbers_draws_them_again():
    made = parts.parts()
    forward = made[0].hidden
    made[0].hidden = lambda batch, rows: forward(batch, rows) * torch.rand((), dtype=torch.float32)
    with parts.trainer(made, "sequential", trust_model=True) as trainer, Replay(1.0) as replay:
        replay.attach(trainer)
        list(trainer.run(parts.batches(2)))
    assert replay.counts["replayed_micro_batches"] and not replay.counts["replay_bytes"]


def test_buffers_of_the_model_are_those_of_its_own_calls():
    made = parts.parts()
    made[0].register_buffer("calls", torch.zeros((), dtype=torch.int64))
    forward = made[0].hidden

    def counted(batch, rows):
        made[0].calls += 1
        return forward(batch, rows)

    made[0].hidden = counted
    with parts.trainer(made, "sequential", trust_model=True) as trainer, Replay(1.0) as replay:
        replay.attach(trainer)
        list(trainer.run(parts.batches(2)))
    assert int(made[0].calls) == 6


def gradient_of(rank, from_step=2):
    def plant(program):
        def flip(
            micro_batch: int,
            context: Context,
            window: Window,
            routes: Read[Routes],
            gradients: Update[Gradients],
        ) -> None:
            used = routes.tables[0].inverse[micro_batch]
            if context.rank == rank and window.step >= from_step and len(used):
                gradients[0][used[0], 3] ^= BIT

        program.after("compute", flip)

    return plant


def loss_of(rank):
    def plant(program):
        def flip(micro_batch: int, context: Context, losses: Update[Losses]) -> None:
            if context.rank == rank and len(losses[micro_batch]):
                losses[micro_batch].view(torch.int32)[0] ^= BIT

        program.after("compute", flip)

    return plant


def update_of(rank):
    def plant(program):
        def flip(context: Context, buffer: Update[Buffer]) -> None:
            if context.rank == rank:
                buffer[0].view(torch.int32)[:, 3] ^= BIT

        program.after("sparse_update", flip)

    return plant


def parameter_of(rank, at=2):
    def plant(program):
        def flip(context: Context, window: Window) -> None:
            if context.rank == rank and window.step == at:
                program.model.mix.bias.data.view(torch.int32)[1] ^= BIT
                program.dense._sums = None  # the guard of the caller's changes would see it first

        program.after("dense_update", flip)

    return plant


def optimizer_state_of(rank):
    def plant(program):
        def flip(context: Context, window: Window) -> None:
            if context.rank == rank and window.step == 2:
                moment = program.dense.tensors()["mix.weight/exp_avg"]
                moment.view(torch.int32)[0, 0] ^= BIT

        program.after("dense_update", flip)

    return plant


FLIPS = {"gradient": gradient_of, "loss": loss_of, "update": update_of}
STATES = {"parameter": parameter_of, "optimizer state": optimizer_state_of}


THREE = [("gradient", 1), ("update", 2)]


@pytest.mark.smoke
@pytest.mark.parametrize(("what", "rank"), slow_except(THREE, product(FLIPS | STATES, range(3))))
def test_of_three_ranks_the_one_at_fault_is_named(what, rank):
    error = found(3, (FLIPS | STATES)[what](rank), share=1.0)
    assert error.ranks == (rank,)
    assert f"rank {rank} has other bits of" in str(error)


@pytest.mark.parametrize("what", slow_except(["parameter"], FLIPS | STATES))
def test_of_two_ranks_one_is_named_beside_the_other(what):
    error = found(2, (FLIPS | STATES)[what](1), share=1.0)
    assert sorted(error.ranks) == [0, 1] and "one of them is wrong" in str(error)


def test_of_four_ranks_two_against_two_are_all_suspects():
    def plant(program):
        parameter_of(2)(program)
        parameter_of(3)(program)

    assert found(4, plant, share=0.1, steps=10).ranks == (0, 1, 2, 3)


@pytest.mark.parametrize("what", slow_except(["update"], FLIPS))
def test_a_single_rank_computes_twice(what):
    error = found(1, FLIPS[what](0), share=1.0)
    assert error.ranks == (0,) and "twice from the same input" in str(error)


@pytest.mark.parametrize(
    ("world_size", "rank"), slow_except([(2, 1)], [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
)
def test_it_is_found_within_the_stated_number_of_updates(world_size, rank):
    share, since = 0.11, 3
    error = found(world_size, gradient_of(rank, since), share=share, steps=40)
    step = int(re.search(r"step (\d+)", str(error))[1])
    assert since <= step < since + Plan(share, world_size, 3).most_updates


def row_at_rest(rank, at):
    """A bit of a row flips in the table between two runs."""

    def plant(trainer):
        table = trainer.tables.groups[0].table
        if trainer.program.context.rank == rank:
            _keys, handles = table._rows.items()
            values = table._rows.gather(handles)
            values.view(torch.int32)[:, at] ^= BIT
            table._rows._storage.update(handles, values)
        return table

    return plant


@pytest.mark.smoke
@pytest.mark.parametrize("reader", slow_except(["step"], ["step", "save", "export"]))
def test_a_row_at_rest_is_checked_as_it_is_read(reader, tmp_path):
    made = [parts.parts() for _ in range(2)]

    def rank(communicators):
        with (
            parts.trainer(made[communicators.rank], communicators=communicators) as trainer,
            Replay() as replay,
        ):
            replay.attach(trainer)
            every = parts.batches(6, 7, communicators.rank, 2)
            list(trainer.run(every[:3]))
            row_at_rest(1, 2)(trainer)
            if reader == "step":
                list(trainer.run(every[3:]))
            elif reader == "save":
                trainer.save(tmp_path)
            else:
                trainer.tables.export()

    with pytest.raises((StageFailedError, CorruptionError)) as raised:
        run_ranks(2, rank)
    error = raised.value if isinstance(raised.value, CorruptionError) else raised.value.__cause__
    assert isinstance(error, CorruptionError) and error.ranks == (1,)
    assert re.search(r"the row of id -?\d+ of table item on rank 1 has other bits", str(error))


def test_rows_that_are_loaded_erased_or_changed_between_runs_are_no_fault():
    made = parts.parts()
    with parts.trainer(made) as trainer, Replay(1.0) as replay:
        replay.attach(trainer)
        every = parts.batches(6)
        list(trainer.run(every[:2]))
        table = trainer.tables.groups[0].table
        keys, rows = table.export()
        table.load(keys[:9], rows[:9] + 1)
        assert bool(table.erase(keys[-9:]).all())
        list(trainer.run(every[2:]))
        table.load_state(table.state())
        table.export()


KINDS = [(torch.float32, 1.0), (torch.uint8, 1.0), (torch.float32, 1e-3)]


@pytest.mark.parametrize(("kind", "share"), slow_except(KINDS[1:2], KINDS))
def test_a_message_that_changes_on_its_way_is_named_by_both_ends(kind, share):
    """Of rows, and of gradients: behind their widths, without which the exchange would fail by itself.

    Where all messages are looked at one flip is enough, else the link goes on being bad.
    """

    def plant(program):
        communication = program.communicators.communication
        exchange, seen = communication.exchange, []

        def flipped(values, send, receive, out=None):
            received = exchange(values, send, receive, out)
            if values.dtype == kind and communication.rank == 0 and receive[1]:
                seen.append(None)
                if len(seen) == 2 or (share < 1 and len(seen) > 2):
                    received.view(torch.uint8).view(-1)[-1] ^= 1  # of those from rank 1
            return received

        communication.exchange = flipped

    error = found(2, plant, share=share, steps=14)
    assert error.ranks == (1, 0) and "a message from rank 1 has other bits at rank 0" in str(error)


class _Echo:
    """A group of two ranks whose other one sends what this one does."""

    name, rank, world_size, peers = "group", 0, 2, ()


@pytest.mark.parametrize("one_in", [1, 3, 8, 16])
def test_a_ledger_takes_every_place_of_a_step_in_turn(one_in):
    rows = torch.ones(2, 3, dtype=torch.float32)
    for calls in (1, 8, 13, 24):
        ledger, places = Ledger(one_in, 10**6), set()
        for number in range(calls * one_in * 16):
            before = len(ledger._entries)
            ledger.note(_Echo(), rows, [1, 1], rows, [1, 1])
            if len(ledger._entries) > before:
                places.add(number % calls)
        assert places == set(range(calls))
        assert abs(len(ledger._entries) - calls * 16) <= 2


@given(st.floats(1e-4, 1), st.integers(1, 5), st.integers(1, 6))
@settings(max_examples=examples(30))
def test_the_plan_takes_every_rank_and_place_in_turn(share, world_size, micro_batches):
    plan = Plan(share, world_size, micro_batches)
    updates = plan.period * micro_batches if plan.period < 300 else 2 * plan.most_updates
    units = [unit for update in range(updates) for unit in plan.units(update)]
    assert len(units) == updates * plan.window // plan.period
    last = {rank: -1 for rank in range(world_size)}
    for update in range(updates):
        for unit in plan.units(update):
            assert update - last[unit.rank] <= plan.most_updates
            last[unit.rank] = update
    if plan.period < 300:
        assert set(units) == {(r, i) for r in range(world_size) for i in range(micro_batches)}


@pytest.mark.parametrize(("share", "world_size", "micro_batches"), [(1.0, 2, 3), (0.3, 2, 1), (0.01, 3, 2)])
def test_the_plan_takes_every_row_in_turn(share, world_size, micro_batches):
    plan = Plan(share, world_size, micro_batches)
    found, due = set(), [plan.rows(update) for update in range(plan.period)]
    for first, every in filter(None, due):
        assert 0 <= first < every
        found.add((first, every))
    every = min(plan.window, plan.period)
    assert sum(each is not None for each in due) == every
    assert found == {(first, every) for first in range(every)}


TENSORS = [
    torch.arange(7, dtype=torch.int64)[2:],
    torch.randn(3, 0, dtype=torch.float32),
    torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float32).t(),
    torch.tensor(True),
    torch.arange(3, dtype=torch.uint8),
    torch.ones(3, dtype=torch.bfloat16),
]


def test_a_message_is_its_tensors():
    there = unpack(pack(TENSORS, torch.device("cpu")), 0, 1)
    assert [each.dtype for each in there] == [each.dtype for each in TENSORS]
    assert all(torch.equal(a, b) for a, b in zip(there, TENSORS, strict=True))
    assert unpack(pack([], torch.device("cpu")), 0, 0) == []


@given(st.data())
@settings(max_examples=examples(30))
def test_no_flipped_bit_of_a_message_gets_in(data):
    message = pack(TENSORS, torch.device("cpu"))
    message[data.draw(st.integers(0, len(message) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptionError, match="from rank 2 has other bits at rank 0"):
        unpack(message, 2, 0)


def test_a_batch_is_rebuilt_from_another_of_its_step():
    batch = NextItemLoader(load("zipf:users=60,items=80,seed=1"), 7, 9, 1, 3).batch(0)
    few, nothing = batch.select(torch.tensor([3, 1])), batch.select(torch.arange(0))
    for like in (batch, few, nothing):
        again = rebuilt(like, iter(few.tensors()))
        assert parts.same(again.tensors(), few.tensors()) and again.validate().num_samples == 2
        assert parts.same(again.lookups()["item"][:1], few.lookups()["item"][:1])


@pytest.mark.parametrize("share", [0, -1, 1.1, float("nan"), 1e-320, float("inf")])
def test_no_share(share):
    with pytest.raises(ValueError, match="share of the work to replay must lie in"):
        Replay(share)


def test_the_reference_has_no_stages():
    with parts.trainer(parts.parts(), "reference") as trainer:
        replay = Replay()
        with pytest.raises(ValueError, match="mode 'reference' has none"):
            replay.attach(trainer)


def test_ranks_give_the_same_share():
    made = [parts.parts() for _ in range(2)]

    def rank(communicators):
        with parts.trainer(made[communicators.rank], communicators=communicators) as trainer:
            Replay(0.5 / (1 + communicators.rank)).attach(trainer)

    with pytest.raises(RanksDisagreeError, match="share of replay"):
        run_ranks(2, rank)


def test_messages_are_left_alone_afterwards():
    made = [parts.parts() for _ in range(2)]

    def rank(communicators):
        with parts.trainer(made[communicators.rank], communicators=communicators) as trainer:
            with Replay() as replay:
                replay.attach(trainer)
                assert communicators.communication.ledger is not None
            return [getattr(communicators, name).ledger for name in ("communication", "routing", "reduce")]

    assert run_ranks(2, rank) == [[None] * 3] * 2


@pytest.mark.parametrize("count", range(7))
def test_of_every_nth_row_those_below_the_count_are_counted(count):
    handles, rows = torch.arange(6), torch.randn(6, 2)
    table = SimpleNamespace(handles=handles, count=torch.tensor(count), low_precision=None)
    routes, stage = SimpleNamespace(row_normalizer=3, loss_normalizer=2), sparse_update
    for every in (1, 2, 3):
        for first in range(every):
            owned, some = SimpleNamespace(tables=[table]), [rows]
            update = RowUpdate(stage, first, every, routes, owned, some, some, None, some)
            assert int(update.done().inputs[-1]) == len(range(first, count, every))


def test_its_own_time_is_counted_in_microseconds(monkeypatch):
    times = iter([10**9, 10**9 + 5_000_999, 0, 2000])
    monkeypatch.setattr(replaying.time, "thread_time_ns", lambda: next(times))
    counts = Counter()
    for _ in range(2):
        with replaying._Timed(counts):
            pass
    assert counts == {"replay_microseconds": 5002}


def test_the_time_of_its_checks_is_counted_in_microseconds(monkeypatch):
    times, counts = iter([10**9, 10**9 + 7_000_900]), Counter()
    monkeypatch.setattr(replaying.time, "thread_time_ns", lambda: next(times))
    tables = SimpleNamespace(tables=[], groups=[])
    Replay._read(SimpleNamespace(counts=counts), tables, [], None, SimpleNamespace(tables=tables))
    assert counts == {"check_microseconds": 7000}


def test_a_message_between_replicas_that_changes_on_its_way_is_named():
    """In a word of a header that nothing depends on, so that the ledger alone can see it."""
    made = [parts.parts() for _ in range(4)]

    def rank(communicators):
        over = communicators.replica_routing
        exchange, width = over.exchange, Header(0, 0, False)

        def flipped(values, send, receive, out=None):
            received = exchange(values, send, receive, out)
            header = values.shape[1:] == (2 * (len(width) + WIDTH),)
            if header and communicators.rank == 2 and received[1, -1] == 0:  # not of a run's first window
                received[1, -1] = BIT
            return received

        over.exchange = flipped
        own = made[communicators.rank]
        with parts.trainer(own, communicators=communicators) as trainer, Replay(1.0) as replay:
            replay.attach(trainer)
            list(trainer.run(parts.batches(9, 7, communicators.rank, 4)))

    with pytest.raises(StageFailedError) as raised:
        run_ranks(4, rank, replicas=2)
    error = raised.value.__cause__
    assert isinstance(error, CorruptionError) and error.ranks == (3, 2)
    assert "of group replica_routing" in str(error)
