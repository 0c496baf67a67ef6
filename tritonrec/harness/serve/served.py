"""The DLRM that `tritonrec serve-bench` serves: its tables, its weights and its clicks.

Without a checkpoint the tables are drawn, in the proportions of Criteo's (`data.synthetic_clicks`), and an id
reads the row of its remainder. With one, tables and weights are those of `tritonrec train --model dlrm`.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch

from ...checkpoint import CheckpointStream
from ...data import ClickBatch, ClickLog, KeyedJaggedTensor
from ...data.sources import load_clicks
from ...data.synthetic_clicks import SHAPES, SyntheticClickOptions, generate, table_rows
from ...nn import DLRM, DLRMConfig, partition_tables
from ...serving import Predictor, TableWiseDLRM, export, load_weights, own_samples
from ...serving.manifest import read_manifest
from ..job import Job
from ..train.config import CONFIG, from_tables
from ..train.run import Run

SHAPE = SHAPES["criteo"]
DENSE_FILE, TABLES_FOLDER = "dense.pt", "tables"


@dataclass(frozen=True)
class Served:
    """What is served.

    Args:
        rows: of all tables together, about. dim: columns of a row.
        data: clicks for `data.sources.load_clicks`; synthetic ones in Criteo's shape by default.
        exported: folder of `export_checkpoint`; then `rows` and `dim` are the checkpoint's.
    """

    rows: int
    dim: int
    data: str = ""
    exported: Path | None = None

    def table_rows(self) -> dict[str, int]:
        """Rows of each feature's table; of drawn ones in Criteo's proportions, alike for other features."""
        if self.exported:
            manifest = read_manifest(self.exported / TABLES_FOLDER)
            features = manifest["features"].items()
            return {name: manifest["tables"][each["table"]]["rows"] for name, each in features}
        drawn = load_clicks(self.data).features if self.data else tuple(SHAPE.tables)
        if drawn == tuple(SHAPE.tables):
            return table_rows(SHAPE, self._scale)
        return dict.fromkeys(drawn, -(-self.rows // len(drawn)))

    @property
    def _scale(self) -> float:
        return min(1.0, self.rows / sum(SHAPE.tables.values()))

    def describe(self) -> str:
        """In words, for a report."""
        tables = self.table_rows()
        return (
            f"{len(tables)} tables with {sum(tables.values()):,} rows of {self.dim}, the largest "
            f"{max(tables.values()):,}; clicks: {self.data or 'synthetic'}"
        )

    def clicks(self, samples: int, seed: int) -> ClickLog:
        """The impressions of `data`, or `samples` drawn ones."""
        if self.data:
            return load_clicks(self.data)
        return generate("criteo", SyntheticClickOptions(samples, self._scale, seed=seed))


def export_checkpoint(checkpoint: Path, folder: Path) -> Served:
    """Write the tables and weights of a checkpoint for the ranks.

    Raises ValueError for a checkpoint that `tritonrec train --model dlrm` has not saved.
    """
    stream = CheckpointStream(checkpoint, None)
    text = stream.meta.get(CONFIG)
    if text is None:
        raise ValueError(f"{checkpoint} was not saved by tritonrec train: serve-bench cannot build its model")
    run = from_tables(Run(Job()), tomllib.loads(text), checkpoint)
    if run.job.model != "dlrm":
        raise ValueError(f"{checkpoint} holds a model {run.job.model}, and serve-bench serves dlrm")
    model = run.job.build(run.optimizer)[0]
    assert isinstance(model, DLRM)
    load_weights(stream, model)
    manifest = export(checkpoint, folder / TABLES_FOLDER, format="safetensors", step=stream.step)
    torch.save({"config": asdict(model.config), "state": model.state_dict()}, folder / DENSE_FILE)
    rows = sum(table["rows"] for table in manifest["tables"].values())
    return Served(rows, model.config.dim, run.job.source, folder)


class BenchDLRM(TableWiseDLRM):
    """Knows the sizes that it will receive, for a collective that takes them."""

    batch_size = 0

    def receive(self, step: int) -> list[int]:
        block = own_samples(self.batch_size, self.rank, self.world_size)
        return [(block.stop - block.start) * len(names) for names in self.features]


@lru_cache(maxsize=1)
def served_dlrm(served: Served, rank: int, world_size: int, batch_size: int, seed: int) -> BenchDLRM:
    """The model, with the tables that this rank owns."""
    if served.exported is None:
        torch.manual_seed(seed)
        sizes = served.table_rows()
        dense = served.clicks(1, seed).dense.shape[1]
        model = DLRM(DLRMConfig(tuple(sizes), dense, served.dim, (64,), (64,)))
        owners = partition_tables(sizes, world_size)
        own = {
            name: _drawn(rows, served.dim, seed + place)
            for place, (name, rows) in enumerate(sizes.items())
            if owners[name] == rank
        }
    else:
        saved = torch.load(served.exported / DENSE_FILE, weights_only=True)
        model = DLRM(DLRMConfig(**saved["config"]))
        model.load_state_dict(saved["state"])
        owners = partition_tables(served.table_rows(), world_size)
        mine = [name for name in model.config.features if owners[name] == rank]
        loaded = Predictor.load(served.exported / TABLES_FOLDER, features=mine)
        of_feature = loaded.manifest["features"]
        own = {name: loaded.tables[of_feature[name]["table"]].rows for name in mine}
    model_of_rank = BenchDLRM(model, owners, own, rank, world_size)
    model_of_rank.batch_size = batch_size
    return model_of_rank


def _drawn(rows: int, dim: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.empty(rows, dim, dtype=torch.float32).uniform_(-1, 1, generator=generator)
    return lambda ids: weights[ids % rows]


@lru_cache(maxsize=1)
def served_batches(served: Served, batch_size: int, steps: int, seed: int) -> list[ClickBatch]:
    """Preloaded, as in section V-C; impressions come again where the log has fewer."""
    log = served.clicks(batch_size * steps, seed)
    categories, dense = torch.from_numpy(log.categories), torch.from_numpy(log.dense)
    rows = torch.arange(steps * batch_size).view(steps, batch_size) % len(log)
    return [
        ClickBatch(
            step,
            torch.arange(batch_size),
            dense=dense[at],
            features=KeyedJaggedTensor.from_matrix(log.features, categories[at]),
            labels=torch.zeros(batch_size, dtype=torch.int64),
        )
        for step, at in enumerate(rows)
    ]
