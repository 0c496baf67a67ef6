"""Trains with rows on disk and saves as it goes: from the newest checkpoint to step LAST, a line a save.

python disk_training.py CHECKPOINTS ROWS STORAGE
"""

import sys
from contextlib import suppress

from trainer_parts import DIM, Ranker, batches, optimizer_of, trainer

from tritonrec.checkpoint import steps
from tritonrec.embedding import FeatureConfig, HashTableCollection, Placement, RowOptimizer, TablePolicy

LAST, EVERY = 60, 2


def made(placement):
    model, rule = Ranker(), RowOptimizer("adam", lr=0.05)
    feature = FeatureConfig("item", DIM, policy=TablePolicy())
    tables = HashTableCollection([feature], rule, seed=2, slots=8, chunk_rows=32, placement=placement)
    return model, tables, optimizer_of(model)


def train(parts, folder=None):
    with trainer(parts) as training:
        given = batches(LAST)
        if folder is None:
            list(training.run(given))
            return
        with training.saver(folder, full_every=4) as saver:
            first = training.load(saver) if steps(folder) else 0
            for result in training.run(given[first:], saver=saver, save_every=EVERY):
                if result.step > first and not result.step % EVERY:
                    print(result.step, flush=True)  # begun; it goes on beside the next steps


if __name__ == "__main__":
    checkpoints, rows, storage = sys.argv[1:]
    with suppress(BrokenPipeError):
        train(made(Placement(storage, cache_rows=6, path=rows, memory="2000")), checkpoints)
