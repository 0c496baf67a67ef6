"""Reading a checkpoint at any world size: a rank opens the files that meet its range, and no others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse
from torch import Tensor

from .. import ops
from . import slices
from .files import CheckpointError, manifest_of, read_manifest, steps
from .writer import ERASED, columns_of, difference


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
) -> Checkpoint:
    """This rank's part of the last checkpoint in `directory`, or of the given step; not a collective.

    Every byte read is checked against the manifest first. An incremental checkpoint gives what a full one of
    the same state would, bit for bit.

    Args:
        rank, world_size: of the run that loads, whatever world size saved.
        like: tables, of any number of rows, whose names, columns, dtypes and widths the checkpoint must have.
    Raises:
        CheckpointError: naming the file, when there is no checkpoint, a file is missing, shortened or
            altered, a slice is missing or there twice, or another version wrote it.
        ValueError: the tables differ from `like`.
    """
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
    for name, table in body["tables"].items():
        for layer in table["layers"]:
            flaw = slices.first_flaw([(part["begin"], part["end"]) for part in layer["parts"]])
            if flaw:
                raise CheckpointError(
                    f"{path}: table {name!r}, layer of step {layer['step']}: {flaw}{advice}"
                )

    reader = _Reader(directory, rank, world_size, advice)
    tables = {name: reader.table(name, table) for name, table in body["tables"].items()}
    tensors = reader.read(body["dense"])
    dense = {name.removeprefix("dense/"): tensor for name, tensor in tensors.items()}
    columns = [values for table in tables.values() for values in table.values()]
    needed = sum(tensor.nbytes for tensor in [*dense.values(), *columns])
    return Checkpoint(
        step, dense, tables, body["meta"], body["world_size"], tuple(reader.files), reader.bytes_read, needed
    )


class _Reader:
    def __init__(self, directory: Path, rank: int, world_size: int, advice: str):
        self.directory, self.rank, self.world_size, self.advice = directory, rank, world_size, advice
        self.owned = slices.range_of(rank, world_size)
        self.files: list[str] = []
        self.bytes_read = 0

    def read(self, entry: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of a file whose bytes are those that were written."""
        path = self.directory / entry["file"]
        try:
            content = path.read_bytes()
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing, but the manifest names it{self.advice}") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}{self.advice}") from error
        if len(content) != entry["bytes"]:
            raise CheckpointError(
                f"{path} has {len(content)} bytes, but {entry['bytes']} were written{self.advice}"
            )
        digest = hashlib.sha256(content).hexdigest()
        if digest != entry["sha256"]:
            raise CheckpointError(
                f"{path} was altered: its sha256 is {digest}, written {entry['sha256']}{self.advice}"
            )
        self.files.append(entry["file"])
        self.bytes_read += len(content)
        try:
            return parse(content)
        except SafetensorError as error:
            raise CheckpointError(f"{path} is no safetensors file: {error}{self.advice}") from error

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
                    tensors = self.read(part)
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
