"""Checksums of the messages of a group, at both ends: a bit that flips on the way is seen by the receiver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..kernels.checksums import part_checksums

GOLDEN = 0x9E3779B1  # 2**32 over the golden ratio


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

    One all-to-all in so many is entered, by its number, so that ranks agree. They exchange their entries from
    time to time: W numbers of 8 bytes for each.

    Args:
        one_in: all-to-alls of which one is entered. They are spread (multiples of the golden ratio), so that
            every place in a step gets its turn.
        every: entries after which the ledgers are compared, at least 1.

    Attributes:
        messages: compared so far.
    """

    def __init__(self, one_in: int, every: int):
        self.one_in, self.every, self.messages = one_in, every, 0
        self._calls = 0
        self._entries: list[int] = []  # the numbers of the all-to-alls
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
        """Note an all-to-all of rows (sum of `send`, ...) and of those received; enter it if it is due.

        Raises `CorruptionError` on the receiver of a message that was another one when it was sent.
        """
        number, self._calls = self._calls, self._calls + 1
        # number * GOLDEN mod 2**32 is spread evenly over 32 bits:
        # it is in the first 1 / one_in of them once in one_in.
        if number * GOLDEN % 2**32 * self.one_in >= 2**32:
            return
        self._entries.append(number)
        self._sent.append(part_checksums(sent, send, over.rank))
        self._received.append(part_checksums(received, receive, over.rank))
        if len(self._sent) == self.every:
            self._compare(over)

    def _compare(self, over: SupportsExchange) -> None:
        sent, received = torch.stack(self._sent, 1), torch.stack(self._received, 1)
        entries, self._entries, self._sent, self._received = self._entries, [], [], []
        one = [1] * over.world_size
        wrong = (over.exchange(sent, one, one) != received).nonzero()
        self.messages += received.numel() - received.shape[1]
        if not len(wrong):
            return
        peers = over.peers or range(over.world_size)
        peer, call = wrong[0].tolist()
        group = over.name.partition(" ")[0]
        raise CorruptionError(
            f"a message from rank {peers[peer]} has other bits at rank {peers[over.rank]} than when it was "
            f"sent (all-to-all {entries[call]} of group {group}): check the link and the memory of both, and "
            "go on from a checkpoint before this step",
            (peers[peer], peers[over.rank]),
        )
