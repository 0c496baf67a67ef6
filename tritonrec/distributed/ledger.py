"""Checksums of the messages of a group, at both ends: a bit that flips on the way is seen by the receiver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..kernels.checksums import checksum


class SupportsExchange(Protocol):
    """A group of ranks, as `Communicator` is."""

    name: str
    rank: int
    world_size: int

    @property
    def peers(self) -> Sequence[int]: ...

    def exchange(self, values: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor: ...


class CorruptionError(RuntimeError):
    """Bits of a training have changed, or were computed wrongly, outside of its program.

    Args:
        ranks: those of which one is at fault.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()):
        super().__init__(message)
        self.ranks = ranks


class Ledger:
    """The checksums of what a rank sent to and received from each other rank of a group.

    Ranks exchange them after every so many all-to-alls of the group: W numbers of 8 bytes for each.

    Args:
        every: all-to-alls after which the ledgers are compared, at least 1.

    Attributes:
        messages: compared so far.
    """

    def __init__(self, every: int):
        self.every, self.messages = every, 0
        self._calls = 0
        self._sent: list[torch.Tensor] = []
        self._received: list[torch.Tensor] = []

    def note(
        self,
        over: SupportsExchange,
        sent: torch.Tensor,
        send: list[int],
        received: torch.Tensor,
        receive: list[int],
    ) -> None:
        """Enter an all-to-all of rows (sum of `send`, ...) and of those received.

        Raises `CorruptionError` on the receiver of a message that was another one when it was sent.
        """
        self._sent.append(_checksums(sent, send, over.rank))
        self._received.append(_checksums(received, receive, over.rank))
        self._calls += 1
        if len(self._sent) == self.every:
            self._compare(over)

    def _compare(self, over: SupportsExchange) -> None:
        sent, received = torch.stack(self._sent, 1), torch.stack(self._received, 1)
        self._sent, self._received = [], []
        one = [1] * over.world_size
        wrong = (over.exchange(sent, one, one) != received).nonzero()
        self.messages += received.numel() - received.shape[1]
        if not len(wrong):
            return
        peers = over.peers or range(over.world_size)
        peer, call = wrong[0].tolist()
        number = self._calls - received.shape[1] + call
        group = over.name.partition(" ")[0]
        raise CorruptionError(
            f"a message from rank {peers[peer]} has other bits at rank {peers[over.rank]} than when it was "
            f"sent (all-to-all {number} of group {group}): check the link and the memory of both, and go on "
            "from a checkpoint before this step",
            (peers[peer], peers[over.rank]),
        )


def _checksums(rows: torch.Tensor, sizes: list[int], own: int) -> torch.Tensor:
    """(W,) int64 of the parts of `rows`, in this order; 0 for a rank's own."""
    parts = rows.split(sizes)
    zero = torch.zeros((), dtype=torch.int64, device=rows.device)
    return torch.stack([zero if rank == own else checksum(part) for rank, part in enumerate(parts)])
