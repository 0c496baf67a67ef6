"""Promise: a TorchRec script runs after a change of its import; TorchRec's tensors give TorchRec's types."""

import sys
import types

import pytest
import torch

from tritonrec import HashOptimizer, KeyedJaggedTensor, RowOptimizer
from tritonrec.torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)

SCRIPT = """
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

torch.manual_seed(0)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            device=torch.device("cpu"),
            tables=[
                EmbeddingBagConfig(
                    name="product_table", embedding_dim=8, num_embeddings=4096, feature_names=["product"],
                    pooling=PoolingType.SUM,
                ),
                EmbeddingBagConfig(
                    name="user_table", embedding_dim=4, num_embeddings=4096, feature_names=["user", "friend"],
                    pooling=PoolingType.MEAN,
                ),
            ],
        )
        self.over = torch.nn.Linear(16, 1)

    def forward(self, features):
        pooled = self.ebc(features)
        assert pooled.keys() == ["product", "user", "friend"] and pooled["friend"].shape == (2, 4)
        return self.over(pooled.values())

model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
features = KeyedJaggedTensor.from_lengths_sync(
    keys=["product", "user", "friend"],
    values=torch.tensor([101, 202, 303, 404, 505, 606]),
    lengths=torch.tensor([2, 0, 1, 1, 1, 1], dtype=torch.int32),
)
losses = []
for _ in range(5):
    loss = (model(features) - 1.0).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(float(loss.detach()))
"""


def test_a_script_runs_after_a_change_of_its_import():
    assert SCRIPT.count("torchrec") == 1
    found = {}
    exec(SCRIPT.replace("from torchrec import", "from tritonrec import"), found)
    assert found["losses"] == sorted(found["losses"], reverse=True)
    module = found["model"].ebc.embeddings
    assert module.fused_optimizer.updates == 5
    for table, ids in {"product_table": [101, 202], "user_table": [303, 404, 505, 606]}.items():
        seen, weights = module.tables.weights()[table]
        initial = module.tables.initial_rows(table, seen)[:, : weights.shape[1]]
        assert seen.tolist() == ids and not (weights == initial).all(1).any()


TABLES = [
    EmbeddingConfig(name="items", embedding_dim=3, feature_names=["clicked", "bought"]),
    EmbeddingConfig(name="city", embedding_dim=2, weight_init_min=-0.5, weight_init_max=0.5),
]
KEYS = ["bought", "clicked", "city"]
VALUES, LENGTHS = torch.tensor([7, 7, 8, 9, -1]), torch.tensor([1, 0, 0, 3, 1, 0])


def test_a_collection_gives_jagged_rows():
    module = EmbeddingCollection(TABLES, seed=1, merge=False)
    found = module(KeyedJaggedTensor.from_lengths_sync(KEYS, VALUES, LENGTHS))
    assert list(found) == ["clicked", "bought", "city"]
    clicked = found["clicked"]
    assert clicked.lengths().tolist() == [0, 3] and clicked.offsets().tolist() == [0, 0, 3]
    assert [len(part) for part in clicked.to_dense()] == [0, 3]
    assert torch.equal(clicked.values()[:1], found["bought"].values())
    tables = module.embeddings.tables
    assert tables.table_names == ["city", "items"]
    assert torch.equal(found["city"].values(), tables.initial_rows("city", torch.tensor([-1]))[:, :2])
    assert tables.groups[0].table.scales == (0.5,)


def test_a_hash_optimizer_may_take_the_place_of_the_fused_one():
    module = EmbeddingCollection(TABLES[:1], optimizer=RowOptimizer("sgd", lr=1.0), fused=False, seed=1)
    optimizer = HashOptimizer(module)
    features = KeyedJaggedTensor.from_lengths_sync(KEYS, VALUES, LENGTHS)
    before = module(features)["bought"].values()
    before.sum().backward()
    assert torch.equal(module(features)["bought"].values(), before)
    optimizer.step()
    assert torch.equal(module(features)["bought"].values(), before - 1)


class Standin:
    """The parts of TorchRec's ``KeyedJaggedTensor`` that are read."""

    def __init__(self, values=VALUES, weights=None):
        self.keys, self.values = lambda: KEYS, lambda: values
        self.weights_or_none, self.variable_stride_per_key = lambda: weights, lambda: False
        self.offsets = lambda: torch.tensor([0, *LENGTHS.cumsum(0).tolist()], dtype=torch.int32)


@pytest.fixture
def torchrec(monkeypatch):
    """TorchRec's result types, which note their arguments."""
    made = types.SimpleNamespace(
        KeyedTensor=lambda keys, length_per_key, values: ("KeyedTensor", keys, length_per_key, values),
        JaggedTensor=lambda **arguments: arguments,
    )
    monkeypatch.setitem(sys.modules, "torchrec", made)


def test_torchrecs_tensors_give_torchrecs_types(torchrec):
    rows = EmbeddingCollection(TABLES, seed=1, merge=False)(Standin())
    assert rows["clicked"]["lengths"].tolist() == [0, 3] and rows["clicked"]["values"].shape == (3, 3)
    bags = EmbeddingBagCollection(
        [EmbeddingBagConfig(name="items", embedding_dim=3, feature_names=["clicked", "bought"])], seed=1
    )
    kind, keys, dims, values = bags(Standin())
    assert (kind, keys, dims, values.shape) == ("KeyedTensor", ["clicked", "bought"], [3, 3], (2, 6))
    own = bags(KeyedJaggedTensor.from_lengths_sync(KEYS, VALUES, LENGTHS))
    assert torch.equal(own.values(), values) and own.offset_per_key() == [0, 3, 6]
    initial = bags.embeddings.tables.initial_rows("items", torch.tensor([7, 7, 8, 9]))[:, :3]
    assert torch.equal(own["bought"], torch.stack([initial[0], torch.zeros(3)]))
    torch.testing.assert_close(own["clicked"], torch.stack([torch.zeros(3), initial[1:].sum(0)]))
    assert torch.equal(own["bought"], own.to_dict()["bought"]) and own.length_per_key() == dims


def test_what_is_not_supported_is_named(torchrec):
    with pytest.raises(ValueError, match=r"must be integers, got torch\.float32"):
        EmbeddingCollection(TABLES)(Standin(values=VALUES.float()))
    with pytest.raises(ValueError, match=r"table 'a': initial weights are uniform in \[-scale, scale\)"):
        EmbeddingCollection([EmbeddingConfig(name="a", embedding_dim=3, weight_init_max=1.0)])
