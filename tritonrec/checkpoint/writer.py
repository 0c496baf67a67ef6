"""Writing a checkpoint: every rank its own files, rank 0 the manifest, in three agreements of all ranks."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .. import ops
from ..kernels.arguments import check_rank
from . import files, slices
from .agreement import Agreement, Gather, alone
from .files import CheckpointError, folder_of, manifest_of
from .lock import WriterLock
from .manifest import (
    ERASED,
    FORMAT,
    MAX_MANIFEST_BYTES,
    RESERVED,
    VERSION,
    first_missing,
    label_of,
    read_manifest,
    seal,
)
from .pruning import prune

Tables = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was published: what an incremental one may build upon.

    `bytes` is what this rank wrote, without the manifest.
    """

    step: int
    path: Path
    sha256: str
    bytes: int


def save(
    directory: Path | str,
    step: int,
    dense: Mapping[str, Tensor],
    tables: Tables,
    meta: Mapping[str, Any],
    *,
    rank: int = 0,
    world_size: int = 1,
    gather: Gather = alone,
    base: Saved | None = None,
    erased: Mapping[str, Tensor] | None = None,
    lock: WriterLock | None = None,
) -> Saved:
    """Write the state after `step` steps; collective, all ranks call it for the same steps in the same order.

    Args:
        directory: made if it is not there, and seen by all ranks. Afterwards it holds this checkpoint and the
            latest one before, with all that these build upon.
        step: from 0 to 10**12 - 1, and not less than the last step saved there; the same step is replaced.
        dense: replicated tensors of any dtype and shape; rank 0's are written.
        tables: for each table the columns of the rows that this rank owns: ``"keys"`` (n,) int64, distinct,
            and any others of n rows. All ranks give the same tables, dtypes and widths.
        meta: anything that JSON gives back unchanged; rank 0's is written.
        gather: exchanges small texts among the ranks. A rank that fails reports so, and all of them raise.
        base: makes this checkpoint incremental: `tables` hold the rows that changed or came since `base`,
            which is the newest one in `directory`.
        erased: with `base`, for each table the keys (n,) int64 of this rank that went since. A key that is in
            `tables` as well came back.
        lock: on the directory, which the caller gives up; by default it is taken for this call alone.
    Raises:
        ValueError: a rank, shape, dtype, key or step out of place, or `meta` that JSON would change.
        CheckpointError: the files could not be written here or on another rank, or another run saves there.
            What was there before still is, and so it is after a ValueError.
    """
    check_rank(rank, world_size)
    if lock is not None:
        return _save(Path(directory), step, dense, tables, meta, rank, world_size, gather, base, erased, lock)
    lock = WriterLock(directory)
    try:
        return _save(Path(directory), step, dense, tables, meta, rank, world_size, gather, base, erased, lock)
    finally:
        lock.release()


def _save(
    directory: Path,
    step: int,
    dense: Mapping[str, Tensor],
    tables: Tables,
    meta: Mapping[str, Any],
    rank: int,
    world_size: int,
    gather: Gather,
    base: Saved | None,
    erased: Mapping[str, Tensor] | None,
    lock: WriterLock,
) -> Saved:
    manifest = manifest_of(directory, step)
    agreement = Agreement(gather, rank, f"{manifest} could not be written")
    layers: dict[str, Any] = {}

    with agreement.of_all() as report:
        _check_tables(tables, base, erased)
        columns = columns_of(tables)
        if rank == 0:
            _check_meta(meta)
            lock.hold()
            layers = _prepare(directory, step, columns, base)
        report["call"] = {"step": step, "tables": columns, "base": base and base.sha256, "ranks": world_size}
    calls = [other["call"] for other in agreement.reports]
    if any(call != calls[0] for call in calls) or len(calls) != world_size:
        raise CheckpointError(
            f"{manifest}: the ranks do not save the same thing, so nothing was written: rank {rank} saves "
            f"{calls[rank] if rank < len(calls) else None} and rank 0 {calls[0]}"
        )

    with agreement.of_all(undo=lambda: prune(directory, kept=None)) as report:
        (directory / folder_of(step)).mkdir(parents=True, exist_ok=True)
        nothing = torch.empty(0, dtype=torch.int64)
        report["tables"] = {
            name: _write_table(
                directory, step, name, tables[name], (erased or {}).get(name, nothing), rank, world_size
            )
            for name in columns
        }
        if rank == 0:
            # Copies, for safetensors takes no views of one storage.
            tensors = {f"dense/{name}": copy_of(tensor) for name, tensor in dense.items()}
            report["dense"] = _write(directory, f"{folder_of(step)}/dense", tensors, {}, rank)
        files.flush(directory / folder_of(step))
    written = agreement.reports

    with agreement.of_all(undo=lambda: prune(directory, kept=None)) as report:
        if rank == 0:
            body = {
                "format": FORMAT,
                "version": VERSION,
                "step": step,
                "world_size": world_size,
                "dense": written[0]["dense"],
                "tables": {
                    name: {
                        "columns": columns[name],
                        "layers": [*layers.get(name, ()), _layer(step, world_size, name, written)],
                    }
                    for name in columns
                },
                "meta": dict(meta),
            }
            report["sha256"] = _publish_manifest(directory, step, body)
    if rank == 0:
        # What cannot be removed now does no harm, and the next save fails over it by name.
        with suppress(OSError):
            prune(directory)

    own = [part["bytes"] for parts in written[rank]["tables"].values() for part in parts]
    own += [written[0]["dense"]["bytes"]] if rank == 0 else []
    return Saved(step, manifest, agreement.reports[0]["sha256"], sum(own))


