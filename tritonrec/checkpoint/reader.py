"""Loading a checkpoint at any world size, or in slices: a rank reads only files that overlap its range."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import IO, Any

import numpy as np
import torch
from safetensors.torch import load as parse
from torch import Tensor

from ..files.places import Place, place_of
from ..kernels import launch
from ..kernels.arguments import check_rank
from . import slices
from .files import CheckpointError, describe, manifest_of, reported, size_of, steps
from .manifest import ERASED, MAX_HEADER_BYTES, read_manifest
from .writer import Saved, columns_of, difference, differences

SLICE_BYTES = 16 << 20
"""Of files that `CheckpointStream.rows` reads at a time."""

AHEAD = 2
"""Files read before they are used."""


@dataclass(frozen=True)
class Checkpoint:
    """The loaded shard of one rank.

    Attributes:
        step: number of steps of the saved state.
        dense: replicated tensors by name.
        tables: by name the columns of this rank's rows, with ``"keys"`` (n,) int64 ascending.
        meta: as saved.
        saved_by: world size of the run that saved.
        files: names of the files read. bytes_read: their size. bytes_needed: bytes of the tensors above.
        digest: of the manifest, which has those of all files.
    """

    step: int
    dense: dict[str, Tensor]
    tables: dict[str, dict[str, Tensor]]
    meta: dict[str, Any]
    saved_by: int
    files: tuple[str, ...]
    bytes_read: int
    bytes_needed: int
    digest: str


def load(
    directory: Place | str,
    step: int | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    like: Mapping[str, Mapping[str, Tensor]] | None = None,
    like_dense: Mapping[str, Tensor] | None = None,
) -> Checkpoint:
    """Load this rank's shard of the last checkpoint in `directory`, or of the given step; not a collective.

    Checksums of all files read are compared with the manifest. An incremental checkpoint gives the same bits
    as a full one of the same state.

    Args:
        rank, world_size: of the run that loads; the run that saved may have had another world size.
        like: tables, of any number of rows, with the expected names, columns, dtypes and widths.
        like_dense: tensors with the expected names, dtypes and shapes.
    Raises:
        CheckpointError: naming the file, where there is no checkpoint, a file is missing, shortened, altered
            or of another step, a slice is missing or repeated, the format has another version, or memory is
            short.
        ValueError: a rank outside [0, world_size), or tensors that differ from `like` or `like_dense`; the
            message names all differences.
    """
    check_rank(rank, world_size)
    stream = CheckpointStream(directory, step)
    if like is not None:
        saved, expected = stream.kinds, columns_of(like)
        if saved != expected:
            raise ValueError(f"{stream.path} does not fit this run's tables: {difference(saved, expected)}")
    try:
        dense = stream.dense()
        if like_dense is not None:
            there, here = (
                {f"{name!r}": f"{each.dtype} of shape {tuple(each.shape)}" for name, each in tensors.items()}
                for tensors in (dense, like_dense)
            )
            if different := differences(there, here, "the checkpoint"):
                raise ValueError(f"{stream.path} does not fit this run's parameters: {'; '.join(different)}")
        tables = {name: stream.shard(name, rank, world_size) for name in stream.columns}
    except MemoryError as error:
        raise CheckpointError(
            f"{stream.path}: the shard of rank {rank} of {world_size} takes more memory than there is"
            f"{stream.advice}"
        ) from error
    columns = [values for table in tables.values() for values in table.values()]
    needed = sum(tensor.nbytes for tensor in [*dense.values(), *columns])
    return Checkpoint(
        stream.step, dense, tables, stream.meta, stream.world_size, tuple(stream.files), stream.bytes_read,
        needed, stream.digest,
    )  # fmt: skip


class CheckpointStream:
    """A checkpoint whose tables are read in parts; never a whole table is in memory.

    Args:
        directory, step: as of `load`.

    Attributes:
        directory: of the checkpoint. step: number of steps of the saved state. meta: as saved. world_size: of
            the run that saved.
        digest: of the manifest, which has those of all files.
        saved: the checkpoint as a base of changes. layers: saves that it is made of.
        columns: by table and column the dtype and the shape of a row, such as ``("float32", [64])``.
        kinds: the same, as `columns_of` gives it. path: of the manifest. files: names of those read so far.
        bytes_read: their size.

    Raises CheckpointError as `load`.
    """

    advice = ""  # of errors

    def __init__(self, directory: Place | str, step: int | None = None):
        self.directory = place_of(directory)
        available = steps(self.directory)
        if step is None and not available:
            raise CheckpointError(f"{self.directory} holds no checkpoint")
        step = available[-1] if step is None else step
        others = [other for other in available if other != step]
        if others:
            self.advice = f"; the directory also holds step {others[-1]}"
        self.path = manifest_of(self.directory, step)
        self._take(read_manifest(self.path, self.advice))
        self.saved = Saved(self.step, self.path, self._body["manifest_sha256"], 0)

    def _take(self, manifest: dict[str, Any]) -> None:
        """The attributes that a manifest says."""
        self._body = manifest
        self.step: int = self._body["step"]
        self._layers = {name: table["layers"] for name, table in self._body["tables"].items()}
        self.layers = max(map(len, self._layers.values()), default=1)
        self.meta: dict[str, Any] = self._body["meta"]
        self.world_size: int = self._body["world_size"]
        self.digest = hashlib.sha256(json.dumps(self._body).encode()).hexdigest()[:16]
        self.kinds = {name: table["columns"] for name, table in self._body["tables"].items()}
        self.columns: dict[str, dict[str, tuple[str, list[int]]]] = {
            name: {column: (dtype, shape) for column, (dtype, shape) in kinds.items()}
            for name, kinds in self.kinds.items()
        }
        self.files: list[str] = []
        self.bytes_read = 0

    def dense(self) -> dict[str, Tensor]:
        """Replicated tensors by name."""
        tensors = self._read(self._body["dense"], {})
        return {name.removeprefix("dense/"): tensor for name, tensor in tensors.items()}

    def slices_of(self, table: str, slice_bytes: int = SLICE_BYTES) -> int:
        """Parts of a table, at most `MAX_PARTS`, to read about `slice_bytes` of files at a time."""
        total = sum(part["bytes"] for layer in self._layers[table] for part in layer["parts"])
        # A power of two: the bounds of the parts are bounds of slices, and of most files.
        count = 1
        while count < slices.MAX_PARTS and count * slice_bytes < total:
            count *= 2
        return count

    def rows(self, table: str, count: int | None = None) -> Iterator[dict[str, Tensor]]:
        """Columns of a table's rows, some of the hash's slices at a time, ``"keys"`` by (slice, key).

        The order of all rows is a function of the keys, whatever world size and incremental checkpoints
        wrote them. Each file is read once, or twice where it was saved at a world size that is no power of
        two.

        Args:
            count: parts, a power of two up to `MAX_PARTS`; by default `slices_of`.
        """
        count = count or self.slices_of(table)
        for number in range(count):
            columns = self.shard(table, number, count)
            order = slices.order_of(columns["keys"])
            yield {name: slices.take_rows(values, order) for name, values in columns.items()}

    def most_rows(self, table: str, rank: int = 0, world_size: int = 1) -> int:
        """At most how many rows `parts` gives; exact for a full checkpoint of the same world size."""
        owned = slices.range_of(rank, world_size)
        return sum(part["rows"] for layer in self._layers[table] for part in _files(layer, owned))

    def shard(self, table: str, rank: int = 0, world_size: int = 1) -> dict[str, Tensor]:
        """Columns of those of a table's rows that a rank owns, keys ascending."""
        most = self.most_rows(table, rank, world_size)
        found = {
            column: torch.empty(most, *shape, dtype=getattr(torch, dtype), device="cpu")
            for column, (dtype, shape) in self.columns[table].items()
        }
        end = 0
        for part in self.parts(table, rank, world_size):
            begin, end = end, end + len(part["keys"])
            for column, values in part.items():
                found[column][begin:end] = values
        order = np.argsort(found["keys"][:end].numpy())
        return {column: slices.take_rows(found.pop(column), order) for column in self.columns[table]}

    def parts(self, table: str, rank: int = 0, world_size: int = 1) -> Iterator[dict[str, Tensor]]:
        """Columns of those of a table's rows that a rank owns, each key once, some slices at a time, in the
        order of the slices.

        The newest layer that has a key, or has erased it, decides. Each file is read once, on a thread, while
        the part before it is used, and is kept until its last slice has come. Raises CheckpointError as
        `load`, at the part that cannot be read.
        """
        # Incremental checkpoints are layers, and their files are cut in different places. A *stretch* is a
        # run of slices between two cuts of any layer: in it each layer has whole files or parts of them.
        #     newest  |     file a     |     file b     |
        #     oldest  |  file c  |    file d    | file e |
        #     cuts    |          |     |        |        |
        owned = slices.range_of(rank, world_size)
        layers = [_files(layer, owned) for layer in reversed(self._layers[table])]
        first, last = slices.slices_of(owned)
        cuts = {slices.slices_of((part["begin"], part["end"]))[0] for files in layers for part in files}
        stretches = list(pairwise([first, *sorted(cut for cut in cuts if first < cut <= last), last + 1]))
        # by stretch and layer the files with a part of it
        needed = [
            [[part for part in files if _reaches(part, stretch)] for files in layers] for stretch in stretches
        ]
        # In the order of their first use, each once: what the thread reads ahead.
        order = {part["file"]: part for files in needed for layer in files for part in layer}
        waiting, ready, futures = iter(order.values()), dict[str, _Part](), dict[str, Future[_Part]]()
        with ThreadPoolExecutor(1, "checkpoint") as thread:

            def read_ahead() -> None:
                # At most AHEAD files more than the one that is used are in memory or being read.
                for part in islice(waiting, AHEAD + 1 - len(futures)):
                    futures[part["file"]] = thread.submit(self._part, table, part)

            for stretch, layers_here in zip(stretches, needed, strict=True):
                here = []
                for parts in layers_here:
                    for file in (part["file"] for part in parts if part["file"] not in ready):
                        read_ahead()
                        ready[file] = futures.pop(file).result()
                    here.append([ready[part["file"]].between(stretch) for part in parts])
                read_ahead()
                yield from _newest(here, rank, world_size)
                # A file whose last slice has come is not needed again.
                for file in [file for file, part in ready.items() if part.last < stretch[1]]:
                    del ready[file]

    def _part(self, table: str, part: Mapping[str, Any]) -> _Part:
        """Read a file and check its columns, and that its keys are in their order and of its slices."""
        tensors = self._read(part, {"table": table, "begin": part["begin"], "end": part["end"]})
        columns = self.columns[table].items()
        expected = {column: (dtype, [part["rows"], *shape]) for column, (dtype, shape) in columns}
        expected[ERASED] = ("int64", [part[ERASED]])
        actual = {
            column: (str(values.dtype).removeprefix("torch."), list(values.shape))
            for column, values in tensors.items()
        }
        if actual != expected:
            raise CheckpointError(
                f"{self.directory / part['file']} holds {actual} of table {table!r}, but the manifest says "
                f"{expected}{self.advice}"
            )
        first, last = slices.slices_of((part["begin"], part["end"]))
        of_column = {}
        for column in ("keys", ERASED):
            of_column[column] = found = slices.slice_of(tensors[column]).numpy()
            if len(found) and (found[0] < first or found[-1] > last or (found[1:] < found[:-1]).any()):
                raise CheckpointError(
                    f"{self.directory / part['file']} was altered: its keys are not in the order of slices "
                    f"{first} to {last}{self.advice}"
                )
        return _Part(last, tensors, of_column["keys"], of_column[ERASED])

    def _read(self, entry: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Tensor]:
        """Read the tensors of a file for the given part of a table, and check size, header and checksum."""
        path = self.directory / entry["file"]
        size: int | None = None
        try:
            size = size_of(path)
            if size != entry["bytes"]:
                raise CheckpointError(
                    f"{path} has {size} bytes, but {entry['bytes']} were written{self.advice}"
                )
            with path.open("rb") as file:  # header first: the rest may exceed the memory
                problem = _header_error(file, size, part)
                if problem:
                    raise CheckpointError(
                        f"{path} was altered, or is no file of a checkpoint: {problem}{self.advice}"
                    )
                file.seek(0)
                content = file.read()
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing, but the manifest names it{self.advice}") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}{self.advice}") from error
        except MemoryError as error:
            raise CheckpointError(
                f"{path} has {size} bytes, more than there is memory for{self.advice}"
            ) from error
        digest = hashlib.sha256(content).hexdigest()
        if digest != entry["sha256"]:
            raise CheckpointError(
                f"{path} was altered: its sha256 is {digest}, written {entry['sha256']}{self.advice}"
            )
        self.files.append(entry["file"])
        self.bytes_read += len(content)
        # safetensors and torch raise many types for wrong dtypes and offsets
        with reported(f"{path} was altered, or is no file of a checkpoint", self.advice):
            return parse(content)


