"""What a reader has before a page's first block, or before one of its blocks: functions that return names."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from tritonrec import (
    Communicators,
    FeatureConfig,
    HashTableCollection,
    RowOptimizer,
    Trainer,
    WindowConfig,
    ops,
)
from tritonrec.data import ClickLoader, NextItemLoader, load, load_clicks
from tritonrec.data.convert_sequences import write_sequences
from tritonrec.nn import DLRM, HSTU, DLRMConfig, HSTUConfig


def loop(dim=16):
    """A next-item model with its batches, tables and optimizer."""
    loader = NextItemLoader(load("zipf:users=40,items=60,seed=3"), 16, 10, 4, seed=0)

    def build_model():
        torch.manual_seed(0)
        return HSTU(HSTUConfig(dim=dim, heads=2, qk_dim=8, v_dim=8, max_seq_len=10))

    model = build_model()
    return {
        "build_model": build_model,
        "model": model,
        "loader": loader,
        "tables": HashTableCollection([FeatureConfig("item", dim)], RowOptimizer("adam", lr=3e-3)),
        "optimizer": torch.optim.Adam(model.parameters(), lr=3e-3),
        "communicators": Communicators.local(),
        "batches": [loader.batch(step) for step in range(3)],
        "more_batches": [loader.batch(step) for step in range(3, 6)],
        "rank": 0,
        "world_size": 1,
    }


def trainer(names):
    parts = (names[name] for name in ("model", "tables", "optimizer", "communicators"))
    return Trainer(*parts, "nestpipe", WindowConfig(micro_batches=2))


def wide_loop():
    return loop(dim=64)


def running():
    """`faults`: a trainer in its loop, with a saver."""
    names = loop()
    trained = trainer(names)
    return {**names, "trainer": trained, "steps": 3, "saver": trained.saver("checkpoints")}


def training_before_saving():
    """A trainer between two runs; the page's own ran out of its `with`."""
    return {"trainer": trainer(loop())}


def checkpoints():
    """One rank's state."""
    keys = torch.arange(5)
    columns = {"keys": keys, "rows": torch.randn(5, 8)}
    return {
        "rank": 0, "world_size": 1, "gather": lambda text: [text], "step": 3, "meta": {"note": "first"},
        "dense": {"weight": torch.randn(3)}, "tables": {"items": columns},
        "changed_rows": {"items": columns}, "gone": {"items": keys[:0]},
    }  # fmt: skip


def checkpoints_before_loading():
    columns = {"keys": torch.empty(0, dtype=torch.int64), "rows": torch.empty(0, 8)}
    return {"tables": {"items": columns}}


def a_stream_of_sequences():
    """`checkpoints`: a trainer, and sequences in Parquet."""
    Path("sequences").mkdir()
    write_sequences([load("zipf:users=40,items=60,seed=3")], Path("sequences"), 20, 10)
    return {"trainer": trainer(loop())}


def step_on_padded_lists():
    """`ops`: a table of the reader's own with 16 slots."""
    numbers = {name: torch.zeros((), dtype=torch.int64) for name in ("next_row", "full", "lost", "used")}
    tensors = {
        "keys": torch.tensor([7, 3, 7, 7, 3]),
        "slot_keys": torch.zeros(16, dtype=torch.int64),
        "slot_rows": torch.full((16,), -1, dtype=torch.int32),
        "weight": torch.zeros(8, 4),
        "momentum": torch.zeros(8, 1),
        "gradients": torch.randn(5, 4),
    }
    return {**numbers, **tensors, "world_size": 3, "dim": 4, "seed": 0, "table": 0, "scale": 0.5, "lr": 0.1}


def sums_to_send():
    sums = torch.tensor([[1, 2], [2**40, -(2**62)], [0, 0], [3, -300]])
    widths, packed = ops.pack_rows(sums, torch.tensor([3, 1]))
    return {
        "sums": sums, "rows": torch.tensor([3, 2, 1]), "rows_to_each_rank": [2, 1], "dim": 2,
        "own_sums": torch.zeros(3, 2, dtype=torch.int64), "segments": torch.tensor([0, 2]),
        "their_widths": widths, "their_packed": packed,
    }  # fmt: skip


def table_of_hostile_keys():
    names = step_on_padded_lists()
    return {**names, "keys": torch.tensor([7, 3, -9])}


def clicks():
    """`slipstream`: a DLRM with its loader, in a trainer."""
    log = load_clicks("criteo:samples=300,scale=0.0001,seed=4")
    model = DLRM(DLRMConfig(log.features, log.dense.shape[1], 4, (8,), (8,)))
    names = {
        "model": model,
        "loader": ClickLoader(log, 24, 0),
        "tables": HashTableCollection(
            [FeatureConfig(name, 4) for name in log.features], RowOptimizer("rowwise_adagrad", lr=0.05)
        ),
        "optimizer": torch.optim.Adagrad(model.parameters(), lr=0.05),
        "communicators": Communicators.local(),
        "steps": 260,
    }
    return {**names, "trainer": trainer(names)}


def served():
    """One rank with torchrun's variables; a DLRM with its tables, and batches of clicks."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    log = load_clicks("criteo:samples=60,scale=0.0001,seed=4")
    loader = ClickLoader(replace(log, categories=log.categories % 50), 8, 0)
    return {
        "model": DLRM(DLRMConfig(log.features, log.dense.shape[1], 4, (8,), (8,))),
        "tables": {name: torch.randn(50, 4) for name in log.features},
        "batches": [loader.batch(step) for step in range(3)],
        "batch_size": 8,
    }


def rows_to_serve():
    return {"group": dist.group.WORLD, "k": 2, "values": torch.randn(5, 4), "send": [5]}


def another_process_group():
    dist.destroy_process_group()
    return {"received": torch.empty(5, 4), "receive": [5]}


def an_array():
    return {"x": torch.randn(70)}


GIVEN = {
    "checkpoints": checkpoints,
    "checkpoints 1": checkpoints_before_loading,
    "checkpoints 2": a_stream_of_sequences,
    "emulator": an_array,
    "faults": running,
    "ops": step_on_padded_lists,
    "ops 1": sums_to_send,
    "ops 2": table_of_hostile_keys,
    "serving 4": served,
    "serving 5": rows_to_serve,
    "serving 6": another_process_group,
    "slipstream": clicks,
    "traces": loop,
    "training": loop,
    "training 2": training_before_saving,
    "verifying": wide_loop,
}
"""By page, or page and number of its Python block from 0."""
