"""Trains with rows on disk and saves as it goes: from the newest checkpoint to step LAST, a line a save.

python disk_training.py CHECKPOINTS ROWS STORAGE [BYTES]

STORAGE is "disk", "cached", or "keys": on disk, keys too. With BYTES the process kills itself in a write of
pages of keys, once so many bytes of them are written.
"""

import os
import signal
import sys
from contextlib import suppress

from trainer_parts import batches, parts, trainer

from tritonrec.checkpoint import steps
from tritonrec.embedding import Placement
from tritonrec.embedding.index_file import IndexFile

LAST, EVERY = 60, 2


def placed(storage, rows):
    keys = {"index_memory": "0"} if storage == "keys" else {}
    return Placement("disk" if keys else storage, cache_rows=6, path=str(rows), memory="2000", **keys)


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


def die_in_a_write_of_keys(left, write=IndexFile._write):
    def dies(file, groups, there):
        nonlocal left
        if there.nbytes <= left:
            left -= there.nbytes
            return write(file, groups, there)
        size = there[0].nbytes
        whole, part = divmod(left, size)
        write(file, groups[:whole], there[:whole])
        os.pwrite(file._file._file.fileno(), there[whole].tobytes()[:part], int(groups[whole]) * size)
        os.kill(os.getpid(), signal.SIGKILL)

    IndexFile._write = dies


if __name__ == "__main__":
    checkpoints, rows, storage, *at = sys.argv[1:]
    for given in at:
        die_in_a_write_of_keys(int(given))
    with suppress(BrokenPipeError):
        train(parts(placement=placed(storage, rows)), checkpoints)