def _header_error(file: IO[bytes], size: int, part: Mapping[str, Any]) -> str | None:
    """Read the header of a file of `size` bytes; an error if it is not that of `part`, else None."""
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(size, MAX_HEADER_BYTES) - 8:
        return f"its header has {length} bytes, and it has {size}"
    try:
        header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        written = json.loads(header["__metadata__"]["part"])
        whole = 8 + length + max(ends, default=0)
    except MemoryError:
        raise
    except Exception as error:  # JSON values may be of any type
        return f"its header gives {describe(error)}"
    if whole != size:
        return f"its header is that of {whole} bytes, and it has {size}"
    return None if written == part else f"it was written for {written}, but the manifest has it for {part}"


@dataclass(frozen=True)
class _Part:
    """Tensors of a file up to slice `last`, and the slices (n,) of its keys and of its erased keys."""

    last: int
    tensors: dict[str, Tensor]
    of_keys: np.ndarray
    of_erased: np.ndarray

    def between(self, stretch: slices.Range) -> dict[str, Tensor]:
        """Views of the rows of slices [begin, end)."""
        rows, erased = (
            slice(*np.searchsorted(each, stretch).tolist()) for each in (self.of_keys, self.of_erased)
        )
        return {name: values[erased if name == ERASED else rows] for name, values in self.tensors.items()}


