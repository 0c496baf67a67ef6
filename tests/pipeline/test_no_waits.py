"""Promise: with tables on a device no stage waits for it but `route`, and none mixes it with the host.

The device has shapes and no values: whatever looks at a value fails, and so does an op on tensors of two
devices.
"""

import pytest
import torch
from no_values import DEVICE, device_without_values
from trainer_parts import DIM, Ranker, batches

from tritonrec.distributed import Communicators
from tritonrec.embedding import (
    DenseOptimizer,
    DynamicTable,
    FeatureConfig,
    HashTableCollection,
    KeyLayout,
    Placement,
    RowOptimizer,
    TablePolicy,
)
from tritonrec.pipeline import Trainer, WindowConfig, reference
from tritonrec.pipeline.flight import on_the_callers_thread
from tritonrec.pipeline.reference import run_sequentially
from tritonrec.pipeline.stages import input_dist
from tritonrec.pipeline.streams import HostStreams

LATE = TablePolicy(admission=2, admission_window=1000)
STORAGES = ["device", "cached"]


@pytest.fixture(autouse=True)
def no_values():
    with device_without_values():
        yield


def placed(storage):
    return Placement(storage, str(DEVICE), cache_rows=7)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("policy", [TablePolicy(), LATE], ids=["all", "admitted"])
@pytest.mark.parametrize("layout", [None, KeyLayout(("a", "b"))], ids=["alone", "merged"])
def test_lookups_and_updates_of_a_table(storage, policy, layout):
    table = DynamicTable(3, 5, layout=layout, slots=8, chunk_rows=4, policy=policy, placement=placed(storage))
    table.track_changes()
    keys = torch.empty(6, dtype=torch.int64, device=DEVICE)
    for step in range(1, 5):  # at 0 candidates are forgotten
        found = table.lookup(keys, step, count=torch.empty((), dtype=torch.int64, device=DEVICE))
        values = table.gather(found.handles, keys, initial=policy is LATE)
        table.update(found.handles, values)
    assert table._rows.end == 24


def trainer(storage, policy, mode, **window):
    rule, model = RowOptimizer("adam"), Ranker().to(DEVICE)
    feature = FeatureConfig("item", DIM, policy=policy)
    tables = HashTableCollection([feature], rule, slots=8, chunk_rows=32, placement=placed(storage))
    dense = DenseOptimizer(model.named_parameters(), rule)
    config = WindowConfig(**window)
    return Trainer(
        model, tables, dense, Communicators.local(), mode, config, device=DEVICE, streams=HostStreams()
    )


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("policy", [TablePolicy(), LATE], ids=["all", "admitted"])
@pytest.mark.parametrize("consistency", ["batch", "window"])
@pytest.mark.parametrize(
    "switches",
    [{}, {"first_use": True}, {"dedup": "none"}, {"dedup": "exchange"}, {"skip_fetch": True}],
    ids=str,
)
def test_every_stage_of_a_step(monkeypatch, storage, policy, consistency, switches):
    # one key for each owner and micro-batch: the only numbers that the host waits for
    monkeypatch.setattr(input_dist, "to_host", lambda sizes: torch.ones(sizes.shape, dtype=torch.int64))
    training = trainer(storage, policy, "nestpipe", micro_batches=3, consistency=consistency, **switches)
    for batch in batches(4)[1:]:
        window = training._next_window(iter([batch]))
        with on_the_callers_thread("auto"):
            run_sequentially(training.program, training._begin(window), training._span)
    assert len(training.program.model.seen) == 9


def test_the_reference_computes_on_the_device_of_the_model(monkeypatch):
    """Its tables are in host memory, where rows without values are written as zeros."""
    monkeypatch.setattr(reference, "to_host", lambda values: torch.zeros(values.shape, dtype=values.dtype))
    monkeypatch.setattr(reference.ops, "unique", lambda keys: (keys, torch.empty_like(keys), None))
    training = trainer("host", TablePolicy(), "reference")
    losses = training.reference.step(batches(1))
    assert losses[0].device == DEVICE and losses[0].shape == (7,)
