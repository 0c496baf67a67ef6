"""Promise: a state dict that is refused has changed nothing: no tensor, no number."""

import copy
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from trainer_parts import Ranker, batches, parts, trainer

from tritonrec import EmbeddingBagCollection, EmbeddingBagConfig, HashEmbeddingCollection, HashOptimizer
from tritonrec.callbacks import EarlyStopping
from tritonrec.data import (
    DynamicBatchLoader,
    DynamicStream,
    NextItemLoader,
    NextItemStream,
    NumberedLoader,
    TopicStream,
    Vocabulary,
    load,
)
from tritonrec.data.convert_sequences import write_sequences
from tritonrec.embedding import (
    Eviction,
    FeatureConfig,
    HashTableCollection,
    PrecisionTiers,
    RowOptimizer,
    TablePolicy,
)
from tritonrec.embedding.warm_start import load_table_weights
from tritonrec.metrics import ClickMetrics
from tritonrec.pipeline import DenseModel
from tritonrec.pipeline.precision import LossScaler, LossScaling

NAN = float("nan")
KEPT = TablePolicy(eviction=Eviction("lru", 50, every=2), admission=2, precision=PrecisionTiers(1, 4))


def equal(a, b):
    """In every bit, and of the same types."""
    if isinstance(a, torch.Tensor):
        same = isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return same and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def places(value, path=()):
    """Paths of all values in a state."""
    if path:
        yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in parts:
        yield from places(each, (*path, key))


def _length(value):
    return len(value) if isinstance(value, torch.Tensor) and value.dim() else 0


def gone(value):
    return None


def other_type(value):
    return "x"


def a_number(value):
    return -7


def nothing(value):
    return {} if isinstance(value, dict) else []


def shorter(value):
    return value[:-1] if _length(value) else value


def other_dtype(value):
    return value.to(torch.float64) if isinstance(value, torch.Tensor) else value


def wider(value):
    return value.unsqueeze(-1).expand(*value.shape, 3) if isinstance(value, torch.Tensor) else value


def repeated(value):
    return value[[0, *range(len(value) - 1)]] if _length(value) else value


def no_number(value):
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return torch.full_like(value, NAN) if floats else NAN if isinstance(value, float) else value


def elsewhere(value):
    return value.to("meta") if isinstance(value, torch.Tensor) else value


DAMAGES = gone, other_type, a_number, nothing, shorter, other_dtype, wider, repeated, no_number, elsewhere


def damaged(state):
    """Name and state, one value of which was lost, changed, renamed, or added."""
    for path in places(state):
        for damage in ("lost", "renamed", *DAMAGES):
            other = copy.deepcopy(state)
            inner = other
            for key in path[:-1]:
                inner = inner[key]
            if not isinstance(damage, str):
                was, inner[path[-1]] = inner[path[-1]], damage(inner[path[-1]])
                if not isinstance(was, torch.Tensor) and equal(was, inner[path[-1]]):
                    continue
            elif isinstance(inner, dict):
                value = inner.pop(path[-1])
                inner |= {"renamed": value} if damage == "renamed" else {}
            yield f"{getattr(damage, '__name__', damage)} {'/'.join(map(str, path))}", other
    yield "one more", {**state, "unknown": torch.ones(2)}


