"""Ranks as threads of one process, each with a gloo group of its own: real messages, no new processes."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from datetime import timedelta
from time import perf_counter_ns
from unittest import mock

import torch.distributed as dist


class ThreadRanks:
    """`world_size` gloo groups, connected with each other, on which functions run at the same time.

    After a failure the groups are made anew, since messages may be left in the old ones.
    """

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.groups: list = []

    def run(self, function, *args):
        """Call ``function(group, *args)`` for every rank; results in order, or the first rank's error."""
        outcomes = self.outcomes(function, *args)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def outcomes(self, function, *args) -> list:
        """The same, with errors in the places of results."""
        if not self.groups:
            with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo")):
                self.groups = self._in_threads(_connect(self.world_size))
        outcomes = self._in_threads(lambda rank: function(self.groups[rank], *args))
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for error in errors:
            _forget_variables(error)
        if errors:
            self.groups = []
        return outcomes

    def _in_threads(self, function) -> list:
        outcomes = [None] * self.world_size

        def call(rank):
            try:
                outcomes[rank] = function(rank)
            except BaseException as error:
                outcomes[rank] = error

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(self.world_size)]
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)  # ranks hand over to each other often
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(before)
        return outcomes


def _forget_variables(error: BaseException | None) -> None:
    """Of the functions that raised: they hold groups, and a thread of each wakes up 100 times a second."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _connect(world_size: int):
    store = dist.HashStore()
    return lambda rank: dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=20))


class Clock:
    """A recorder that notes when each exchange was started, and the values of counters."""

    def __init__(self):
        self.metadata = {}
        self.starts: list[int] = []
        self.counters: list[tuple[str, float]] = []

    def span(self, lane, name, *, batch, micro_batch=None, **args):
        return _Noted(self, name)

    def counter(self, name, value):
        self.counters.append((name, value))


class _Noted:
    def __init__(self, clock, name):
        self.clock, self.name = clock, name

    def __enter__(self):
        if self.name == "start":
            self.clock.starts.append(perf_counter_ns())
        return {}

    def __exit__(self, *exc):
        return None


def lags(starts: list[list[int]]) -> list[list[list[int]]]:
    """lags[p][j][q]: j minus the exchanges that q had started when p started j, from their start times."""
    return [
        [[j - sum(other < at for other in others) for others in starts] for j, at in enumerate(own)]
        for own in starts
    ]
