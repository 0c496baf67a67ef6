"""Reading a checkpoint at any world size: a rank opens the files that meet its range, and no others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors.torch import load as parse
from torch import Tensor

from .. import ops
from ..kernels.arguments import check_rank
from . import slices
from .files import CheckpointError, in_words, manifest_of, size_of, steps
from .manifest import ERASED, MAX_HEADER_BYTES, read_manifest
from .writer import columns_of, difference


@dataclass(frozen=True)
class Checkpoint:
    """What one rank loaded.

    Attributes:
        step: the state is that after this many steps.
        dense: replicated tensors by name.
        tables: by name the columns of the rows this rank owns, ``"keys"`` (n,) int64 ascending among them.
        meta: as it was saved.
        saved_by: world size of the run that saved.
        files: names of the files read; bytes_read: their size; bytes_needed: of it what ended up in here.
    """

    step: int
    dense: dict[str, Tensor]
    tables: dict[str, dict[str, Tensor]]
    meta: dict[str, Any]
    saved_by: int
    files: tuple[str, ...]
    bytes_read: int
    bytes_needed: int


def load(
    directory: Path | str,
    step: int | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    like: Mapping[str, Mapping[str, Tensor]] | None = None,
    like_dense: Mapping[str, Tensor] | None = None,
) -> Checkpoint:
    """This rank's part of the last checkpoint in `directory`, or of the given step; not a collective.

    Every byte read is checked against the manifest first. An incremental checkpoint gives what a full one of
    the same state would, bit for bit.

    Args:
        rank, world_size: of the run that loads, whatever world size saved.
        like: tables, of any number of rows, whose names, columns, dtypes and widths the checkpoint must have.
        like_dense: tensors whose names, dtypes and shapes those of the checkpoint must have.
    Raises:
        CheckpointError: naming the file, when there is no checkpoint, a file is missing, shortened, altered
            or that of another step, a slice is missing or there twice, another version wrote it, or it takes
            more memory than there is.
        ValueError: a rank outside [0, world_size), or tensors that differ from `like` or `like_dense`; all
            differences are named.
    """
    check_rank(rank, world_size)
    directory = Path(directory)
    available = steps(directory)
    if step is None and not available:
        raise CheckpointError(f"{directory} holds no checkpoint")
    step = available[-1] if step is None else step
    others = [other for other in available if other != step]
    advice = f"; the directory also holds step {others[-1]}" if others else ""
    path = manifest_of(directory, step)
    body = read_manifest(path, advice)

    if like is not None:
        saved = {name: table["columns"] for name, table in body["tables"].items()}
        wanted = columns_of(like)
        if saved != wanted:
            raise ValueError(f"{path} does not fit this run's tables: {difference(saved, wanted)}")
    reader = _Reader(directory, rank, world_size, advice)
    try:
        tensors = reader.read(body["dense"], {})
        dense = {name.removeprefix("dense/"): tensor for name, tensor in tensors.items()}
        different = "" if like_dense is None else _dense_difference(dense, like_dense)
        if different:
            raise ValueError(f"{path} does not fit this run's parameters: {different}")
        tables = {name: reader.table(name, table) for name, table in body["tables"].items()}
    except MemoryError as error:
        raise CheckpointError(
            f"{path}: the part of rank {rank} of {world_size} takes more memory than there is{advice}"
        ) from error
    columns = [values for table in tables.values() for values in table.values()]
    needed = sum(tensor.nbytes for tensor in [*dense.values(), *columns])
    return Checkpoint(
        step, dense, tables, body["meta"], body["world_size"], tuple(reader.files), reader.bytes_read, needed
    )


def _dense_difference(saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """All tensors in which the two differ, in words."""
    kinds = (
        {name: f"{tensor.dtype} of shape {tuple(tensor.shape)}" for name, tensor in tensors.items()}
        for tensors in (saved, wanted)
    )
    there, here = kinds
    return "; ".join(
        f"{name!r} is {there.get(name, 'not there')} in the checkpoint, {here.get(name, 'not there')} here"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    )


def _first_flaw(file: IO[bytes], size: int, part: Mapping[str, Any]) -> str | None:
    """Why a file of `size` bytes, read to its header's end, is not that of `part`, in words."""
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
    except Exception as error:  # whatever JSON holds, it may be of any type
        return f"its header gives {in_words(error)}"
    if whole != size:
        return f"its header is that of {whole} bytes, and it has {size}"
    return None if written == part else f"it was written for {written}, and the manifest names it for {part}"


