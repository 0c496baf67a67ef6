"""Promise: policies follow their rules key by key, whatever the world size and the pipeline's depth."""

from __future__ import annotations

import threading
from itertools import product
from tempfile import gettempdir
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)  # fmt: skip
from naive_table import NaiveTable, Ranks, rounded
from speeds import examples, slow_except

from tritonrec import ops
from tritonrec.embedding import DynamicTable, Eviction, KeyLayout, Placement, PrecisionTiers, TablePolicy
from tritonrec.embedding.evictor import Evictor
from tritonrec.embedding.precision import AccessCounter
from tritonrec.embedding.trained_table import Lookup

DIM, WIDTH, SEED = 3, 5, 7
EXTREMES = [-(2**63), -(2**63) + 1, -2, -1, 0, 1, 2**63 - 2, 2**63 - 1]
IDS = [*EXTREMES, *range(20, 30), *range(-70, -35, 7)]
MERGED_IDS = [0, 1, 2, 2**61 - 1, 2**61 - 2, *range(20, 27)]
LAYOUTS = {"alone": None, "named": KeyLayout(("item",)), "merged": KeyLayout(("action", "item", "user"))}
EVICTIONS = {
    "none": None,
    "lru": Eviction("lru", capacity=6),
    "lru_every_2": Eviction("lru", capacity=3, every=2),
    "lfu": Eviction("lfu", capacity=5),
    "ttl": Eviction("ttl", ttl=2, every=2),
}
TIERS = {
    "none": None,
    "tiers": PrecisionTiers(threshold=2, every=3),
    "sized": PrecisionTiers(str(4 * (48 + 4 * WIDTH) + 3), every=2),  # four rows in float32
}


picked_keys = st.lists(st.integers(0, 35), unique=True, max_size=9)


def keys_of(layout: KeyLayout | None) -> list[int]:
    if layout is None or not layout.bits:
        return IDS
    ids = torch.tensor(MERGED_IDS)
    return torch.cat([layout.pack(member, ids, "f") for member in range(len(layout.names))]).tolist()


def tensor(keys: list[int]) -> torch.Tensor:
    return torch.tensor(keys, dtype=torch.int64)


def rows_of(rows: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.array(rows, np.float32).reshape(-1, WIDTH))


class Cluster:
    """The ranks' tables seen as one."""

    def __init__(
        self,
        world_size: int,
        policy: TablePolicy,
        layout: KeyLayout | None,
        placement: Placement | None = None,
    ):
        self.layout, self.world_size = layout, world_size
        self.tables = [
            DynamicTable(
                DIM,
                WIDTH,
                layout=layout,
                seed=SEED,
                scale=0.5,
                slots=8,
                chunk_rows=4,
                policy=policy,
                placement=placement,
            )
            for _ in range(world_size)
        ]
        self.ranks = Ranks(world_size)
        self.before: dict[str, int] = {}  # counters at a restart

    def owned(self, keys: list[int]) -> list[torch.Tensor]:
        """Positions in `keys` of each rank's."""
        asked = tensor(keys)
        ids = asked if self.layout is None else self.layout.unpack(asked)[1]
        owners = ops.owner_of(ids, self.world_size)
        return [(owners == rank).nonzero().squeeze(1) for rank in range(self.world_size)]

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        return merged([table.state() for table in self.tables])

    def counter(self, name: str) -> int:
        return sum(getattr(table.counters, name) for table in self.tables) - self.before.get(name, 0)

    def begin_counting(self) -> None:
        self.before = {name: self.counter(name) for name in vars(self.tables[0].counters)}


def merged(states: list[dict[str, dict[str, torch.Tensor]]]) -> dict[str, dict[str, torch.Tensor]]:
    return {
        group: {name: torch.cat([state[group][name] for state in states]) for name in columns}
        for group, columns in states[0].items()
    }


def by_key(group: dict[str, torch.Tensor]) -> dict[int, tuple]:
    """Columns as the naive table's `state` gives them."""
    keys = group["keys"].tolist()
    assert len(set(keys)) == len(keys)
    if "counts" in group:
        return dict(
            zip(keys, zip(group["counts"].tolist(), group["last"].tolist(), strict=True), strict=True)
        )
    missing = [None] * len(keys)
    columns = [group[name].tolist() if name in group else missing for name in ("score", "heat", "recent")]
    rows = [row.tobytes() for row in group["rows"].numpy()]
    return dict(zip(keys, zip(*columns, rows, strict=True), strict=True))


