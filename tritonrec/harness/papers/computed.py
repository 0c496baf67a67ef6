"""NestPipe's figures that are computed here: keys of a window, shapes in the lab, the dual-buffer copy.

Keys: how many more the micro-batches of a window exchange than its batch has (section V.C). Cut plainly,
clustered as `WindowConfig(clustering=True)` does it, and with `clustering_swaps` too, however long it takes.
No cut is below `bound`.

Shapes: Fig. 10 in the lab, other dimensions, layers and tokens over links that stay the same. The first shape
has the paper's shares of lookup and communication in a synchronous step, from which the seconds of emulated
stages follow. Of another shape the computation takes as many times that as it has operations (tokens x layers
x dim^2, as it grows in the paper), the lookup as many times as it has tokens. Transfers are real.

The copy (IV.B): the rows that two batches share are found, and copied.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console

from ...data import NextItemLoader, load_interactions
from ...data.clustering import split
from ...kernels import launch
from ...nn import HSTUConfig
from ..job import Job
from ..lab.rounds import PLAN, LabConfig, run_lab
from ..lab.settings import PAPER

COUNTS = 4, 8, 16, 32
SAMPLES, BATCHES, EVENTS = 256, 8, 50
MICRO_BATCHES = 8
RANKS = 4, 2, 8
"""The first has the paper's shares."""
DIM, LAYERS, TOKENS = 32, 2, 48
SHAPES = {
    "first": (1, 1, 1),
    "dimension x 2": (2, 1, 1),
    "layers / 2": (1, 0.5, 1), "layers x 2": (1, 2, 1),
    "tokens / 2": (1, 1, 0.5), "tokens x 2": (1, 1, 2),
}  # fmt: skip
"""Name -> dimension, layers and tokens over the first shape's, as the paper changes its own."""
ROUNDS, WARM_UP = 50, 5
STATES = 2
"""Of Adam, each as wide as a row."""


@dataclass(frozen=True)
class Samples:
    """The distinct keys of each sample, as far as `split` asks: (B + 1,) offsets of `keys`."""

    offsets: torch.Tensor
    keys: torch.Tensor

    @property
    def num_samples(self) -> int:
        return len(self.offsets) - 1

    def sample_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.offsets, self.keys


def samples_of(drawn: list[torch.Tensor]) -> Samples:
    """Of the keys of each sample, repeats left out."""
    distinct = [torch.unique(keys) for keys in drawn]
    lengths = torch.tensor([0, *map(len, distinct)], dtype=torch.int64)
    return Samples(lengths.cumsum(0), torch.cat(distinct))


def movielens(step: int) -> Samples:
    """Histories of MovieLens-100K, negatives left out: they are shared by chance alone."""
    loader = NextItemLoader(load_interactions("ml-100k"), SAMPLES, EVENTS, 0, seed=0)
    offsets, keys = loader.batch(step).sample_keys()
    return samples_of(list(keys.tensor_split(offsets[1:-1])))


def zipf(step: int) -> Samples:
    """Every sample draws 50 of 200,000 items with exponent 1.05: popular items are all that they share."""
    draw = np.random.default_rng(step)
    weights = 1 / np.arange(1, 200_001) ** 1.05
    items = draw.choice(len(weights), (SAMPLES, EVENTS), p=weights / weights.sum())
    return samples_of(list(torch.from_numpy(items)))


def communities(step: int) -> Samples:
    """Each sample is of one of 40 communities, and takes four fifths of its items from its 500 own ones."""
    draw = np.random.default_rng(step)
    own = draw.integers(0, 500, (SAMPLES, EVENTS)) + 500 * draw.integers(0, 40, (SAMPLES, 1))
    anywhere = draw.integers(0, 20_000, (SAMPLES, EVENTS))
    return samples_of(list(torch.from_numpy(np.where(draw.random(own.shape) < 0.8, own, anywhere))))


LOGS = {
    "MovieLens-100K": movielens,
    "200,000 Zipf items": zipf,
    "40 communities of 500 items": communities,
}


def inflation(samples: Samples, place: np.ndarray) -> float:
    """Distinct keys of all micro-batches over those of the batch; (B,) the micro-batch of each sample."""
    owners = np.repeat(place, np.diff(samples.offsets.numpy()))
    pairs = np.unique(np.stack([owners, samples.keys.numpy()]), axis=1)
    return pairs.shape[1] / len(np.unique(samples.keys))


def bound(samples: Samples, largest: int) -> float:
    """No micro-batch has more than `largest` keys, so samples that share a key fill so many at least."""
    lengths = np.diff(samples.offsets.numpy())
    _, numbers = np.unique(samples.keys.numpy(), return_inverse=True)
    together = np.bincount(numbers, np.repeat(lengths, lengths))
    return float(np.ceil(together / largest).mean())