class _Reader:
    def __init__(self, directory: Path, rank: int, world_size: int, advice: str):
        self.directory, self.rank, self.world_size, self.advice = directory, rank, world_size, advice
        self.owned = slices.range_of(rank, world_size)
        self.files: list[str] = []
        self.bytes_read = 0

    def read(self, entry: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of a file whose bytes are those that were written, for the given part of a table."""
        path = self.directory / entry["file"]
        size: int | None = None
        try:
            size = size_of(path)
            if size != entry["bytes"]:
                raise CheckpointError(
                    f"{path} has {size} bytes, but {entry['bytes']} were written{self.advice}"
                )
            with path.open("rb") as file:  # the header first: the rest may be more than the memory holds
                flaw = _first_flaw(file, size, part)
                if flaw:
                    raise CheckpointError(
                        f"{path} was altered, or is no file of a checkpoint: {flaw}{self.advice}"
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
        try:
            return parse(content)
        except (
            Exception
        ) as error:  # of safetensors or torch: dtypes, shapes and offsets can be wrong in many ways
            raise CheckpointError(
                f"{path} was altered, or is no file of a checkpoint: {in_words(error)}{self.advice}"
            ) from error

    def table(self, name: str, table: Mapping[str, Any]) -> dict[str, Tensor]:
        """The columns of the rows that this rank owns, from the newest layer down, keys ascending."""
        found: dict[str, list[Tensor]] = {
            column: [torch.empty(0, *shape, dtype=getattr(torch, dtype))]
            for column, (dtype, shape) in table["columns"].items()
        }
        settled = np.empty(0, np.int64)  # keys that newer layers hold or have erased
        for layer in reversed(table["layers"]):
            newly_settled = [settled]
            for part in layer["parts"]:
                if part["file"] and slices.meets((part["begin"], part["end"]), self.owned):
                    place = {"table": name, "begin": part["begin"], "end": part["end"]}
                    tensors = self.read(part, place)
                    self._check(part, tensors, table["columns"], name)
                    keys = tensors["keys"]
                    wanted = ops.owner_of(keys, self.world_size).numpy() == self.rank
                    if len(settled):
                        wanted &= ~np.isin(keys.numpy(), settled)
                    chosen = torch.from_numpy(np.flatnonzero(wanted))
                    for column, values in found.items():
                        values.append(slices.take_rows(tensors[column], chosen))
                    newly_settled += [keys.numpy(), tensors[ERASED].numpy()]
            if layer is not table["layers"][0]:
                settled = np.concatenate(newly_settled)
        order = torch.from_numpy(np.argsort(torch.cat(found["keys"]).numpy()))
        return {column: slices.take_rows(torch.cat(found.pop(column)), order) for column in table["columns"]}

    def _check(
        self, part: Mapping[str, Any], tensors: dict[str, Tensor], columns: Mapping[str, Any], name: str
    ) -> None:
        expected = {column: (dtype, [part["rows"], *shape]) for column, (dtype, shape) in columns.items()}
        expected[ERASED] = ("int64", [part[ERASED]])
        held = {
            column: (str(values.dtype).removeprefix("torch."), list(values.shape))
            for column, values in tensors.items()
        }
        if held != expected:
            raise CheckpointError(
                f"{self.directory / part['file']} holds {held} of table {name!r}, but the manifest says "
                f"{expected}{self.advice}"
            )
