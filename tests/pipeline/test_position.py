"""Promise: the position of a loader is in the checkpoint; any loader with a state has one."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from speeds import slow_except
from torch.utils.data import DataLoader
from trainer_parts import batches, parts, same, state, trained, trainer

from tritonrec.data import NumberedLoader
from tritonrec.distributed import Communicators
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.pipeline.position import position_of, positions


def made_batches(count):
    return [type(batch)(**{**vars(batch), "step": 0}) for batch in batches(count)]


class Shuffled:
    """A loader with a position of its own, in a tensor, which ends an epoch as torchdata's does."""

    def __init__(self, count=4):
        self.order = torch.arange(count)
        self.done = 0

    def __iter__(self):
        every = made_batches(len(self.order))
        while self.done < len(self.order):
            self.done += 1
            yield every[self.order[self.done - 1]]
        self.order, self.done = self.order.roll(1), 0

    def state_dict(self):
        return {"order": self.order, "done": self.done}

    def load_state_dict(self, state):
        self.order, self.done = state["order"], state["done"]


def plain():
    return DataLoader(made_batches(4), batch_size=None)


@pytest.mark.parametrize(
    ("kind", "position"), slow_except([(Shuffled, 4), (plain, 6)], product([Shuffled, plain], [1, 4, 6]))
)
def test_a_training_goes_on_where_it_was_saved(tmp_path, kind, position):
    def numbered(count):
        found = []
        for batch in NumberedLoader(kind(), epochs=2):
            found.append(batch)
        assert [batch.step for batch in found] == list(range(8))
        return found[:count]

    expected, _ = trained(parts(), "reference", "batch", numbered(8))
    first = parts()
    loader = NumberedLoader(kind(), epochs=2)
    with trainer(first) as training:
        list(training.run(next(loader) for _ in range(position)))
        training.save(tmp_path, {"note": 1}, loader=loader)
    made, loader = parts(), NumberedLoader(kind(), epochs=2)
    with trainer(made) as training:
        assert training.load(tmp_path, lambda meta: meta["note"], loader=loader) == position
        results = list(training.run(loader))
    assert [result.step for result in results] == list(range(position, 8))
    assert same(state(made), expected)


def test_a_batch_that_was_read_and_not_trained_is_named(tmp_path):
    loader = NumberedLoader(plain())
    with trainer(parts()) as training:
        list(training.run(next(loader) for _ in range(2)))
        next(loader)
        with pytest.raises(ValueError, match="the loader is at step 3 and the training at step 2"):
            training.save(tmp_path, loader=loader)


def test_a_checkpoint_without_a_position_is_named(tmp_path):
    with trainer(parts()) as training:
        training.save(tmp_path)
        with pytest.raises(ValueError, match="has the key 'loader', which the trainer uses"):
            training.save(tmp_path, {"loader": 1})


def test_a_loader_without_batches_is_named():
    with pytest.raises(ValueError, match="epoch 0 of the loader has no batches"):
        next(NumberedLoader([]))


def test_the_epoch_is_set_in_the_sampler():
    epochs = []

    class Sampler:
        def set_epoch(self, epoch):
            epochs.append(epoch)

    class Loader(list):
        sampler = Sampler()

    list(NumberedLoader(Loader(made_batches(2)), epochs=3))
    assert epochs == [0, 1, 2]


class OfRank:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_each_rank_gets_its_own_position():
    def rank(communicators):
        saved = positions(communicators, OfRank(communicators.rank * 10), 0)
        loader = OfRank(-1)
        loader.load_state_dict(position_of(communicators, saved))
        equal = positions(communicators, OfRank(7), 0)
        return saved, loader.value, equal

    saved, values, equal = zip(*run_ranks(3, rank), strict=True)
    assert values == (0, 10, 20) and len(saved[0]) == 3 and len(equal[0]) == 1
    with pytest.raises(ValueError, match="each of 3 ranks saved a position of its own, and here are 1"):
        position_of(Communicators.local(), saved[0])
    loader = OfRank(0)
    loader.load_state_dict(position_of(Communicators.local(), equal[0]))
    assert loader.value == 7
    every_rank = SimpleNamespace(rank=2, world_size=3)
    (loader := OfRank(0)).load_state_dict(position_of(every_rank, equal[0]))
    assert loader.value == 7