class Dense:
    """Model, optimizer, scheduler, average and scaler."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + seed)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        average = torch.optim.swa_utils.AveragedModel(model)
        self.dense = DenseModel(model, optimizer, scheduler, average, LossScaler(LossScaling()))
        for _ in range(seed):
            self.dense.step({name: torch.randn_like(p) for name, p in self.dense.parameters.items()})

    def load(self, state):
        self.dense.load_state_dict(state)

    def state(self):
        return copy.deepcopy(self.dense.state_dict())


class Fields:
    """An object with a state of plain values."""

    def __init__(self, made):
        self.made = made

    def load(self, state):
        self.made.load_state_dict(state)

    def state(self):
        return copy.deepcopy(self.made.state_dict())


def stopping(seed):
    made = EarlyStopping("loss", mode="min")
    for step in range(seed):
        made.on_evaluation_end(step, {"loss": 1.0 / (step + 1)})
    return Fields(made)


def numbered(seed):
    made = NumberedLoader(batches(4))
    for _ in range(seed):
        next(made)
    return Fields(made)


def scaler(seed):
    made = LossScaler(LossScaling())
    for step in range(seed):
        made.update(step % 2 == 0)
    return Fields(made)


FEATURES = [
    FeatureConfig("a", 2, policy=KEPT), FeatureConfig("b", 2, policy=KEPT), FeatureConfig("c", 3),
]  # fmt: skip
IDS = {"a": torch.arange(9), "b": torch.arange(3, 12), "c": torch.tensor([-(2**60), 5, 7])}


class Tables:
    def __init__(self, seed):
        self.tables = HashTableCollection(FEATURES, RowOptimizer("adagrad"), seed=seed)
        for step in range(3 + seed):
            for group, keys in zip(self.tables.groups, self._keys(seed), strict=True):
                group.table.lookup(keys, step)

    def _keys(self, seed):
        from tritonrec.data import Lookup

        keys = self.tables.keys({name: Lookup(ids + 1) for name, ids in IDS.items()})
        return [each[seed:].unique() for each in keys]

    def load(self, state):
        self.tables.load_state(state)

    def state(self):
        return self.tables.state()


class Embeddings(Tables):
    """Tables as a module."""

    def __init__(self, seed):
        self.module = HashEmbeddingCollection(FEATURES, RowOptimizer("adagrad"), seed=seed)
        self.tables = self.module.tables
        for _ in range(3 + seed):
            self.module({name: ids[seed:] for name, ids in IDS.items()})

    def load(self, state):
        self.module.load_state_dict(state)

    def state(self):
        return dict(self.module.state_dict()) | {"module": [self.tables.seed, self.module.lookups]}


class Rows(Embeddings):
    """The optimizer of these."""

    def __init__(self, seed):
        super().__init__(seed)
        self.optimizer = HashOptimizer(self.module)
        for _ in range(seed):
            self.optimizer.zero_grad()
            sum(each.square().sum() for each in self.module(IDS).values()).backward()
            self.optimizer.step()
        self.optimizer.param_groups[0]["lr"] = 0.1 * seed

    def load(self, state):
        self.optimizer.load_state_dict(state)

    def state(self):
        return self.optimizer.state_dict()


class Bags(Embeddings):
    """TorchRec's interface."""

    def __init__(self, seed):
        configs = [EmbeddingBagConfig(0, 2, "a", ["a"]), EmbeddingBagConfig(0, 3, "c", ["c"])]
        self.module = EmbeddingBagCollection(configs, seed=seed)
        self.tables = self.module.embeddings.tables
        self.module.embeddings({n: (IDS[n][seed:], torch.tensor([0, len(IDS[n]) - seed])) for n in "ac"})

    def state(self):
        return dict(self.module.state_dict()) | {"module": [self.tables.seed]}


class Weights(Bags):
    """A module that takes the weights of TorchRec's state dict."""

    def load(self, state):
        load_table_weights(self.module, state, tables=["a", "c"])


class Warm:
    """A trainer that begins with another's weights."""

    def __init__(self, seed):
        self.made = parts()
        self.training = trainer(self.made, "sequential")
        list(self.training.run(batches(2 + seed)))

    def load(self, state):
        self.training.warm_start(state, tables=["item"], dense=["mix", "norm"])

    def state(self):
        model, tables, _ = self.made
        rows = tables.state()["item"]
        own = {
            "item.keys": rows["keys"],
            "item.weight": rows["rows"][:, : tables.dim_of("item")].contiguous(),
        }
        return copy.deepcopy(own | dict(model.state_dict()))


def words(seed):
    made = Vocabulary()
    made.encode(["a", "bc", "", "ö"][: seed + 1], extend=True)
    return Fields(made)


def clicks(seed):
    made = ClickMetrics(2)
    for _ in range(1 + seed):
        made.update(torch.tensor([0.25, 1.0]), torch.tensor([1.0, 0.0]))
    return Fields(made)


def shuffled(seed):
    """A position in a loader whose own load may fail."""
    made = NumberedLoader(Shuffled())
    for _ in range(2 * seed):
        next(made)
    return Fields(made)


class Shuffled:
    """A loader with a state, and a sampler whose epoch is set."""

    def __init__(self):
        self.sampler, self.at = self, 0
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.at += 1
        return iter(batches(2))

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        if not isinstance(state, dict) or type(state.get("at")) is not int:
            raise ValueError("at")
        self.at = state["at"] - 1


LOG = load("zipf:users=60,items=80,seed=1")


@cache
def _folder():
    made = TemporaryDirectory()
    write_sequences([LOG], Path(made.name), rows_per_file=20, rows_per_group=6)
    return made


def topic(seed):
    made = TopicStream(SimpleNamespace(name="clicks", partitions=2), lambda *given: given, 3, [seed, 1])
    made.step = seed
    return Fields(made)


