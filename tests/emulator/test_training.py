"""Promise: a pipelined step whose every op is an emulated kernel ends at the bits of the CPU's reference run.

The model is of torch's own ops: integers, exact sums and row updates run on our kernels, whose arithmetic the
CPU shares. Dense kernels have an order of summation of their own, and are compared among Triton runs only.
"""

import threading
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from speeds import slow_except

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
from tritonrec.harness.job import Job, dense_optimizer
from tritonrec.harness.verify.run_case import compare_run
from tritonrec.harness.verify.state import Comparison, dense_state, loss_state, table_state
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.kernels import dispatch
from tritonrec.kernels.op import Op
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import PIPELINED, StageFailedError, Trainer, WindowConfig

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
        ("rowwise_lamb", "device"),
        ("ftrl", "cached"),
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
    assert comparison.steps_seen == {(step, part) for step in range(4) for part in ("loss", "table item")}
    launched = {name for name, row in current().rows.items() if row.launches > before.get(name, 0)}
    kernel = "norm" if "lamb" in optimizer else "rowwise" if "rowwise" in optimizer else "elementwise"
    update = f"sparse_optimizers.{kernel}_kernel"
    assert {*IN_A_STEP, update, *(ON_DEVICE if storage != "host" else ())} <= launched, launched
    assert ops.implementation("auto", torch.ones(1)) == "cpu"


HOST = {"hash_find", "hash_insert", "hash_move"}  # keys of tables in host memory
# of arguments and parameters in host memory, where these are
CHECKS = {"first_outside", "add_bits", "add_chunks"}


@contextmanager
def recorded(monkeypatch):
    """Ops by implementation, and functions of the CPU's kernels, of all threads that begin inside."""
    chosen, called, implementation_of = defaultdict(set), set(), Op._implementation

    def implementation(op, name):
        chosen[name].add(op.name)
        return implementation_of(op, name)

    def profile(frame, event, _argument):
        place = Path(frame.f_code.co_filename)
        if event == "call" and place.name.startswith(("numba_", "cpu_")) and "kernels" in place.parts:
            called.add(frame.f_code.co_name)

    monkeypatch.setattr(Op, "_implementation", implementation)
    threading.setprofile(profile)
    try:
        yield chosen, called
    finally:
        threading.setprofile(None)


def hstu_job(storage, world_size):
    """A model whose dense layers are kernels, too."""
    sizes = HSTUConfig(dim=16, layers=1, heads=1, qk_dim=16, v_dim=16, max_seq_len=9, dropout=0.2)
    log, placement = "zipf:users=60,items=80,seed=1", Placement(storage, "cpu", 400)
    return Job(log, "hstu", 7 * world_size, 9, 3, sizes=sizes, placement=placement)


@pytest.mark.parametrize("world_size", slow_except([1], [1, 2]))
@pytest.mark.parametrize("storage", ["host", "device", "cached"])
@pytest.mark.parametrize("mode", slow_except(["nestpipe"], PIPELINED))
def test_no_stage_falls_back_to_the_cpu(monkeypatch, mode, storage, world_size):
    job = hstu_job(storage, world_size)
    loaders = [job.loader(rank, world_size) for rank in range(world_size)]
    batches = [[loader.batch(step) for step in range(3)] for loader in loaders]

    def train(ranks):
        with Trainer(*job.build("adam"), ranks, mode, WindowConfig(4, seed=4), impl="triton") as running:
            return [result.loss for result in running.run(batches[ranks.rank])]

    with recorded(monkeypatch) as (chosen, called):
        losses = run_ranks(world_size, train)
    assert all(len(each) == 3 for each in losses)
    assert {name: ops for name, ops in chosen.items() if name != "triton"} == {}
    assert {"linear", "linear_weight_grad", "segment_sum_into", "sparse_adam"} <= chosen["triton"]
    assert storage == "host" or "hash_insert" in chosen["triton"]
    assert mode == "fwp" or chosen["triton"] & {"intersect", "intersect_padded"}
    assert called - {"<module>"} <= CHECKS | (HOST if storage == "host" else set())


def test_later_steps_compile_nothing():
    """`tests/ci/test_specialised.py` asks launches; here Triton decides, also by seeds and by the tables."""
    job, programs, sizes = hstu_job("device", 1), [], set()
    batches = [job.loader().batch(step) for step in range(8)]
    with Trainer(
        *job.build("adam"), Communicators.local(), config=WindowConfig(4, seed=4), impl="triton"
    ) as running:
        for result, batch in zip(running.run(batches), batches, strict=True):
            programs.append({name: row.programs for name, row in current().rows.items()})
            sizes.add((result.step, batch.num_tokens))
    assert len({tokens for _, tokens in sizes}) > 2
    # of the tiles there is one for each power of two of a batch's blocks
    assert {n: k for n, k in programs[-1].items() if programs[2][n] != k and n != "tiles.order_kernel"} == {}


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
