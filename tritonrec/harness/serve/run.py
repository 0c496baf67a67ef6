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

from ...data import ClickBatch
from ...distributed import TIMEOUT, Communicators
from ...nn import DLRM, DLRMConfig, sigmoid
from ...serving import ServedModel, infer, own_samples
from ...serving.bounded_lag import BoundedLagAllToAll
from ...trace import Recorder
from .served import Served, served_batches, served_dlrm

MOST_VECTORS = 100
"""Of a sample and table in the scenario ``sizes``, as in section V-E."""


@dataclass(frozen=True)
class ServeRun:
    """One run of one setting: `steps` batches served with a backend and bound.

    Args:
        scenario: ``sizes`` draws the sizes of messages; the others serve `TableWiseDLRM`.
        served: model and clicks. delays: (W, steps) seconds that each rank sleeps before each step.
        batch_size: samples of all ranks together.
        trace: directory for a trace of each rank. timeout: of the exchange.
    """

    scenario: str
    backend: str
    bound: int
    served: Served
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
    model: ServedModel
    if sizes:
        model = _ragged(run.served, rank, world, run.batch_size, steps, run.seed)
    else:
        model = served_dlrm(run.served, rank, world, run.batch_size, run.seed)
    recorder = Recorder(rank, world, {"mode": f"{run.backend} k={run.bound}"}) if run.trace else None
    exchange: Any
    group = communicators.control.group
    if run.backend == "bls":
        exchange = BoundedLagAllToAll(group, run.bound, model.capacity(run.batch_size), run.timeout, recorder)
        exchange.connect()
    else:
        exchange = PlainExchange(group, run.bound, model)
    began: list[float] = []
    response: list[float] = []
    predictions: list[torch.Tensor] = []

    def batches() -> Iterator[Any]:
        for step, batch in enumerate(served_batches(run.served, run.batch_size, steps, run.seed)):
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


class RaggedModel:
    """Messages of drawn sizes: each sample takes 1 to 100 vectors from each rank's table, pooled on arrival.

    How many is drawn for each step, source and destination, so that messages differ up to a hundredfold.
    """

    def __init__(self, served: Served, rank: int, world_size: int, batch_size: int, steps: int, seed: int):
        generator = np.random.default_rng([seed, 7])
        self.vectors = generator.integers(1, MOST_VECTORS + 1, (steps, world_size, world_size))
        self.rank, self.world_size = rank, world_size
        blocks = [own_samples(batch_size, each, world_size) for each in range(world_size)]
        self.block = blocks[rank]
        self.samples = [block.stop - block.start for block in blocks]
        torch.manual_seed(seed)
        features, dense = (
            tuple(f"r{each}" for each in range(world_size)),
            served.clicks(1, seed).dense.shape[1],
        )
        self.model = DLRM(DLRMConfig(features, dense, served.dim, (64,), (64,)))
        shape, generator_of_rank = (served.rows // world_size, served.dim), torch.Generator()
        self.table = torch.randn(
            shape, dtype=torch.float32, generator=generator_of_rank.manual_seed(seed + rank)
        )

    def capacity(self, batch_size: int) -> int:
        return MOST_VECTORS * max(self.samples) * self.model.config.dim * torch.float32.itemsize

    def receive(self, step: int) -> list[int]:
        return [int(n) * self.samples[self.rank] for n in self.vectors[step, :, self.rank]]

    def lookup(self, batch: ClickBatch) -> tuple[torch.Tensor, list[int]]:
        send = [
            int(n) * samples
            for n, samples in zip(self.vectors[batch.step, self.rank], self.samples, strict=True)
        ]
        ids = (torch.arange(sum(send)) * 7 + batch.step) % len(self.table)
        return self.table[ids], send

    def bottom(self, batch: ClickBatch) -> torch.Tensor | None:
        return self.model.bottom_vectors(batch.dense[self.block])

    def top(self, batch: ClickBatch, x: Any, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        samples = self.samples[self.rank]
        pooled = {
            f"r{source}": part.view(samples, -1, self.model.config.dim).mean(1)
            for source, part in enumerate(rows.split(counts))
        }
        return sigmoid(self.model.top_logits(x, pooled)).squeeze(1)


_ragged = lru_cache(maxsize=1)(RaggedModel)
