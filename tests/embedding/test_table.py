"""Promise: no row is lost, moved or shared, and initial values depend on nothing but the key."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tritonrec import ops
from tritonrec.embedding import DynamicTable

EXTREMES = [-(2**63), -(2**63) + 1, -2, -1, 0, 1, 2**63 - 2, 2**63 - 1]
keys_strategy = st.lists(
    st.one_of(st.sampled_from(EXTREMES), st.integers(-(2**63), 2**63 - 1), st.integers(-20, 20)),
    unique=True,
    max_size=12,
)


def table(**options):
    return DynamicTable(3, 5, seed=7, scale=0.5, slots=8, chunk_rows=4, **options)


class TableAgainstDict(RuleBasedStateMachine):
    """The table and a dict see the same operations."""

    def __init__(self):
        super().__init__()
        self.table, self.model = table(), {}
        self.version = 0.0

    @rule(keys=keys_strategy)
    def add(self, keys):
        rows = self.table.rows_of(torch.tensor(keys, dtype=torch.int64))
        assert len(set(rows.tolist())) == len(keys)
        initial = ops.initial_rows(7, 0, torch.tensor(keys, dtype=torch.int64), 3, 0.5, impl="reference")
        for key, values in zip(keys, initial.tolist(), strict=True):
            self.model.setdefault(key, [*values, 0.0, 0.0])

    @rule(keys=keys_strategy)
    def write(self, keys):
        known = [key for key in keys if key in self.model]
        self.version += 1
        values = torch.arange(len(known) * 5, dtype=torch.float32).reshape(-1, 5) + 100 * self.version
        self.table.write(self.table.find(torch.tensor(known, dtype=torch.int64)), values)
        self.model.update(zip(known, values.tolist(), strict=True))

    @rule(keys=keys_strategy)
    def find(self, keys):
        rows = self.table.find(torch.tensor(keys, dtype=torch.int64))
        assert [row >= 0 for row in rows.tolist()] == [key in self.model for key in keys]

    @invariant()
    def same_content(self):
        keys, rows = self.table.export()
        assert keys.tolist() == sorted(self.model)
        assert rows.tolist() == [self.model[key] for key in sorted(self.model)]
        assert self.table.load_factor <= 0.75


TestTableAgainstDict = TableAgainstDict.TestCase
TestTableAgainstDict.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


@settings(max_examples=20, deadline=None)
@given(keys_strategy, st.randoms(use_true_random=False))
def test_order_of_arrival_does_not_change_rows(keys, random):
    first, second = table(), table()
    first.rows_of(torch.tensor(keys, dtype=torch.int64))
    shuffled = random.sample(keys, len(keys))
    for key in shuffled:
        second.rows_of(torch.tensor([key]))
    for a, b in zip(first.export(), second.export(), strict=True):
        assert torch.equal(a, b)


def test_growth_keeps_row_numbers():
    grown = table()
    early = torch.arange(6)
    rows = grown.rows_of(early)
    grown.rows_of(torch.arange(1000, 3000))
    assert torch.equal(grown.find(early), rows)
    assert len(grown) == 2006


def test_another_table_id_gives_other_initial_values():
    keys = torch.arange(4)
    a, b = table(table_id=0), table(table_id=1)
    assert not torch.equal(a.read(a.rows_of(keys)), b.read(b.rows_of(keys)))


def test_export_and_load_round_trip():
    source, target = table(), table()
    rows = source.rows_of(torch.tensor(EXTREMES))
    source.write(rows, torch.randn(len(EXTREMES), 5))
    target.load(*source.export())
    for a, b in zip(source.export(), target.export(), strict=True):
        assert torch.equal(a, b)


def test_rows_of_another_width_are_refused():
    with pytest.raises(ValueError, match="another optimizer or dimension"):
        table().load(torch.arange(2), torch.zeros(2, 4))


@pytest.mark.parametrize("slots", [0, 4, 12])
def test_slots_must_be_a_power_of_two(slots):
    with pytest.raises(ValueError, match="power of two"):
        DynamicTable(2, slots=slots)