def measured(samples: Samples, count: int) -> dict[str, float]:
    """Inflation of one batch in `count` micro-batches, and the milliseconds that each cut took."""
    lengths = np.diff(samples.offsets.numpy())

    def cut(clustered: bool, swaps: bool = False) -> np.ndarray:
        place = np.empty(samples.num_samples, np.int64)
        for number, part in enumerate(split(samples, count, clustered, swaps=swaps)):  # type: ignore[arg-type]
            place[part.numpy()] = number
        return place

    began = time.perf_counter()
    place = cut(True)
    clustered = time.perf_counter() - began
    largest = int(np.bincount(place, lengths, count).max())
    began = time.perf_counter()
    offline = cut(True, True)
    searched = time.perf_counter() - began - clustered
    found = inflation(samples, offline)
    assert found <= inflation(samples, place) and int(np.bincount(offline, lengths).max()) <= largest
    return {
        "plain": inflation(samples, cut(False)), "clustered": inflation(samples, place), "offline": found,
        "bound": bound(samples, largest), "clustered ms": 1e3 * clustered, "offline ms": 1e3 * searched,
    }  # fmt: skip


def inflations() -> dict[str, Any]:
    """Means over batches of each log and number of micro-batches."""
    measured(zipf(0), 2)  # compiles
    rows = []
    for name, log in LOGS.items():
        batches = [log(step) for step in range(BATCHES)]
        for count in COUNTS:
            each = [measured(samples, count) for samples in batches]
            means = {key: float(np.mean([one[key] for one in each])) for key in each[0]}
            rows.append({"log": name, "micro-batches": count, **means})
    return {"samples": SAMPLES, "batches": BATCHES, "rows": rows}


def shapes() -> dict[str, Any]:
    """Per step and rank of each shape: milliseconds, and the exposed part of the communication."""
    rows: list[dict[str, Any]] = []
    seconds: dict[str, float] = {}
    for name, (dim, layers, tokens) in SHAPES.items():
        length = int(TOKENS * tokens)
        sizes = HSTUConfig(dim=DIM * dim, layers=int(LAYERS * layers), max_seq_len=length, dropout=0.0)
        data = "zipf:users=8000,items=40000,median_length=160,seed=1"  # most histories fill every length
        job = Job(data, batch_size=256, max_seq_len=length, num_negatives=2, sizes=sizes)
        plan = LabConfig(
            job, rate=30.0, modes=("nestpipe",), micro_batches=(MICRO_BATCHES,), steps=6, rounds=1
        )
        work = {stage: tokens * (layers * dim**2 if stage == "compute" else 1) for stage in seconds}
        scaled = {stage: seconds[stage] * times for stage, times in work.items()}
        plan = replace(plan, seconds=scaled) if scaled else replace(plan, proportions=PAPER)
        result = run_lab(plan, Console(quiet=True))
        seconds = seconds or result.seconds
        found = result.rows[-1]
        rows.append({
            "shape": name,
            "step_ms": 1e3 * found.figures.step,
            "compute_ms": 1e3 * found.figures.compute,
            "communication_ms": 1e3 * found.figures.communication,
            "exposed_ratio": found.figures.exposed_ratio,
            "speedup": found.ratios[0],
            "losses": found.losses,
        })  # fmt: skip
    return {"rows": rows}


def cluster_sizes() -> dict[str, Any]:
    """Parts of a step of each mode by number of ranks, 64 samples a rank; milliseconds per step and rank.

    Four ranks have the paper's shares; lookup and computation of a rank stay the same at other numbers.
    """
    rows: list[dict[str, Any]] = []
    seconds: dict[str, float] = {}
    for ranks in RANKS:
        plan = replace(
            PLAN, job=replace(PLAN.job, batch_size=64 * ranks), ranks=ranks, rate=30.0, rounds=1, steps=6,
            modes=("dbp", "fwp", "nestpipe"), micro_batches=(MICRO_BATCHES,),
        )  # fmt: skip
        plan = replace(plan, seconds=seconds) if seconds else replace(plan, proportions=PAPER)
        result = run_lab(plan, Console(quiet=True))
        seconds = seconds or result.seconds
        rows += [{
            "ranks": ranks,
            "mode": row.setting.mode,
            "step_ms": 1e3 * row.figures.step,
            "lookup_ms": 1e3 * row.figures.exposed_lookup,
            "communication_ms": 1e3 * row.figures.exposed,
            "compute_ms": 1e3 * row.figures.compute,
            "busy": row.figures.busy,
            "losses": row.losses,
        } for row in result.rows]  # fmt: skip
    return {"rows": sorted(rows, key=lambda row: row["ranks"])}


def synchronisation() -> dict[str, Any]:
    """Milliseconds of one rank of the lab's four, whose tables are in host memory: medians over batches."""
    job, world = PLAN.job, PLAN.ranks
    loader, times = job.loader(), []
    before, source = torch.empty(0, dtype=torch.int64), torch.empty(0, 0, dtype=torch.float32)
    for step in range(WARM_UP + ROUNDS):
        ids = torch.cat([each.ids for each in loader.batch(step).lookups().values()]).unique()
        keys = ids[launch.owner_of(ids, world) == 0]
        target = torch.zeros(len(keys), (1 + STATES) * job.sizes.dim, dtype=torch.float32)
        if len(before):
            began = time.perf_counter()
            there, here = launch.intersect(before, keys)
            found = time.perf_counter()
            launch.scatter_rows(target, here, source, there)
            times.append((len(keys), len(here), found - began, time.perf_counter() - found))
            assert torch.equal(before[there], keys[here]) and bool((target[here] == 1).all()), step
        before, source = keys, torch.ones_like(target)
    rows, shared, found_in, copied_in = (median(each) for each in zip(*times[WARM_UP:], strict=True))
    return {"rows": rows, "shared": shared, "intersection_ms": found_in * 1e3, "copy_ms": copied_in * 1e3}
