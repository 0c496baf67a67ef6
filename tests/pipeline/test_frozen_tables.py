"""Promise: frozen tables stay as they are in every mode; a trainer takes no rows that it cannot train."""

import pytest
import torch
from speeds import slow_except
from trainer_parts import NoParameters, batches, same, trainer

from tritonrec.embedding import FeatureConfig, HashEmbedding, HashTableCollection, RowOptimizer
from tritonrec.pipeline import MODES


@pytest.mark.parametrize("mode", slow_except(["reference", "nestpipe"], MODES))
@pytest.mark.parametrize("clips", [0.0, 0.1])
def test_frozen_tables_stay_in_every_mode(mode, clips):
    def trained(mode):
        tables = HashTableCollection([FeatureConfig("item", 6)], RowOptimizer("adam", lr=0.1), seed=2)
        model = NoParameters()
        with trainer((model, tables, None), mode, max_grad_norm=clips) as training:
            list(training.run(batches(2)))
            before = tables.export()["item"]
            tables.requires_grad_(False)
            norms = [result.grad_norm for result in training.run(batches(3)[2:])]
            ids, rows = tables.export()["item"]
            assert len(ids) > len(before[0])  # new ids appear, as they begin
            old = torch.isin(ids, before[0])
            assert torch.equal(rows[old], before[1])
            assert torch.equal(rows[~old], tables.initial_rows("item", ids[~old]))
            tables.requires_grad_()
            list(training.run(batches(4)[3:]))
        assert not clips or norms[0] == 0.0
        assert not torch.equal(tables.current_rows("item", before[0]), before[1])
        return [*tables.export()["item"]]

    assert same(trained(mode), trained("reference"))


def test_a_trainer_refuses_a_model_with_rows_of_its_own():
    net = torch.nn.ModuleDict({"item": HashEmbedding(3)})
    tables = HashTableCollection([FeatureConfig("item", 6)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"rows of its own \(item.rows\), .*HashTableCollection"):
        trainer((net, tables, optimizer))
