"""Promise: a weighted bag is the sum of its rows times their weights, with the same bits in any batch."""

import pytest
import torch

from tritonrec import HashEmbeddingBag, HashEmbeddingCollection, HashOptimizer, KeyedJaggedTensor, ops
from tritonrec.data import Lookup, WeightedLookup, split
from tritonrec.data.batch import Batch
from tritonrec.embedding import FeatureConfig, RowOptimizer
from tritonrec.embedding.bags import pool, weighted_rows
from tritonrec.kernels import launch

DIM, BAGS = 37, 12
GENERATOR = torch.Generator().manual_seed(3)
LENGTHS = torch.tensor([2, 0, 5, 1, 0, 3, 7, 1, 2, 0, 4, 1])
IDS = torch.randint(-3, 6, (int(LENGTHS.sum()),), generator=GENERATOR)
WEIGHTS = torch.randn(len(IDS), generator=GENERATOR) * 3
COTANGENT = torch.randn(BAGS, DIM, generator=GENERATOR) * 5


def features(samples=None, weights=WEIGHTS):
    whole = KeyedJaggedTensor.from_lengths_sync(["f"], IDS, LENGTHS, weights)
    return whole if samples is None else whole.select(samples)


def module_of(rule="adam", **options):
    return HashEmbeddingBag(DIM, "sum", RowOptimizer(rule, lr=0.1), seed=1, **options)


def test_a_weighted_bag_is_that_of_torch():
    module, distinct = module_of(), IDS.unique()
    rows = module.tables.initial_rows("embedding", distinct)[:, :DIM].clone()
    same = torch.nn.EmbeddingBag.from_pretrained(rows, mode="sum", freeze=False, include_last_offset=True)
    ours, theirs = WEIGHTS.clone().requires_grad_(), WEIGHTS.clone().requires_grad_()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)])
    found = module(IDS, offsets[:-1], ours)
    expected = same(torch.searchsorted(distinct, IDS), offsets, theirs)
    torch.testing.assert_close(found, expected)
    assert torch.equal(module(features()), found)
    (found * COTANGENT).sum().backward()
    (expected * COTANGENT).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    gradients = module.row_gradients[0]
    order = gradients.keys.argsort()
    torch.testing.assert_close(gradients.mean[order], same.weight.grad, rtol=1e-5, atol=1e-5)


def test_weights_of_a_matrix_of_ids_have_its_shape():
    module, ids, weights = module_of(), IDS[:6].view(2, 3), WEIGHTS[:6].view(2, 3)
    flat = module(IDS[:6], torch.tensor([0, 3]), WEIGHTS[:6])
    assert torch.equal(module(ids, per_sample_weights=weights), flat)
    assert torch.equal(
        module(ids.t(), per_sample_weights=weights.t())[0], module(ids.t()[:1], None, weights.t()[:1])[0]
    )


def test_ones_change_no_bit():
    assert torch.equal(
        module_of()(features(weights=torch.ones(len(IDS)))), module_of()(features(weights=None))
    )


@pytest.mark.parametrize("rule", ["adam", "rowwise_adagrad"])
def test_any_cut_into_passes_gives_the_bits_of_one(rule):
    """Rows, results, and gradients of the weights; a cut has samples in another order, and empty passes."""
    found = []
    for parts in ([torch.arange(BAGS)], torch.randperm(BAGS, generator=GENERATOR).tensor_split([1, 1, 4, 9])):
        module = module_of(rule)
        optimizer = HashOptimizer(module)
        results, gradients = torch.empty(BAGS, DIM), {}
        for part in parts:
            jagged = features(part)
            weights = jagged.weights.clone().requires_grad_()
            pooled = module(jagged.values, jagged.offsets[:-1], weights)
            (pooled * COTANGENT[part]).sum().backward()
            results[part] = pooled.detach()
            for sample, own in zip(
                part.tolist(), weights.grad.split(jagged.lengths[0].tolist()), strict=True
            ):
                gradients[sample] = own
        optimizer.step()
        found.append((results, module.tables.export()["embedding"], gradients))
    (one, rows, own), (other, same, theirs) = found
    assert torch.equal(one, other)
    assert all(torch.equal(a, b) for a, b in zip(rows, same, strict=True))
    assert all(torch.equal(own[sample], theirs[sample]) for sample in range(BAGS))


