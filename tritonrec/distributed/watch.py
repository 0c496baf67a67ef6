"""Where every rank is, for the others: so that one that stands still is named, with its stage.

Each rank reports to a store, every second or more often, which collectives it has begun, by group, and what
its threads are doing. The report comes from a thread of its own, so that it goes on during a long computation
and stops when the process does. Nobody reads reports until a collective fails.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

REPORT_EVERY = 1.0
"""Seconds between a rank's reports; with timeouts below 8 s an eighth of them."""

READ_PATIENCE = 2.0
"""Seconds that the store gets to answer; the rank that serves it may be the one that stands still."""

SHOWN = 3
"""Stages of a rank, or ranks, that a message names."""


class RankDiedError(RuntimeError):
    """A rank ended, failed, or stayed silent beyond its timeout.

    The message has one line per rank that has something to say; `details` holds their tracebacks.
    """

    def __init__(self, message: str, details: str = ""):
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class Report:
    """What a rank said of itself last.

    Args:
        number: of the report. time: when, in seconds since 1970 by its own clock.
        doing: its threads' stages, the longest under way first. last: the stage it finished last.
        calls: collectives begun, by group. task: how many tasks it has begun.
        failure: of this task, empty if it goes on. lost: whether it failed because another rank did.
    """

    number: int = 0
    time: float = 0.0
    doing: tuple[str, ...] = ()
    last: str = ""
    calls: tuple[tuple[str, int], ...] = ()
    task: int = 0
    failure: str = ""
    lost: bool = False

    @property
    def place(self) -> str:
        """Where the rank was, in words."""
        if self.doing:
            return "in " + ", ".join(self.doing[:SHOWN])
        return f"after {self.last}" if self.last else "before its first stage"

    @property
    def age(self) -> str:
        """How long ago, in words; between machines as exact as their clocks."""
        return f"{max(0.0, time.time() - self.time):.1f} s ago"


def read_reports(store: dist.Store, ranks: Sequence[int]) -> dict[int, Report]:
    """The last report of each rank that has made one."""
    found = {}
    for rank in ranks:
        key = _key(rank)
        if store.check([key]):
            values: dict[str, Any] = json.loads(store.get(key))
            values["doing"] = tuple(values["doing"])
            values["calls"] = tuple(map(tuple, values["calls"]))
            found[rank] = Report(**values)
    return found


