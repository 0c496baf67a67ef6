"""Checkpoints of ``torch.distributed.checkpoint`` (DCP): a training is exported to one, and goes on from it
at any world size.

One folder is one checkpoint; all that it has are tensors::

    meta                   (n,) uint8, JSON: the step, settings, and numbers of optimizers and schedulers
    dense/NAME             parameters, buffers and states of optimizers, as in checkpoints of the library
    tables/NAME/keys       (N,) int64, all rows of all ranks, by slice of the hash (`checkpoint.slices`)
    tables/NAME/rows       (N, w) float32 of these keys, weights and optimizer states; and metadata of rows
    tables/NAME/starts     (257,) int64, where each 256th part of the slices begins

To DCP a column is one tensor of which each rank has a part, so its own tools read it, and a rank of another
world size reads the rows that it owns. DCP has no checksums, and its ``.metadata`` is a pickle: load folders
of authors whose programs you would run. ``format="safetensors"`` has none (`HuggingFaceStorageWriter`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..checkpoint import CheckpointError, Gather, range_of, slice_of
from ..checkpoint.agreement import Agreement
from ..checkpoint.files import describe
from ..checkpoint.rows import Rows, TensorRows, close_rows, sort_by_part
from ..checkpoint.slices import SLICES, order_of, slices_of
from ..checkpoint.writer import check_seen
from ..files.places import local_path
from ..kernels import launch
from ..pipeline import SupportsState, Trainer

Format = Literal["dcp", "safetensors"]
PARTS = 256
"""Of the slices of the hash, whose first rows are kept."""
PART_ROWS = 1 << 16
"""Rows that a load reads at a time."""


def async_save(
    trainer: Trainer,
    folder: str | Path,
    meta: Mapping[str, Any] | None = None,
    loader: SupportsState | None = None,
    format: Format = "dcp",
) -> Future[None]:
    """Export the state after `trainer.next_step` steps while training goes on. Collective.

    Rows are read beside the training, as `Trainer.saver` reads them. Arguments as of `Trainer.save`; the
    folder must be empty, or not there.

    Raises RuntimeError while batches are in flight; the future raises `CheckpointError` on all ranks where
    one cannot write, and then the folder holds no checkpoint.
    """
    if format not in ("dcp", "safetensors"):
        raise ValueError(f"format must be dcp or safetensors, got {format!r}")
    made: list[_Writer] = []
    place = local_path(folder, "a folder of DCP")

    def make(directory: str, **options: Any) -> _Writer:
        made.append(_Writer(place, format, **options))
        return made[0]

    trainer.saver(str(place), meta, loader=loader, make=make).save(trainer.next_step)
    if made:
        return made[0].future
    done: Future[None] = Future()  # of a replica, which saves nothing
    done.set_result(None)
    return done


def save(
    trainer: Trainer,
    folder: str | Path,
    meta: Mapping[str, Any] | None = None,
    loader: SupportsState | None = None,
    format: Format = "dcp",
) -> None:
    """`async_save`, and wait until it is written. Collective."""
    async_save(trainer, folder, meta, loader, format).result()


def load(
    trainer: Trainer,
    folder: str | Path,
    accept: Callable[[dict[str, Any]], None] = lambda meta: None,
    loader: SupportsState | None = None,
    changed: Collection[str] = (),
) -> int:
    """Go on from a folder that `save` wrote, at any world size; returns the next step. Collective.

    Everything as of `Trainer.load`, which checks it all before it changes anything.
    """
    return trainer.load(_Folder(local_path(folder, "a folder of DCP")), accept, loader, changed)


class _Writer:
    """Writes one folder, for `TrainingSaver`, in the place of `checkpoint.Saver`."""

    def __init__(self, folder: Path, format: Format, *, rank: int, gather: Gather, **options: Any):
        self._folder, self._format = folder, format
        self._rank, self._gather, self._context = rank, gather, options["context"]
        self.future: Future[None]

    def next_is_full(self, step: int) -> bool:
        return True

    def save(
        self, step: int, dense: dict[str, Tensor], tables: dict[str, Any], meta: dict[str, Any], owned: bool
    ) -> None:
        pool = ThreadPoolExecutor(1, "dcp")
        self.future = pool.submit(self._write, step, dense, tables, meta)
        pool.shutdown(wait=False)

    def _write(
        self, step: int, dense: dict[str, Tensor], tables: dict[str, Any], meta: dict[str, Any]
    ) -> None:
        try:
            with self._context(step):
                agreement = Agreement(self._gather, self._rank, f"{self._folder} could not be written")
                with agreement.phase() as report:
                    if self._rank == 0 and self._folder.exists() and any(self._folder.iterdir()):
                        raise CheckpointError(f"{self._folder} is not empty: one folder is one checkpoint")
                    columns = {name: _in_order(rows) for name, rows in tables.items()}
                    report["rows"] = {name: _counts(each["keys"]) for name, each in columns.items()}
                text = json.dumps({"step": step, "meta": meta}).encode()
                state = {f"dense/{name}": values for name, values in dense.items()}
                state["meta"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
                shards = {}
                for name, of_table in columns.items():
                    counts = np.array([each["rows"][name] for each in agreement.reports])  # (ranks, PARTS)
                    starts = np.append(0, counts.sum(0).cumsum())
                    state[f"tables/{name}/starts"] = torch.from_numpy(starts)
                    first = int(counts[: self._rank].sum())
                    for column, values in of_table.items():
                        shards[f"tables/{name}/{column}"] = first, int(starts[-1]), values
                self._write_all(agreement, state, shards)
        finally:
            close_rows(tables)

    def _write_all(
        self, agreement: Agreement, state: dict[str, Tensor], shards: dict[str, tuple[int, int, Tensor]]
    ) -> None:
        """The calls of `dcp.save` in its order, between collectives that wait for disks and name a rank."""
        writer = (
            dcp.FileSystemWriter(self._folder)
            if self._format == "dcp"
            else HuggingFaceStorageWriter(str(self._folder), save_distributed=True)
        )
        planner, first = _SavePlanner(shards, self._format), self._rank == 0
        with agreement.phase() as report, _named(self._folder):
            planner.set_up_planner(state, writer.storage_meta(), first)
            writer.set_up_storage_writer(first)
            report["plan"] = _packed(writer.prepare_local_plan(planner.create_local_plan()))
        plans, metadata = planner.create_global_plan([_unpacked(each["plan"]) for each in agreement.reports])
        with agreement.phase() as report, _named(self._folder):
            plan = planner.finish_plan(writer.prepare_global_plan(plans)[self._rank])
            report["written"] = _packed(writer.write_data(plan, planner).wait())
        with agreement.phase(), _named(self._folder):
            if first:
                results = [_unpacked(each["written"]) for each in agreement.reports]
                check_seen(self._folder, ([e.storage_data.relative_path for e in own] for own in results))
                writer.finish(metadata, results)


def _packed(value: object) -> str:
    """A plan or a result of DCP for the other ranks, pickled as DCP sends it."""
    return base64.b64encode(pickle.dumps(value)).decode()


def _unpacked(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


def _in_order(rows: Mapping[str, Tensor] | Rows) -> dict[str, Tensor]:
    """The columns of this rank's rows, by (slice, key)."""
    source: Rows = TensorRows(rows) if isinstance(rows, Mapping) else rows
    parts = 16
    source.arrange(sort_by_part([SLICES // parts * part for part in range(1, parts)]))
    found = {name: like.new_empty(len(source), *like.shape[1:]) for name, like in source.like.items()}
    end = 0
    for part in range(parts):
        columns = source.read(part, order_of(source.keys(part)))
        begin, end = end, end + len(columns["keys"])
        for name, values in columns.items():
            found[name][begin:end] = values
    return found


def _counts(keys: Tensor) -> list[int]:
    return torch.bincount(slice_of(keys) // (SLICES // PARTS), minlength=PARTS).tolist()


class _SavePlanner(dcp.DefaultSavePlanner):
    """Writes the tensors of the state, and shards: by name first row, rows of all ranks, and tensor."""

    def __init__(self, shards: dict[str, tuple[int, int, Tensor]], format: Format):
        super().__init__(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
        # DCP reads a chunk whole, whatever is asked of it: one of all rows would be read again for each part
        # of them. A file of safetensors has one chunk of a name, and is read in slices.
        most = PART_ROWS if format == "dcp" else sys.maxsize
        self._chunks = {
            name: {first + at: values[at : at + most] for at in range(0, max(len(values), 1), most)}
            for name, (first, _, values) in shards.items()
        }
        self._totals = {name: total for name, (_, total, _) in shards.items()}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(values), torch.Size([total, *values.shape[1:]])
                ),
            )
            for name, chunks in self._chunks.items()
            for first, values in chunks.items()
            for total, chunk in [(self._totals[name], _chunk(first, values))]
            if len(values) or (not total and self.is_coordinator)
        ]
        self.plan = replace(plan, items=[*plan.items, *items])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self._chunks.get(index.fqn)
        return super().lookup_object(index) if found is None else found[index.offset[0]]  # type: ignore[index]


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Reads into each tensor of the state the rows from `first` on."""

    def __init__(self, first: int):
        super().__init__(flatten_state_dict=False)
        self._first = first

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, values in self.state_dict.items():
            saved: Any = self.metadata.state_dict_metadata[name]  # type: ignore[union-attr]
            items += create_read_items_for_chunk_list(name, saved, [_chunk(self._first, values)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn]


def _chunk(first: int, values: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([first, *[0] * (values.dim() - 1)][: values.dim()]), values.shape)


class _Folder:
    """Read as `checkpoint.CheckpointStream` is, once it is called."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __str__(self) -> str:
        return str(self._folder)

    def __call__(self) -> _Folder:
        with _named(self._folder):
            self._open()
        return self

    def _open(self) -> None:
        if (self._folder / ".metadata").exists():
            self._reader: Any = dcp.FileSystemReader(self._folder)
        elif any(self._folder.glob("*.safetensors")):
            self._reader = HuggingFaceStorageReader(str(self._folder))
        else:
            raise CheckpointError(f"{self._folder} holds no checkpoint of torch.distributed.checkpoint")
        self._saved = self._reader.read_metadata().state_dict_metadata
        if "meta" not in self._saved:
            raise CheckpointError(f"{self._folder} was not written by tritonrec.dcp: it has no tensor 'meta'")
        text = bytes(self._read(["meta"])["meta"].tolist())
        said, self.digest = json.loads(text), hashlib.sha256(text).hexdigest()[:16]
        self.step, self.meta = said["step"], said["meta"]
        self.columns: dict[str, dict[str, tuple[str, list[int]]]] = {}
        for name, each in self._saved.items():
            table, _, column = name.removeprefix("tables/").rpartition("/")
            if name.startswith("tables/") and column != "starts":
                dtype = str(each.properties.dtype).removeprefix("torch.")
                self.columns.setdefault(table, {})[column] = dtype, list(each.size[1:])
                found, rows = sum(chunk.sizes[0] for chunk in each.chunks), self._starts(table)[-1]
                if found != rows:  # DCP reads nothing where nothing is, and says nothing
                    raise CheckpointError(f"{self._folder} is not whole: {name} has {found} of {rows} rows")

    def dense(self) -> dict[str, Tensor]:
        names = [name for name in self._saved if name.startswith("dense/")]
        return {name.removeprefix("dense/"): values for name, values in self._read(names).items()}

    def most_rows(self, table: str, rank: int, world_size: int) -> int:
        first, last = self._span(table, rank, world_size)
        return last - first

    def parts(self, table: str, rank: int, world_size: int) -> Iterator[dict[str, Tensor]]:
        first, last = self._span(table, rank, world_size)
        for begin in range(first, last, PART_ROWS):
            names = [f"tables/{table}/{column}" for column in self.columns[table]]
            found = self._read(names, begin, min(begin + PART_ROWS, last))
            columns = {name.rpartition("/")[2]: values for name, values in found.items()}
            own = launch.owner_of(columns["keys"], world_size) == rank
            yield {name: values[own] for name, values in columns.items()}

    def _span(self, table: str, rank: int, world_size: int) -> tuple[int, int]:
        """Rows [first, last) with all that a rank owns."""
        first, last = slices_of(range_of(rank, world_size))
        starts = self._starts(table)
        return starts[first * PARTS // SLICES], starts[last * PARTS // SLICES + 1]

    def _starts(self, table: str) -> list[int]:
        return self._read([f"tables/{table}/starts"])[f"tables/{table}/starts"].tolist()

    def _read(self, names: Collection[str], first: int = 0, last: int | None = None) -> dict[str, Tensor]:
        state: dict[str, Any] = {}
        with _named(self._folder):
            for name in names:
                saved = self._saved[name]
                shape = saved.size if last is None else [last - first, *saved.size[1:]]
                state[name] = torch.empty(tuple(shape), dtype=saved.properties.dtype, device="cpu")
            dcp.load(state, storage_reader=self._reader, planner=_LoadPlanner(first), no_dist=True)
        return state


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Errors of DCP, one of which is no Exception, and of damaged files, as one that names the folder."""
    try:
        with warnings.catch_warnings():  # of a process alone, which is what it is
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointError:
        raise
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]  # by rank, with its trace
        raise CheckpointError(f"{folder}: {describe(first)}") from error
    except Exception as error:
        raise CheckpointError(
            f"{folder} is damaged, or no checkpoint of this kind: {describe(error)}"
        ) from error