class TableAgainstRules(RuleBasedStateMachine):
    """Training as the pipeline does it, beside the naive table, which goes one step after another."""

    policy = TablePolicy()
    placements = (Placement(),)
    """The first one is that of the start, any of them that of a restart."""

    @initialize(
        world_size=st.integers(1, 4), layout=st.sampled_from(sorted(LAYOUTS)), pipelined=st.booleans()
    )
    def begin(self, world_size, layout, pipelined):
        self.layout, self.pipelined = LAYOUTS[layout], pipelined
        self.universe = keys_of(self.layout)
        self.initial: dict[int, np.ndarray] = {}
        self.naive = NaiveTable(self.policy, DIM, self._unpack, self._initial, WIDTH)
        self.cluster = Cluster(world_size, self.policy, self.layout, self.placements[0])
        self.now = -1
        self.pending: dict[int, np.ndarray] = {}  # rows of the last step that are still in its buffer
        self.handles: dict[int, int] = {}  # of these rows
        self.erased: list[tuple[int, int, np.ndarray]] = []  # rank, handle, row: erased while in the buffer
        self.saved: dict[str, dict[int, object]] = {}
        self._save_all()

    def _unpack(self, key):
        return (0, key) if self.layout is None else tuple(int(x) for x in self.layout.unpack(tensor([key])))

    def _initial(self, key):
        if key not in self.initial:
            member, number = self._unpack(key)
            table_id = 0 if self.layout is None else self.layout.table_ids[member]
            weights = ops.initial_rows(SEED, table_id, tensor([number]), DIM, 0.5, impl="reference")
            self.initial[key] = np.concatenate([weights.numpy()[0], np.zeros(WIDTH - DIM, np.float32)])
        return self.initial[key].copy()

    def _pick(self, numbers):
        return list(dict.fromkeys(self.universe[number % len(self.universe)] for number in numbers))

    def _flush(self):
        """Update the tables by the handles of the lookup, whatever came in between."""
        keys, rows = list(self.pending), rows_of(list(self.pending.values()))
        handles = tensor([self.handles[key] for key in keys])
        for rank, here in enumerate(self.cluster.owned(keys)):
            stale = [(handle, row) for owner, handle, row in self.erased if owner == rank]
            self.cluster.tables[rank].update(
                torch.cat([handles[here], tensor([handle for handle, _row in stale])]),
                torch.cat([rows[here], rows_of([row for _handle, row in stale])]),
            )
        self.pending, self.erased = {}, []

    def _save_all(self):
        for table in self.cluster.tables:
            table.track_changes()
        self.saved = {group: by_key(columns) for group, columns in self.cluster.state().items()}

    @rule(
        steps=st.lists(
            st.tuples(
                picked_keys, st.sampled_from([1, 1, 1, 2, 3]), st.sampled_from(["now", "late", "beside"])
            ),
            min_size=1,
            max_size=6,
        )
    )
    def train(self, steps):
        for picked, gap, write_back in steps:
            self._step(self._pick(picked), gap, write_back)
            self.same_content()

    def _step(self, keys: list[int], gap: int, write_back: str):
        self.now += gap
        expected = [self.naive.row(key) for key in keys]
        self.naive.lookup(keys, self.now)
        expected = [
            row if key in self.pending else self.naive.row(key)
            for key, row in zip(keys, expected, strict=True)
        ]
        owned = self.cluster.owned(keys)
        writer = threading.Thread(target=self._flush)
        beside = write_back == "beside" and bool(self.pending)
        before = dict(self.pending)

        def retrieve(rank, all_reduce):
            table, mine = self.cluster.tables[rank], tensor(keys)[owned[rank]]
            if not table.padded:
                found = table.lookup(mine, self.now, all_reduce)
                return found, table.gather(found.handles, mine)
            count, padded = torch.tensor(len(mine)), torch.cat([mine, tensor([0, 5, -7])])
            found = table.lookup(padded, self.now, all_reduce, count)
            values = table.gather(found.handles, padded)
            assert (found.handles[len(mine) :] == -1).all()
            return Lookup(*(None if each is None else each[: len(mine)] for each in found)), values[
                : len(mine)
            ]

        if beside:
            writer.start()
        found = self.cluster.ranks(retrieve)
        if beside:
            writer.join()
        else:
            self._flush()

        trained: dict[int, np.ndarray] = {}
        noise = np.random.default_rng([self.now, len(keys)])
        for (lookup, values), here in zip(found, owned, strict=True):
            mine = [keys[i] for i in here.tolist()]
            self.handles |= zip(mine, lookup.handles.tolist(), strict=True)
            assert [handle >= 0 for handle in lookup.handles.tolist()] == [
                key in self.naive.entries for key in mine
            ]
            present = lookup.handles[lookup.handles >= 0].tolist()
            assert len(set(present)) == len(present)
            for i, key in enumerate(mine):
                if key in before:  # the dual-buffer synchronization
                    values[i] = torch.from_numpy(before[key])
                row = expected[keys.index(key)]
                assert values[i].numpy().tobytes() == row.tobytes(), (key, values[i], row)
                # large and odd enough that neither 16-bit form holds it; now and then one that both hold
                change = 1.0 if noise.random() < 0.2 else noise.normal(size=WIDTH).astype(np.float32)
                trained[key] = (row + change).astype(np.float32)
                values[i] = torch.from_numpy(trained[key])
            if lookup.low_precision is None:
                assert self.policy.precision is None
                continue
            assert lookup.low_precision.tolist() == [self.naive.low(key) for key in mine]
            self.cluster.tables[0].round_low_precision(values, lookup.low_precision)
            for i, key in enumerate(mine):
                if self.naive.low(key):
                    trained[key] = rounded(trained[key], DIM)
                assert values[i].numpy().tobytes() == trained[key].tobytes()
        trained = {key: row for key, row in trained.items() if key in self.naive.entries}
        for key, row in trained.items():
            self.naive.write(key, row)
        self.pending = trained
        if not self.pipelined or write_back == "now":
            self._flush()

    @rule(picked=picked_keys, flushed=st.booleans())
    def erase(self, picked, flushed):
        """Also rows that are in a buffer: their update comes later, and changes no other row."""
        if flushed:
            self._flush()
        keys = self._pick(picked)
        for rank, here in enumerate(self.cluster.owned(keys)):
            mine = tensor(keys)[here]
            erased = self.cluster.tables[rank].erase(mine).tolist()
            assert erased == [self.naive.erase(key) for key in mine.tolist()]
            for key in set(mine.tolist()) & self.pending.keys():
                self.erased.append((rank, self.handles[key], self.pending.pop(key)))

    @rule(picked=picked_keys)
    def load(self, picked):
        keys = self._pick(picked)
        if self.pending.keys() & keys:
            self._flush()
        noise = np.random.default_rng([len(keys), max(self.now, 0)])
        rows = noise.normal(size=(len(keys), WIDTH)).astype(np.float32)
        rows[::2] = np.round(rows[::2])
        for key, row in zip(keys, rows, strict=True):
            self.naive.load(key, row)
        for table, here in zip(self.cluster.tables, self.cluster.owned(keys), strict=True):
            table.load(tensor(keys)[here], torch.from_numpy(rows)[here])

    @rule(world_size=st.integers(1, 4), place=st.integers(0, 2))
    def restart(self, world_size, place):
        """From the state of all ranks, at another world size and place; each table takes it in two parts."""
        self._flush()
        state = self.cluster.state()
        self.cluster.ranks.close()
        placement = self.placements[place % len(self.placements)]
        self.cluster = Cluster(world_size, self.policy, self.layout, placement)
        owned = {group: self.cluster.owned(columns["keys"].tolist()) for group, columns in state.items()}
        for rank, table in enumerate(self.cluster.tables):
            for part in (slice(0, None, 2), slice(1, None, 2)):
                table.load_state(
                    {
                        group: {name: column[owned[group][rank]][part] for name, column in columns.items()}
                        for group, columns in state.items()
                    }
                )
        self.cluster.begin_counting()
        self.naive.restart()
        self._save_all()

    @rule(flushed=st.booleans())
    def save_changes(self, flushed):
        """Also while rows are in a buffer: their update is a change after it."""
        if flushed:
            self._flush()
        for table in self.cluster.tables:
            changed, erased = table.take_changes()
            for group, saved in self.saved.items():
                fresh = by_key(changed[group])
                erased_keys = erased[group].tolist()
                assert not fresh.keys() & set(erased_keys)
                for key in erased_keys:
                    saved.pop(key, None)
                saved.update(fresh)
        state = {group: by_key(columns) for group, columns in self.cluster.state().items()}
        assert self.saved == state

    @invariant()
    @precondition(lambda self: hasattr(self, "cluster"))
    def same_content(self):
        entries = self.naive.entries
        state = self.cluster.state()
        assert sum(map(len, self.cluster.tables)) == len(entries)
        found, expected = by_key(state["rows"]), self.naive.state()
        assert found.keys() == entries.keys()
        absent = [self.policy.eviction is None, self.policy.precision is None]
        absent.append(all(absent))
        for key, columns in expected["rows"].items():
            *metadata, row = columns
            metadata = [None if missing else value for missing, value in zip(absent, metadata, strict=True)]
            assert list(found[key][:-1]) == metadata, key
            assert key in self.pending or found[key][-1] == row, key
        if self.policy.admission > 1:
            assert by_key(state["candidates"]) == expected["candidates"]
        else:
            assert "candidates" not in state
        for name in ("found", "inserted", "rejected", "evicted"):
            assert self.cluster.counter(name) == self.naive.counters[name], name
        if not self.pipelined:
            for name in ("promoted", "demoted"):
                assert self.cluster.counter(name) == self.naive.counters[name], name
        if not self.pipelined and len(self.placements) == 1:  # a cached row moves when it leaves the cache
            halves = sum(entry.half for entry in entries.values())
            assert sum(t.memory()["saved_by_fp16"] for t in self.cluster.tables) == 2 * WIDTH * halves
        for table, here in zip(self.cluster.tables, self.cluster.owned(self.universe), strict=True):
            mine = tensor(self.universe)[here]
            assert [row >= 0 for row in table.find(mine).tolist()] == [
                key in entries for key in mine.tolist()
            ]

    def teardown(self):
        if hasattr(self, "cluster"):
            self.save_changes(flushed=True)
            self.same_content()
            self.cluster.ranks.close()


