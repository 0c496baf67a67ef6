"""Exchanges by tagged messages of a process group: each rank posts its receives, and its sends.

A receive is posted only when its buffer is free, so an early message waits at its sender, and k + 1 slots are
enough. `messages` has the protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from ...distributed.watch import RankDiedError
from .checks import check_header
from .messages import (
    EAGER,
    FAILED,
    HEADER,
    NO_MESSAGE,
    UNKNOWN,
    Deadline,
    Header,
    Layout,
    Slot,
    SupportsMessages,
    Tags,
    buffer_size,
    header_words,
)
from .transport import Exchange, others


class MessageTransport:
    """A `Transport` over a group with tagged point-to-point messages, or of one rank without any."""

    name = "messages"

    def __init__(self, group: SupportsMessages | None, bound: int, capacity: int, tags: Tags):
        rank, world_size = (0, 1) if group is None else (group.rank(), group.size())
        self.group, self.rank, self.world_size, self.capacity = group, rank, world_size, capacity
        self._tags = tags
        self._eager = buffer_size(max(EAGER, capacity))  # bytes of rows in the first message, at most
        self._slots = [Slot(world_size) for _ in range(bound + 1)]
        self._others = others(rank, world_size)
        self._receives: dict[int, tuple[list[tuple[int, Any]], list[tuple[int, Any]]]] = {}
        self._failure_messages: list[Any] = []

    @property
    def _messages(self) -> SupportsMessages:
        assert self.group is not None, "a run of one rank sends nothing"
        return self.group

    @property
    def buffer_bytes(self) -> int:
        return sum(len(each) for slot in self._slots for each in (*slot.send, *slot.receive))

    def begin(self, number: int, deadline: Deadline) -> None:
        # Exchange number - (k + 1) used these buffers last: its messages have to be sent before they are
        # written again.
        self._await(self._slots[number % len(self._slots)].sending, number, deadline)

    def post(self, exchange: Exchange, values: torch.Tensor) -> None:
        """Post the receives, then the sends; a rank's rows to itself go into its receive buffer."""
        place, size_of = exchange.number % len(self._slots), exchange.size
        slot, send, receive = self._slots[place], exchange.send, exchange.receive
        head, tag = HEADER + self._eager, self._tags.first(place, self._eager)
        first: list[tuple[int, Any]] = []
        rest: list[tuple[int, Any]] = []
        self._receives[exchange.number] = (first, rest)
        for peer in self._others:
            more = 0 if receive is None else max(0, size_of(receive[peer]) - self._eager)
            buffer = slot.buffer(slot.receive, peer, head + (buffer_size(more) if more else 0))
            # Before the receive is posted: gloo may fill the buffer
            # from then on, and `started` looks at this word.
            header_words(buffer)[0] = NO_MESSAGE
            with naming(peer, exchange.number):
                first.append((peer, self._messages.recv([buffer[:head]], peer, tag)))
            if more:
                tail = buffer[head : head + buffer_size(more)]
                with naming(peer, exchange.number):
                    rest.append((peer, self._messages.recv([tail], peer, self._tags.rest(place, more))))
        # First byte of each rank's rows among this rank's own.
        starts = [size_of(int(rows)) for rows in np.cumsum([0, *send])]
        rows = values.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        # This rank's own rows come last: the messages are on their way meanwhile.
        for peer in (*self._others, self.rank):
            size = HEADER + size_of(send[peer])
            buffer = slot.buffer(slot.receive if peer == self.rank else slot.send, peer, size)
            expects = UNKNOWN if receive is None else receive[peer]
            Header.of(exchange.number, send[peer], exchange.layout, expects).write(buffer)
            buffer[HEADER:size].copy_(rows[starts[peer] : starts[peer + 1]])
            if peer == self.rank:
                continue
            with naming(peer, exchange.number):
                slot.sending.append((peer, self._messages.send([buffer[: min(size, head)]], peer, tag)))
                if size > head:
                    work = self._messages.send([buffer[head:size]], peer, self._tags.rest(place, size - head))
                    slot.sending.append((peer, work))

    def finish(self, exchange: Exchange, deadline: Deadline) -> torch.Tensor:
        slot = self._slots[exchange.number % len(self._slots)]
        first, rest = self._receives.pop(exchange.number)
        self._await(first, exchange.number, deadline)
        for peer in range(self.world_size):
            self._compare(exchange, peer, slot.receive[peer])
        # Headers are compared first: ranks that disagree about sizes have different tags, and the rest never
        # comes.
        self._await(rest, exchange.number, deadline)
        values = exchange.make_out(self.rank)
        flat = values.detach().view(-1).view(torch.uint8)
        at = 0
        for peer, rows in enumerate(exchange.counts):
            size = exchange.size(rows)
            flat[at : at + size].copy_(slot.receive[peer][HEADER : HEADER + size])
            at += size
        return values

    def started(self, number: int, in_flight: int) -> list[int]:
        """From the headers that have arrived: gloo writes a message into the posted buffer at any time.

        So a lag may be reported too large, never too small.
        """
        counts = [number] * self.world_size
        for peer in self._others:
            # All exchanges up to the oldest in flight are complete, so their senders have started them.
            counts[peer] = number - in_flight
            while counts[peer] < number:
                slot = self._slots[counts[peer] % len(self._slots)]
                if header_words(slot.receive[peer])[0] != counts[peer]:
                    break
                counts[peer] += 1
        return counts

    def drain(self, number: int, deadline: Deadline) -> None:
        for slot in self._slots:
            self._await(slot.sending, number - 1, deadline)

    def report(self, number: int, problem: str, died: bool) -> None:
        if died:
            return  # the others see the end of this rank's connections
        text = problem.encode()[: self._eager]
        notice = torch.zeros(HEADER + len(text), dtype=torch.uint8, device="cpu")
        Header.of(number, len(text), Layout(torch.uint8, 1), FAILED).write(notice)
        notice[HEADER:] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        tag = self._tags.first(number % len(self._slots), self._eager)
        for peer in self._others:
            with suppress(RuntimeError):  # the rank has ended
                self._failure_messages.append((notice, self._messages.send([notice], peer, tag)))

    def _compare(self, exchange: Exchange, peer: int, buffer: torch.Tensor) -> None:
        """Raise for a message of another exchange, or with other rows than one of the two ranks expects."""
        header = Header.read(buffer)
        if header.expects == FAILED:
            raise RuntimeError(bytes(buffer[HEADER : HEADER + header.rows].tolist()).decode(errors="replace"))
        check_header(header, exchange, peer, self.rank, self.capacity, self._eager)
        exchange.counts.append(header.rows)

    def _await(self, works: list[tuple[int, Any]], number: int, deadline: Deadline) -> None:
        """Wait for point-to-point messages, and remove them from `works` one by one."""
        while works:
            peer, work = works[0]
            await_work(peer, work, number, deadline)
            works.pop(0)


def await_work(peer: int, work: Any, number: int, deadline: Deadline) -> None:
    """Wait for a message to or from `peer`. Raises RankDiedError naming it."""
    with naming(peer, number, deadline):
        work.wait(deadline.left)


@contextmanager
def naming(peer: int, number: int, deadline: Deadline | None = None) -> Iterator[None]:
    """Raise RankDiedError naming `peer` for an error of the group, at once or after a wait."""
    try:
        yield
    except RuntimeError as error:
        if deadline is not None and deadline.is_over:
            raise RankDiedError(deadline.stalled(peer, number)) from error
        raise RankDiedError(
            f"rank {peer} is gone, or gave up on another rank, in exchange {number}: {error}"
        ) from error
