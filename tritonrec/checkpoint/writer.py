"""Writing a checkpoint in three phases of all ranks: checks, files of every rank, manifest of rank 0."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..files.places import Place, RemotePath, place_of
from ..kernels import launch
from ..kernels.arguments import check_rank
from . import files, slices
from .agreement import Agreement, Gather, single_rank
from .files import NUM_KEPT, PARTIAL, CheckpointError, flush, folder_of, manifest_of, names_in, steps
from .lock import WriterLock
from .manifest import (
    CONTENT,
    ERASED,
    FORMAT,
    MAX_MANIFEST_BYTES,
    RESERVED,
    VERSION,
    add_checksum,
    files_of,
    first_missing,
    label_of,
    read_manifest,
)
from .rows import Rows, TensorRows, sort_by_part, sources_of
from .tensor_file import save_file

Tables = Mapping[str, Mapping[str, Tensor] | Rows]
"""By name of a table its columns, or its rows part by part."""

THREADS = 2
"""That read, checksum, write and flush parts, each one at a time."""

NOTHING = torch.empty(0, dtype=torch.int64, device="cpu")
"""Erased keys of a full checkpoint."""

_FOLDER = re.compile(r"step-\d{12}")


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint, the possible base of an incremental one.

    `bytes` were written by this rank, without the manifest.
    """

    step: int
    path: Place
    sha256: str
    bytes: int


def save(
    directory: Place | str,
    step: int,
    dense: Mapping[str, Tensor],
    tables: Tables,
    meta: Mapping[str, Any],
    *,
    rank: int = 0,
    world_size: int = 1,
    gather: Gather = single_rank,
    base: Saved | None = None,
    erased: Mapping[str, Tensor] | None = None,
    lock: WriterLock | None = None,
) -> Saved:
    """Write the state after `step` steps. Collective: all ranks save the same steps in the same order.

    Args:
        directory: visible to all ranks; created if needed. Afterwards it holds this checkpoint and the
            previous one, with all files that they need.
        step: in [0, 10**12), not below the last step saved there; the same step is replaced.
        dense: replicated tensors of any dtype and shape; those of rank 0 are written.
        tables: for each table the columns of this rank's rows: ``"keys"`` (n,) int64, distinct, and others of
            n rows. All ranks give the same tables, dtypes and widths.
        meta: values that JSON keeps unchanged; those of rank 0 are written.
        gather: all-gather of small texts. If a rank fails, all ranks raise.
        base: makes this checkpoint incremental: `tables` have the rows that changed or were added since
            `base`, the newest checkpoint in `directory`.
        erased: with `base`, for each table the keys (n,) int64 of this rank erased since. A key also in
            `tables` was inserted again.
        lock: of the directory, released by the caller; by default it is taken for this call only.
    Raises:
        ValueError: a wrong rank, shape, dtype, key or step, or `meta` that JSON would change.
        CheckpointError: the files could not be written here or on another rank, or another run saves there.
            Earlier checkpoints are unchanged, as after a ValueError.
    """
    check_rank(rank, world_size)
    if lock is None:
        lock = WriterLock(directory)
        try:
            return save(
                directory, step, dense, tables, meta, rank=rank, world_size=world_size, gather=gather,
                base=base, erased=erased, lock=lock,
            )  # fmt: skip
        finally:
            lock.release()
    directory = place_of(directory)
    manifest = manifest_of(directory, step)
    agreement = Agreement(gather, rank, f"{manifest} could not be written")
    layers: dict[str, Any] = {}

    with agreement.phase() as report:
        _check_tables(tables, base, erased)
        sources = sources_of(tables)
        columns = columns_of({name: rows.like for name, rows in sources.items()})
        if rank == 0:
            _check_meta(meta)
            lock.acquire()
            layers = _prepare(directory, step, columns, base)
        report["call"] = {"step": step, "tables": columns, "base": base and base.sha256, "ranks": world_size}
    # Every rank has all reports: all of them see the same difference, and nobody writes.
    calls = [other["call"] for other in agreement.reports]
    if any(call != calls[0] for call in calls) or len(calls) != world_size:
        raise CheckpointError(
            f"{manifest}: the ranks do not save the same tables, so nothing was written: rank {rank} saves "
            f"{calls[rank] if rank < len(calls) else None} and rank 0 {calls[0]}"
        )

    # Until the manifest is there no reader sees the files. A rank that fails makes all remove theirs.
    with agreement.phase(undo=lambda: prune(directory, kept=None)) as report:
        (directory / folder_of(step)).mkdir(parents=True, exist_ok=True)
        with _Files(directory, step, rank) as new:
            report["tables"] = {
                name: write_table(new.write, name, rows, (erased or {}).get(name, NOTHING), rank, world_size)
                for name, rows in sources.items()
            }
            if rank == 0:
                report["dense"] = {}
                new.write("dense", partial(_dense_tensors, dense), {}, report["dense"])
            new.publish()
        flush(directory / folder_of(step))
    written = agreement.reports

    # The commit: one rename of one file, after every rank's files and their folder are on the disk.
    with agreement.phase(undo=lambda: prune(directory, kept=None)) as report:
        if rank == 0:
            check_seen(
                directory,
                (
                    [each["file"] for parts in report["tables"].values() for each in parts if each["file"]]
                    for report in written
                ),
            )
            body = body_of(step, world_size, written[0]["dense"], sources, layers, written, meta)
            report["sha256"] = _publish_manifest(directory, step, body)
    if rank == 0:
        # A file that cannot be removed does no harm; the next save fails and names it.
        with suppress(OSError):
            prune(directory)

    own = [part["bytes"] for parts in written[rank]["tables"].values() for part in parts]
    own += [written[0]["dense"]["bytes"]] if rank == 0 else []
    return Saved(step, manifest, agreement.reports[0]["sha256"], sum(own))