@pytest.mark.parametrize("dim", [1, 2, 3, 100, 100_000])
def test_the_gradient_of_a_weight_depends_on_its_row_alone(two_threads, dim):
    rows, cotangent = torch.randn(2, 20, dim, generator=GENERATOR) * 7
    gradients = []
    for count in (20, 1):
        weights = torch.ones(count, requires_grad=True)
        lookup = WeightedLookup(torch.arange(count), torch.arange(count + 1), weights)
        weighted_rows("f", rows[:count], "sum", lookup).backward(cotangent[:count])
        gradients.append(weights.grad)
    whole, one = gradients
    assert torch.equal(whole[:1], one)
    torch.testing.assert_close(whole, (rows * cotangent).sum(1), rtol=1e-3, atol=1e-3)


def test_features_of_a_collection_have_weights_one_by_one():
    module = HashEmbeddingCollection(
        [FeatureConfig("a", 3, table="t", pooling="sum"), FeatureConfig("b", 3, table="t", pooling="mean")],
        seed=1,
    )
    ids, offsets, weights = torch.tensor([1, 2]), torch.tensor([0, 2]), torch.tensor([2.0, -1.0])
    found = module({"a": WeightedLookup(ids, offsets, weights), "b": Lookup(ids, offsets)})
    rows = module.tables.initial_rows("t", ids)[:, :3]
    assert torch.equal(found["a"], (rows * weights[:, None]).sum(0, keepdim=True))
    torch.testing.assert_close(found["b"], rows.mean(0, keepdim=True))


def test_a_batch_is_cut_with_its_weights():
    batch = Batch(0, torch.arange(BAGS), features()).validate()
    whole = features()["f"]
    for part in split(batch, 4):
        own = batch.select(part).lookups()["f"]
        at = torch.cat([torch.arange(whole.offsets[s], whole.offsets[s + 1]) for s in part.tolist()])
        assert torch.equal(own.weights, WEIGHTS[at]) and torch.equal(own.ids, IDS[at])


def test_wrong_weights_are_named():
    one, offsets = torch.tensor([1, 2]), torch.tensor([0])
    with pytest.raises(ValueError, match=r"shape of ids, \(2,\), got \(3,\)"):
        module_of()(one, offsets, torch.ones(3))
    with pytest.raises(ValueError, match=r"must be float32 \(2,\), one for each id, got torch.float64"):
        module_of()(one, offsets, torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="pooling 'mean': weighted bags need pooling='sum'"):
        HashEmbeddingBag(3)(one, offsets, torch.ones(2))
    with pytest.raises(ValueError, match="has weights of its own: leave out per_sample_weights"):
        module_of()(features(), None, WEIGHTS)
    module = HashEmbeddingCollection([FeatureConfig("f", 3)])
    with pytest.raises(ValueError, match="feature 'f' has weights and pooling 'none'"):
        module(features())


@pytest.mark.parametrize("consistency", ["batch", "window"])
@pytest.mark.parametrize("how", ["sum", "mean"])
def test_bags_are_summed_where_rows_lie_with_the_bits_of_gathered_rows(how, consistency, monkeypatch):
    dims = {"seen": 15, "bought": 16}  # one table, with a column of zeros
    lookups = {
        "seen": Lookup(torch.tensor([5, 3, 5, 5, 8, 3]), torch.tensor([0, 2, 2, 5, 6])),
        "bought": Lookup(torch.tensor([3, 9, 3]), torch.tensor([0, 0, 2, 3, 3])),
    }

    def trained(pooling):
        features = [FeatureConfig(name, dim, pooling=pooling) for name, dim in dims.items()]
        module = HashEmbeddingCollection(
            features, RowOptimizer("adam", lr=0.1), consistency=consistency, seed=3
        )
        optimizer, draw = HashOptimizer(module), torch.Generator().manual_seed(5)
        for _ in range(3):
            found = module(lookups)
            if pooling == "none":
                found = {name: pool(rows, lookups[name].offsets, how) for name, rows in found.items()}
            gradients = [torch.randn(each.shape, generator=draw) for each in found.values()]
            gradients[list(found).index("seen")][1] = torch.inf  # an empty bag's, which no row has a part in
            torch.autograd.backward(list(found.values()), gradients)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            found = module(lookups)
        return found, [each for rows in module.tables.export().values() for each in rows]

    rows, expected = trained("none")
    for door, name in ((launch, "gather_rows"), (ops.IndexedRows, "gathered")):
        monkeypatch.setattr(door, name, lambda *_: pytest.fail("a row was written for each id"))
    found, state = trained(how)
    for name, each in rows.items():
        assert torch.equal(found[name], pool(each, lookups[name].offsets, how))
    assert all(map(torch.equal, state, expected))
