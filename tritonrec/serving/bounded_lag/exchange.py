"""Bounded-lag all-to-all: ranks exchange rows and may be up to a bound of exchanges apart.

Dichev et al., "Faster Distributed Inference-Only Recommender Systems via Bounded Lag Synchronous Collectives"
(arXiv 2512.19342), section III-C and III-D. A rank starts exchange j at once and waits for exchange j - k
before it starts j + 1. So at most k + 1 exchanges are in flight. k = 0 is the synchronous collective::

    k = 2        start 0   start 1   start 2   wait 0  start 3   wait 1  start 4   ...   wait 3   wait 4
    tag              0         1         2                0                 1

The **lag** of rank p over rank q, as p starts exchange j, is j minus the number of exchanges that q has
started. It never exceeds k; under a synchronous collective it is 0.

Rows travel by one of the `transport.TRANSPORTS`: between processes of one host they are put into each other's
memory (`one_sided`), elsewhere sent as messages (`by_messages`).

No other collective is used. With its rows a rank sends their number, dtype and width, and the number of rows
that it expects in return. Both ranks compare them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch

from ...distributed.communicator import TIMEOUT
from ...distributed.watch import RankDiedError
from .by_messages import MessageTransport
from .checks import check_out, check_values, checked_counts
from .meeting import Meeting
from .messages import TAG, Deadline, Layout, SupportsMessages, Tags
from .transport import TRANSPORTS, Disagreement, Exchange, Transport, others

if TYPE_CHECKING:
    from ...trace import SupportsRecording


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
        transport: one of `TRANSPORTS`, the same on all ranks.

    Made by all ranks of the group, in the same order; the first `start` waits until they have. Rows of a CUDA
    tensor are staged in host memory. Call `drain` at the end: messages of a rank that ends earlier may be
    lost. Not thread-safe.
    """

    def __init__(
        self,
        group: SupportsMessages | None,
        bound: int,
        capacity: int = 0,
        timeout: timedelta = TIMEOUT,
        recorder: SupportsRecording | None = None,
        tag: int = TAG,
        transport: str = "auto",
    ):
        for name, value, unit in (("bound", bound, "exchanges"), ("capacity", capacity, "bytes")):
            if not isinstance(value, Integral) or value < 0:
                raise ValueError(f"{name} must be at least 0 {unit}, and whole, got {value}")
        if transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
        self.group, self.bound, self.capacity, self.timeout = group, bound, capacity, timeout
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()
        self.recorder = recorder
        self.started = 0
        self.lags = [0] * self.world_size
        self.largest_lag = 0
        self._in_flight: deque[Exchange] = deque()
        self._others = others(self.rank, self.world_size)
        self._failure = ""
        tags = Tags(tag, bound + 1)
        self._meeting = Meeting(group, bound, capacity, transport, tags)
        self._transport: Transport | None = None
        if not self._others:
            self._transport = MessageTransport(None, bound, capacity, tags)

    @property
    def in_flight(self) -> int:
        """Exchanges that were started and not completed."""
        return len(self._in_flight)

    @property
    def transport(self) -> str:
        """How rows travel: ``shared``, ``mpi`` or ``messages``; ``""`` before the ranks have chosen."""
        return "" if self._transport is None else self._transport.name

    @property
    def buffer_bytes(self) -> int:
        """Memory of this rank's buffers; 0 before the first exchange."""
        return 0 if self._transport is None else self._transport.buffer_bytes

    def connect(self) -> None:
        """Wait until all ranks have made the exchange, as the first `start` does otherwise.

        Raises the errors of `start` for ranks that are missing or have other settings.
        """
        self._ready()

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
        transport = self._ready()
        # k + 1 exchanges are in flight: the start of j completes
        # j - (k + 1), which is what bounds the lag by k.
        if len(self._in_flight) > self.bound:
            self._finish_oldest()
        number = self.started
        with self._reporting():
            transport.begin(number, Deadline(self.timeout))
        exchange = Exchange(self.finish_through, number, values, send, receive, out)
        self._update_lags(transport, number)
        with self._span("start", batch=number, bytes=exchange.size(sum(send))), self._reporting():
            transport.post(exchange, values)
        self._in_flight.append(exchange)
        self.started += 1
        return exchange

    def drain(self) -> None:
        """Complete every exchange, and wait until every message is sent."""
        while self._in_flight:
            self._finish_oldest()
        deadline = Deadline(self.timeout)
        with self._reporting():
            if self._transport is None:
                self._meeting.finish(deadline)
            else:
                self._transport.drain(self.started, deadline)

    def _ready(self) -> Transport:
        """The transport, which the ranks choose before the first exchange."""
        if self._transport is None:
            with self._reporting():
                self._transport = self._meeting.choose(Deadline(self.timeout))
        return self._transport

    def finish_through(self, exchange: Exchange, timeout: timedelta | None = None) -> None:
        """Complete `exchange`, and before it every older one; see `Exchange.wait`."""
        while not exchange.done:
            self._finish_oldest(timeout)

    def _finish_oldest(self, timeout: timedelta | None = None) -> None:
        if self._failure:
            raise RankDiedError(f"an earlier exchange failed: {self._failure}")
        exchange = self._in_flight.popleft()
        transport = self._ready()
        with self._span("wait", batch=exchange.number) as args, self._reporting():
            values = transport.finish(exchange, Deadline(timeout or self.timeout))
            args["bytes"] = values.numel() * values.element_size()
        exchange.values = values
        exchange.done = True

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Keep an error for later exchanges, and report this rank's own to the others."""
        try:
            yield
        except (RankDiedError, RuntimeError) as error:
            self._failure = str(error)
            # The others wait for this rank's next exchange, which never comes: they learn why instead.
            if self._transport is not None and isinstance(error, (RankDiedError, Disagreement)):
                self._transport.report(self.started, self._failure, isinstance(error, RankDiedError))
            raise

    def _update_lags(self, transport: Transport, number: int) -> None:
        """Set `lags`, without waiting; they are counters only, and decide nothing."""
        # What the others had started as this exchange begins;
        # it may be seen late, so a lag is never too small.
        counts = transport.started(number, len(self._in_flight))
        for peer in self._others:
            self.lags[peer] = max(0, number - counts[peer])
            self.largest_lag = max(self.largest_lag, self.lags[peer])
            if self.recorder is not None:
                self.recorder.counter(f"lag over rank {peer}", self.lags[peer])

    def _span(self, name: str, **args: Any) -> AbstractContextManager[dict[str, Any]]:
        if self.recorder is None:
            return nullcontext({})
        return self.recorder.span("communication", name, **args)
