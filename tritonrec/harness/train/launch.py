"""Start of `tritonrec train` on this rank of torchrun's, on one rank, or on processes of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

from ... import distributed, resilience
from ...distributed import Communicators
from ...distributed.environment import rank_here
from ..devices import BACKENDS, Device, rank_pool, take_gpu_here
from . import loop
from .elastic import Memory
from .run import Run
from .stopping import Begun, BegunHere, Stop, graceful_stop

Summary = tuple[dict[str, Any], bool, Stop]
"""The summary of a run, whether this process writes it to files, and whether it was stopped."""
Stoppable = Callable[[Callable[[], None]], AbstractContextManager[Stop]]


@dataclass(frozen=True)
class Launch:
    """Where a training runs.

    Args:
        world_size: ranks to start; under torchrun, srun or mpirun their own count.
        replicas, timeout, nodes: of `Communicators`. device: each rank takes a GPU of its own.
    """

    world_size: int
    replicas: int
    timeout: timedelta
    nodes: int = 1
    device: Device = "cpu"

    def train(self, run: Run) -> Summary:
        """`train` on all ranks; signals stop it after its step."""
        with self._begun() as begun:
            return self._run(partial(graceful_stop, begun=begun), partial(loop.train, begun=begun), run)

    def run(self, function: Callable[..., dict[str, Any]], *args: Any) -> Summary:
        """``function(communicators, *args)`` on all ranks; signals end it."""
        return self._run(lambda request: nullcontext(Stop()), function, *args)

    def train_elastically(self, run: Run) -> Summary:
        """As `train`, on the ranks that are left where some are lost."""
        if self._is_here:
            memory, stopping, ranks = Memory(), Event(), list[int]()

            def train(communicators: Communicators) -> dict[str, Any]:
                ranks.append(communicators.rank)
                return loop.train(replace(communicators, stop=stopping), run, memory=memory)

            with graceful_stop(stopping.set) as stop:
                summary = resilience.run_elastic(train, self.timeout, self.replicas, run.min_ranks)
            return summary, ranks[-1] == 0, stop
        with (
            self._begun() as begun,
            resilience.ElasticPool(self.world_size, self.timeout, self.replicas, run.min_ranks) as pool,
            graceful_stop(pool.request_stop, begun=begun) as stop,
        ):
            return pool.run(loop.train, run, False, Memory(), begun)[0], True, stop

    @contextmanager
    def _begun(self) -> Iterator[Begun | None]:
        """Of ranks that end with this process; None of a launcher's, which have nothing in common."""
        if rank_here().world_size > 1:
            yield None
        elif self.world_size == 1:
            yield Event()
        else:
            with TemporaryDirectory() as folder:
                yield BegunHere(Path(folder) / "begun")

    @property
    def _is_here(self) -> bool:
        """Whether this process is a rank."""
        return rank_here().world_size > 1 or self.world_size == 1

    def _run(self, stoppable: Stoppable, function: Callable[..., dict[str, Any]], *args: Any) -> Summary:
        if self._is_here:
            take_gpu_here(self.device)
            backend = BACKENDS[self.device]
            with (
                distributed.from_environment(
                    self.timeout, self.replicas, backend, self.nodes
                ) as communicators,
                stoppable(communicators.stop.set) as stop,
            ):
                return function(communicators, *args), communicators.rank == 0, stop
        with (
            rank_pool(self.device, [(self.world_size, self.replicas, self.nodes)], self.timeout) as pool,
            stoppable(pool.request_stop) as stop,
        ):
            mesh = {"replicas": self.replicas, "nodes": self.nodes}
            results = pool.run(function, self.world_size, *args, **mesh)
            return results[0], True, stop
