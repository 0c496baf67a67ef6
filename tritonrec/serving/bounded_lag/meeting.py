"""The ranks of an exchange compare their settings, and choose a transport together."""

from __future__ import annotations

import os
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch

from ...distributed import RankDiedError
from ...distributed.environment import LAUNCHERS
from ...distributed.limits import READ_TIMEOUT, within
from .by_messages import MessageTransport, await_work, naming
from .messages import Deadline, SupportsMessages, Tags
from .transport import TRANSPORTS, Disagreement, Transport, others
from .window import host_words

WORDS = 9
"""Of the settings: bound, capacity, transport, two of the host, three of the window, whether MPI may be."""
_unawaited: dict[int, tuple[list[tuple[int, Any]], list[torch.Tensor]]] = {}
"""Messages that nobody has waited for, and their tensors, by the id of the list. Once such a message is
forgotten and its answer comes, gloo's thread polls for ever: it has no place to read it into."""


def started_by_mpiexec(world_size: int) -> bool:
    """Whether mpiexec started as many ranks, this process among them, and mpi4py is installed."""
    sizes = [each.size for each in LAUNCHERS if each.name in ("Open MPI", "MVAPICH", "MPI")]
    told = any(os.environ.get(name) == str(world_size) for name in sizes)
    # A child of torchrun has the variables of its parent, whose place in MPI it cannot take.
    return told and "TORCHELASTIC_RUN_ID" not in os.environ and find_spec("mpi4py") is not None


class Meeting:
    """Sends this rank's settings at once; `choose` and `finish` wait for those of the others.

    Args: as of `BoundedLagAllToAll`.
    """

    def __init__(self, group: SupportsMessages | None, bound: int, capacity: int, transport: str, tags: Tags):
        self.group, self.bound, self.capacity, self.transport = group, bound, capacity, transport
        self._tags = tags
        self._works: list[tuple[int, Any]] = []
        self._shared: Any = None
        if group is None or group.size() == 1:
            return
        rank, world_size = group.rank(), group.size()
        host = host_words() if transport in ("auto", "shared") else (0, 0)
        if any(host):
            from .shared import SharedMemory

            self._shared = SharedMemory(rank, world_size, bound, capacity)
        name = self._shared.window.name if self._shared is not None else (0, 0, 0)
        if transport == "mpi":
            from .mpi import number_of_rank

            name = (number_of_rank(), 0, 0)
        mpi = transport == "auto" and capacity > 0 and started_by_mpiexec(world_size)
        self._send(group, [bound, capacity, TRANSPORTS.index(transport), *host, *name, mpi])

    def _send(self, group: SupportsMessages, words: list[int]) -> None:
        """Words to each rank, and places for theirs."""
        rank, world_size = group.rank(), group.size()
        self._settings = [torch.zeros(WORDS, dtype=torch.int64, device="cpu") for _ in range(world_size)]
        self._settings[rank] = torch.tensor(words, dtype=torch.int64, device="cpu")
        _unawaited[id(self._works)] = self._works, self._settings
        for peer in others(rank, world_size):
            with naming(peer, 0):
                self._works.append((peer, group.recv([self._settings[peer]], peer, self._tags.settings)))
        for peer in others(rank, world_size):
            with naming(peer, 0):
                self._works.append((peer, group.send([self._settings[rank]], peer, self._tags.settings)))

    def finish(self, deadline: Deadline) -> None:
        """Wait until the settings of all ranks are here."""
        while self._works:
            # Removed after its wait: a message whose wait failed stays in `_unawaited`.
            await_work(*self._works[0], 0, deadline)
            self._works.pop(0)
        _unawaited.pop(id(self._works), None)

    def choose(self, deadline: Deadline) -> Transport:
        """The transport of all ranks.

        Raises RankDiedError naming a rank that has not come, and RuntimeError for settings that differ.
        """
        group = self.group
        assert group is not None
        rank, world_size = group.rank(), group.size()
        self.finish(deadline)
        found = [each.tolist() for each in self._settings]
        names = [TRANSPORTS[each[2]] for each in found]
        for peer in others(rank, world_size):
            theirs = {"bound": found[peer][0], "capacity": found[peer][1], "transport": names[peer]}
            mine = {"bound": self.bound, "capacity": self.capacity, "transport": self.transport}
            for name, value in mine.items():
                if theirs[name] != value:
                    raise Disagreement(
                        f"rank {peer} has {name}={theirs[name]} and rank {rank} has {name}={value}: give "
                        "BoundedLagAllToAll the same on all ranks"
                    )
        # All ranks compute this from the same words, so they choose one transport without another message.
        together = all(any(each[3:5]) and each[3:5] == found[0][3:5] for each in found)
        if self._shared is not None and together:
            self._shared.open([(each[5], each[6], each[7]) for each in found])
            return self._shared
        if self.transport == "mpi" or all(each[8] for each in found):
            from .mpi import MpiWindows, place_among

            numbers = [each[5] for each in found]
            if self.transport == "auto":  # MPI starts with this first look at it
                self._send(group, [place_among(world_size)] * WORDS)
                self.finish(deadline)
                numbers = [int(each[0]) for each in self._settings]
            if sorted(numbers) == [*range(world_size)]:
                try:
                    made = numbers, rank, self.bound, self.capacity
                    return within(deadline.seconds, lambda: MpiWindows(*made))
                except TimeoutError as error:  # MPI has no limits, and does not say who stopped
                    self._send(group, [0] * WORDS)
                    self.finish(Deadline(timedelta(seconds=READ_TIMEOUT)))
                    raise RankDiedError(f"MPI made no windows of all ranks: {error}") from error
        if self.transport == "shared":
            raise Disagreement(
                'transport="shared" needs all ranks to be processes of one user on one host with Linux 5.3 '
                'or later; transport="messages" does not'
            )
        return MessageTransport(group, self.bound, self.capacity, self._tags)
