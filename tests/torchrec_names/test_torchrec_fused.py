"""Promise: TorchRec's fused collections run after a change of their import, with the rule that they name."""

import pytest
import torch

from tritonrec import KeyedJaggedTensor, RowOptimizer
from tritonrec.torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)

SCRIPT = """
import torch
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

ebc = FusedEmbeddingBagCollection(
    tables=[
        EmbeddingBagConfig(name="t1", embedding_dim=4, num_embeddings=10, feature_names=["f1"]),
        EmbeddingBagConfig(name="t2", embedding_dim=8, num_embeddings=10, feature_names=["f2"]),
    ],
    optimizer_type=torch.optim.SGD,
    optimizer_kwargs={"lr": 0.02},
)
features = KeyedJaggedTensor(
    keys=["f1", "f2"],
    values=torch.tensor([0, 1, 2, 3, 4, 5, 6, 7]),
    offsets=torch.tensor([0, 2, 2, 3, 4, 5, 8]),
)
pooled = ebc(features)
before = pooled.values().detach().clone()
pooled.values().sum().backward()
after = ebc(features).values().detach()
"""

FEATURES = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([5, -9, 5]), torch.tensor([2, 1]))


class RowWiseAdagrad(torch.optim.Optimizer):
    """TorchRec's, by its name."""


KINDS = {
    "bags": (FusedEmbeddingBagCollection, EmbeddingBagCollection, EmbeddingBagConfig),
    "rows": (FusedEmbeddingCollection, EmbeddingCollection, EmbeddingConfig),
}
RULES = {
    "sgd": (torch.optim.SGD, {}, RowOptimizer("sgd", 0.01)),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-3}, RowOptimizer("adagrad", 0.1, 1e-3)),
    "rowwise": (RowWiseAdagrad, {"learning_rate": 0.3}, RowOptimizer("rowwise_adagrad", 0.3, 1e-8)),
    "adam": (torch.optim.Adam, {"betas": (0.5, 0.6)}, RowOptimizer("adam", 0.01, 1e-8, 0.5, 0.6)),
    "betas": (torch.optim.Adam, {"lr": 1.0, "beta2": 0.6}, RowOptimizer("adam", 1.0, 1e-8, 0.9, 0.6)),
}


def values(module):
    found = module(FEATURES)
    return found.values() if hasattr(found, "values") and not isinstance(found, dict) else found["f"].values()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_updated_as_those_of_the_plain_collection_with_the_rule(kind, rule):
    fused, plain, config = KINDS[kind]
    optimizer, arguments, expected = RULES[rule]
    made = fused([config(10, 4, "t", ["f"])], optimizer, arguments, seed=3)
    other = plain([config(10, 4, "t", ["f"])], optimizer=expected, seed=3)
    for _ in range(3):
        for module in (made, other):
            values(module).square().sum().backward()
    assert torch.equal(values(made), values(other))
    assert made.optimizer_type() is optimizer and made.optimizer_kwargs() == arguments
    assert made.fused_optimizer().updates == 3


def test_a_script_runs_after_a_change_of_its_import():
    found = {}
    text = SCRIPT.replace("torchrec.modules.fused_embedding_modules", "tritonrec.torchrec")
    exec(text.replace("from torchrec", "from tritonrec"), found)
    ids = torch.tensor([[2.0, 1.0], [0.0, 1.0], [1.0, 3.0]])  # of each bag; the gradient of each row is one
    want = found["before"] - 0.02 * ids.repeat_interleave(torch.tensor([4, 8]), 1)
    torch.testing.assert_close(found["after"], want)


@pytest.mark.parametrize(
    ("optimizer", "arguments", "message"),
    [
        (
            torch.optim.Rprop,
            {},
            "must be one of SGD, Adagrad, RowWiseAdagrad, Adam, got Rprop",
        ),
        (torch.optim.Adam, {"weight_decay": 0.1}, r"got weight_decay: .* optimizer=RowOptimizer\(\.\.\.\)"),
    ],
)
def test_other_optimizers_are_refused_by_name(optimizer, arguments, message):
    for fused, _plain, config in KINDS.values():
        with pytest.raises(ValueError, match=message):
            fused([config(10, 4, "t", ["f"])], optimizer, arguments)


def test_weighted_bags_and_ids_of_rows():
    weighted = KeyedJaggedTensor.from_lengths_sync(
        ["f"], torch.tensor([5, -9, 5]), torch.tensor([2, 1]), torch.tensor([1.0, 0.0, 2.0])
    )
    bags = FusedEmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t", ["f"])], torch.optim.SGD, {}, True)
    found = bags(weighted).values()
    assert bags.is_weighted() and torch.equal(found[1], 2 * found[0])
    config = EmbeddingConfig(10, 4, "t", ["f"])
    rows = FusedEmbeddingCollection([config], torch.optim.SGD, {}, need_indices=True)
    assert rows(FEATURES)["f"].weights().tolist() == [5, -9, 5]
