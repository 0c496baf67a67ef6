"""Bounded-lag all-to-all: ranks exchange rows without waiting for each other, up to a bound.

Dichev et al., "Faster Distributed Inference-Only Recommender Systems via Bounded Lag Synchronous Collectives"
(arXiv 2512.19342), section III-C and III-D. A rank starts exchange j at once and waits for exchange j - k
before it starts j + 1, so k + 1 are in flight at most and one slot of buffers for each is enough: exchange j
uses slot and tag j mod (k + 1). k = 0 is the synchronous collective::

    k = 2        start 0   start 1   start 2   wait 0  start 3   wait 1  start 4   ...   wait 3   wait 4
    slot, tag        0         1         2                0                 1

The **lag** of rank p over rank q, as p starts exchange j, is j minus the number of exchanges that q has
started. It never exceeds k; under a synchronous collective it is 0.

The paper has k buffers and one-sided puts into the peers' memory: there a fast rank may overwrite a buffer
whose owner still waits for a third rank. Here every rank posts its own receives, and posts one only when its
buffer is free, so a message that comes early waits at its sender.

No collective is hidden anywhere: a message carries its number of rows in a header, into a receive buffer as
large as the largest message allowed.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ..communicator import TIMEOUT
from ..launch import RankDiedError

if TYPE_CHECKING:
    from ...trace import SupportsRecording

HEADER = 32
"""Bytes before the rows: int64 number of the exchange, rows, bytes of a row, and the sender's bound."""
TAG = 0x626C7300
"""First tag of an exchange; far from the tags that people choose."""
_NOTHING = -1


