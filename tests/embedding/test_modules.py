"""Promise: hash embeddings are those of torch over any ids: results, training, rows on first use."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tritonrec import HashEmbedding, HashEmbeddingBag, HashEmbeddingCollection, HashOptimizer
from tritonrec.data import KeyedJaggedTensor, Vocabulary
from tritonrec.embedding import (
    Eviction,
    FeatureConfig,
    HashTableCollection,
    Placement,
    RowOptimizer,
    TablePolicy,
    row_exchange,
)
from tritonrec.embedding.in_flight import as_lane
from tritonrec.files.places import place_of

LAST = 2**63 - 1
IDS = torch.tensor([[3, -(2**63), 3], [LAST, 0, -7]])


def table_of(module):
    return module.tables.groups[0].table


def twin(module, ids):
    """`torch.nn.Embedding` with the initial rows of `ids` (n,) distinct; row i is that of ids[i]."""
    name = next(iter(module.tables.features))
    rows = module.tables.initial_rows(name, ids)[:, : module.tables.dim_of(name)]
    return torch.nn.Embedding.from_pretrained(rows.clone(), freeze=False)


@pytest.mark.parametrize("shape", [(0,), (), (6,), (2, 3), (3, 0, 2), (1, 1, 6)])
def test_any_shape_of_any_ids_has_the_initial_rows_and_the_shape_of_an_embedding(shape):
    module = HashEmbedding(5, seed=2)
    ids = IDS.flatten()[: torch.Size(shape).numel()].reshape(shape)
    found = module(ids)
    assert found.shape == (*shape, 5) and found.dtype == torch.float32
    assert torch.equal(found.reshape(-1, 5), module.tables.initial_rows("embedding", ids.reshape(-1))[:, :5])
    assert len(table_of(module)) == len(set(ids.flatten().tolist()))


def test_ids_may_be_views():
    module = HashEmbedding(4, seed=2)
    assert torch.equal(module(IDS.t()), module(IDS).transpose(0, 1))
    assert torch.equal(module(IDS[:, ::2]), module(IDS)[:, ::2])


@pytest.mark.parametrize("consistency", ["batch", "window"])
@pytest.mark.parametrize("passes", [1, 3])
def test_rows_train_as_those_of_an_embedding(consistency, passes):
    module = HashEmbedding(5, RowOptimizer("adam", lr=0.05), seed=1, consistency=consistency)
    ids = torch.tensor([9, -4, LAST, 2])
    same = twin(module, ids)
    optimizer, expected = HashOptimizer(module), torch.optim.Adam(same.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        optimizer.zero_grad()
        expected.zero_grad()
        for _ in range(passes):  # every row in each pass, as Adam moves the rows of an Embedding always
            at = torch.cat([torch.arange(4), torch.randint(4, (5,), generator=generator)])
            weight = torch.randn(9, 5, generator=generator)
            (module(ids[at]) * weight).tanh().sum().backward()
            (same(at) * weight).tanh().sum().backward()
        optimizer.step()
        expected.step()
    module.eval()
    torch.testing.assert_close(module(ids), same.weight.detach(), rtol=1e-5, atol=1e-6)
    assert not torch.equal(module(ids), module.tables.initial_rows("embedding", ids)[:, :5])


def test_passes_in_any_order_give_the_bits_of_one():
    """Gradients of fixed point: cut the ids in any way, in any order, in one pass or several."""
    generator = torch.Generator().manual_seed(0)
    ids, weight = (
        torch.randint(-4, 4, (40,), generator=generator),
        torch.randn(40, 6, generator=generator) * 9,
    )
    whole = HashEmbedding(6, RowOptimizer("rowwise_adagrad", lr=0.1), seed=1)
    cut = HashEmbedding(6, RowOptimizer("rowwise_adagrad", lr=0.1), seed=1)
    (whole(ids) * weight).sum().backward()
    order = torch.randperm(40, generator=generator)
    for part in order.tensor_split([7, 7, 25]):  # of which one is empty
        (cut(ids[part]) * weight[part]).sum().backward()
    for module in (whole, cut):
        HashOptimizer(module).step()
    for one, other in zip(whole.tables.export()["embedding"], cut.tables.export()["embedding"], strict=True):
        assert torch.equal(one, other)


def test_two_uses_of_one_lookup_and_two_lookups_add_up():
    module = HashEmbedding(3, RowOptimizer("sgd", lr=1.0), seed=1)
    before = module(IDS[0]).detach().clone()
    rows = module(IDS[0])
    (rows.sum() + 2 * rows[0].sum() + module(IDS[0, 1:2]).sum()).backward()
    HashOptimizer(module).step()
    module.eval()
    change = before - module(IDS[0])  # id 3 twice in a row: 1 + 1 + 2
    torch.testing.assert_close(change, torch.tensor([4.0, 2.0, 4.0])[:, None].expand(3, 3))


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference_mode"])
def test_outside_of_training_nothing_is_inserted_and_no_gradient_flows(mode):
    module = HashEmbedding(3, RowOptimizer("sgd", lr=1.0), seed=1)
    module(torch.tensor([5])).sum().backward()
    HashOptimizer(module).step()
    if mode == "eval":
        module.eval()
        found = module(torch.tensor([5, 6, 5]))
    else:
        with getattr(torch, mode)():
            found = module(torch.tensor([5, 6, 5]))
    initial = module.tables.initial_rows("embedding", torch.tensor([5, 6]))[:, :3]
    assert not found.requires_grad and len(table_of(module)) == 1
    assert torch.equal(found[0], initial[0] - 1) and torch.equal(found[2], found[0])
    assert torch.equal(found[1], initial[1])


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_bags_are_those_of_torch(pooling):
    module = HashEmbeddingBag(4, pooling, seed=1)
    ids = torch.tensor([8, 2, 8, 5, 2, 2])
    torch_ids = torch.tensor([0, 1, 0, 2, 1, 1])
    same = torch.nn.EmbeddingBag.from_pretrained(
        module.tables.initial_rows("embedding", torch.tensor([8, 2, 5]))[:, :4].clone(), mode=pooling
    )
    offsets = torch.tensor([0, 3, 3])
    torch.testing.assert_close(module(ids, offsets), same(torch_ids, offsets))
    torch.testing.assert_close(module(ids.view(2, 3)), same(torch_ids.view(2, 3)))
    jagged = KeyedJaggedTensor.from_lengths_sync(["f"], ids, torch.tensor([3, 0, 3]))
    assert torch.equal(module(jagged), module(ids, offsets))
    last = HashEmbeddingBag(4, pooling, seed=1, include_last_offset=True)
    assert torch.equal(last(ids, torch.tensor([0, 3, 3, 6])), module(ids, offsets))
    assert torch.equal(module(ids[:0], torch.tensor([0, 0])), torch.zeros(2, 4))
    assert module(ids[:0], torch.tensor([], dtype=torch.int64)).shape == (0, 4)


FEATURES = [
    FeatureConfig("user", 4),
    FeatureConfig("clicked", 6, table="item"),
    FeatureConfig("bought", 6, table="item"),
    FeatureConfig("genre", 6, pooling="mean"),
]


def test_a_collection_looks_features_up_by_table():
    module = HashEmbeddingCollection(FEATURES, RowOptimizer("sgd", lr=1.0), seed=1)
    batch = KeyedJaggedTensor.from_lengths_sync(
        ["genre", "bought", "unused", "user", "clicked"],
        torch.tensor([1, 2, 7, 50, 3, 4, 7]), torch.tensor([2, 0, 1, 0, 0, 1, 1, 1, 1, 0]),
    )  # fmt: skip
    found = module(batch)
    assert {name: tuple(rows.shape) for name, rows in found.items()} == {
        "user": (2, 4), "clicked": (1, 6), "bought": (1, 6), "genre": (2, 6)
    }  # fmt: skip
    assert torch.equal(found["clicked"], found["bought"])  # id 7 of table item
    same = module({name: batch[name] for name in found})
    assert all(torch.equal(same[name], found[name]) for name in found)
    (found["clicked"].sum() + found["bought"].sum()).backward()
    HashOptimizer(module).step()
    module.eval()
    torch.testing.assert_close(found["clicked"] - module(batch)["clicked"], torch.full((1, 6), 2.0))
    assert torch.equal(found["user"], module(batch)["user"])


def test_rows_leave_by_policy_and_their_updates_are_dropped():
    policy = TablePolicy(eviction=Eviction("lru", capacity=2))
    module = HashEmbedding(3, RowOptimizer("sgd", lr=1.0), seed=1, policy=policy)
    first = module(torch.tensor([1, 2])).sum()
    for id_ in (3, 4, 5, 6):
        module(torch.tensor([id_]))
    first.backward()  # both rows are gone, and their places have other rows
    HashOptimizer(module).step()
    ids, rows = module.tables.export()["embedding"]
    assert ids.tolist() == [5, 6] or ids.tolist() == [4, 5, 6]
    assert torch.equal(rows, module.tables.initial_rows("embedding", ids))


def test_a_key_waits_for_its_row_until_it_is_admitted():
    module = HashEmbedding(3, RowOptimizer("sgd", lr=1.0), seed=1, policy=TablePolicy(admission=2))
    optimizer = HashOptimizer(module)
    for count in (0, 1, 1):
        optimizer.zero_grad()
        module(torch.tensor([4, 4])).sum().backward()
        optimizer.step()
        assert len(table_of(module)) == count
    initial = module.tables.initial_rows("embedding", torch.tensor([4]))
    assert torch.equal(module.eval()(torch.tensor([4])), initial - 2 - 2)


def test_seeds_come_from_torchs_generator():
    torch.manual_seed(4)
    one, other = HashEmbedding(3), HashEmbedding(3)
    assert not torch.equal(one(IDS), other(IDS))
    torch.manual_seed(4)
    assert torch.equal(HashEmbedding(3)(IDS), one(IDS))


def test_the_divisor_is_the_number_of_ranks_until_it_is_set():
    module = HashEmbedding(3)
    assert module.divisor == 1.0
    module.divisor = 4
    module(torch.tensor([1])).sum().backward()
    assert module.divisor == 4.0
    assert torch.equal(module.row_gradients[0].mean, torch.full((1, 3), 0.25))
    with pytest.raises(ValueError, match=r"divisor must lie in \(0, inf\), got 0"):
        module.divisor = 0
    with pytest.raises(ValueError, match=r"divisor must lie in \(0, inf\), got 0"):
        HashEmbedding(3, divisor=0)


@pytest.mark.parametrize("kind", [HashEmbedding, HashEmbeddingBag])
def test_rows_of_another_module_do_not_tie_and_are_refused(kind):
    one, other = kind(3), kind(3)
    own = one.rows
    with pytest.raises(TypeError, match="ties nothing: use one module at both places"):
        one.rows = other.rows
    one.rows = own
    assert one.rows is own and copy.deepcopy(one).rows is not own


def test_tables_with_windows_in_flight_are_refused_by_name():
    tables = HashTableCollection([FeatureConfig("item", 3)])
    module = HashEmbeddingCollection(tables)
    guard = tables.groups[0].table.in_flight
    rows = module({"item": torch.tensor([1])})["item"]
    rows.sum().backward()
    guard.begin(lambda: "steps 4 to 6 are")
    try:
        for action in (
            lambda: module({"item": torch.tensor([1])}),
            lambda: module.eval()({"item": torch.tensor([1])}),
            HashOptimizer(module).step,
            module.state_dict,
            lambda: copy.deepcopy(module),
        ):
            with pytest.raises(RuntimeError, match="refused while steps 4 to 6 are in flight"):
                action()
        with as_lane():
            HashOptimizer(module).step()
    finally:
        guard.end()


def test_fused_rows_are_updated_in_each_backward_pass():
    fused = HashEmbedding(3, RowOptimizer("adam", lr=0.1), seed=1, fused=True)
    plain = HashEmbedding(3, RowOptimizer("adam", lr=0.1), seed=1)
    optimizer = HashOptimizer(plain)
    for _ in range(3):
        optimizer.zero_grad()
        for module in (fused, plain):
            module(IDS).square().sum().backward()
        optimizer.step()
    assert fused.fused_optimizer.updates == 3
    for one, other in zip(
        fused.tables.export()["embedding"], plain.tables.export()["embedding"], strict=True
    ):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="only fused hash embeddings"):
        HashOptimizer(fused)


@pytest.mark.parametrize("options", [{"storage": "device"}, {"storage": "cached", "cache_rows": 8}])
@pytest.mark.parametrize("policy", [TablePolicy(), TablePolicy(Eviction("lru", capacity=5), admission=2)])
def test_a_table_has_the_same_bits_wherever_it_is(options, policy):
    found = []
    for placement in (None, Placement(device="cpu", **options)):
        module = HashEmbedding(3, seed=1, policy=policy, placement=placement)
        optimizer = HashOptimizer(module)
        for step in range(5):
            optimizer.zero_grad()
            ids = torch.arange(step, step + 4)
            module(ids).square().sum().backward()
            module(ids[:2]).sum().backward()
            optimizer.step()
        again = HashEmbedding(3, policy=policy, placement=placement)
        again.load_state_dict(module.state_dict())
        found += [module.tables.weights()["embedding"], again.tables.weights()["embedding"]]
    assert len(found[0][0]) > 4
    assert all(torch.equal(one, other) for each in found for one, other in zip(each, found[0], strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_no_bit(reentrant):
    found = []
    for checkpointed in (True, False):
        module = HashEmbedding(3, seed=1)
        weight = torch.arange(18.0).view(2, 3, 3).requires_grad_()

        def loss(weight, module=module):
            return (module(IDS) * weight).square().sum()

        (checkpoint(loss, weight, use_reentrant=reentrant) if checkpointed else loss(weight)).backward()
        HashOptimizer(module).step()
        found.append(module.tables.export()["embedding"])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.slow
def test_compiled_models_break_their_graph_at_a_lookup():
    features = [FeatureConfig("user", 3), FeatureConfig("item", 3, pooling="sum")]
    module, dense = HashEmbeddingCollection(features, seed=1), torch.nn.Linear(3, 2)

    def plain(jagged):
        found = module(jagged)
        return dense(found["user"]) + dense(found["item"])

    compiled, optimizer = torch.compile(plain, backend="aot_eager"), HashOptimizer(module)
    for _ in range(2):
        jagged = KeyedJaggedTensor.from_lengths_sync(
            ["user", "item"], torch.arange(4), torch.tensor([1, 1, 0, 2])
        )
        optimizer.zero_grad()
        found = compiled(jagged)
        assert torch.equal(found, plain(jagged))
        found.square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", [HashEmbedding, HashEmbeddingBag])
def test_a_module_of_one_table_puts_it_where_it_is_told(kind):
    placement = Placement("cached", cache_rows=8)
    (group,) = kind(4, placement=placement).tables.groups
    assert group.table.placement == placement and group.table.padded


@pytest.mark.parametrize("supported", [True, False])
def test_keys_leave_a_device_from_which_ranks_cannot_exchange_them(supported, monkeypatch):
    routed = []

    def plan(keys, layouts, over):
        routed.extend(keys)
        raise KeyboardInterrupt

    module = HashEmbedding(5)
    monkeypatch.setattr(row_exchange, "plan_routes", plan)
    monkeypatch.setattr(type(module.communicator), "supports", lambda self, device: supported)
    key = SimpleNamespace(device="there", cpu=lambda: "on the host")
    with pytest.raises(KeyboardInterrupt):
        module._rows([key], {})
    assert routed == [key if supported else "on the host"]


def test_features_of_torchrec_are_taken_as_they_are():
    class Features:
        """What `from_torchrec` asks of TorchRec's ``KeyedJaggedTensor``."""

        variable_stride_per_key = staticmethod(lambda: False)
        keys = staticmethod(lambda: ["item"])
        values = staticmethod(lambda: torch.tensor([3, 4, 3]))
        offsets = staticmethod(lambda: torch.tensor([0, 1, 3]))
        weights_or_none = staticmethod(lambda: None)

    module = HashEmbeddingCollection([FeatureConfig("item", dim=2, pooling="sum")], seed=1)
    ours = KeyedJaggedTensor(("item",), torch.tensor([3, 4, 3]), torch.tensor([0, 1, 3]))
    assert torch.equal(module(Features())["item"], module(ours)["item"])


