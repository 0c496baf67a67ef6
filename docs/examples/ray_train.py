"""The model of train.py under Ray Train: the same digits on any number of workers, and after one is lost.

    python docs/examples/ray_train.py out/ray                # two workers on this machine
    RAY_ADDRESS=auto python docs/examples/ray_train.py /shared/ray 8     # eight, on the cluster that is there

The folder has to be one that all workers see: a checkpoint has the part of each.
"""

import os
import sys

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer

from tritonrec import Communicators, FeatureConfig, HashTableCollection, RowOptimizer, Trainer, checkpoint
from tritonrec.data import NextItemLoader, load
from tritonrec.nn import HSTU, HSTUConfig

STEPS, EVERY = 20, 5


def train(config):  # on every worker; Ray has joined them in a process group
    ranks = Communicators.over(range(dist.get_world_size()))
    log = load("zipf:users=400,items=600,seed=3")
    loader = NextItemLoader(log, 64, 20, 8, seed=0, rank=ranks.rank, world_size=ranks.world_size)
    torch.manual_seed(0)
    model = HSTU(HSTUConfig(dim=32, max_seq_len=20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    tables = HashTableCollection([FeatureConfig("item", dim=32)], RowOptimizer("adam", lr=1e-2))
    with Trainer(model, tables, optimizer, ranks) as trainer:
        if checkpoint.steps(config["folder"]):  # Ray has started the workers anew
            trainer.load(config["folder"])
        while trainer.next_step < STEPS:
            part = range(trainer.next_step, trainer.next_step + EVERY)
            for result in trainer.run(loader.batch(step) for step in part):
                if ranks.rank == 0:
                    print(f"step {result.step + 1}: loss {result.loss:.6f}", flush=True)
            trainer.save(config["folder"])
            ray.train.report({"step": trainer.next_step, "loss": result.loss})


if __name__ == "__main__":
    folder, workers = os.path.abspath(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2
    TorchTrainer(
        train,
        train_loop_config={"folder": f"{folder}/checkpoints"},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),  # use_gpu=True where there are some
        run_config=ray.train.RunConfig(
            name="run", storage_path=folder, failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    ).fit()
