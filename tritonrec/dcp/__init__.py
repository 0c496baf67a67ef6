"""Folders of ``torch.distributed.checkpoint`` (DCP): a training is exported to one, and goes on from it at
any world size (`docs/checkpoints.md`). All that a folder has are tensors, and to DCP a column is one of them,
of which each rank has parts::

    meta                   (n,) uint8, JSON: a manifest of `tritonrec.checkpoint`, and each part's first row
    dense/NAME             parameters, buffers and states of optimizers, as in checkpoints of the library
    tables/NAME/COLUMN     (N, ...) of all ranks' rows by slice of the hash: keys, rows, metadata of rows

DCP's ``.metadata`` is a pickle: load folders of authors whose programs you would run. Those of
``format="safetensors"`` have none (`HuggingFaceStorageWriter`).
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..checkpoint import CheckpointError, CheckpointStream, Gather
from ..checkpoint.agreement import Agreement
from ..checkpoint.files import reported
from ..checkpoint.manifest import ERASED
from ..checkpoint.rows import sources_of
from ..checkpoint.writer import NOTHING, body_of, check_seen, write_table
from ..files.places import local_path
from ..pipeline import SupportsState, Trainer
from ..settings import typed


@typed
def async_save(
    trainer: Trainer,
    folder: str | Path,
    meta: Mapping[str, Any] | None = None,
    loader: SupportsState | None = None,
    format: Literal["dcp", "safetensors"] = "dcp",
) -> Future[None]:
    """Export the state after `trainer.next_step` steps while training goes on. Collective.

    Rows are read beside the training, as `Trainer.saver` reads them. Arguments as of `Trainer.save`; the
    folder must be empty, or not there.

    Raises RuntimeError while batches are in flight; the future raises `CheckpointError` on all ranks where
    one cannot write, and then the folder holds no checkpoint.
    """
    place = local_path(folder, "a folder of DCP")
    saver = trainer.saver(place, meta, loader=loader, write=partial(_write, format))
    saver.save(trainer.next_step)
    return ThreadPoolExecutor(1, "dcp").submit(saver.__exit__, None, None, None)  # which waits for the save


def save(trainer: Trainer, folder: str | Path, *arguments: Any, **options: Any) -> None:
    """`async_save`, and wait until it is written. Collective."""
    async_save(trainer, folder, *arguments, **options).result()


def load(trainer: Trainer, folder: str | Path, *arguments: Any, **options: Any) -> int:
    """Go on from a folder that `save` wrote, at any world size; returns the next step. Collective.

    Arguments and errors are those of `Trainer.load`, which checks everything before it changes anything.
    """
    return trainer.load(partial(_Folder, local_path(folder, "a folder of DCP")), *arguments, **options)


def _write(
    format: str, folder: Path, step: int, dense: Mapping[str, Tensor], tables: Mapping[str, Any],
    meta: Mapping[str, Any], *, rank: int, world_size: int, gather: Gather, lock: Any,
) -> None:  # fmt: skip
    """The calls of `dcp.save` in its order, between collectives that wait for disks and name a rank."""
    agreement = Agreement(gather, rank, f"{folder} could not be written")

    def of_all(work: Callable[[], Any]) -> list[Any]:
        """What `work` gives on each rank, pickled as DCP sends it; CheckpointError where it fails on one."""
        with agreement.phase() as report, reported("torch.distributed.checkpoint"):
            report["pickle"] = pickle.dumps(work()).hex()
        return [pickle.loads(bytes.fromhex(each["pickle"])) for each in agreement.reports]

    sources = sources_of(tables)
    kept: dict[str, list[dict[str, Tensor]]] = {name: [] for name in sources}

    def keep(label: str, tensors: Callable[[], Any], header: dict[str, Any], entry: dict[str, Any]) -> None:
        if (part := tensors()) is not None:
            entry["file"] = label
            kept[header["table"]].append({name: values.clone() for name, values in part.items()})

    with agreement.phase() as report:
        if rank == 0 and any(each != lock.path for each in folder.iterdir()):
            raise CheckpointError(f"{folder} is not empty: one folder is one checkpoint")
        report["tables"] = {
            name: write_table(keep, name, rows, NOTHING, rank, world_size) for name, rows in sources.items()
        }
    manifest = body_of(step, world_size, {}, sources, {}, agreement.reports, meta)
    state = {f"dense/{name}": values for name, values in dense.items()}
    for name, rows in sources.items():
        total, parts = 0, manifest["tables"][name]["layers"][0]["parts"]
        for part in parts:
            part["first"], total = total, total + part["rows"]
        first = [part["first"] for part in parts if part["rank"] == rank and part["rows"]]
        for column, like in rows.like.items():
            values = [part.pop(column) for part in kept[name]]
            if format == "safetensors":  # each of whose files has a name once
                first, values = first[:1], [torch.cat(values)] if values else []
            shards = dict(zip(first, values, strict=True)) if total else {0: like}
            state[f"tables/{name}/{column}"] = _Shards(shards, total, like)
    state["meta"] = torch.frombuffer(bytearray(json.dumps(manifest).encode()), dtype=torch.uint8)

    writer: dcp.FileSystemWriter = dcp.FileSystemWriter(folder)
    if format == "safetensors":
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    planner.set_up_planner(state, writer.storage_meta(), rank == 0)
    writer.set_up_storage_writer(rank == 0)
    planned = of_all(lambda: writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planner.create_global_plan(planned)
    own = planner.finish_plan(writer.prepare_global_plan(plans)[rank])
    written = of_all(lambda: writer.write_data(own, planner).wait())
    with agreement.phase(), reported("torch.distributed.checkpoint"):
        if rank == 0:
            check_seen(folder, ([each.storage_data.relative_path for each in some] for some in written))
            writer.finish(metadata, written)


class _Shards(Tensor):
    """A tensor of so many rows, with `parts` by their first row (`torch.distributed._checkpointable`)."""

    def __new__(cls, parts: Mapping[int, Tensor], rows: int, like: Tensor) -> _Shards:
        return like.as_subclass(cls)

    def __init__(self, parts: Mapping[int, Tensor], rows: int, like: Tensor):
        self.parts, self.rows = parts, rows

    def size(self) -> torch.Size:  # type: ignore[override]
        return torch.Size([self.rows, *self.shape[1:]])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        rest = [0] * (self.dim() - 1)
        return [ChunkStorageMetadata(torch.Size([at, *rest]), each.shape) for at, each in self.parts.items()]

    def __create_write_items__(self, name: str, tensor: object) -> list[WriteItem]:
        items, properties = [], TensorProperties.create_from_tensor(self)
        for chunk in self.__create_chunk_list__():
            data = TensorWriteData(chunk, properties, self.size())
            items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.parts[index.offset[0]]


class _Folder(CheckpointStream):
    """A folder of DCP, read as a checkpoint."""

    def __init__(self, folder: Path):
        self.directory, self._wrong = folder, f"{folder} is damaged, or no checkpoint of this version"
        with reported(self._wrong):
            kind = dcp.FileSystemReader if (folder / ".metadata").exists() else HuggingFaceStorageReader
            self._reader = kind(str(folder))
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, True)
            self._saved: dict[str, Any] = self._metadata.state_dict_metadata
            if "meta" not in self._saved:
                raise CheckpointError(f"{folder} holds no checkpoint of tritonrec.dcp, with a tensor 'meta'")
            self._take(json.loads(bytes(self._tensors("", ["meta"])["meta"].tolist())))

    def _read(self, entry: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of a part of a table, or the dense ones."""
        if not part:
            return self._tensors("", [name for name in self._saved if name.startswith("dense/")])
        prefix, columns = f"tables/{part['table']}/", self.columns[part["table"]]
        return self._tensors(prefix, columns, entry["first"], entry["rows"]) | {ERASED: NOTHING}

    def _tensors(self, prefix: str, names: Iterable[str], first: int = 0, rows: int = 0) -> dict[str, Tensor]:
        """Tensors by name behind a `prefix`: whole, or so many `rows` from `first` on."""
        found, state = {}, {}
        for name in names:
            saved = self._saved[prefix + name]
            shape = (rows, *saved.size[1:]) if rows else saved.size
            found[name] = values = torch.empty(shape, dtype=saved.properties.dtype, device="cpu")
            state[prefix + name] = _Shards({first: values}, saved.size[0], values) if rows else values
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
        with reported(self._wrong):
            planner.set_up_planner(state, self._metadata, True)
            plan = planner.create_local_plan()
            # DCP reads nothing where nothing is, and says nothing.
            if sum(item.lengths.numel() for item in plan.items) != sum(map(torch.numel, found.values())):
                raise CheckpointError(f"{self.directory} is not whole: it lacks rows of {', '.join(state)}")
            self._reader.read_data(plan, planner).wait()
        return found
