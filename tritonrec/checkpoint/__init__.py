"""Elastic checkpoints: atomic, written by all ranks, and loaded at any world size.

::

    directory/
      step-000000000040.json                      manifest: a checkpoint exists if and only if this file does
      step-000000000040/
        dense.1c9f2a....safetensors               replicated tensors, by rank 0
        items.0000-7fff.88b03e....safetensors     rows of table "items" in these slices of the hash, by rank 0
        items.8000-ffff.0d51c7....safetensors     by rank 1
      step-000000000060.json                      an incremental checkpoint, which names files of step 40 too
      step-000000000060/...

Files are written under another name, flushed to the disk and renamed, the manifest last. So a crash of any
rank or a full disk at any moment leaves earlier checkpoints unchanged. The last two are kept, with all files
that they need. Nothing is pickled. One run writes into a directory at a time: it holds a lock on the file
``.lock`` there, and a second run gets an error.

::

    save(directory, step, dense, tables, meta, *, rank=0, world_size=1, gather=single_rank, base=None,
         erased=None) -> Saved(step, path, sha256, bytes)                                       collective
    load(directory, step=None, *, rank=0, world_size=1, like=None, like_dense=None)
        -> Checkpoint(step, dense, tables, meta, saved_by, files, bytes_read, bytes_needed)     a rank's shard
    CheckpointStream(directory, step=None).rows(table) -> columns of some slices at a time
    Saver(directory, *, rank=0, world_size=1, gather=single_rank, full_every=1)
        .next_is_full(), .save(step, dense, tables, meta, *, erased=None, owned=False), .wait(), .close()
    flatten(state_dict, name) -> (values for meta, tensors for dense)
    unflatten(values, tensors) -> state_dict

`docs/checkpoints.md` has the guarantees, and how to read the files with safetensors alone.
"""

from .agreement import Gather, single_rank
from .files import NUM_KEPT, CheckpointError, steps
from .manifest import VERSION
from .reader import Checkpoint, CheckpointStream, load
from .saver import Saver
from .slices import SLICES, range_of, slice_of
from .trees import flatten, unflatten
from .writer import Saved, save

__all__ = [
    "NUM_KEPT",
    "SLICES",
    "VERSION",
    "Checkpoint",
    "CheckpointError",
    "CheckpointStream",
    "Gather",
    "Saved",
    "Saver",
    "flatten",
    "load",
    "range_of",
    "save",
    "single_rank",
    "slice_of",
    "steps",
    "unflatten",
]