POLICIES = [
    (eviction, *admission, tiers)
    for eviction, admission, tiers in product(EVICTIONS, [(1, 1), (2, 1000), (3, 3)], TIERS)
]
QUICK = [
    ("none", 1, 1, "none"), ("lru", 3, 3, "tiers"), ("lfu", 1, 1, "none"), ("ttl", 2, 1000, "tiers"),
    ("none", 1, 1, "sized"), ("ttl", 2, 1000, "sized"),
]  # fmt: skip


@pytest.mark.parametrize(("eviction", "admission", "window", "tiers"), slow_except(QUICK, POLICIES))
def test_policies_equal_the_naive_table(eviction, admission, window, tiers):
    policy = TablePolicy(EVICTIONS[eviction], admission, TIERS[tiers], window)
    machine = type("Machine", (TableAgainstRules,), {"policy": policy})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(15), stateful_step_count=12, deadline=None)
    )


ON_DISK = Placement("disk", path=gettempdir(), memory="150")


@pytest.mark.if_changed
@pytest.mark.parametrize("storage", ["device", "cached", "disk"])
@pytest.mark.parametrize(
    ("eviction", "admission", "tiers"),
    slow_except([("lru", 2, "tiers"), ("lfu", 1, "sized")], product(EVICTIONS, (1, 2), TIERS)),
)
def test_policies_are_the_same_wherever_the_rows_are(storage, eviction, admission, tiers):
    policy = TablePolicy(EVICTIONS[eviction], admission, TIERS[tiers], 3)
    other = Placement(storage, cache_rows=5) if storage != "disk" else ON_DISK
    placements = other, Placement(), Placement("cached", cache_rows=5)
    attributes = {"policy": policy, "placements": placements}
    machine = type("Machine", (TableAgainstRules,), attributes)
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(10), stateful_step_count=12, deadline=None)
    )


