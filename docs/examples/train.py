"""A next-item model on dynamic tables: the same digits on one rank and on many.

python docs/examples/train.py
torchrun --nproc-per-node 2 docs/examples/train.py
"""

import torch

from tritonrec import FeatureConfig, HashTableCollection, RowOptimizer, Trainer, WindowConfig
from tritonrec.data import NextItemLoader, load
from tritonrec.distributed import from_environment
from tritonrec.nn import HSTU, HSTUConfig

with from_environment() as ranks:  # torchrun's variables, or one process
    log = load("zipf:users=400,items=600,seed=3")  # or a file, a published log, a data frame
    loader = NextItemLoader(log, 64, 20, 8, seed=0, rank=ranks.rank, world_size=ranks.world_size)
    torch.manual_seed(0)
    model = HSTU(HSTUConfig(dim=32, max_seq_len=20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)  # any of torch
    rows = RowOptimizer("adam", lr=1e-2)
    tables = HashTableCollection([FeatureConfig("item", dim=32)], rows)  # any int64 id; grows by itself
    window = WindowConfig(micro_batches=4)
    with Trainer(model, tables, optimizer, ranks, "nestpipe", window) as trainer:
        for result in trainer.run(loader.batch(step) for step in range(20)):
            if ranks.rank == 0 and (result.step + 1) % 5 == 0:
                print(f"step {result.step + 1}: loss {result.loss:.4f}", flush=True)