def next_items(seed):
    return Fields(NextItemLoader(LOG, 7, 9, 1, 3))


def by_tokens(seed):
    return Fields(DynamicBatchLoader(NextItemLoader(LOG, 7, 9, 1, 3), 30))


def next_stream(seed):
    made = NextItemStream(_folder().name, 7, 9, 1, 5)
    made.step = seed
    return made


def streamed(seed):
    return Fields(next_stream(seed))


def streamed_by_tokens(seed):
    made = DynamicStream(next_stream(0), 30)
    for _ in range(seed):
        next(made)
    return Fields(made)


LOADS = (
    Dense, Tables, Embeddings, Rows, Bags, Weights, Warm, stopping, numbered, shuffled, scaler, words, clicks,
    next_items, by_tokens, streamed, streamed_by_tokens, topic,
)  # fmt: skip


@pytest.mark.parametrize("make", LOADS, ids=lambda make: make.__name__)
def test_what_is_refused_has_changed_nothing(make):
    good = make(2).state()
    good.pop("module", None)
    other = make(1)
    before, refused, taken = other.state(), 0, 0
    for name, state in islice(damaged(good), 0, None, 5 if make is Dense else 1):
        try:
            other.load(state)
        except (ValueError, RuntimeError):
            refused += 1
            assert equal(other.state(), before), name
        else:
            taken += 1
            other = make(1)
    assert refused > taken or make is Dense, (refused, taken)
    other.load(good)
    assert not equal(other.state(), before) or make in (next_items, by_tokens)  # which have no position
    loaded = other.state()
    loaded.pop("module", None)
    if make not in (Tables, Weights, Warm):  # whose load adds to the rows that are there
        assert equal(loaded, good)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"lr": each}, "the learning rate of table 'a' is ") for each in (NAN, -0.1, True, torch.ones(2), [0.1])]
    + [({"momentum": 0.9}, "momentum of table a, b was set"), ({"tables": ["a", "c", "a"]}, "in two groups")],
    ids=str,
)
def test_settings_of_rows_that_would_fail_later_are_refused_at_once(change, said):
    state, other = copy.deepcopy(Rows(2).state()), Rows(1)
    before = other.state()
    state["param_groups"][0] |= change
    with pytest.raises(ValueError, match=said):
        other.load(state)
    assert equal(other.state(), before)


class Broken(torch.optim.Adam):
    """An optimizer whose load fails after a change, as any of a user's own may."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if len(state["state"]) > 1:
            raise KeyError("mine")


def test_an_optimizer_that_fails_in_the_middle_leaves_the_model_as_it_was():
    model = Ranker()
    saved = DenseModel(model, torch.optim.Adam(model.parameters()))
    saved.step({name: torch.ones_like(p) for name, p in saved.parameters.items()})
    dense = DenseModel(other := Ranker(), Broken(other.parameters()))
    before = copy.deepcopy(dense.state_dict())
    with pytest.raises(ValueError, match=r"cannot load the state: KeyError.*mine"):
        dense.load_state_dict(saved.state_dict())
    assert equal(dense.state_dict(), before)


def test_strict_false_loads_what_is_there():
    """As in torch: tables and columns that the state has, and names of the others."""
    features = [replace(each, policy=TablePolicy()) for each in FEATURES]
    saved = HashEmbeddingCollection(features[:2], RowOptimizer("adagrad"), seed=1)
    saved({name: IDS[name] for name in "ab"})
    state = saved.state_dict()
    more = HashEmbeddingCollection([features[0], FEATURES[1], features[2]], RowOptimizer("adagrad"), seed=7)
    more.eval()
    own = more.tables.initial_rows("c", torch.tensor([5]))
    more.tables.load("c", torch.tensor([5]), own + 1)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*c\.keys"):
        more.load_state_dict(state)
    assert not len(more.tables.export()["a"][0]) and more.tables.seed == 7
    found = more.load_state_dict({**state, "x.y": torch.ones(1)}, strict=False)
    assert {"c.keys", "c.weight", "b.score", "b.candidates.keys"} <= {*found.missing_keys}
    assert found.unexpected_keys == ["x.y"]
    exported = more.tables.export()
    for name in "ab":
        want_ids, want_rows = saved.tables.export()[name]
        assert torch.equal(exported[name][0], want_ids)
        assert torch.equal(exported[name][1][:, :2], want_rows[:, :2])
    assert torch.equal(exported["c"][1], own + 1) and len(exported["c"][0]) == 1
    assert more.tables.seed == 1 and more.lookups == saved.lookups
