"""Promise: a pipelined step whose every op is an emulated kernel ends at the bits of the CPU's reference run.

The model is of torch's own ops: integers, exact sums and row updates run on our kernels, whose arithmetic the
CPU shares. Dense kernels have an order of summation of their own, and are compared among Triton runs only.
"""

import pytest
import torch

from tritonrec import ops
from tritonrec.data import NextItemLoader, load
from tritonrec.distributed import Communicators
from tritonrec.embedding import (
    FeatureConfig,
    HashTableCollection,
    Placement,
    RowOptimizer,
    WarmupLinear,
)
from tritonrec.harness.emulator.driver import current
from tritonrec.harness.job import dense_optimizer
from tritonrec.harness.verify.run_case import compare_run
from tritonrec.harness.verify.state import Comparison, dense_state, loss_state, table_state
from tritonrec.kernels import dispatch
from tritonrec.pipeline import StageFailedError, Trainer, WindowConfig

pytestmark = pytest.mark.skipif(dispatch.emulated is None, reason="needs pytest --emulate")
BATCHES = [NextItemLoader(load("zipf:users=60,items=80,seed=1"), 7, 9, 1, 3).batch(step) for step in range(4)]
IN_A_STEP = {
    "unique.mark_kernel", "intersect.list_kernel", "philox.initial_rows_kernel",
    "rows.move_kernel", "segment_sum.segment_sum_kernel", "fixed_point.from_fixed_point_kernel",
}  # fmt: skip
ON_DEVICE = {
    "bucketize.place_kernel", "hash_table.find_kernel", "hash_table.claim_kernel",
    "chunked_rows.read_kernel", "chunked_rows.write_kernel",
}  # fmt: skip

LAZY = RowOptimizer("rowwise_adam", WarmupLinear(0.05, 2, 9), weight_decay=0.5, lazy_weight_decay=True)


class Scores(torch.nn.Module):
    """A loss per sample of the rows alone, in float64 sums of a fixed order."""

    def forward(self, batch, rows, seed):
        rows, tokens = rows["item"], batch.num_tokens
        score = (rows[:tokens] * rows[tokens : 2 * tokens]).double().sum(1)
        lengths = batch.offsets.diff()
        owners = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return (
            torch.zeros(len(lengths), dtype=torch.float64).index_add(0, owners, 1 - torch.tanh(score)).float()
        )


def trainer(optimizer, mode, impl, storage="host", model=Scores):
    model, rule = model(), LAZY if optimizer == "rowwise_adam" else RowOptimizer(optimizer, lr=0.05)
    tables = HashTableCollection(
        [FeatureConfig("item", 6)],
        rule,
        seed=2,
        slots=8,
        chunk_rows=32,
        placement=Placement(storage, "cpu", 20),
    )
    config = WindowConfig(1 if mode == "reference" else 4, seed=4)
    return Trainer(
        model,
        tables,
        dense_optimizer(model.parameters(), optimizer, 0.05),
        Communicators.local(),
        mode,
        config,
        impl=impl,
    )


@pytest.mark.parametrize(
    ("optimizer", "storage"),
    [
        ("adam", "host"),
        ("rowwise_adagrad", "device"),
        ("sgd", "cached"),
        ("adam", "device"),
        ("adam", "cached"),
        ("rowwise_adam", "device"),
    ],
)
def test_the_nested_pipeline_on_emulated_kernels_ends_at_the_cpus_bits(optimizer, storage):
    expected = []
    with trainer(optimizer, "reference", "cpu") as reference:
        for result in reference.run(BATCHES):
            losses = loss_state(result.sample_ids, result.losses)
            expected.append({**losses, **dense_state(reference.dense), **table_state(reference.tables)})
    before = {name: row.launches for name, row in current().rows.items()}
    with trainer(optimizer, "nestpipe", "triton", storage) as running:
        comparison = Comparison(running.program.tables, rank=0, world_size=1)
        compare_run(running, [BATCHES], comparison, expected.__getitem__, BATCHES[-1].step)
    assert comparison.first is None, comparison.first
    assert comparison.steps_seen == {(step, part) for step in range(4) for part in ("loss", "table")}
    launched = {name for name, row in current().rows.items() if row.launches > before.get(name, 0)}
    update = f"sparse_optimizers.{'rowwise' if 'rowwise' in optimizer else 'elementwise'}_kernel"
    assert {*IN_A_STEP, update, *(ON_DEVICE if storage != "host" else ())} <= launched, launched
    assert ops.implementation("auto", torch.ones(1)) == "cpu"


class Unbounded(Scores):
    """Its losses are infinite from the second step on."""

    def forward(self, batch, rows, seed):
        return super().forward(batch, rows, seed) * (torch.inf if batch.step else 1.0)


def test_a_sum_that_does_not_exist_is_an_error_of_its_step_though_nobody_waited_for_it():
    with trainer("adam", "nestpipe", "triton", "device", Unbounded) as running:
        steps = running.run(BATCHES)
        assert next(steps).step == 0
        with pytest.raises(StageFailedError, match="step 1 failed: ExactSumError: embedding gradient"):
            next(steps)