def test_a_module_shows_its_consistency():
    assert "consistency='batch'" in repr(HashEmbedding(5))


EMBEDDING, BAGS = HashEmbedding(4, name="item"), HashEmbeddingBag(4, name="item")
BY_NAME, FEW = HashEmbeddingCollection([FeatureConfig("item", 4)]), HashEmbeddingCollection(FEATURES)
THREE, HUGE = torch.tensor([1, 2, 3]), torch.tensor([2**62])
TWO = KeyedJaggedTensor.from_lengths_sync(["a", "b"], THREE[:2], torch.tensor([1, 1]))
OUTSIDE = {each.name: HUGE for each in FEATURES} | {"genre": (HUGE, torch.tensor([0, 1]))}
EMBEDDING(THREE)
NO_IDS = r"ids of .*'item' must be an int64 tensor, got "
WRONG_TYPES = [
    (lambda: EMBEDDING([1, 2]), NO_IDS + r"list: convert with torch\.as_tensor\(ids\)"),
    (lambda: EMBEDDING(THREE.int()), NO_IDS + r"torch\.int32: convert with \.long\(\)"),
    (lambda: EMBEDDING(THREE.float()), NO_IDS + r"torch\.float32"),
    (lambda: EMBEDDING(None), NO_IDS + "NoneType"), (lambda: BAGS([1, 2], [0]), NO_IDS + "list"),
    (lambda: BAGS({"item": THREE}), NO_IDS + "dict"), (lambda: BAGS(None), NO_IDS + "NoneType"),
    (lambda: BAGS(THREE, torch.tensor([0.0, 1.5])), "offsets of 'item' must be .* got torch.f"),
    (lambda: BAGS(THREE, [0, 1]), "offsets of 'item' must be an int64 tensor, got list"),
    (lambda: BY_NAME(THREE), r"features are a KeyedJaggedTensor, or ids \(and offsets\) by .*got Tensor"),
    (lambda: BY_NAME(None), "features are a KeyedJaggedTensor, .* got NoneType"),
    (lambda: BY_NAME({"item": [1]}), NO_IDS + "list"),
    (lambda: BY_NAME({"item": (1, 2)}), NO_IDS + "tuple"),
    (lambda: HashEmbeddingCollection(FeatureConfig("a", 4)), r"features are several: \[FeatureConfig"),
    (lambda: HashOptimizer(EMBEDDING.parameters()), "HashOptimizer takes the model, .* got generator"),
    (lambda: HashOptimizer([EMBEDDING]), r"got list: HashOptimizer\(model\)"),
    (lambda: place_of(None), "a path or a URL is a text or a pathlib.Path, got None"),
    (lambda: Vocabulary(None), "words must be an Arrow array or several texts, got one: None"),
]  # fmt: skip
WRONG_VALUES = [
    (lambda: EMBEDDING(torch.empty(2, dtype=torch.int64, device="meta")), "on meta, .* has had ids on cpu"),
    (lambda: BAGS(THREE), r"ids \(n,\) with offsets, or ids \(m, k\) without"),
    (lambda: BAGS(THREE, torch.tensor([1])), "offsets of 'item' must start at 0"),
    (lambda: BAGS(THREE, torch.tensor([0, 4])), "must not decrease"),
    (lambda: BAGS(TWO), "one table takes one key, got"),
    (lambda: FEW(TWO), r"features \['a', 'b'\], and the module needs"),
    (lambda: FEW({name: THREE.new_zeros(2, 2) for name in OUTSIDE}), "shape"),
    (lambda: FEW(OUTSIDE), "does not fit into a table merged"),
    (lambda: HashEmbedding(3, consistency="exact"), "consistency must be one of batch, window"),
    (lambda: HashEmbeddingBag(3, "max"), "pooling must be one of sum, mean, got 'max'"),
    (lambda: HashEmbeddingCollection(HashTableCollection(FEATURES), seed=3), "the tables are made already"),
]


@pytest.mark.parametrize(
    ("error", "call", "says"),
    [*((TypeError, *each) for each in WRONG_TYPES), *((ValueError, *each) for each in WRONG_VALUES)],
)
def test_what_a_module_does_not_take_is_named_and_adds_no_row(error, call, says):
    before = [len(table_of(each)) for each in (EMBEDDING, BAGS, BY_NAME, FEW)]
    with pytest.raises(error, match=says):
        call()
    assert [len(table_of(each)) for each in (EMBEDDING, BAGS, BY_NAME, FEW)] == before


def test_features_may_come_from_a_generator():
    made = HashEmbeddingCollection(FeatureConfig(name, 4) for name in "ab")
    assert [*made.tables.features] == ["a", "b"]
    pair = made({"a": [THREE, torch.tensor([0, 3])], "b": THREE})
    assert pair["a"].shape == pair["b"].shape == (3, 4)
