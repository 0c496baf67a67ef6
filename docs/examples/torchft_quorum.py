"""Ranks that come and go by torchft's quorum, with the digits of one rank.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 &
    export TORCHFT_LIGHTHOUSE=http://host0:29510
    python docs/examples/torchft_quorum.py /shared/run  # a rank; as many as wanted, at any time

The lighthouse says who is there. At another answer all join anew, and go on from the newest checkpoint in the
folder, which all of them see.
"""

import os
import socket
import sys
import threading
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist
from torchft.coordination import LighthouseClient

from tritonrec import Communicators, FeatureConfig, HashTableCollection, RowOptimizer, Trainer, checkpoint
from tritonrec.data import NextItemLoader, load
from tritonrec.nn import HSTU, HSTUConfig

folder, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 60
name, minute = f"{socket.gethostname()}-{uuid4()}", timedelta(seconds=60)
store = dist.TCPStore(
    socket.gethostname(), 0, is_master=True, wait_for_workers=False
)  # others may meet at it
lighthouse = LighthouseClient(os.environ["TORCHFT_LIGHTHOUSE"], minute)
over = threading.Event()
log = load("zipf:users=400,items=600,seed=3")


def beat():
    while not over.wait(0.2):
        lighthouse.heartbeat(name)


def quorum():
    """Its number, and its members in an order that all know."""
    found = lighthouse.quorum(name, minute, address=name, store_address=f"{store.host}:{store.port}", step=0)
    return found.quorum_id, sorted(found.participants, key=lambda member: member.replica_id)


def train(number, members):
    """The step, and another quorum where a rank has come."""
    host, port = members[0].store_address.rsplit(":", 1)
    meet = dist.PrefixStore(f"quorum {number}", dist.TCPStore(host, int(port), is_master=False))
    rank = [member.replica_id for member in members].index(name)
    dist.init_process_group("gloo", store=meet, rank=rank, world_size=len(members), timeout=minute)
    ranks = Communicators.over(range(len(members)))
    loader = NextItemLoader(log, 64, 20, 8, seed=0, rank=rank, world_size=len(members))
    torch.manual_seed(0)
    model = HSTU(HSTUConfig(dim=32, max_seq_len=20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    tables = HashTableCollection([FeatureConfig("item", dim=32)], RowOptimizer("adam", lr=1e-2))
    with Trainer(model, tables, optimizer, ranks) as trainer:
        if checkpoint.steps(folder):
            trainer.load(folder)
        while trainer.next_step < steps:
            part = range(trainer.next_step, min(trainer.next_step + 5, steps))
            for result in trainer.run(loader.batch(step) for step in part):
                print(
                    f"step {result.step + 1}: loss {result.loss:.6f}, rank {rank} of {len(members)}",
                    flush=True,
                )
            trainer.save(folder)
            if (found := quorum())[0] != number:  # all ask at the same step, and get the same answer
                return trainer.next_step, found
        return steps, None


beats = threading.Thread(target=beat)
beats.start()
try:
    step, found = 0, quorum()
    while step < steps:
        try:
            step, found = train(*found)
        except RuntimeError as error:  # a rank is gone; the lighthouse finds out too
            print(f"again, since {str(error).splitlines()[0]}", flush=True)
            found = quorum()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
finally:
    over.set()
    beats.join()
