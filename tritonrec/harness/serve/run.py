"""What the ranks of `tritonrec serve-bench` do: serve batches under delays."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...data import ClickBatch, KeyedJaggedTensor
from ...distributed import TIMEOUT, Communicators
from ...distributed.bounded_lag import BoundedLagAllToAll
from ...nn import DLRM, DLRMConfig, partition_tables, sigmoid
from ...serving import ServedModel, TableWiseDLRM, infer, own_samples
from ...trace import Recorder

DENSE, DIM, TABLE_ROWS = 13, 16, 1000
FEATURES = tuple(f"c{number:02d}" for number in range(26))
"""Mini-Kaggle's shape: 13 dense and 26 categorical features."""
MOST_VECTORS = 100
"""Of a sample and table in the scenario ``sizes``, as in section V-E."""


@dataclass(frozen=True)
class ServeRun:
    """One run of one setting: `steps` batches served with a backend and bound.

    Args:
        scenario: ``sizes`` draws the sizes of messages; the others serve `TableWiseDLRM`.
        delays: (W, steps) seconds that each rank sleeps before each step.
        batch_size: samples of all ranks together.
        trace: directory for a trace of each rank. timeout: of the exchange.
    """

    scenario: str
    backend: str
    bound: int
    delays: np.ndarray
    batch_size: int
    seed: int
    trace: Path | None = None
    timeout: timedelta = TIMEOUT


def serve(communicators: Communicators, run: ServeRun) -> dict[str, Any]:
    """Serve all batches of `run` on this rank.

    Returns:
        ``seconds`` per batch, drained to the end; ``response``, mean seconds from a batch's turn to its
        prediction; ``digest`` of the predictions; ``largest_lag`` where it is known.
    """
    rank, world = communicators.rank, communicators.world_size
    steps = run.delays.shape[1]
    sizes = run.scenario == "sizes"
    make = _ragged if sizes else _dlrm
    model: ServedModel = make(rank, world, run.batch_size, steps, run.seed)
    recorder = Recorder(rank, world, {"mode": f"{run.backend} k={run.bound}"}) if run.trace else None
    exchange: Any
    group = communicators.control.group
    if run.backend == "bls":
        exchange = BoundedLagAllToAll(group, run.bound, model.capacity(run.batch_size), run.timeout, recorder)  # type: ignore[attr-defined]
    else:
        exchange = PlainExchange(group, run.bound, model)
    began: list[float] = []
    response: list[float] = []
    predictions: list[torch.Tensor] = []

    def batches() -> Iterator[Any]:
        for step, batch in enumerate(_batches(run.batch_size, steps, run.seed)):
            began.append(perf_counter())
            time.sleep(run.delays[rank, step])
            yield batch

    communicators.control.all_to_all_equal(torch.zeros(world, 1, dtype=torch.float32))
    start = perf_counter()
    for step, prediction in enumerate(infer(model, batches(), exchange)):
        response.append(perf_counter() - began[step])
        predictions.append(prediction)
    seconds = (perf_counter() - start) / steps
    if recorder is not None:
        recorder.save(run.trace / f"{run.scenario}-k{run.bound}-rank{rank}.pftrace")  # type: ignore[operator]
    return {
        "seconds": seconds,
        "response": float(np.mean(response)),
        "digest": hashlib.sha256(torch.cat(predictions).numpy().tobytes()).hexdigest(),
        "largest_lag": getattr(exchange, "largest_lag", None),
    }


class PlainExchange:
    """Listing 2 over the backend's own collective, started with ``async_op=True``; sizes known beforehand."""

    def __init__(self, group: dist.ProcessGroup | None, bound: int, model: Any):
        self.group, self.bound, self.model = group, bound, model
        self.started = 0

    def start(self, values: torch.Tensor, send: list[int]) -> Any:
        receive = self.model.receive(self.started)
        self.started += 1
        out = values.new_empty(sum(receive), *values.shape[1:])
        work = dist.all_to_all_single(out, values, receive, send, self.group, async_op=True)
        return _PlainHandle(work, values, out, receive)

    def drain(self) -> None:
        """Nothing is left: the loop has waited for every handle."""


