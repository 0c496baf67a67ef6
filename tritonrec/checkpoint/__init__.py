"""Elastic checkpoints: whole or not there, written by every rank, loaded at any world size.

::

    directory/
      step-000000000040.json                      manifest: a checkpoint exists when this does
      step-000000000040/
        dense.1c9f2a....safetensors               replicated tensors, by rank 0
        items.0000-7fff.88b03e....safetensors     rows of table "items" in these slices of the hash, by rank 0
        items.8000-ffff.0d51c7....safetensors     by rank 1
      step-000000000060.json                      names files of step 40 too where it is incremental
      step-000000000060/...

Files are written under another name, flushed to the disk and renamed, the manifest last, so a crash of any
rank or a full disk at any moment leaves the checkpoints before it as they were. The last two are kept, with
what they build upon. Nothing is pickled. One run writes into a directory at a time: it holds a lock on the
file ``.lock`` there, and a second run is refused.

::

    save(directory, step, dense, tables, meta, *, rank=0, world_size=1, gather=alone, base=None, erased=None)
        -> Saved(step, path, sha256, bytes)                     one checkpoint, on all ranks at once
    load(directory, step=None, *, rank=0, world_size=1, like=None, like_dense=None)
        -> Checkpoint(step, dense, tables, meta, saved_by, files, bytes_read, bytes_needed)     a rank's part
    Saver(directory, *, rank=0, world_size=1, gather=alone, full_every=1)
        .next_is_full(), .save(step, dense, tables, meta, *, erased=None, owned=False), .wait(), .close()

`docs/checkpoints.md` says what is guaranteed and how to read the files with safetensors alone.
"""

from .agreement import Gather, alone
from .files import KEPT, CheckpointError, steps
from .manifest import VERSION
from .reader import Checkpoint, load
from .saver import Saver
from .slices import SLICES, range_of, slice_of
from .writer import Saved, save

__all__ = [
    "KEPT",
    "SLICES",
    "VERSION",
    "Checkpoint",
    "CheckpointError",
    "Gather",
    "Saved",
    "Saver",
    "alone",
    "load",
    "range_of",
    "save",
    "slice_of",
    "steps",
]