class SupportsMessages(Protocol):
    """What an exchange asks of a group: `torch.distributed.ProcessGroup` and its backends have it."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int, /) -> Any: ...

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int, /) -> Any: ...


class _Slot:
    """Buffers of one exchange in flight: one to and one from each rank, header first."""

    def __init__(self, world_size: int):
        self.send: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * world_size
        self.receive = list(self.send)
        self.sending: list[tuple[int, Any]] = []

    @staticmethod
    def room(buffers: list[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """`buffers[rank]`, replaced by a larger one where it has fewer than `size` bytes."""
        if len(buffers[rank]) < size:
            buffers[rank] = torch.empty(size, dtype=torch.uint8)
        return buffers[rank]


class Exchange:
    """An exchange that has been started; `wait` returns what came."""

    def __init__(
        self, owner: BoundedLagAllToAll, number: int, values: torch.Tensor, out: torch.Tensor | None
    ):
        self.number = number
        self.done = False
        self.counts: list[int] = []
        self.values: torch.Tensor | None = None
        self.out = out
        self.like = values[:0]
        self.receiving: list[tuple[int, Any]] = []
        self._owner = owner

    def wait(self) -> tuple[torch.Tensor, list[int]]:
        """Complete this exchange, and before it every older one.

        Returns:
            (sum(counts), ...) rows grouped by source rank, and how many came from each.

        Raises RankDiedError naming the rank that died, or sent nothing within the timeout.
        """
        self._owner._finish_through(self)
        assert self.values is not None
        return self.values, self.counts


class BoundedLagAllToAll:
    """Exchanges of rows among the ranks of a group, at most `bound` exchanges apart.

    Args:
        group: a process group with tagged point-to-point messages (gloo, or one of `register`), or None for a
            run of one rank. Nobody else may use its tags from `tag` to `tag + bound`.
        bound: k, at least 0, the same on all ranks.
        capacity: most bytes of rows that one rank sends to another in one exchange, the same on all ranks;
            needed by exchanges that are not told what they receive. Every rank keeps
            2 (k + 1) (W - 1) buffers of this size, whatever the tables' sizes (section V-F).
        timeout: how long `wait` stays for the other ranks before it raises.
        recorder: gets a span for each start and each wait, and the counters ``lag over rank q``.
        tag: first tag; two exchanges over one group need ranges of their own.

    Rows of a CUDA tensor travel through the buffers in host memory. Call `drain` at the end: a rank that
    leaves earlier may take messages with it. Not for use from several threads at a time.
    """

    def __init__(
        self,
        group: SupportsMessages | None,
        bound: int,
        capacity: int = 0,
        timeout: timedelta = TIMEOUT,
        recorder: SupportsRecording | None = None,
        tag: int = TAG,
    ):
        if bound < 0:
            raise ValueError(f"bound must be at least 0 exchanges, got {bound}")
        if capacity < 0:
            raise ValueError(f"capacity must be at least 0 bytes, got {capacity}")
        self.group, self.bound, self.capacity, self.timeout = group, bound, capacity, timeout
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()
        self.recorder, self.tag = recorder, tag
        self.started = 0
        self.lags = [0] * self.world_size
        self.largest_lag = 0
        self._flight: deque[Exchange] = deque()
        self._slots = [_Slot(self.world_size) for _ in range(bound + 1)]
        self._others = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        self._failure = ""

    @property
    def _messages(self) -> SupportsMessages:
        assert self.group is not None, "a run of one rank sends nothing"
        return self.group

    @property
    def in_flight(self) -> int:
        """Exchanges that were started and not completed."""
        return len(self._flight)

    @property
    def buffer_bytes(self) -> int:
        """Host memory of all slots."""
        return sum(len(each) for slot in self._slots for each in (*slot.send, *slot.receive))

    def start(
        self,
        values: torch.Tensor,
        send: list[int],
        receive: list[int] | None = None,
        out: torch.Tensor | None = None,
    ) -> Exchange:
        """Send ``send[r]`` leading rows of `values` to each rank r in turn; returns without waiting for them.

        With bound + 1 exchanges in flight it completes the oldest first. `values` may be changed afterwards.

        Args:
            values: (sum(send), ...) rows grouped by destination rank.
            send: rows to each rank, world_size entries.
            receive: rows from each rank where they are known; buffers then grow as needed and `capacity`
                does not count. They must be right: gloo ends a process that gets a longer message.
            out: contiguous, where the rows go that come; new by default.

        Raises ValueError for counts that do not fit `values`, and for messages larger than the capacity;
        RankDiedError as `Exchange.wait` does.
        """
        row_bytes = self._check(values, send, receive)
        if len(self._flight) > self.bound:
            self._finish_oldest()
        number = self.started
        slot = self._slots[number % len(self._slots)]
        deadline = time.monotonic() + self.timeout.total_seconds()
        self._await(slot.sending, number, deadline)
        exchange = Exchange(self, number, values, out)
        self._look_at_lags(number)
        with self._span("start", batch=number, bytes=sum(send) * row_bytes):
            self._post(exchange, slot, values, send, receive, row_bytes)
        self._flight.append(exchange)
        self.started += 1
        return exchange

    def drain(self) -> None:
        """Complete every exchange, and see every message off."""
        while self._flight:
            self._finish_oldest()
        deadline = time.monotonic() + self.timeout.total_seconds()
        for slot in self._slots:
            self._await(slot.sending, self.started - 1, deadline)

    def _post(self, exchange, slot, values, send, receive, row_bytes) -> None:
        """Post the receives, then the sends; a rank's rows to itself go into its receive buffer."""
        tag = self.tag + exchange.number % len(self._slots)
        for peer in self._others:
            size = HEADER + (self.capacity if receive is None else receive[peer] * row_bytes)
            buffer = slot.room(slot.receive, peer, size)
            _header(buffer)[0] = _NOTHING
            exchange.receiving.append((peer, self._messages.recv([buffer[:size]], peer, tag)))
        starts = np.cumsum([0, *send]) * row_bytes
        rows = values.detach().contiguous().view(-1).view(torch.uint8)
        for peer in (*self._others, self.rank):
            size = HEADER + send[peer] * row_bytes
            buffer = slot.room(slot.receive if peer == self.rank else slot.send, peer, size)
            _header(buffer)[:] = exchange.number, send[peer], row_bytes, self.bound
            buffer[HEADER:size].copy_(rows[starts[peer] : starts[peer + 1]])
            if peer != self.rank:
                slot.sending.append((peer, self._messages.send([buffer[:size]], peer, tag)))

    def _finish_through(self, exchange: Exchange) -> None:
        while not exchange.done:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        if self._failure:
            raise RankDiedError(f"an earlier exchange failed: {self._failure}")
        exchange = self._flight.popleft()
        with self._span("wait", batch=exchange.number) as noted:
            deadline = time.monotonic() + self.timeout.total_seconds()
            self._await(exchange.receiving, exchange.number, deadline)
            values = self._collect(exchange)
            noted["bytes"] = values.numel() * values.element_size()
        exchange.values = values
        exchange.done = True

    def _collect(self, exchange: Exchange) -> torch.Tensor:
        """The rows that came, in order of source, after the headers were checked."""
        slot = self._slots[exchange.number % len(self._slots)]
        like, row_shape = exchange.like, exchange.like.shape[1:]
        row_bytes = row_shape.numel() * like.element_size()
        for peer in range(self.world_size):
            number, rows, their_row_bytes, bound = _header(slot.receive[peer]).tolist()
            if (number, their_row_bytes, bound) != (exchange.number, row_bytes, self.bound):
                self._failure = (
                    f"rank {peer} sent exchange {number}, bound {bound}, rows of {their_row_bytes} bytes; "
                    f"rank {self.rank} expected {exchange.number}, bound {self.bound}, {row_bytes} bytes: "
                    "all ranks have to run the same exchanges"
                )
                raise RuntimeError(self._failure)
            exchange.counts.append(rows)
        total = sum(exchange.counts)
        values = like.new_empty((total, *row_shape)) if exchange.out is None else exchange.out
        flat = values.view(-1).view(torch.uint8)
        at = 0
        for peer, rows in enumerate(exchange.counts):
            size = rows * row_bytes
            flat[at : at + size].copy_(slot.receive[peer][HEADER : HEADER + size])
            at += size
        return values

    def _await(self, works: list[tuple[int, Any]], number: int, deadline: float) -> None:
        """Wait for point-to-point messages, which are dropped from `works` one by one."""
        while works:
            peer, work = works[0]
            left = max(deadline - time.monotonic(), 0.001)
            try:
                work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                seconds = self.timeout.total_seconds()
                if time.monotonic() >= deadline:
                    why = f"did nothing about exchange {number} within {seconds:g} s: it stalled"
                else:
                    why = f"is gone, or gave up on another rank, in exchange {number}: {error}"
                self._failure = f"rank {peer} {why}"
                raise RankDiedError(self._failure) from error
            works.pop(0)

    def _look_at_lags(self, number: int) -> None:
        """Set `lags` from the headers that have arrived; nothing is waited for.

        gloo writes a message into the posted buffer while nobody waits, so the header tells that it came. The
        figure is never too small, and what it feeds is a counter, not a decision.
        """
        for peer in self._others:
            arrived = number - len(self._flight)
            for exchange in self._flight:
                slot = self._slots[exchange.number % len(self._slots)]
                if _header(slot.receive[peer])[0] != exchange.number:
                    break
                arrived += 1
            self.lags[peer] = number - arrived
            self.largest_lag = max(self.largest_lag, number - arrived)
            if self.recorder is not None:
                self.recorder.counter(f"lag over rank {peer}", self.lags[peer])

    def _check(self, values: torch.Tensor, send: list[int], receive: list[int] | None) -> int:
        """Bytes of a row of `values`, after the arguments of `start` were checked."""
        if self._failure:
            raise RankDiedError(f"an earlier exchange failed: {self._failure}")
        world = self.world_size
        for name, counts in (("send", send), ("receive", receive)):
            if counts is not None and (len(counts) != world or min(counts) < 0):
                raise ValueError(
                    f"{name} needs {world} counts of at least 0, one for each rank, got {counts}"
                )
        if values.dim() < 1 or len(values) != sum(send):
            raise ValueError(f"values must have sum(send) = {sum(send)} rows, got {tuple(values.shape)}")
        row_bytes = values.shape[1:].numel() * values.element_size()
        largest = max((send[peer] for peer in self._others), default=0) * row_bytes
        if receive is None and largest > self.capacity:
            raise ValueError(
                f"a message of {largest} bytes does not fit the capacity of {self.capacity}: "
                "give BoundedLagAllToAll a larger one, on all ranks"
            )
        return row_bytes

    def _span(self, name: str, **args: Any) -> AbstractContextManager[dict[str, Any]]:
        if self.recorder is None:
            return nullcontext({})
        return self.recorder.span("communication", name, **args)


def _header(buffer: torch.Tensor) -> np.ndarray:
    """The four int64 at the head of a buffer, sharing its memory."""
    return buffer[:HEADER].numpy().view(np.int64)
