"""Bytes of all tensors on rank 0 with a whole dense model and with one that `fully_shard` has sharded.

    torchrun --nproc-per-node 4 ci/benchmarks/measure_sharded.py

HSTU with 5.3 million parameters under Adam and small tables, in a forward and when the optimizer updates.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tritonrec import Communicators, Trainer, WindowConfig
from tritonrec.distributed import from_environment
from tritonrec.harness.job import Job
from tritonrec.nn import HSTUConfig

SIZES = HSTUConfig(dim=512, layers=4, heads=4, qk_dim=128, v_dim=128, max_seq_len=20)
JOB = Job(
    "zipf:users=60,items=200,seed=1", batch_size=8, max_seq_len=20, num_negatives=1, sizes=SIZES,
    fused=False, chunk_rows=512,
)  # fmt: skip


def held() -> int:
    """Bytes of the memory under all tensors, each counted once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    local = (each.to_local() if isinstance(each, DTensor) else each for each in tensors)
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in local}
    return sum(storages.values())


def shard(model: Any) -> None:
    for each in (*model.layers, model):
        fully_shard(each)


def measure(communicators: Communicators, sharded: bool) -> dict[str, int]:
    """Bytes in the second step."""
    model: Any
    model, tables, optimizer = JOB.build("adam", shard if sharded else lambda model: None)
    assert optimizer is not None
    found = {"parameters": 4 * sum(each.numel() for each in model.parameters())}
    loader = JOB.loader(communicators.rank, communicators.world_size)
    window = WindowConfig(micro_batches=2)
    with Trainer(model, tables, optimizer, communicators, "sequential", window) as trainer:
        trainer.step(loader.batch(0))
        model.layers[-1].register_forward_hook(lambda *_: found.update(forward=held()))
        optimizer.register_step_pre_hook(lambda *_: found.update(update=held()))
        trainer.step(loader.batch(1))
    return found


def main() -> None:
    torch.set_num_threads(1)
    with from_environment() as communicators:
        for sharded in (False, True):
            found = measure(communicators, sharded)
            if communicators.rank == 0:
                megabytes = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in found.items())
                print(f"{'sharded' if sharded else 'whole'}: {megabytes}", flush=True)


if __name__ == "__main__":
    main()
