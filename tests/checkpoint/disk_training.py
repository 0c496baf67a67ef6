"""Trains with rows on disk and saves as it goes: from the newest checkpoint to step LAST, a line a save.

python disk_training.py CHECKPOINTS ROWS STORAGE
"""

import sys
from contextlib import suppress

from trainer_parts import batches, parts, trainer

from tritonrec.checkpoint import steps
from tritonrec.embedding import Placement

LAST, EVERY = 60, 2


def train(made, folder=None):
    with trainer(made) as training:
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
        placement = Placement(storage, cache_rows=6, path=rows, memory="2000")
        train(parts(placement=placement), checkpoints)