class Watch:
    """Reports where this rank is, and explains why a collective of this rank failed.

    Args:
        store: where reports go, a connection of its own; None: nothing is reported and no rank can be named.
        rank, world_size: of all ranks that report there. timeout: of their collectives.
    """

    def __init__(self, store: dist.Store | None, rank: int, world_size: int, timeout: timedelta):
        self.store, self.rank, self.world_size = store, rank, world_size
        self.timeout = timeout.total_seconds()
        self.interval = min(REPORT_EVERY, self.timeout / 8)
        self._doing: dict[int, tuple[object, float]] = {}  # by thread: its stage, and since when
        self._last: object = ""
        self._calls: dict[str, int] = {}
        self._task, self._failure, self._lost = 0, "", False
        self._number = 0
        self._known: dict[int, Report] = {}  # of rank 0, which may serve the store and take it along
        self._closed = threading.Event()
        self._reporting = threading.Lock()
        if store is not None:
            self._report()
            threading.Thread(target=self._report_on, name="watch", daemon=True).start()

    @contextmanager
    def doing(self, stage: object) -> Iterator[None]:
        """Around what this thread does next; `stage` is shown as ``str(stage)``."""
        thread = threading.get_ident()
        before = self._doing.get(thread)
        self._doing[thread] = stage, time.monotonic()
        try:
            yield
        finally:
            self._last = stage
            if before is None:
                del self._doing[thread]
            else:
                self._doing[thread] = before

    def begin_task(self) -> None:
        """Forget the failure of the task before."""
        self._task, self._failure, self._lost = self._task + 1, "", False
        self._last = ""

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks at once that this one goes on no more."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, RankDiedError):
            cause = cause.__cause__
        self._lost = cause is not None
        self._failure = f"{type(error).__name__}: {error}"[:500]
        self._report_quickly()

    def close(self) -> None:
        """Report no more."""
        self._closed.set()

    def begin_call(self, group: str) -> int:
        """Count a collective of that group; the number of this one, from 1."""
        number = self._calls[group] = self._calls.get(group, 0) + 1
        return number

    def meet(self, group: str, peers: Sequence[int], patience: timedelta) -> None:
        """Wait until all `peers` are at this collective, for as long as they report, up to `patience`.

        For work that may take longer than the timeout, as writing to a disk. Raises `RankDiedError` naming a
        rank that reported nothing for the timeout, or that has failed.
        """
        if self.store is None:
            return
        number = self.begin_call(f"{group}, meeting")
        key = f"{group} {number}"
        self.store.set(f"{key} {self.rank}", "here")
        missing = [peer for peer in peers if peer != self.rank]
        began = heard = time.monotonic()
        seen: dict[int, tuple[int, float]] = {}  # the last report's number, and when it was new
        while missing := [peer for peer in missing if not self.store.check([f"{key} {peer}"])]:
            now = time.monotonic()
            if now - heard > self.interval:
                heard = now
                reports = self._read(missing)
                failed = self._failed(reports)
                if failed:
                    raise RankDiedError(failed)
                for peer, report in reports.items():
                    if seen.get(peer, (0, 0.0))[0] != report.number:
                        seen[peer] = report.number, now
                limit = {peer: self.timeout - (now - seen.get(peer, (0, began))[1]) for peer in missing}
                silent = [peer for peer in missing if limit[peer] <= 0]
                if silent or now - began > patience.total_seconds():
                    raise RankDiedError(
                        self._missed(silent or missing, silent, reports, now - began, group, number)
                    )
            time.sleep(0.005)
        if number > 1:  # everybody has left the meeting before
            self.store.delete_key(f"{group} {number - 1} {self.rank}")

    def explain(
        self, group: str, number: int, peers: Sequence[int], waited: float, error: Exception
    ) -> RankDiedError:
        """Why collective `number` of a group failed after `waited` seconds: who is behind, and where.

        Takes two and a half reports, to tell ranks that stand still from those that wait as well.
        """
        if self.store is None or self._failure:
            return RankDiedError(f"{self._place(group, number)}: {error}")
        everyone = [rank for rank in range(self.world_size) if rank != self.rank]
        before = self._read(everyone)
        failed = self._failed(before)
        if failed:
            return RankDiedError(failed)
        time.sleep(2.5 * self.interval)
        after = self._read(everyone)
        failed = self._failed(after)
        if failed:
            return RankDiedError(failed)
        silent = [
            rank
            for rank in everyone
            if rank not in after or rank not in before or after[rank].number == before[rank].number
        ]
        if not after:
            silent = [0]  # it serves the store, which does not answer
            after = self._known
        behind = [
            rank
            for rank in peers
            if rank in after and rank not in silent and dict(after[rank].calls).get(group, 0) < number
        ]
        if not silent and not behind:
            return RankDiedError(
                f"{self._place(group, number)} failed after {waited:.1f} s, and every rank goes on; is the "
                f"network between them down? {error}"
            )
        return RankDiedError(self._missed(silent or behind, silent, after, waited, group, number))

    def _missed(
        self,
        ranks: Sequence[int],
        silent: Sequence[int],
        reports: dict[int, Report],
        waited: float,
        group: str,
        number: int,
    ) -> str:
        """A line for each of the `ranks` that this one waited for."""
        place, lines = self._place(group, number), []
        for rank in ranks[:SHOWN]:
            report = reports.get(rank)
            began = report is not None and dict(report.calls).get(group, 0) >= number
            missed = f"has not {'finished' if began else 'reached'} {place} within {waited:.3g} s"
            if waited < 0.9 * self.timeout and rank in silent:
                missed = f"ended before {place} was done"
            if report is None:
                seen = "it was never seen"
            elif rank in silent:
                seen = f"it was last seen {report.place}, {report.age}"
            else:
                seen = f"it is {report.place}"
            lines.append(f"rank {rank} {missed}: {seen}")
        more = len(ranks) - SHOWN
        return "; ".join(lines) + (f"; and {more} more ranks" if more > 0 else "")

    def _place(self, group: str, number: int) -> str:
        """What this thread is doing, in words."""
        stage, _ = self._doing.get(threading.get_ident(), ("", 0.0))
        return f"stage {stage}" if stage else f"collective {number} of group {group.partition(' of ')[0]}"

    def _failed(self, reports: dict[int, Report]) -> str:
        """A line about the rank whose failure came first, empty if none has failed in this task."""
        failed = {rank: each for rank, each in reports.items() if each.failure and each.task == self._task}
        for rank, report in sorted(failed.items(), key=lambda item: (item[1].lost, item[0])):
            return report.failure if report.lost else f"rank {rank} has failed: {report.failure}"
        return ""

    def _read(self, ranks: Sequence[int]) -> dict[int, Report]:
        """Reports, or none where the store does not answer."""
        found: list[dict[int, Report]] = []

        def read() -> None:
            with suppress(RuntimeError, TypeError):  # the store is gone, or a rank of another version
                assert self.store is not None
                found.append(read_reports(self.store, ranks))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(READ_PATIENCE)
        return found[0] if found else {}

    def _report_quickly(self) -> None:
        """Report from another thread, for the store may not answer."""
        if self.store is not None:
            reporter = threading.Thread(target=self._report, daemon=True)
            reporter.start()
            reporter.join(READ_PATIENCE)

    def _report_on(self) -> None:
        while not self._closed.wait(self.interval):
            self._report()
            if self.rank:
                with suppress(RuntimeError):
                    assert self.store is not None
                    self._known = read_reports(self.store, [0])

    def _report(self) -> None:
        assert self.store is not None
        with self._reporting, suppress(RuntimeError):  # of a store that is gone: nobody can read this
            self._number += 1
            doing = sorted(list(self._doing.values()), key=lambda item: item[1])
            report = Report(
                self._number,
                time.time(),
                tuple(str(stage) for stage, _ in doing),
                str(self._last),
                tuple(dict(self._calls).items()),
                self._task,
                self._failure,
                self._lost,
            )
            self.store.set(_key(self.rank), json.dumps(vars(report)))


def _key(rank: int) -> str:
    return f"report of rank {rank}"
