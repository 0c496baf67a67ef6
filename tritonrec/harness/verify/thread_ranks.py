"""Ranks as threads of one process, which exchange tensors by handing them over.

For checks of a model that cannot be sent to another process, such as a class made in a notebook. Collectives
are those of `Communicator`: all of them are made of `all_to_all` and `all_reduce`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import fields
from itertools import product
from typing import Any, TypeVar

import torch

from ...distributed import Communicator, Communicators, RankDiedError
from ...distributed.groups import nodes_and_rails, validate_division

Result = TypeVar("Result")
TIMEOUT = 120.0
"""Seconds that a rank waits for the others, which may compile kernels meanwhile."""

LOOKS = 0.1
"""Seconds between two looks for ranks that wait for one that has ended."""


class _Table:
    """Where the ranks of one group put what the others take."""

    def __init__(self, world_size: int):
        self.slots: list[Any] = [None] * world_size
        self.broken = "another rank stopped"
        self.barrier = threading.Barrier(world_size, timeout=TIMEOUT)


class ThreadCommunicator(Communicator):
    """The collectives of one group on one rank."""

    def __init__(self, table: _Table, rank: int, name: str, peers: Sequence[int]):
        super().__init__(None, name, peers=peers)
        self._table, self.rank, self.world_size = table, rank, len(table.slots)

    def exchange(
        self, values: torch.Tensor, send: list[int], receive: list[int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `Communicator.exchange`."""

        def rows(slots: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
            # No rows may be those of a rank with rows of another size, as on torch's backends.
            return torch.cat([values[:0], *(parts[self.rank] for parts in slots if len(parts[self.rank]))])

        received = self._swap(values.split(send), rows)
        return received if out is None else out.copy_(received)

    def all_reduce(self, values: torch.Tensor, name: str, bounded: bool = False) -> torch.Tensor:
        """As `Communicator.all_reduce`; floats are added in the order of ranks."""
        if not bounded:
            self._check_overflow(values, name)

        def total(slots: list[torch.Tensor]) -> torch.Tensor:
            first, *others = slots
            result = first.clone()
            for other in others:
                result += other
            return result

        return values.copy_(self._swap(values, total))

    def _swap(self, mine: Any, take: Callable[[list[Any]], torch.Tensor]) -> torch.Tensor:
        table = self._table
        try:
            table.slots[self.rank] = mine
            table.barrier.wait()
            taken = take(table.slots)
            table.barrier.wait()  # nobody changes what another one still reads
        except threading.BrokenBarrierError:
            raise RuntimeError(table.broken) from None
        return taken


def run_ranks(
    world_size: int, function: Callable[[Communicators], Result], replicas: int = 1, nodes: int = 1
) -> list[Result]:
    """Call ``function(communicators)`` on every rank at once; results in order, or the first rank's error.

    A rank that fails ends the others, whose errors say so and are not raised. `replicas` and `nodes` are
    as in `Communicators`.
    """
    if world_size == 1:
        return [function(Communicators.local())]
    validate_division(world_size, replicas, nodes)
    mesh = torch.arange(world_size, dtype=torch.int64).view(-1, replicas)
    groups: list[dict[str, Communicator]] = [{} for _ in range(world_size)]
    tables: list[_Table] = []
    members: list[list[int]] = []
    for name in (each.name for each in fields(Communicators) if each.type == "Communicator"):
        for ranks in _members(name, mesh, nodes):
            tables.append(_Table(len(ranks)))
            members.append(ranks)
            for place, number in enumerate(ranks):
                alone = len(ranks) == 1
                groups[number][name] = (
                    Communicator() if alone else ThreadCommunicator(tables[-1], place, name, ranks)
                )
    errors: list[BaseException] = []

    def rank(number: int) -> Result:
        own: dict[str, Any] = {**groups[number]}
        try:
            return function(Communicators(**own))
        except BaseException as error:
            errors.append(error)
            for table in tables:
                table.barrier.abort()
            raise

    with ThreadPoolExecutor(world_size, thread_name_prefix="tritonrec-rank") as pool:
        futures = [pool.submit(rank, number) for number in range(world_size)]
        while wait(futures, LOOKS).not_done:
            for table, ranks in zip(tables, members, strict=True):
                ended = [number for number in ranks if futures[number].done()]
                if ended and table.barrier.n_waiting:  # for one that will not come
                    table.broken = (
                        f"rank {ended[0]} has ended, and others wait for it: give every rank as many batches"
                    )
                    table.barrier.abort()
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


def _members(name: str, mesh: torch.Tensor, nodes: int) -> list[list[int]]:
    """The groups of a name on a mesh (L, G) of ranks, as `Communicators` has them."""
    if name in ("reduce", "control"):
        return [mesh.flatten().tolist()]
    if name.startswith(("node", "rail")):
        return nodes_and_rails(mesh, nodes)[name.startswith("rail")].tolist()
    return mesh.tolist() if name in ("replica_routing", "replica") else mesh.t().tolist()


class ThreadPool:
    """Runs functions on ranks that are threads, as `RankPool` does on ranks that are processes.

    Functions and arguments are not pickled.
    """

    meshes = tuple(
        (world, replicas, nodes)
        for world, replicas, nodes in product(range(1, 9), repeat=3)
        if world % replicas == world % nodes == 0 and 1 in (replicas, nodes)
    )

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        replicas: int = 1,
        nodes: int = 1,
    ) -> list[Any]:
        """As `RankPool.run`; RankDiedError with the first error's text, from that error."""
        try:
            return run_ranks(world_size, lambda ranks: function(ranks, *args), replicas, nodes)
        except Exception as error:
            raise RankDiedError(f"{type(error).__name__}: {error}") from error

    def restart(self) -> None:
        """Nothing is left of a failed run."""
