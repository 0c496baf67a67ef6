"""DLRM: dot products of all pairs between two MLPs; a sample's bits depend on that sample alone."""

from dataclasses import replace
from itertools import pairwise

import formulas
import pytest
import torch

from tritonrec.data import ClickBatch, KeyedJaggedTensor
from tritonrec.nn import DLRM, DLRMConfig
from tritonrec.nn.dlrm import interact, partition_tables

CONFIGS = {
    "criteo": DLRMConfig(tuple(f"C{i}" for i in range(1, 27)), 13, 16, (32, 24), (40, 20)),
    "odd": DLRMConfig(("site", "app", "device"), 1, 7, (5,), (9,)),
    "six": DLRMConfig(tuple(f"C{i}" for i in range(1, 27)), 13, 6, (8,), (8,)),
    "no_dense": DLRMConfig(("user", "item"), 0, 5, (), (3,)),
    "one_feature_no_hidden": DLRMConfig(("item",), 2, 4, (), ()),
}
SAMPLES = 37
CASES, DISTINCT, EMPTY = CONFIGS, SAMPLES, [[]]
SUBSETS = [[5], [0, 1], [36, 2, 17], [*range(0, 37, 2)], [*range(36, -1, -1)], [*range(16)]]
SPLIT = [[*range(1, 37, 3)], [], [0], [*range(2, 37, 3)], [*range(3, 37, 3)]]


def make_model(config):
    torch.manual_seed(0)
    model = DLRM(config)
    for parameter in model.parameters():  # no bias at zero
        parameter.data = parameter.data * 1.3 + 0.1 * torch.randn_like(parameter)
    return model


def make_batch(config, samples=SAMPLES, seed=1):
    generator = torch.Generator().manual_seed(seed)
    batch = ClickBatch(
        0,
        torch.arange(samples) * 10 + 3,
        dense=torch.randn(samples, config.dense, generator=generator),
        features=KeyedJaggedTensor.from_matrix(
            config.features, torch.randint(0, 90, (samples, len(config.features)), generator=generator)
        ),
        labels=torch.randint(0, 2, (samples,), generator=generator),
    ).validate()
    return batch, {
        name: torch.randn(samples, config.dim, generator=generator) * 0.8 + 0.1 for name in config.features
    }


def select(batch, rows, samples):
    at = torch.tensor(samples, dtype=torch.int64)
    return batch.select(at), {name: part[at] for name, part in rows.items()}


def run(model, batch, rows):
    leaves = {name: part.clone().requires_grad_() for name, part in rows.items()}
    losses = model(batch, leaves)
    losses.sum().backward()
    return losses.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def make(case, lengths=range(SAMPLES)):
    return make_model(CONFIGS[case]), make_batch(CONFIGS[case], len(lengths))


def of_samples(args, found, samples):
    return [found[0][samples], *(gradient[samples] for gradient in found[1].values())]


def oracle_logit(model, dense, rows):
    """The logit of one sample: dense (F,), rows of each feature (d,)."""

    def mlp(layers, x):
        for before, after in pairwise([*layers, None]):
            x = formulas.linear(x[None], before)[0]
            x = x if after is None else x.clamp(min=0)
        return x

    vectors = [rows[name] for name in model.config.features]
    x = []
    if model.config.dense:
        x = [mlp(model.bottom, dense).clamp(min=0)]
        vectors = x + vectors
    pairs = [(vectors[i] * vectors[j]).sum() for i in range(len(vectors)) for j in range(i)]
    return mlp(model.top, torch.cat([*x, torch.stack(pairs)]))[0]


@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_forward_and_gradients_are_the_formula(accumulate, config, exactly):
    model, (batch, rows) = make_model(config), make_batch(config)
    attached = accumulate(model) if exactly else {}
    losses, gradients = run(model, batch, rows)
    exact = make_model(config).double()
    leaves = {name: part.double().requires_grad_() for name, part in rows.items()}
    z = torch.stack([
        oracle_logit(exact, batch.dense[b].double(), {name: part[b] for name, part in leaves.items()})
        for b in range(SAMPLES)
    ])  # fmt: skip
    p, y = torch.sigmoid(z), batch.labels.double()
    wanted = -(y * p.log() + (1 - y) * (1 - p).log())
    wanted.sum().backward()
    results = {"losses": (losses, wanted), "probabilities": (model.predict(batch, rows), p)}
    results |= {f"rows of {name}": (gradients[name], leaf.grad) for name, leaf in leaves.items()}
    formulas.assert_same(results, model, exact, attached)


@pytest.mark.parametrize("vectors", [1, 2, 4, 22, 27])
def test_products_of_any_size_do_not_depend_on_the_place_in_the_batch(vectors):
    """`torch.bmm` itself fails for 27 vectors of 5, 6 or 7 columns: it goes by addresses."""
    generator = torch.Generator().manual_seed(vectors)
    for dim in (1, 3, 5, 6, 7, 8, 13, 16, 17, 33):
        x = torch.randn(24, vectors, dim, generator=generator)
        dy = torch.randn(24, vectors * (vectors - 1) // 2, generator=generator)

        def run(at, x=x, dy=dy):
            leaf = x[at].requires_grad_()
            pairs = interact(*leaf.unbind(1))
            (gradient,) = torch.autograd.grad(pairs, leaf, dy[at])
            return pairs.detach(), gradient

        whole = run(torch.arange(24))
        for size in (1, 2, 3, 8, 11, 24):
            at = torch.randperm(24, generator=generator)[:size]
            for got, expected in zip(run(at), whole, strict=True):
                assert torch.equal(got, expected[at]), (dim, size)


def test_pairs_are_in_the_order_of_the_paper_s_lower_triangle():
    vectors = torch.tensor([[[1.0, 0], [10, 1], [100, 2]]])
    assert interact(*vectors.unbind(1)).tolist() == [[10, 100, 1002]]  # (1,0) (2,0) (2,1)
    assert interact(vectors[:, 0]).shape == (1, 0)


def test_what_does_not_fit_is_refused():
    config = CONFIGS["odd"]
    model, (batch, rows) = make_model(config), make_batch(config)
    with pytest.raises(ValueError, match=r"dense must be \(B, 1\), got \(37, 2\)"):
        model(replace(batch, dense=torch.zeros(SAMPLES, 2)), rows)
    with pytest.raises(ValueError, match=r"rows of feature 'app' are missing, there are \['device'"):
        model(batch, {name: part for name, part in rows.items() if name != "app"})
    with pytest.raises(ValueError, match="distinct names"):
        replace(config, features=("a", "a"))
    with pytest.raises(ValueError, match="top must be at least 1"):
        replace(config, top=(4, 0))
    with pytest.raises(ValueError, match="dense must be at least 0"):
        replace(config, dense=-1)


def test_tables_are_dealt_by_their_size():
    sizes = {"a": 5, "b": 9, "c": 5, "d": 4, "e": 1}
    assert partition_tables(sizes, 2) == {"b": 0, "a": 1, "c": 1, "d": 0, "e": 1}  # 13 and 11
    assert partition_tables({"b": 5, "a": 5}, 2) == {"a": 0, "b": 1}
    assert partition_tables(sizes, 1) == dict.fromkeys(sizes, 0)
    assert set(partition_tables(sizes, 9).values()) == {0, 1, 2, 3, 4}
    assert partition_tables({}, 3) == {}
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        partition_tables(sizes, 0)