def _reaches(part: Mapping[str, Any], stretch: slices.Range) -> bool:
    """Whether a file has a part of slices [begin, end)."""
    first, last = slices.slices_of((part["begin"], part["end"]))
    return first < stretch[1] and stretch[0] <= last


def _files(layer: Mapping[str, Any], owned: slices.Range) -> list[dict[str, Any]]:
    """Entries of a layer's files with slices of the range `owned`, by slice."""
    own = [part for part in layer["parts"] if slices.overlaps((part["begin"], part["end"]), owned)]
    return sorted((part for part in own if part["file"]), key=lambda part: part["begin"])


def _newest(layers: list[list[dict[str, Tensor]]], rank: int, world_size: int) -> Iterator[dict[str, Tensor]]:
    """Of columns of the same slices by layer, the newest first: a rank's rows that none replaces."""
    superseded: list[np.ndarray] = []
    for parts in layers:
        for part in parts:
            keys = part["keys"]
            chosen = launch.owner_of(keys, world_size).numpy() == rank
            if superseded:
                chosen &= ~np.isin(keys.numpy(), np.concatenate(superseded))
            columns = {column: values for column, values in part.items() if column != ERASED}
            if not chosen.all():
                places = np.flatnonzero(chosen)
                columns = {name: slices.take_rows(values, places) for name, values in columns.items()}
            if len(columns["keys"]):
                yield columns
        # After the layer's own rows: a key that a layer erased and
        # inserted again is in both of its lists, and its row counts.
        superseded += [part[column].numpy() for part in parts for column in ("keys", ERASED)]
