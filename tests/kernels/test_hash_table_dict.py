"""The hash table is a dict, through random calls of every kind."""

import pytest
from hash_tables import EXTREMES, contents, empty, in_walk, keys_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from impls import GPU, IMPLS

from tritonrec.kernels.hash_table.errors import HashTableFullError
from tritonrec.kernels.hash_table.op import hash_erase, hash_find, hash_grow, hash_insert


class TableMachine(RuleBasedStateMachine):
    """Random calls on a table of tensors and on a dict."""

    impl = "reference"
    keys = st.lists(
        st.one_of(
            st.sampled_from(EXTREMES),
            st.sampled_from([*in_walk(24), *in_walk(8, home=1, step=3)]),
            st.integers(-30, 30),
        ),
        unique=True,
        max_size=24,
    )

    @initialize(slots=st.sampled_from([8, 32, 64]), leftover=st.sampled_from(EXTREMES), counted=st.booleans())
    def start(self, slots, leftover, counted):
        self.table, self.rows_of = empty(slots, self.impl, leftover), {}
        self.used = keys_of([0], self.impl)[0] if counted else None
        self.next_row, self.free_rows = 0, []

    @rule(keys=keys, reuse=st.integers(0, 30))
    def insert(self, keys, reuse):
        new = [key for key in keys if key not in self.rows_of]
        free = self.free_rows[:reuse]
        arguments = (keys_of(keys, self.impl), self.next_row, keys_of(free, self.impl))
        if len(self.rows_of) + len(new) > self.table[0].numel():
            with pytest.raises(HashTableFullError):
                hash_insert(*self.table, *arguments, used=self.used, impl=self.impl)
            return
        rows, inserted = hash_insert(*self.table, *arguments, used=self.used, impl=self.impl)
        fresh = range(self.next_row, self.next_row + len(keys))
        self.rows_of.update(zip(new, [*free, *fresh], strict=False))
        assert inserted.tolist() == [key in new for key in keys]
        assert rows.tolist() == [self.rows_of[key] for key in keys]
        self.free_rows = self.free_rows[min(len(free), len(new)) :]
        self.next_row += max(len(new) - len(free), 0)

    @rule(keys=keys)
    def erase(self, keys):
        expected = [self.rows_of.pop(key, -1) for key in keys]
        before = hash_erase(*self.table, keys_of(keys, self.impl), used=self.used, impl=self.impl)
        assert before.tolist() == expected
        self.free_rows += [row for row in expected if row != -1]

    @rule(keys=keys)
    def find(self, keys):
        rows = hash_find(*self.table, keys_of(keys + keys[:2], self.impl), impl=self.impl).tolist()
        assert rows == [self.rows_of.get(key, -1) for key in keys + keys[:2]]

    @precondition(lambda self: self.table[0].numel() < 256)
    @rule()
    def grow(self):
        self.table = hash_grow(*self.table, impl=self.impl)

    @invariant()
    def holds_the_same(self):
        assert contents(*self.table) == self.rows_of
        assert self.used is None or int(self.used) == len(self.rows_of)
        keys = list(self.rows_of)
        assert hash_find(*self.table, keys_of(keys), impl="cpu").tolist() == list(self.rows_of.values())


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["reference", "cpu"] if GPU else IMPLS)
def test_is_a_dict(impl):
    examples, steps = {"reference": (10, 60), "cpu": (15, 100), "triton": (4, 25)}[impl]
    machine = type("Machine", (TableMachine,), {"impl": impl})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None),
    )


@settings(max_examples=15)
@given(
    st.lists(st.lists(st.one_of(st.sampled_from(EXTREMES), st.integers(-30, 30)), unique=True, max_size=20)),
    st.sampled_from(["cpu"] if GPU else ["cpu", "triton"]),
)
def test_is_a_dict_that_grows(batches, impl):
    table, rows_of = empty(8), {}
    for batch in batches:
        while len(rows_of) + len(batch) > 0.75 * table[0].numel():
            table = hash_grow(*table, impl=impl)
        rows, inserted = hash_insert(*table, keys_of(batch), len(rows_of), impl=impl)
        assert inserted.tolist() == [key not in rows_of for key in batch]
        for key in batch:
            rows_of.setdefault(key, len(rows_of))
        assert rows.tolist() == [rows_of[key] for key in batch]
        assert contents(*table) == rows_of