def check_seen(directory: Place, by_rank: Iterable[Iterable[str]]) -> None:
    """Raise CheckpointError for a rank whose first file is not in this `directory`, in one of its name."""
    for rank, own in enumerate(by_rank):
        file = next(iter(own), None)
        if file and not (directory / file).exists():
            raise CheckpointError(
                f"rank {rank} has written {file} where rank 0 does not see it: give all ranks one "
                "directory, on a disk that their machines share"
            )


def _dense_tensors(dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"dense/{name}": tensor.detach().cpu().contiguous() for name, tensor in dense.items()}


def copy_of(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def columns_of(tables: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Any]]:
    """dtype and row shape of every column of every table."""
    return {
        name: {
            column: [str(values.dtype).removeprefix("torch."), list(values.shape[1:])]
            for column, values in sorted(tables[name].items())
        }
        for name in sorted(tables)
    }


def difference(saved: Mapping[str, Mapping[str, Any]], expected: Mapping[str, Mapping[str, Any]]) -> str:
    """A text about all tables and columns in which two results of `columns_of` differ."""
    found = []
    for name in sorted({*saved, *expected}):
        if name not in saved or name not in expected:
            found.append(f"table {name!r} is only {'here' if name in expected else 'in the checkpoint'}")
            continue
        there, here = (
            {
                f"column {column!r} of table {name!r}": f"{kind[0]} {tuple(kind[1])}"
                for column, kind in kinds[name].items()
            }
            for kinds in (saved, expected)
        )
        found += differences(there, here, "the checkpoint")
    return "; ".join(found)


def differences(there: Mapping[str, str], here: Mapping[str, str], where: str) -> list[str]:
    """Texts about the names with another description `there`, in `where`, and `here`, or with one alone."""
    return [
        f"{name} is {there.get(name, 'not there')} in {where}, {here.get(name, 'not there')} here"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    ]


def _check_tables(tables: Tables, base: Saved | None, erased: Mapping[str, Tensor] | None) -> None:
    if (base is None) != (erased is None):
        raise ValueError("an incremental checkpoint needs both `base` and `erased`, a full one neither")
    for name, erased_keys in (erased or {}).items():
        if name not in tables or erased_keys.dim() != 1 or erased_keys.dtype != torch.int64:
            raise ValueError(
                f"erased keys of table {name!r} must be (n,) int64 and of a table that is saved, "
                f"got {tuple(erased_keys.shape)} {erased_keys.dtype}"
            )
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            continue
        keys = table.get("keys")
        if keys is None or keys.dim() != 1 or keys.dtype != torch.int64:
            given = None if keys is None else f"{tuple(keys.shape)} {keys.dtype}"
            raise ValueError(f"table {name!r} must have a column 'keys' (n,) int64, got {given}")
        for column, values in table.items():
            if column in RESERVED:
                raise ValueError(f"table {name!r} must not have a column {column!r}: the name is reserved")
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
    directory: Place, step: int, columns: dict[str, dict[str, Any]], base: Saved | None
) -> dict[str, Any]:
    """Check step and base, and remove leftovers; returns the layers of the base by table."""
    if not 0 <= step < 10**12:
        raise ValueError(f"step must be in [0, 10**12), got {step}")
    saved = steps(directory)
    if saved and saved[-1] > step:
        raise ValueError(
            f"{directory} holds step {saved[-1]} already, which is later than {step}: "
            "choose another directory for a run that restarts at an earlier step"
        )
    layers = {}
    if base is not None:
        path = manifest_of(directory, base.step)
        below = read_manifest(path)
        # Changes are taken once, so they belong on top of one
        # checkpoint: the newest, and the very one they follow.
        if saved[-1] != base.step or base.step == step or below["manifest_sha256"] != base.sha256:
            raise CheckpointError(
                f"{path} is not the base of the changes, or not the newest checkpoint: save a full one"
            )
        missing = first_missing(directory, below)
        if missing:
            raise CheckpointError(f"{missing}, and an incremental checkpoint needs it: save a full one")
        tables = {name: table["columns"] for name, table in below["tables"].items()}
        if tables != columns:
            raise ValueError(
                f"{path} has other tables or columns than the changes: {difference(tables, columns)}; "
                "save a full checkpoint"
            )
        layers = {name: table["layers"] for name, table in below["tables"].items()}
    directory.mkdir(parents=True, exist_ok=True)
    prune(directory)  # leftovers of a failed save would take disk space from this one
    return layers