def test_loaded_rows_tie_with_those_of_the_step_that_gave_them_their_timestamp():
    """Both are of one step, so that the smaller id goes first, whether it was looked up or not."""
    policy = TablePolicy(EVICTIONS["lru"], 2, None, 3)
    machine = type("Machine", (TableAgainstRules,), {"policy": policy})()
    machine.begin(world_size=1, layout="alone", pipelined=False)
    machine.load(picked=[0, 1, 2, 3, 4, 5, 6])
    machine.train(steps=[([0], 1, "now"), ([1], 1, "now"), ([1], 1, "now"), ([], 1, "now")])
    machine.teardown()


def test_a_row_that_comes_again_is_as_old_as_its_last_use():
    """Of two rows that expire together one comes again before the next pass, at the handle of either."""
    for again in (1, 2):
        table = DynamicTable(2, policy=TablePolicy(Eviction("ttl", ttl=3, every=2)))
        for step, keys in enumerate([[1, 2], [9], [9], [9], [9], [again], [9]]):
            table.lookup(torch.tensor(keys, dtype=torch.int64), step)
        assert sorted(table.keys().tolist()) == [again, 9]


def test_only_rows_that_were_loaded_without_a_timestamp_get_one_and_only_once():
    class Rows:
        padded = False

        def items(self):
            return torch.tensor([5, 7]), torch.tensor([0, 1])

    evictor = Evictor(Eviction("lru", capacity=5), KeyLayout(("item",)))
    evictor.values.grow(2)
    evictor.add(torch.tensor([0, 1]), torch.tensor([5, 7]))
    evictor.record(torch.tensor([7]), torch.tensor([1]), 3)
    assert evictor.stamp(Rows(), 8).tolist() == []  # nothing was loaded
    evictor.expect_missing_timestamps()
    assert evictor.stamp(Rows(), 8).tolist() == [0, -1]
    assert evictor.values.rows[:2].tolist() == [8, 3]
    evictor.add(torch.tensor([1]), torch.tensor([7]))  # a new row, which no step has used
    assert evictor.stamp(Rows(), 9).tolist() == []


