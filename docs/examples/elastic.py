"""A rank may die at any time: the others go on, and the digits stay those of one rank.

python docs/examples/elastic.py out/elastic
bash docs/examples/elastic.sh out/elastic      # three ranks, an agent of torchrun for each; kill one
"""

import os
import sys

import torch

from tritonrec import FeatureConfig, HashTableCollection, PeerCopies, RowOptimizer, Trainer, run_elastic
from tritonrec.data import NextItemLoader, load
from tritonrec.nn import HSTU, HSTUConfig

folder, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 60
log = load("zipf:users=400,items=600,seed=3")
copies = PeerCopies()


def say(line):
    sys.stdout.write(f"{line}\n")  # print writes the end apart under torchrun, and lines of ranks would mix
    sys.stdout.flush()


def train(ranks):  # once more with the ranks that are left, each time that some are lost
    loader = NextItemLoader(log, 64, 20, 8, seed=0, rank=ranks.rank, world_size=ranks.world_size)
    torch.manual_seed(0)
    model = HSTU(HSTUConfig(dim=32, max_seq_len=20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    tables = HashTableCollection([FeatureConfig("item", dim=32)], RowOptimizer("adam", lr=1e-2))
    with Trainer(model, tables, optimizer, ranks) as trainer, trainer.saver(folder) as saver:
        copies.restore(trainer, folder)  # the newest: in the ranks' memory, or on the disk
        start = f"rank {ranks.rank} of {ranks.world_size}, step {trainer.next_step}"
        say(f"process {os.getpid()} begins: {start}")
        while trainer.next_step < steps:
            part = range(trainer.next_step, min(trainer.next_step + 5, steps))
            for result in trainer.run(loader.batch(step) for step in part):
                if ranks.rank == 0:
                    say(f"step {result.step + 1}: loss {result.loss:.6f}")
            copies.keep(trainer)
            if trainer.next_step % 20 == 0:
                saver.save(trainer.next_step)


run_elastic(train)
