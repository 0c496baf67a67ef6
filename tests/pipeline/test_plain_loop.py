"""Promise: a plain PyTorch loop over hash embeddings has the bits of the trainer's reference."""

from typing import get_args

import pytest
from speeds import slow_except
from trainer_parts import DIM, NoParameters, batches, parts, same, state, trained

from tritonrec import HashEmbeddingCollection, HashOptimizer, ops
from tritonrec.embedding import Eviction, OptimizerName, PrecisionTiers, RowOptimizer, TablePolicy
from tritonrec.pipeline import DenseModel

RULES = get_args(OptimizerName)


def plain_loop(model, tables, optimizer, run_batches):
    """Training of `tables` and `model` on whole batches, without a trainer."""
    module = HashEmbeddingCollection(tables)
    rows = HashOptimizer(module)
    dense = DenseModel(model, optimizer)
    for batch in run_batches:
        accumulator = ops.GradientAccumulator(model, 36)
        rows.zero_grad()
        module.divisor = batch.loss_terms
        with accumulator.empty_gradients(), accumulator.active():
            model(batch, module(batch.lookups()), 0).sum().backward()
            means = ops.from_fixed_point(accumulator.take_flat(), float(batch.loss_terms), 36)
        rows.step()
        dense.step(accumulator.views(means))


def tables_of(policy=None, rule=None):
    return parts(NoParameters, "adam", policy=policy, rule=rule)


@pytest.mark.parametrize("name", slow_except(["adam", "rowwise_adagrad", "ftrl", "lamb"], RULES))
def test_rows_have_the_bits_of_the_reference(name):
    rule = RowOptimizer(name, lr=0.05, weight_decay=0.01)
    expected, _ = trained(tables_of(rule=rule), "reference", "batch", batches(4))
    made = tables_of(rule=rule)
    plain_loop(*made, batches(4))
    assert same(state(made), expected)
    assert len(expected[0]) > 20 and expected[1].shape[1] == rule.row_width(DIM)


@pytest.mark.parametrize(
    "policy",
    [
        TablePolicy(eviction=Eviction("lru", capacity=20), admission=2),
        TablePolicy(eviction=Eviction("ttl", ttl=2), precision=PrecisionTiers(2, 3)),
    ],
    ids=["lru and admission", "ttl and tiers"],
)
def test_policies_have_the_bits_of_the_reference(policy):
    expected, _ = trained(tables_of(policy), "reference", "batch", batches(5))
    made = tables_of(policy)
    plain_loop(*made, batches(5))
    assert same(state(made), expected)


def test_rows_and_a_dense_model_have_the_bits_of_the_reference():
    expected, _ = trained(parts(), "reference", "batch", batches(4))
    made = parts()
    plain_loop(*made, batches(4))
    assert same(state(made), expected)
    assert not same(state(parts()), expected)
