"""Kill a training that publishes at random moments; each state that a replica shows must be the trainer's.

    python ci/attack/kill_publisher.py --kills 500 --seed 7
    python ci/attack/kill_publisher.py --kills 50 --sink 'redis://127.0.0.1:6379/0?key=kills'

A training publishes every two steps and saves a checkpoint every four. It gets SIGKILL at a random moment, of
its start too, and is started again: at the published step it continues the sequence, before it it begins an
epoch. A follower polls meanwhile. Whenever it goes on, its rows and dense values are compared with those of a
training that nobody killed. A training that came to its end is followed by a new one in a new place. The last
line is a JSON object; exit status 1 where a state was another one, or a poll raised an error that does not
pass.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import sys
import time
import warnings
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tritonrec import Communicators, FeatureConfig, HashTableCollection, RowOptimizer, Trainer
from tritonrec import checkpoint as checkpoints
from tritonrec.data import NextItemLoader, load
from tritonrec.embedding import Eviction, TablePolicy
from tritonrec.nn import HSTU, HSTUConfig
from tritonrec.pipeline import WindowConfig
from tritonrec.serving.live import Follower, LiveError, Publisher
from tritonrec.serving.live.wire import digest_of

STEPS, EVERY, SAVE_EVERY = 40, 2, 4
PATIENCE = 300.0
"""Seconds in which a training that nobody kills must end."""


def made() -> tuple[Trainer, NextItemLoader]:
    """The training, in the same bits each time."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = HSTU(HSTUConfig(dim=6, layers=1, heads=2, qk_dim=3, v_dim=4, max_seq_len=6))
    feature = FeatureConfig("item", 6, policy=TablePolicy(Eviction("lru", capacity=40)))
    tables = HashTableCollection([feature], RowOptimizer("adam", lr=0.05), seed=2, slots=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    config = WindowConfig(micro_batches=2)
    trainer = Trainer(model, tables, optimizer, Communicators.local(), "sequential", config)
    return trainer, NextItemLoader(load("zipf:users=60,items=120,seed=1"), 4, 6, 1, 3)


def state_of(trainer: Trainer) -> str:
    ids, weights = trainer.tables.weights()["item"]
    dense = trainer.dense.evaluated.state_dict()
    return digest_of(
        {"ids": ids, "weights": weights, **{f"dense {name}": each for name, each in dense.items()}}
    )


def state_shown(follower: Follower) -> tuple[int, str]:
    predictor = follower.predictor
    table, dense = predictor.tables["item"], predictor.program.state_dict()
    own = {f"dense {name.removeprefix('module.model.')}": each for name, each in dense.items()}
    return predictor.step, digest_of({"ids": table.ids, "weights": table.weights, **own})


def publish(sink: str, saved: str, ready: str) -> None:
    """Train on from the newest checkpoint, and publish."""
    warnings.simplefilter("ignore")
    trainer, loader = made()
    if checkpoints.steps(saved):
        trainer.load(saved)
    with trainer, trainer.saver(saved) as saver:
        Path(ready).touch()
        with Publisher(trainer, sink, every=EVERY, snapshot_every=5, patience=30) as publisher:
            for first in range(trainer.next_step, STEPS, SAVE_EVERY):
                for _ in publisher.run(loader.batch(step) for step in range(first, first + SAVE_EVERY)):
                    time.sleep(0.01)
                saver.save(trainer.next_step)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="end earlier, after so many")
    parser.add_argument("--folder", type=Path, help="an absent one; a temporary one by default")
    parser.add_argument("--sink", default="", help="another place than the folder, such as redis://...")
    given = parser.parse_args()
    draw, began = random.Random(given.seed), time.monotonic()
    trainer, loader = made()
    want = {0: state_of(trainer)}
    for result in trainer.run(loader.batch(step) for step in range(STEPS)):
        want[result.step + 1] = state_of(trainer)
    trainer.close()
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tritonrec.serving.live", "tritonrec.pipeline", "torch._dynamo"])
    counts = {"kills": 0, "runs": 0, "epochs": 0, "compared": 0, "wrong": 0, "refused": 0}
    with TemporaryDirectory(prefix="tritonrec-") as temporary:
        root = given.folder or Path(temporary, "kills")
        while counts["kills"] < given.kills and time.monotonic() - began < given.seconds:
            shutil.rmtree(root, ignore_errors=True)
            counts["runs"] += 1
            sink = f"{given.sink}-{given.seed}-{counts['runs']}" if given.sink else str(root / "sink")
            _one_run(processes, draw, given, root, sink, want, counts, began)
        shutil.rmtree(root, ignore_errors=True)
    counts["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(counts))
    return int(counts["wrong"] > 0)


def _one_run(processes, draw, given, root, sink, want, counts, began) -> None:
    """Kill and start one training until it ends, and follow it."""
    follower: Follower | None = None
    seen = 0
    ended = False

    def look(strict: bool = False) -> None:
        nonlocal follower, seen
        try:
            if follower is None:
                follower = Follower.open(sink)
            else:
                follower.poll()
        except LiveError as error:
            if strict:
                counts["wrong"] += 1
                print(f"refused at the end: {error}")
            elif follower is not None:
                counts["refused"] += 1
                print(f"refused: {type(error).__name__}: {error}")
        if follower is not None and follower.sequence != seen:
            seen = follower.sequence
            step, state = state_shown(follower)
            counts["compared"] += 1
            if want[step] != state:
                counts["wrong"] += 1
                print(f"another state at step {step}, sequence {seen} in {sink}")

    while not ended:
        spared = counts["kills"] >= given.kills or time.monotonic() - began > given.seconds
        ready = root / "ready"
        ready.unlink(missing_ok=True)
        root.mkdir(exist_ok=True, parents=True)
        process: BaseProcess = processes.Process(target=publish, args=(sink, str(root / "saved"), str(ready)))
        process.start()
        end = time.monotonic() + PATIENCE
        while not ready.exists() and process.is_alive() and time.monotonic() < end:
            look()
            time.sleep(0.01)
        delay = draw.choice([draw.uniform(0, 0.3), draw.uniform(0, 4)])
        end = time.monotonic() + (PATIENCE if spared else delay)
        while process.is_alive() and time.monotonic() < end:
            look()
            time.sleep(0.002)
        if process.is_alive():
            process.kill()
            counts["kills"] += not spared
            counts["wrong"] += spared
        process.join()
        ended = process.exitcode == 0 or spared
    look(strict=True)
    if follower is not None:
        counts["epochs"] += follower._state.epoch
        if process.exitcode == 0 and follower.step != STEPS:
            counts["wrong"] += 1
            print(f"the end shows step {follower.step}, not {STEPS}")


if __name__ == "__main__":
    sys.exit(main())