@pytest.mark.parametrize("in_buffers", [0, 1, 3])
def test_the_forecast_of_demotions_counts_rows_that_may_be_widened_before(in_buffers):
    """Handles 2, 4 and 5 are cold after a halving; 4 is stored in 16 bits, which an update may change."""
    counter = AccessCounter(PrecisionTiers(threshold=2, every=4))
    counter.values.grow(8)
    counter.values[torch.arange(8)] = torch.tensor([9, 9, 3, 9, 0, 1, 9, 9], dtype=torch.uint8)
    handles = torch.tensor([2, -1, 4, 0, 5, 7])
    rows = SimpleNamespace(
        slots_in_order=lambda: (handles, handles), in_low_precision=lambda handles: handles == 4
    )
    assert counter.foresee(rows, 4, in_buffers, None).take() == [2 + in_buffers]


@pytest.mark.parametrize(("size", "rows"), [("108", 1), ("2KiB", 18), ("1MiB", 9709)])
def test_a_capacity_in_bytes_holds_as_many_rows(size, rows):
    """15 values of a row, its keys and its metadata are 108 bytes."""
    assert Eviction("lru", capacity=size).rows_of(15) == rows
    by_size, by_rows = (
        DynamicTable(5, 15, slots=8, policy=TablePolicy(Eviction("lfu", capacity=capacity)))
        for capacity in (size, rows)
    )
    for step in range(9):
        keys = torch.randperm(40, generator=torch.Generator().manual_seed(step))[:13]
        for table in (by_size, by_rows):
            table.lookup(keys, step)
    assert by_size.keys().tolist() == by_rows.keys().tolist()
    assert (by_rows.counters.evicted > 0) == (rows < 40)


@pytest.mark.parametrize(
    ("capacity", "named"),
    [("1GB", "capacity must be bytes, or such as"), ("0MiB", "needs capacity of at least 1, got 0")],
)
def test_another_capacity_is_refused(capacity, named):
    with pytest.raises(ValueError, match=named):
        Eviction("lru", capacity=capacity)


def test_a_row_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="no row of 108 bytes fits into a capacity of 107"):
        DynamicTable(5, 15, policy=TablePolicy(Eviction("lru", capacity="107")))