def write_table(
    write: Callable[[str, Callable[[], dict[str, Tensor] | None], dict[str, Any], dict[str, Any]], None],
    name: str,
    rows: Rows,
    erased: Tensor,
    rank: int,
    world_size: int,
) -> list[dict[str, Any]]:
    """Write this rank's rows of one table, by `_Files.write`, say.

    Returns the manifest's entries of its parts, in the order of their slices.
    """
    # Parts by this rank's bytes: about PART_BYTES a file,
    # so that another world size reads few bytes too many.
    width = sum(values.element_size() * prod(values.shape[1:]) for values in rows.like.values())
    parts = slices.parts_of(slices.range_of(rank, world_size), len(rows) * width + erased.nbytes)
    gone = TensorRows({"keys": erased})
    # All cuts are bounds of slices, except the ends of the range; this rank has no key beyond these.
    sort = sort_by_part([slices.slices_of(part)[0] for part in parts[1:]])
    rows.arrange(sort)
    gone.arrange(sort)

    def tensors_of(number: int, entry: dict[str, Any]) -> dict[str, Tensor] | None:
        """The tensors of a part's file, None if it needs none; the numbers of its rows go to its `entry`."""
        keys, gone_keys = rows.keys(number), gone.keys(number)
        entry |= {"rows": len(keys), ERASED: len(gone_keys)}
        order = _order(keys, f"table {name!r}", rank, world_size)
        gone_order = _order(gone_keys, f"erased keys of table {name!r}", rank, world_size)
        if not len(keys) and not len(gone_keys):
            return None
        return {**rows.read(number, order), ERASED: gone.read(number, gone_order)["keys"]}

    entries = []
    for number, (begin, end) in enumerate(parts):
        entry: dict[str, Any] = {"begin": begin, "end": end, "rank": rank, "rows": 0, ERASED: 0}
        entry |= {"file": None, "bytes": 0, "sha256": None}
        header = {"table": name, "begin": begin, "end": end}
        write(label_of(name, (begin, end)), partial(tensors_of, number, entry), header, entry)
        entries.append(entry)
    return entries


def _order(keys: Tensor, what: str, rank: int, world_size: int) -> np.ndarray:
    """The order of `keys` in a file; ValueError for a foreign or repeated key."""
    # A key that another rank owns would be found by nobody: readers look at the files of a key's range alone.
    foreign = np.flatnonzero(launch.owner_of(keys, world_size).numpy() != rank)
    if len(foreign):
        raise ValueError(f"{what}: rank {rank} of {world_size} does not own key {int(keys[foreign[0]])}")
    order = slices.order_of(keys)
    ordered = keys.numpy()[order]
    repeated = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(repeated):
        raise ValueError(f"{what}: key {int(ordered[repeated[0]])} occurs more than once")
    return order


