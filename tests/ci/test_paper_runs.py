"""Promise: what the runs of `make papers` compare is what they name: stale rows, remapped ids, techniques."""

from importlib import import_module

import numpy as np
import pytest
import torch

from tritonrec.distributed import Communicators
from tritonrec.harness.job import Job
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import Trainer, WindowConfig
from tritonrec.pipeline.places import Buffer, OwnedRows
from tritonrec.pipeline.stage import Read

curves = import_module("consistency_curves")
mch = import_module("bench_mch")
simulate_grm = import_module("simulate_grm")


def test_stale_rows_are_those_before_the_last_update_and_updates_go_to_the_newer():
    job = Job("zipf:users=30,items=900,seed=2", batch_size=16, num_negatives=2, sizes=HSTUConfig(dim=8))
    model, tables, optimizer = job.build("sgd")
    loader = job.loader()
    sent, updated = [], []
    with Trainer(model, tables, optimizer, Communicators.local(), "sequential", WindowConfig(1)) as trainer:

        def before_update(owned: Read[OwnedRows], buffer: Read[Buffer]) -> None:
            updated.append((owned.tables[0].keys.clone(), buffer[0].clone()))

        def as_sent(owned: Read[OwnedRows], buffer: Read[Buffer]) -> None:
            sent.append((owned.tables[0].keys.clone(), buffer[0].clone()))

        trainer.program.before("exchange", as_sent)
        curves.Stale(trainer.program)  # its rows are in the buffer when `as_sent` sees it
        trainer.program.before("sparse_update", before_update)
        for step in range(4):
            trainer.step(loader.batch(step))
    stale, compared = 0, 0
    for step in range(1, 4):
        old = dict(zip(updated[step - 1][0].tolist(), updated[step - 1][1], strict=True))
        new = dict(zip(updated[step][0].tolist(), updated[step][1], strict=True))
        for key, row in zip(sent[step][0].tolist(), sent[step][1], strict=True):
            expected = old.get(key, new[key])
            assert torch.equal(row, expected), (step, key)
            stale += not torch.equal(row, new[key])
            compared += 1
    assert 0 < stale < compared


class Remapped:
    """Takes up the ids of every second batch, the first ones, and forgets those from before."""

    nbytes = 77

    def __init__(self, capacity, every):
        self.capacity, self.every, self.calls, self.rows = capacity, every, 0, {}

    def __call__(self, ids):
        self.calls += 1
        if self.calls % self.every == 0:
            self.rows = {key: row for row, key in enumerate(ids.unique().tolist()[: self.capacity])}
        return torch.tensor([self.rows.get(key, self.capacity) for key in ids.tolist()], dtype=torch.int64)


def test_remapped_ids_are_counted_and_checked():
    stream = mch.batches(6, 500, 400, 10, seed=3)
    small, large = (mch.measure(capacity, stream, 2, Remapped) for capacity in (20, 5000))
    assert 0 < large["on_the_shared_row"] < small["on_the_shared_row"] < 1
    assert small["distinct"] == len(np.unique(np.concatenate(stream)))
    assert large["peer_bytes"] == 77 + 5000 * 4 * mch.DIM


def test_a_row_that_two_ids_share_is_no_measurement():
    class Wrong(Remapped):
        def __call__(self, ids):
            return super().__call__(ids) // 2

    with pytest.raises(AssertionError, match="share a row"):
        mch.measure(5000, mch.batches(4, 500, 400, 10, seed=3), 2, Wrong)