def copy_of(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def columns_of(tables: Tables) -> dict[str, dict[str, Any]]:
    """dtype and shape of a row of every column of every table."""
    return {
        name: {
            column: [str(values.dtype).removeprefix("torch."), list(values.shape[1:])]
            for column, values in sorted(tables[name].items())
        }
        for name in sorted(tables)
    }


def difference(saved: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Mapping[str, Any]]) -> str:
    """All tables and columns in which two results of `columns_of` differ, in words."""
    found = []
    for name in sorted({*saved, *wanted}):
        if name not in saved or name not in wanted:
            found.append(f"table {name!r} is {'not in it' if name in wanted else 'in it, but not here'}")
            continue
        for column in sorted({*saved[name], *wanted[name]}):
            there, here = saved[name].get(column), wanted[name].get(column)
            if there != here:
                found.append(
                    f"column {column!r} of table {name!r} is {_in_words(there)} in the checkpoint, "
                    f"{_in_words(here)} here"
                )
    return "; ".join(found)


def _in_words(kind: Sequence[Any] | None) -> str:
    return "not there" if kind is None else f"{kind[0]} {tuple(kind[1])}"


def _check_tables(tables: Tables, base: Saved | None, erased: Mapping[str, Tensor] | None) -> None:
    if (base is None) != (erased is None):
        raise ValueError(
            "an incremental checkpoint needs both its base and the erased keys; a full one neither"
        )
    for name, gone in (erased or {}).items():
        if name not in tables or gone.dim() != 1 or gone.dtype != torch.int64:
            raise ValueError(
                f"erased keys of table {name!r} must be (n,) int64 and of a table that is saved, "
                f"got {tuple(gone.shape)} {gone.dtype}"
            )
    for name, table in tables.items():
        keys = table.get("keys")
        if keys is None or keys.dim() != 1 or keys.dtype != torch.int64:
            given = None if keys is None else f"{tuple(keys.shape)} {keys.dtype}"
            raise ValueError(f"table {name!r} must have a column 'keys' (n,) int64, got {given}")
        for column, values in table.items():
            if column in RESERVED:
                raise ValueError(f"table {name!r} must not have a column {column!r}: the name has a meaning")
            if values.dim() < 1 or len(values) != len(keys):
                raise ValueError(
                    f"column {column!r} of table {name!r} must have {len(keys)} rows as its keys, "
                    f"got {tuple(values.shape)}"
                )


def _check_meta(meta: Mapping[str, Any]) -> None:
    try:
        unchanged = json.loads(json.dumps(meta, allow_nan=False)) == meta
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"meta cannot be written as JSON: {error}") from error
    if not unchanged:
        raise ValueError("meta would be changed by JSON: keys must be strings, and sequences lists")


def _prepare(
    directory: Path, step: int, columns: dict[str, dict[str, Any]], base: Saved | None
) -> dict[str, Any]:
    """Make room for the new checkpoint; the layers of its base by table."""
    if not 0 <= step < 10**12:
        raise ValueError(f"step must be in [0, 10**12), got {step}")
    saved = files.steps(directory)
    if saved and saved[-1] > step:
        raise ValueError(
            f"{directory} holds step {saved[-1]} already, which is later than {step}: "
            "a run that starts again further back needs a directory of its own"
        )
    layers = {}
    if base is not None:
        path = manifest_of(directory, base.step)
        below = read_manifest(path)
        if saved[-1] != base.step or base.step == step or below["manifest_sha256"] != base.sha256:
            raise CheckpointError(
                f"{path} is not what the changes are since, or not the newest checkpoint: save a full one"
            )
        missing = first_missing(directory, below)
        if missing:
            raise CheckpointError(f"{missing}, and the changes would build upon it: save a full checkpoint")
        tables = {name: table["columns"] for name, table in below["tables"].items()}
        if tables != columns:
            raise ValueError(
                f"{path} has other tables or columns than the changes: {difference(tables, columns)}; "
                "save a full checkpoint"
            )
        layers = {name: table["layers"] for name, table in below["tables"].items()}
    directory.mkdir(parents=True, exist_ok=True)
    prune(directory)  # leftovers of a failed save would take the room of this one
    return layers


