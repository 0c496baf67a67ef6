"""Promise: a model whose loss reads negatives where they lie trains to the bits of one that gathers them."""

from types import SimpleNamespace

import pytest
import torch

from tritonrec import ops
from tritonrec.data import NextItemLoader, load
from tritonrec.distributed import Communicators
from tritonrec.embedding import FeatureConfig, HashTableCollection, RowOptimizer
from tritonrec.harness.verify.state import loss_state, table_state
from tritonrec.kernels import dispatch
from tritonrec.nn.context import takes_indexed_rows
from tritonrec.nn.next_item import NextItemModel
from tritonrec.nn.padding import PaddedNextItem
from tritonrec.pipeline import ExchangeConfig, StageFailedError, Trainer, WindowConfig

pytestmark = pytest.mark.skipif(dispatch.emulated is None, reason="needs pytest --emulate")
BATCHES = [NextItemLoader(load("zipf:users=60,items=80,seed=1"), 7, 9, 1, 3).batch(step) for step in range(3)]
seen: list[type] = []  # of the rows that models got


class NextItem(NextItemModel):
    """Items are their own hidden states."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.config = SimpleNamespace(temperature=0.7)
        self.register_forward_pre_hook(note)

    def encode(self, batch, rows, seed=0):
        return rows * 3


class Padded(PaddedNextItem):
    def __init__(self, loss="sampled_softmax"):
        super().__init__(torch.nn.Identity(), 9, loss=loss)
        self.register_forward_pre_hook(note)

    def encode(self, batch, rows):
        return rows * 3


class Pairs(Padded):
    def __init__(self):
        super().__init__("bce")


def note(module, given):
    seen.append(type(given[1]["item"]))


note.only_refuses = True


class Overridden(NextItem):
    """A forward of somebody else's, who knows rows as a tensor."""

    def forward(self, batch, rows, seed):
        return super().forward(batch, {"item": rows["item"] * 1}, seed)


def train(make, mode, count, consistency="batch", precision="float32", hook=None):
    model = make()
    if hook is not None:
        model.register_forward_pre_hook(hook)
    tables = HashTableCollection([FeatureConfig("item", 6)], RowOptimizer("adam", lr=0.05), seed=2, slots=64)
    config = WindowConfig(
        count, seed=4, consistency=consistency, exchange=ExchangeConfig(precision=precision)
    )
    seen.clear()
    with Trainer(model, tables, None, Communicators.local(), mode, config, impl="triton") as trainer:
        losses = [loss_state(each.sample_ids, each.losses) for each in trainer.run(BATCHES)]
        return [losses, table_state(trainer.tables)], set(seen)


def assert_equal(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_equal(*pair)
    else:
        assert one == other


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("make", [NextItem, Padded, Pairs])
def test_rows_that_are_read_where_they_lie_train_to_the_same_bits(make, precision):
    expected, got = train(make, "reference", 1, precision=precision)
    assert got == {torch.Tensor}
    state, got = train(make, "nestpipe", 3, precision=precision)
    assert got == {ops.IndexedRows}
    assert_equal(state, expected)


@pytest.mark.parametrize(
    ("make", "options"),
    [(Overridden, {}), (NextItem, {"consistency": "window"}), (NextItem, {"hook": lambda *given: None})],
)
def test_others_get_gathered_rows(make, options):
    _, got = train(make, "nestpipe", 3, **options)
    assert got == {torch.Tensor}


def test_an_infinite_loss_is_an_error_that_names_the_rows():
    class Unbounded(NextItem):
        def encode(self, batch, rows, seed=0):
            return rows * (torch.inf if batch.step else 3.0)

    with pytest.raises(StageFailedError, match="step 1 failed: ExactSumError: gradient of embedding rows"):
        train(Unbounded, "nestpipe", 3)


def test_values_that_are_read_without_an_op_are_refused():
    class Own(NextItem):
        def encode(self, batch, rows, seed=0):
            return rows * 3 + self.values.sum()

        @takes_indexed_rows
        def forward(self, batch, rows, seed):
            self.values = rows["item"].values
            return super().forward(batch, rows, seed)

    with pytest.raises(StageFailedError, match=r"the model read ops\.IndexedRows\.values by itself"):
        train(Own, "nestpipe", 3)