@dataclass
class _PlainHandle:
    work: Any
    values: torch.Tensor  # alive until it has been sent
    out: torch.Tensor
    counts: list[int]

    def wait(self) -> tuple[torch.Tensor, list[int]]:
        self.work.wait()
        return self.out, self.counts


class _BenchDLRM(TableWiseDLRM):
    """Knows the sizes that it will receive, for a collective that takes them."""

    batch_size = 0

    def receive(self, step: int) -> list[int]:
        block = own_samples(self.batch_size, self.rank, self.world_size)
        return [(block.stop - block.start) * len(names) for names in self.features]


class RaggedModel:
    """Messages of drawn sizes: each sample takes 1 to 100 vectors from each rank's table, pooled on arrival.

    How many is drawn for each step, source and destination, so that messages differ up to a hundredfold.
    """

    def __init__(self, rank: int, world_size: int, batch_size: int, steps: int, seed: int):
        generator = np.random.default_rng([seed, 7])
        self.vectors = generator.integers(1, MOST_VECTORS + 1, (steps, world_size, world_size))
        self.rank, self.world_size = rank, world_size
        blocks = [own_samples(batch_size, each, world_size) for each in range(world_size)]
        self.block = blocks[rank]
        self.samples = [block.stop - block.start for block in blocks]
        torch.manual_seed(seed)
        config = DLRMConfig(tuple(f"r{each}" for each in range(world_size)), DENSE, DIM, (64,), (64,))
        self.model = DLRM(config)
        self.table = torch.randn(
            TABLE_ROWS, DIM, dtype=torch.float32, generator=torch.Generator().manual_seed(seed + rank)
        )

    def capacity(self, batch_size: int) -> int:
        return MOST_VECTORS * max(self.samples) * DIM * torch.float32.itemsize

    def receive(self, step: int) -> list[int]:
        return [int(n) * self.samples[self.rank] for n in self.vectors[step, :, self.rank]]

    def lookup(self, batch: ClickBatch) -> tuple[torch.Tensor, list[int]]:
        send = [
            int(n) * samples
            for n, samples in zip(self.vectors[batch.step, self.rank], self.samples, strict=True)
        ]
        ids = (torch.arange(sum(send)) * 7 + batch.step) % TABLE_ROWS
        return self.table[ids], send

    def bottom(self, batch: ClickBatch) -> torch.Tensor | None:
        return self.model.bottom_vectors(batch.dense[self.block])

    def top(self, batch: ClickBatch, x: Any, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        samples = self.samples[self.rank]
        pooled = {
            f"r{source}": part.view(samples, -1, DIM).mean(1)
            for source, part in enumerate(rows.split(counts))
        }
        return sigmoid(self.model.top_logits(x, pooled)).squeeze(1)


@lru_cache(maxsize=1)
def _dlrm(rank: int, world_size: int, batch_size: int, steps: int, seed: int) -> _BenchDLRM:
    torch.manual_seed(seed)
    model = DLRM(DLRMConfig(FEATURES, DENSE, DIM, (64,), (64,)))
    owners = partition_tables(dict.fromkeys(FEATURES, TABLE_ROWS), world_size)
    tables = {name: torch.randn(TABLE_ROWS, DIM, dtype=torch.float32) for name in FEATURES}
    own = {name: table.__getitem__ for name, table in tables.items() if owners[name] == rank}
    served = _BenchDLRM(model, owners, own, rank, world_size)
    served.batch_size = batch_size
    return served


_ragged = lru_cache(maxsize=1)(RaggedModel)


@lru_cache(maxsize=1)
def _batches(batch_size: int, steps: int, seed: int) -> list[ClickBatch]:
    """Preloaded, as in section V-C."""
    generator = torch.Generator().manual_seed(seed)
    return [
        ClickBatch(
            step,
            torch.arange(batch_size),
            dense=torch.randn(batch_size, DENSE, dtype=torch.float32, generator=generator),
            features=KeyedJaggedTensor.from_matrix(
                FEATURES, torch.randint(0, TABLE_ROWS, (batch_size, len(FEATURES)), generator=generator)
            ),
            labels=torch.zeros(batch_size, dtype=torch.int64),
        )
        for step in range(steps)
    ]