def _write_table(
    directory: Path,
    step: int,
    name: str,
    table: Mapping[str, Tensor],
    erased: Tensor,
    rank: int,
    world_size: int,
) -> list[dict[str, Any]]:
    """Write the rows of one table that this rank owns; the entries of its parts."""
    columns = {column: values.detach().cpu().contiguous() for column, values in table.items()}
    keys, order = _ordered(columns["keys"], f"table {name!r}", rank, world_size)
    erased, _ = _ordered(erased.cpu().contiguous(), f"erased keys of table {name!r}", rank, world_size)

    owned = slices.range_of(rank, world_size)
    parts = slices.parts_of(owned, sum(values.nbytes for values in columns.values()) + erased.nbytes)
    # All cuts but the ends of the range, which nothing of this rank lies beyond, are bounds of slices.
    cuts = [slices.slices_of(part)[0] for part in parts[1:]]
    row_cuts = np.searchsorted(slices.slice_of(keys).numpy(), cuts).tolist()
    erased_cuts = np.searchsorted(slices.slice_of(erased).numpy(), cuts).tolist()

    entries = []
    for part, rows, gone in zip(
        parts, pairwise([0, *row_cuts, len(order)]), pairwise([0, *erased_cuts, len(erased)]), strict=True
    ):
        entry = {"begin": part[0], "end": part[1], "rank": rank, "rows": rows[1] - rows[0]}
        entry |= {ERASED: gone[1] - gone[0], "file": None, "bytes": 0, "sha256": None}
        if entry["rows"] or entry[ERASED]:
            chosen = order[rows[0] : rows[1]]
            tensors = {column: slices.take_rows(values, chosen) for column, values in columns.items()}
            tensors[ERASED] = erased[gone[0] : gone[1]]
            header = {"table": name, "begin": part[0], "end": part[1]}
            entry |= _write(directory, f"{folder_of(step)}/{label_of(name, part)}", tensors, header, rank)
        entries.append(entry)
    return entries


def _ordered(keys: Tensor, what: str, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """`keys` as the files have them and their order, or ValueError where one is foreign or there twice."""
    foreign = np.flatnonzero(ops.owner_of(keys, world_size).numpy() != rank)
    if len(foreign):
        raise ValueError(f"{what}: rank {rank} of {world_size} does not own key {int(keys[foreign[0]])}")
    order = slices.order_of(keys)
    ordered = slices.take_rows(keys, order)
    repeated = np.flatnonzero(np.diff(ordered.numpy()) == 0)
    if len(repeated):
        raise ValueError(f"{what}: key {int(ordered[repeated[0]])} occurs more than once")
    return ordered, order


def _write(
    directory: Path, label: str, tensors: dict[str, Tensor], header: dict[str, Any], rank: int
) -> dict[str, Any]:
    """Write a file under a name that carries a part of its checksum; its entry in the manifest."""
    folder, _, name = label.partition("/")
    partial = directory / folder / f"{files.PARTIAL}{name}.rank{rank}.safetensors"
    partial.touch()
    mode = stat.S_IMODE(partial.stat().st_mode)
    try:
        save_file(tensors, partial, {"part": json.dumps(header)})
    except SafetensorError as error:
        raise CheckpointError(f"{partial}: {error}") from error
    partial.chmod(mode)  # safetensors leaves the file to its owner alone, whatever the umask
    digest = files.sha256_of(partial)
    file = f"{label}.{digest[:16]}.safetensors"
    size = partial.stat().st_size
    files.publish(partial, directory / file)
    return {"file": file, "bytes": size, "sha256": digest}


def _layer(step: int, world_size: int, name: str, written: list[dict[str, Any]]) -> dict[str, Any]:
    parts = [part for report in written for part in report["tables"][name]]
    flaw = slices.first_flaw([(part["begin"], part["end"]) for part in parts])
    if flaw:
        raise CheckpointError(f"table {name!r}: {flaw}")
    return {"step": step, "world_size": world_size, "parts": parts}


def _publish_manifest(directory: Path, step: int, body: Mapping[str, Any]) -> str:
    partial = directory / f"{files.PARTIAL}{folder_of(step)}.json"
    sealed = seal(body)
    text = json.dumps(sealed, indent=1) + "\n"
    if len(text) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{partial} would have {len(text)} bytes, more than {MAX_MANIFEST_BYTES}")
    partial.write_text(text)
    files.publish(partial, manifest_of(directory, step))
    files.flush(directory)
    return sealed["manifest_sha256"]
