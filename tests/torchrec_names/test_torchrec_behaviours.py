"""Promise: collections behave as TorchRec's own tests say, without TorchRec."""

import pickle
from functools import partial

import pytest
import torch

from tritonrec import HashEmbedding, HashEmbeddingBag, KeyedJaggedTensor, PoolingType
from tritonrec.torchrec import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)

NORMAL = partial(torch.nn.init.normal_, mean=0.0, std=1.5)
VALUES, OFFSETS = torch.arange(8), torch.tensor([0, 2, 2, 3, 4, 5, 8])


def bags(*tables, **options):
    """A bag collection of (name, dim, features)."""
    configs = [EmbeddingBagConfig(10, dim, name, features) for name, dim, features in tables]
    return EmbeddingBagCollection(configs, seed=1, **options)


def rows_of(module, table, ids):
    tables = module.embeddings.tables
    return tables.current_rows(table, torch.as_tensor(ids))[:, : tables.dim_of(table)]


def test_a_feature_of_two_tables_has_a_result_of_each():
    module = bags(("t1", 3, ["f1", "f2"]), ("t2", 4, ["f1"]))
    assert module.embedding_names_by_table() == [["f1@t1", "f2"], ["f1@t2"]]
    found = module(KeyedJaggedTensor.from_offsets_sync(["f1", "f2"], VALUES, OFFSETS))
    assert found.keys() == ["f1@t1", "f2", "f1@t2"] and found.offset_per_key() == [0, 3, 6, 10]
    for name, table, ids in (("f1@t1", "t1", [0, 1]), ("f1@t2", "t2", [0, 1]), ("f2", "t1", [3])):
        assert torch.equal(found[name][0], rows_of(module, table, ids).sum(0))
    assert not found["f1@t2"][1].any()
    before = rows_of(module, "t2", [0, 1])
    found["f1@t1"].sum().backward()
    assert torch.equal(rows_of(module, "t2", [0, 1]), before)  # a row of the other table has no gradient


def test_sequences_of_a_shared_feature_have_their_ids():
    tables = [EmbeddingConfig(10, 5, "t1", ["f1", "f2"]), EmbeddingConfig(10, 5, "t2", ["f2"])]
    module = EmbeddingCollection(tables, need_indices=True)
    found = module(
        KeyedJaggedTensor.from_offsets_sync(["f1", "f2"], VALUES[:4], torch.tensor([0, 2, 3, 3, 4]))
    )
    assert list(found) == ["f1", "f2@t1", "f2@t2"]
    assert found["f1"].weights().tolist() == [0, 1, 2] and found["f2@t2"].weights().tolist() == [3]
    assert torch.equal(found["f2@t1"].values(), rows_of(module, "t1", [3]))
    assert torch.equal(found["f2@t2"].values(), rows_of(module, "t2", [3]))
    assert module.need_indices() and module.embedding_dim() == 5 and module.embedding_configs() == tables
    plain = EmbeddingCollection(tables)
    one = plain(KeyedJaggedTensor.from_offsets_sync(["f1", "f2"], VALUES[:1], torch.tensor([0, 1, 1])))["f1"]
    assert one.weights_or_none() is None and not plain.need_indices()
    with pytest.raises(ValueError, match=r"need_indices=True\) has ids there"):
        one.weights()


WEIGHTED = KeyedJaggedTensor.from_offsets_sync(
    ["f1", "f3", "f2"],
    torch.tensor([1, 2, 4, 5, 4, 3, 2, 9, 1, 3, 4, 7]),
    torch.tensor([0, 2, 4, 6, 8, 10, 12]),
    torch.tensor([0.1, 0.2, 0.4, 0.5, 0.4, 0.3, 0.2, 0.9, 0.1, 0.3, 0.4, 0.7]),
)
TABLES = ("t1", 3, ["f1", "f3"]), ("t2", 4, ["f2"])


def test_weighted_bags():
    module = bags(*TABLES, is_weighted=True)
    assert module.is_weighted() and [each.name for each in module.embedding_bag_configs()] == ["t1", "t2"]
    found = module(WEIGHTED)
    assert found.values().shape == (2, 10) and found.keys() == ["f1", "f3", "f2"]
    expected = rows_of(module, "t2", [1, 3]) * torch.tensor([[0.1], [0.3]])
    assert torch.equal(found["f2"][0], expected.sum(0))
    assert torch.equal(bags(*TABLES)(WEIGHTED)["f1"][0], rows_of(module, "t1", [1, 2]).sum(0))
    plain = KeyedJaggedTensor.from_offsets_sync(["f1", "f3"], VALUES[:2], torch.arange(3))
    with pytest.raises(ValueError, match=r"bags are weighted, and features \['f1', 'f3'\] have no weights"):
        bags(TABLES[0], is_weighted=True)(plain)
    with pytest.raises(ValueError, match="table 't1': bags are weighted sums, there are no weighted means"):
        EmbeddingBagCollection([EmbeddingBagConfig(10, 3, "t1", pooling=PoolingType.MEAN)], True)


def test_an_input_without_a_feature_is_refused():
    module = bags(("t1", 3, ["f1"]), ("t2", 3, ["f1", "f4"]))
    with pytest.raises(ValueError, match=r"features \['f1', 'f3', 'f2'\], and the module needs \['f4'\] too"):
        module(WEIGHTED)


