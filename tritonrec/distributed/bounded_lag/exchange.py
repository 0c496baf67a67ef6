"""Bounded-lag all-to-all: ranks exchange rows and may be up to a bound of exchanges apart.

Dichev et al., "Faster Distributed Inference-Only Recommender Systems via Bounded Lag Synchronous Collectives"
(arXiv 2512.19342), section III-C and III-D. A rank starts exchange j at once and waits for exchange j - k
before it starts j + 1. So at most k + 1 exchanges are in flight, each with a slot of buffers: exchange j uses
slot and tag j mod (k + 1). k = 0 is the synchronous collective::

    k = 2        start 0   start 1   start 2   wait 0  start 3   wait 1  start 4   ...   wait 3   wait 4
    slot, tag        0         1         2                0                 1

The **lag** of rank p over rank q, as p starts exchange j, is j minus the number of exchanges that q has
started. It never exceeds k; under a synchronous collective it is 0.

The paper has k buffers and one-sided puts into the peers' memory, where a fast rank may overwrite a buffer
whose owner still waits for a third rank. Here every rank posts a receive only when its buffer is free, so an
early message waits at its sender.

No other collective is used. The header of a message has the number of rows, their dtype and width, and the
number of rows that its sender expects in return. Both ranks compare them; `messages` has the protocol.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..communicator import TIMEOUT
from ..watch import RankDiedError
from .checks import check_out, check_values, checked_counts, disagreement
from .messages import (
    EAGER,
    FAILED,
    HEADER,
    NO_MESSAGE,
    TAG,
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

if TYPE_CHECKING:
    from ...trace import SupportsRecording


class Exchange:
    """A started exchange; `wait` returns the received rows."""

    def __init__(
        self,
        owner: BoundedLagAllToAll,
        number: int,
        values: torch.Tensor,
        send: list[int],
        receive: list[int] | None,
        out: torch.Tensor | None,
    ):
        self.number, self.send, self.receive, self.out = number, send, receive, out
        self.layout = Layout.of(values)
        self.done = False
        self.counts: list[int] = []
        self.values: torch.Tensor | None = None
        self.like = values[:0]
        self.first: list[tuple[int, Any]] = []
        self.rest: list[tuple[int, Any]] = []
        self._owner = owner

    def size(self, rows: int) -> int:
        """Bytes of `rows` rows."""
        return rows * self.layout.row_bytes

    def wait(self, timeout: timedelta | None = None) -> tuple[torch.Tensor, list[int]]:
        """Complete this exchange, and before it every older one, within `timeout` or the owner's.

        Returns:
            (sum(counts), ...) rows grouped by source rank, and the number of rows from each rank.

        Raises RankDiedError naming a rank that died or sent nothing within the timeout, and RuntimeError
        where two ranks disagree about rows, dtype, width, bound or capacity.
        """
        self._owner._finish_through(self, timeout)
        assert self.values is not None
        return self.values, self.counts


class BoundedLagAllToAll:
    """Exchanges of rows among the ranks of a group, at most `bound` exchanges apart.

    Args:
        group: a process group with tagged point-to-point messages (gloo, or one of `register`), or None for a
            run of one rank. Its tags from `tag` to `tag + 128 (bound + 1)` are used here only.
        bound: k, at least 0, the same on all ranks.
        capacity: largest number of bytes of rows from one rank to another in one exchange, the same on all
            ranks; needed by exchanges without `receive`. Every rank keeps 2 (k + 1) (W - 1) buffers of this
            size, rounded up to a power of two, whatever the tables' sizes (section V-F).
        timeout: of `wait` for the other ranks.
        recorder: records a span for each start and each wait, and the counters ``lag over rank q``.
        tag: first tag; two objects over one group need disjoint ranges.

    Rows of a CUDA tensor are staged in host memory. Call `drain` at the end: messages of a rank that ends
    earlier may be lost. Not thread-safe.
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
        for name, value, unit in (("bound", bound, "exchanges"), ("capacity", capacity, "bytes")):
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be at least 0 {unit}, and whole, got {value}")
        self.group, self.bound, self.capacity, self.timeout = group, bound, capacity, timeout
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()
        self.recorder = recorder
        self._tags = Tags(tag, bound + 1)
        self._eager = buffer_size(max(EAGER, capacity))  # bytes of rows in the first message, at most
        self.started = 0
        self.lags = [0] * self.world_size
        self.largest_lag = 0
        self._in_flight: deque[Exchange] = deque()
        self._slots = [Slot(self.world_size) for _ in range(bound + 1)]
        self._others = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        self._settings: list[tuple[int, Any, torch.Tensor]] = []
        self._failure = ""
        self._failure_messages: list[Any] = []

    @property
    def _messages(self) -> SupportsMessages:
        assert self.group is not None, "a run of one rank sends nothing"
        return self.group

    @property
    def in_flight(self) -> int:
        """Exchanges that were started and not completed."""
        return len(self._in_flight)

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
        """Send the next ``send[r]`` rows of `values` to each rank r, without waiting for the ranks.

        With bound + 1 exchanges in flight the oldest is completed first. `values` may be changed afterwards.

        Args:
            values: (sum(send), ...) rows grouped by destination rank.
            send: rows to each rank, world_size entries.
            receive: rows from each rank, if known; buffers then grow as needed, without regard to `capacity`.
                Ranks compare these numbers with the received rows.
            out: for the received rows, contiguous, of the dtype and on the device of `values`; new by
                default.

        Raises ValueError for arguments that do not fit together and for messages larger than the capacity,
        and the errors of `Exchange.wait` for the oldest exchange.
        """
        if self._failure:
            raise RankDiedError(f"an earlier exchange failed: {self._failure}")
        send = checked_counts("send", send, self.world_size)
        check_values(values, send)
        if receive is not None:
            receive = checked_counts("receive", receive, self.world_size)
            if receive[self.rank] != send[self.rank]:
                raise ValueError(
                    f"rank {self.rank} sends itself {send[self.rank]} rows and expects {receive[self.rank]}"
                )
        if out is not None:
            check_out(out, values, receive)
        largest = max((send[peer] for peer in self._others), default=0) * Layout.of(values).row_bytes
        if receive is None and largest > self.capacity:
            raise ValueError(
                f"a message of {largest} bytes does not fit the capacity of {self.capacity}: "
                "give BoundedLagAllToAll a larger one, on all ranks"
            )
        if len(self._in_flight) > self.bound:
            self._finish_oldest()
        number = self.started
        slot = self._slots[number % len(self._slots)]
        self._await(slot.sending, number, Deadline(self.timeout))
        exchange = Exchange(self, number, values, send, receive, out)
        self._update_lags(number)
        with self._span("start", batch=number, bytes=exchange.size(sum(send))):
            if number == 0:
                self._post_settings(slot)
            self._post(exchange, slot, values)
        self._in_flight.append(exchange)
        self.started += 1
        return exchange

    def drain(self) -> None:
        """Complete every exchange, and wait until every message is sent."""
        while self._in_flight:
            self._finish_oldest()
        deadline = Deadline(self.timeout)
        for slot in self._slots:
            self._await(slot.sending, self.started - 1, deadline)

    def _post_settings(self, slot: Slot) -> None:
        """Send this rank's bound and capacity to all others, and post receives for theirs."""
        for peer in self._others:
            theirs = torch.zeros(2, dtype=torch.int64)
            work = self._messages.recv([theirs], peer, self._tags.settings)
            self._settings.append((peer, work, theirs))
            mine = torch.tensor([self.bound, self.capacity], dtype=torch.int64)
            slot.sending.append((peer, self._messages.send([mine], peer, self._tags.settings)))

    def _post(self, exchange: Exchange, slot: Slot, values: torch.Tensor) -> None:
        """Post the receives, then the sends; a rank's rows to itself go into its receive buffer."""
        place, size_of = exchange.number % len(self._slots), exchange.size
        send, receive = exchange.send, exchange.receive
        head, tag = HEADER + self._eager, self._tags.first(place, self._eager)
        for peer in self._others:
            more = 0 if receive is None else max(0, size_of(receive[peer]) - self._eager)
            buffer = slot.buffer(slot.receive, peer, head + (buffer_size(more) if more else 0))
            header_words(buffer)[0] = NO_MESSAGE
            exchange.first.append((peer, self._messages.recv([buffer[:head]], peer, tag)))
            if more:
                rest = buffer[head : head + buffer_size(more)]
                work = self._messages.recv([rest], peer, self._tags.rest(place, more))
                exchange.rest.append((peer, work))
        starts = [size_of(int(rows)) for rows in np.cumsum([0, *send])]
        rows = values.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        for peer in (*self._others, self.rank):
            size = HEADER + size_of(send[peer])
            buffer = slot.buffer(slot.receive if peer == self.rank else slot.send, peer, size)
            expects = UNKNOWN if receive is None else receive[peer]
            Header.of(exchange.number, send[peer], exchange.layout, expects).write(buffer)
            buffer[HEADER:size].copy_(rows[starts[peer] : starts[peer + 1]])
            if peer == self.rank:
                continue
            slot.sending.append((peer, self._messages.send([buffer[: min(size, head)]], peer, tag)))
            if size > head:
                work = self._messages.send([buffer[head:size]], peer, self._tags.rest(place, size - head))
                slot.sending.append((peer, work))

    def _finish_through(self, exchange: Exchange, timeout: timedelta | None = None) -> None:
        while not exchange.done:
            self._finish_oldest(timeout)

    def _finish_oldest(self, timeout: timedelta | None = None) -> None:
        if self._failure:
            raise RankDiedError(f"an earlier exchange failed: {self._failure}")
        exchange = self._in_flight.popleft()
        slot = self._slots[exchange.number % len(self._slots)]
        with self._span("wait", batch=exchange.number) as args:
            deadline = Deadline(timeout or self.timeout)
            self._compare_settings(deadline)
            self._await(exchange.first, exchange.number, deadline)
            for peer in range(self.world_size):
                self._compare(exchange, peer, slot.receive[peer])
            self._await(exchange.rest, exchange.number, deadline)
            values = self._collect(exchange, slot)
            args["bytes"] = values.numel() * values.element_size()
        exchange.values = values
        exchange.done = True

    def _compare_settings(self, deadline: Deadline) -> None:
        """Abort where a rank has another bound or capacity; once, before the first message is read."""
        mine = {"bound": self.bound, "capacity": self.capacity}
        while self._settings:
            peer, work, theirs = self._settings[0]
            self._await([(peer, work)], 0, deadline)
            for (name, value), other in zip(mine.items(), theirs.tolist(), strict=True):
                if value != other:
                    self._abort(
                        f"rank {peer} has {name}={other} and rank {self.rank} has {name}={value}: give "
                        "BoundedLagAllToAll the same on all ranks"
                    )
            self._settings.pop(0)

    def _compare(self, exchange: Exchange, peer: int, buffer: torch.Tensor) -> None:
        """Abort for a message of another exchange, or with other rows than one of the two ranks expects."""
        header = Header.read(buffer)
        if header.expects == FAILED:
            self._failure = bytes(buffer[HEADER : HEADER + header.rows].tolist()).decode(errors="replace")
            raise RuntimeError(self._failure)
        expected = UNKNOWN if exchange.receive is None else exchange.receive[peer]
        sent = exchange.send[peer]
        problem = disagreement(header, peer, self.rank, exchange.number, exchange.layout, sent, expected)
        for source, to, rows, known in (
            (peer, self.rank, header.rows, expected),
            (self.rank, peer, sent, header.expects),
        ):
            size = exchange.size(rows)
            if not problem and known == UNKNOWN and source != to and size > self._eager:
                problem = (
                    f"rank {source} sent {size} bytes, and rank {to} has a capacity of {self.capacity} in "
                    f"all-to-all {exchange.number}: give BoundedLagAllToAll a larger one, on all ranks"
                )
        if problem:
            self._abort(problem)
        exchange.counts.append(header.rows)

    def _abort(self, problem: str) -> None:
        """Raise RuntimeError, on this rank now and on the others at their next exchange."""
        self._failure = problem
        text = problem.encode()[: self._eager]
        notice = torch.zeros(HEADER + len(text), dtype=torch.uint8)
        Header.of(self.started, len(text), Layout(torch.uint8, 1), FAILED).write(notice)
        notice[HEADER:] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        tag = self._tags.first(self.started % len(self._slots), self._eager)
        for peer in self._others:
            with suppress(RuntimeError):  # the rank has ended
                self._failure_messages.append((notice, self._messages.send([notice], peer, tag)))
        raise RuntimeError(problem)

    def _collect(self, exchange: Exchange, slot: Slot) -> torch.Tensor:
        """The received rows, in order of source."""
        like, total = exchange.like, sum(exchange.counts)
        values = like.new_empty((total, *like.shape[1:])) if exchange.out is None else exchange.out
        if len(values) != total:
            self._abort(
                f"out has {len(values)} rows, and rank {self.rank} received {total} in all-to-all "
                f"{exchange.number}: give `out` as many rows as are sent to this rank"
            )
        flat = values.detach().view(-1).view(torch.uint8)
        at = 0
        for peer, rows in enumerate(exchange.counts):
            size = exchange.size(rows)
            flat[at : at + size].copy_(slot.receive[peer][HEADER : HEADER + size])
            at += size
        return values

    def _await(self, works: list[tuple[int, Any]], number: int, deadline: Deadline) -> None:
        """Wait for point-to-point messages, and remove them from `works` one by one."""
        while works:
            peer, work = works[0]
            try:
                work.wait(deadline.left)
            except RuntimeError as error:
                if deadline.is_over:
                    why = f"did nothing about exchange {number} within {deadline.seconds:g} s: it stalled"
                else:
                    why = f"is gone, or gave up on another rank, in exchange {number}: {error}"
                self._failure = f"rank {peer} {why}"
                raise RankDiedError(self._failure) from error
            works.pop(0)

    def _update_lags(self, number: int) -> None:
        """Set `lags` from the headers that have arrived, without waiting.

        gloo writes a message into the posted buffer at any time, so its header shows the arrival. A
        lag may be reported too large, never too small; it is a counter only, and decides nothing.
        """
        for peer in self._others:
            arrived = number - len(self._in_flight)
            for exchange in self._in_flight:
                slot = self._slots[exchange.number % len(self._slots)]
                if header_words(slot.receive[peer])[0] != exchange.number:
                    break
                arrived += 1
            self.lags[peer] = number - arrived
            self.largest_lag = max(self.largest_lag, number - arrived)
            if self.recorder is not None:
                self.recorder.counter(f"lag over rank {peer}", self.lags[peer])

    def _span(self, name: str, **args: Any) -> AbstractContextManager[dict[str, Any]]:
        if self.recorder is None:
            return nullcontext({})
        return self.recorder.span("communication", name, **args)