class _Files:
    """Files of one step, written and flushed on threads under other names, and then renamed together.

    A file's name contains a part of its checksum.
    """

    def __init__(self, directory: Place, step: int, rank: int):
        self.step, self._directory, self._folder, self._rank = step, directory, folder_of(step), rank
        self._threads = ThreadPoolExecutor(THREADS, "checkpoint")
        self._under_way: list[Future[None]] = []
        self._unnamed: list[tuple[Path, Path]] = []  # to be renamed

    def write(
        self,
        label: str,
        tensors: Callable[[], dict[str, Tensor] | None],
        header: dict[str, Any],
        entry: dict[str, Any],
    ) -> None:
        """Begin to write a file, whose `entry` in the manifest is complete after `publish`.

        A thread calls `tensors` for what the file holds, so that each thread has one part in memory; nothing
        is written where that is None.
        """
        name = f"{label}.rank{self._rank}.{len(self._under_way)}"  # labels of two tables may be equal
        self._under_way.append(self._threads.submit(self._write, label, name, tensors, header, entry))

    def publish(self) -> None:
        """Wait until all files are on the disk, and give them their names."""
        for future in self._under_way:
            future.result()
        for unnamed, path in self._unnamed:
            os.replace(unnamed, path)

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *exc: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _write(
        self,
        label: str,
        name: str,
        tensors: Callable[[], dict[str, Tensor] | None],
        header: dict[str, Any],
        entry: dict[str, Any],
    ) -> None:
        if (content := tensors()) is None:
            return
        folder = self._directory / self._folder
        with files.partial_of(folder, name) as unnamed:
            try:
                size, digest = save_file(content, unnamed, {"part": json.dumps(header)})
            except SafetensorError as error:
                raise CheckpointError(f"{unnamed}: {error}") from error
            # By content: a file of the same step that is written
            # again never changes one that a manifest names.
            name = f"{label}.{digest[:16]}.safetensors"
            path = folder / name
            if isinstance(path, RemotePath):
                files.publish(unnamed, path)
            else:
                flush(unnamed)
                self._unnamed.append((unnamed, path))
        entry |= {"file": f"{self._folder}/{name}", "bytes": size, "sha256": digest}


def body_of(
    step: int,
    world_size: int,
    dense: Mapping[str, Any],
    sources: Mapping[str, Rows],
    below: Mapping[str, list[Any]],
    written: list[dict[str, Any]],
    meta: Mapping[str, Any],
) -> dict[str, Any]:
    """A manifest of what all ranks have written, on top of the layers `below`, by table.

    Raises CheckpointError for slices that nobody has.
    """
    tables = {}
    for name, kinds in columns_of({name: rows.like for name, rows in sources.items()}).items():
        parts = [part for report in written for part in report["tables"][name]]
        problem = slices.tiling_error([(part["begin"], part["end"]) for part in parts])
        if problem:
            raise CheckpointError(f"table {name!r}: {problem}")
        layer = {"step": step, "world_size": world_size, "parts": parts}
        tables[name] = {"columns": kinds, "layers": [*below.get(name, ()), layer]}
    return {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "world_size": world_size,
        "dense": dense,
        "tables": tables,
        "meta": dict(meta),
    }


def _publish_manifest(directory: Place, step: int, body: Mapping[str, Any]) -> str:
    path = manifest_of(directory, step)
    sealed = add_checksum(body)
    text = json.dumps(sealed, indent=1) + "\n"
    if len(text) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{path} would have {len(text)} bytes, more than {MAX_MANIFEST_BYTES}")
    with files.partial_of(directory, path.name) as partial:
        partial.write_text(text)
        files.publish(partial, path)
    return sealed["manifest_sha256"]


def prune(directory: Place, kept: int | None = NUM_KEPT) -> None:
    """Remove all but the last `kept` checkpoints (None: keep all), and files that these do not name.

    A manifest that cannot be read may be of a newer tritonrec: then only partial files are removed. Links are
    removed, never followed: no file outside of `directory` is removed, and a linked folder stays unchanged
    while a checkpoint needs it.
    """
    saved = steps(directory)
    dropped = saved[:-kept] if kept else []
    # Manifests first, then files: a reader in between finds no manifest, and never one without its files.
    for step in dropped:
        manifest_of(directory, step).unlink()
    if dropped:
        flush(directory)  # or a power cut could bring back a manifest without its files
    named: set[str] = set()
    unreadable = False
    for step in steps(directory):
        try:
            named |= {entry["file"] for entry in files_of(read_manifest(manifest_of(directory, step)))}
        except CheckpointError:
            unreadable = True
    needed = {file.partition("/")[0] for file in named}
    for name in names_in(directory):
        folder = directory / name
        if name.startswith(PARTIAL):
            folder.unlink()
        if not _FOLDER.fullmatch(name):
            continue
        if isinstance(folder, Path) and folder.is_symlink():
            if name not in needed and not unreadable:
                folder.unlink()
            continue
        for file in (f"{name}/{child}" for child in names_in(folder)):
            stale = CONTENT.fullmatch(file) and file not in named and not unreadable
            if stale or file.startswith(f"{name}/{PARTIAL}"):
                (directory / file).unlink()
        if not names_in(folder):
            folder.rmdir()