def test_rows_begin_as_init_fn_fills_them():
    configs = [
        EmbeddingBagConfig(10, 3, "t1", ["f1"], init_fn=NORMAL),
        EmbeddingBagConfig(10, 3, "t2", ["f2"], init_fn=NORMAL),
        EmbeddingBagConfig(10, 4, "t3", ["f3"], init_fn=partial(torch.nn.init.uniform_, a=-0.036, b=0.036)),
    ]
    state = torch.get_rng_state()
    module = EmbeddingBagCollection(configs, seed=1)
    assert torch.equal(torch.get_rng_state(), state)  # drawn from the seed of the tables
    weights = module.embeddings.tables.weights()
    assert weights["t1"][0].tolist() == list(range(10)) and not len(weights["t3"][0])
    assert weights["t1"][1].abs().max() > 1.5 and not torch.equal(weights["t1"][1], weights["t2"][1])
    again = EmbeddingBagCollection(configs, seed=1, merge=False).embeddings.tables.weights()
    assert torch.equal(again["t1"][1], weights["t1"][1])
    other = EmbeddingBagCollection(configs, seed=2).embeddings.tables.weights()
    assert not torch.equal(other["t1"][1], weights["t1"][1])
    scales = [group.table.scales for group in module.embeddings.tables.groups]
    assert scales == [(3**-0.5, 3**-0.5), (0.036,)]
    found = module(KeyedJaggedTensor.from_offsets_sync(["f1", "f2", "f3"], VALUES[:3], torch.arange(4)))
    assert torch.equal(found["f1"][0], weights["t1"][1][0])
    with pytest.raises(ValueError, match="table 't': init_fn needs num_embeddings"):
        EmbeddingCollection([EmbeddingConfig(0, 3, "t", init_fn=NORMAL)])
    with pytest.raises(ValueError, match="feature 't': dim must be at least 1, got 0"):
        EmbeddingCollection([EmbeddingConfig(10, name="t")])


def test_the_device_is_that_of_the_arguments():
    assert bags(*TABLES).device == torch.device("cpu")
    meta = bags(*TABLES, device=torch.device("meta"))
    with torch.device("meta"):
        assert bags(*TABLES).device == meta.device == torch.device("meta")
    found = meta(WEIGHTED.to("meta"))
    assert found.values().shape == (2, 10) and found.values().is_meta and found.keys() == ["f1", "f3", "f2"]
    assert not any(len(ids) for ids, _ in meta.embeddings.tables.weights().values())
    on_meta = KeyedJaggedTensor.from_offsets_sync(["f1"], VALUES.to("meta"), OFFSETS.to("meta"))
    assert on_meta.num_samples == 6
    with pytest.raises(ValueError, match="on the meta device has no results"):
        EmbeddingCollection([EmbeddingConfig(10, 3, "t")], "meta")(WEIGHTED)


@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_fx_traces_a_collection_alone_and_in_a_model(kind):
    config = EmbeddingBagConfig if kind == "bags" else EmbeddingConfig
    tables = [config(10, 3, "t1", ["f1", "f3"]), config(10, 3, "t2", ["f1", "f2"])]
    make = EmbeddingBagCollection if kind == "bags" else EmbeddingCollection

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = make(tables, seed=1)
            self.over = torch.nn.Linear(12 if kind == "bags" else 3, 1, bias=False)

        def forward(self, features):
            found = self.module(features)
            return self.over(found.values() if kind == "bags" else found["f1@t2"].values())

    model = Model()
    traced = torch.fx.symbolic_trace(model)
    alone = torch.fx.symbolic_trace(model.module)
    calls = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert calls == ["module.embeddings", "over"]
    assert torch.equal(traced(WEIGHTED), model(WEIGHTED))
    again = pickle.loads(pickle.dumps(traced))
    assert torch.equal(again(WEIGHTED), model(WEIGHTED))
    values = alone(WEIGHTED).values() if kind == "bags" else alone(WEIGHTED)["f1@t2"].values()
    assert torch.equal(model.over(values), model(WEIGHTED))
    before = rows_of(model.module, "t1", [1])
    traced(WEIGHTED).sum().backward()
    assert torch.equal(rows_of(model.module, "t1", [1]), before) == (kind == "sequences")
    assert not torch.equal(rows_of(model.module, "t2", [1]), rows_of(again.module, "t2", [1]))


def test_fx_keeps_a_hash_embedding_as_one_call():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.bag = HashEmbedding(3, seed=1), HashEmbeddingBag(3, "sum", seed=2)

        def forward(self, ids, offsets, weights):
            return self.one(ids).sum() + self.bag(ids, offsets, weights).sum()

    model, arguments = Model(), (VALUES, torch.tensor([0, 3]), torch.rand(8))
    assert torch.equal(torch.fx.symbolic_trace(model)(*arguments), model(*arguments))
    with pytest.raises(ValueError, match="trace the model that calls it"):
        torch.fx.symbolic_trace(model.one)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    "module",
    [bags(*TABLES), EmbeddingCollection([EmbeddingConfig(10, 3, "t")]), HashEmbedding(3)],
    ids=lambda module: type(module).__name__,
)
def test_torchscript_is_refused_with_the_reason(module):
    for each in (module, torch.nn.Sequential(module)):
        with pytest.raises(TypeError, match="TorchScript has no type for a table that grows"):
            torch.jit.script(each)


def test_tables_that_no_collection_takes_are_named():
    with pytest.raises(ValueError, match="there are 2 tables of the name 't1'"):
        bags(("t1", 3, ["f1"]), ("t1", 3, ["f2"]))
    with pytest.raises(ValueError, match="table 't' has data_type FP16, and rows are float32"):
        EmbeddingCollection([EmbeddingConfig(10, 3, "t", data_type=DataType.FP16)])
    with pytest.raises(ValueError, match=r"different dimensions, \{'t1': 3, 't2': 4\}"):
        EmbeddingCollection([EmbeddingConfig(1, 3, "t1"), EmbeddingConfig(1, 4, "t2")]).embedding_dim()


def test_one_table_has_a_dimension():
    assert EmbeddingCollection([EmbeddingConfig(10, 5, "t1", ["f1"])]).embedding_dim() == 5
