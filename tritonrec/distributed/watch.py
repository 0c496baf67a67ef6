"""Heartbeats of all ranks, from which a failed collective names the rank that stalled, and its stage.

Each rank reports to a store, every second or more often: the number of collectives begun by group, and the
stages of its threads. A thread of its own writes the reports, so they go on during a long computation and
stop with the process. Reports are read only when a collective fails.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from .limits import READ_TIMEOUT, within
from .reports import MAX_SHOWN, Report, key_of, read_reports

REPORT_INTERVAL = 1.0
"""Seconds between a rank's reports; with timeouts below 8 s an eighth of them."""

LONGEST_PAUSE = 0.05
"""Seconds between two looks for the ranks that are missing."""


class RankDiedError(RuntimeError):
    """A rank ended, failed, or did not answer within the timeout.

    The message has one line for each such rank, and none for ranks that only failed after it; `details` has
    the tracebacks of all.
    """

    def __init__(self, message: str, details: str = ""):
        super().__init__(message)
        self.details = details


def in_words(error: BaseException) -> str:
    """Type, message and notes of an error."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}{notes}"


def of_another_rank(error: BaseException) -> RankDiedError | None:
    """The error about another rank that caused this one; None where the rank failed by itself."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, RankDiedError):
        cause = cause.__cause__
    return cause


class _Doing:
    """A class and no generator, which takes longer to enter: every task of a step does."""

    __slots__ = ("_before", "_stage", "_watch")

    def __init__(self, watch: Watch, stage: object) -> None:
        self._watch, self._stage = watch, stage

    def __enter__(self) -> None:
        self._before = self._watch._begin(self._stage)

    def __exit__(self, *error: object) -> None:
        self._watch._end(self._stage, self._before)


class Watch:
    """Writes this rank's heartbeats, and explains failures of its collectives by those of the others.

    Args:
        store: for the reports, over a connection of its own; None: no reports, and no rank can be named.
        rank, world_size: among all ranks that use the store. timeout: of their collectives.
        is_gone: whether a rank's process has ended, for a sure and quick answer.
        server: the rank whose process serves the store; None: another process, as torchrun's agent.

    Attributes:
        lost: what a failed collective has said of the ranks that are missing, "" before.
        still: of these the ranks that have said nothing for the timeout.
    """

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        world_size: int,
        timeout: timedelta,
        is_gone: Callable[[int], bool] = lambda rank: False,
        server: int | None = 0,
    ):
        self._is_gone, self._server = is_gone, server
        self.store, self.rank, self.world_size = store, rank, world_size
        self.timeout = timeout.total_seconds()
        self.interval = min(REPORT_INTERVAL, self.timeout / 8)
        self._doing: dict[int, tuple[object, float]] = {}  # by thread: its stage, and the start
        self._last: object = ""
        self._calls: dict[str, int] = {}
        self._task, self._failure, self._peer_failed = 0, "", False
        self.lost = ""
        self.still: tuple[int, ...] = ()
        self._number = 0
        self._last_of_rank_0: dict[int, Report] = {}  # a store served by rank 0 ends with it
        self._silent_store = False  # it did not answer when it was read last
        self._closed = threading.Event()
        self._reporting = threading.Lock()
        if store is not None:
            self._report_now()
            threading.Thread(target=self._report_periodically, name="watch", daemon=True).start()

    def doing(self, stage: object) -> _Doing:
        """Report that this thread is in `stage` inside the block; messages show ``str(stage)``."""
        return _Doing(self, stage)

    def _begin(self, stage: object) -> tuple[object, float] | None:
        """This thread is in `stage`; what it was in before."""
        thread = threading.get_ident()
        before = self._doing.get(thread)
        self._doing[thread] = stage, time.monotonic()
        return before

    def _end(self, stage: object, before: tuple[object, float] | None) -> None:
        thread, self._last = threading.get_ident(), stage
        if before is None:
            del self._doing[thread]
        else:
            self._doing[thread] = before

    def begin_task(self) -> None:
        """Begin the next task, without the failure of the last one."""
        self._task, self._failure, self._peer_failed = self._task + 1, "", False
        self._last = self.lost = ""
        self.still = ()

    def fail(self, error: BaseException) -> None:
        """Report at once that this rank has failed."""
        cause = of_another_rank(error)
        self._peer_failed = cause is not None
        self._failure = (in_words(error) if cause is None else str(cause))[:500]
        self._report_now()

    def linger(self) -> None:
        """Where this process serves the store, let the others read that this rank failed before it ends.

        They would name this one, which has only seen first that a third is missing. Two intervals at most,
        and less where all others have failed too.
        """
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        until = time.monotonic() + 2 * self.interval
        while self.rank == self._server and time.monotonic() < until:
            reports = self._read(others)
            if all(rank in reports and reports[rank].failure for rank in others):
                return
            time.sleep(self.interval / 10)

    def close(self) -> None:
        """Stop the reports."""
        self._closed.set()

    def begin_call(self, group: str) -> int:
        """Count a collective of `group`; returns its number, from 1."""
        number = self._calls[group] = self._calls.get(group, 0) + 1
        return number

    def monitored_barrier(self, group: str, peers: Sequence[int], timeout: timedelta) -> None:
        """Wait until all `peers` are at this collective, as long as they report, up to `timeout`.

        For work that may exceed the watch's own timeout, such as writes to a disk. Raises `RankDiedError`
        naming a rank that has failed, has ended, or whose reports stopped for the watch's timeout; or those
        that another collective has named meanwhile; or the rank whose store gives no answer for that long.
        """
        if self.store is None:
            return
        number, began = self.begin_call(f"{group}, meeting"), time.monotonic()
        try:
            self._meet(self.store, group, number, peers, timeout)
        except TimeoutError as error:
            text = self._describe_server(time.monotonic() - began, group, number)
            raise RankDiedError(self.lost or text) from error
        except dist.DistError as error:  # the store has ended, with the rank that served it
            raise self.explain(group, number, peers, time.monotonic() - began, error) from error

    def _meet(
        self, store: dist.Store, group: str, number: int, peers: Sequence[int], timeout: timedelta
    ) -> None:
        """`monitored_barrier`; TimeoutError where the store gives no answer within the watch's timeout."""
        key = f"{group} {number}"
        others = [peer for peer in peers if peer != self.rank]
        within(self.timeout, lambda: store.set(f"{key} {self.rank}", "here"))

        def absent() -> list[int]:
            return [peer for peer in others if not store.check([f"{key} {peer}"])]

        self.wait_for(lambda: within(self.timeout, absent), group, number, timeout)
        if number > 1:  # all ranks have left the barrier before
            within(self.timeout, lambda: store.delete_key(f"{group} {number - 1} {self.rank}"))

    def wait_for(self, missing: Callable[[], list[int]], group: str, number: int, timeout: timedelta) -> None:
        """Wait until `missing` returns no rank, as long as those that it returns report, up to `timeout`.

        Raises what `missing` raises, and `RankDiedError` as `monitored_barrier`.
        """
        began, pause = time.monotonic(), 0.005
        last_read = began
        seen: dict[int, tuple[int, float]] = {}  # number of the last report, and the time it was first read
        # Three clocks: the caller's `timeout` for work that takes long; the watch's for a rank that says
        # nothing; and a read of the reports once an interval, since each one costs the store.
        while ranks := missing():
            if self.lost:
                raise RankDiedError(self.lost)
            if time.monotonic() - last_read > self.interval:
                reports = self._read(ranks)
                now = last_read = time.monotonic()  # reading takes time too, which is no silence of a rank
                failed = self._failed(reports)
                if failed:
                    raise RankDiedError(failed)
                if gone := [peer for peer in ranks if self._is_gone(peer)]:
                    waited = now - began
                    raise RankDiedError(self._describe_missing(gone, gone, reports, waited, group, number))
                for peer, report in reports.items():
                    if seen.get(peer, (0, 0.0))[0] != report.number:
                        seen[peer] = report.number, now
                remaining = {peer: self.timeout - (now - seen.get(peer, (0, began))[1]) for peer in ranks}
                # a store that does not answer says nothing of ranks; `absent` gives it a rank's time
                silent = [peer for peer in ranks if remaining[peer] <= 0 and not self._silent_store]
                self.still = tuple(silent)
                if silent or now - began > timeout.total_seconds():
                    raise RankDiedError(
                        self._describe_missing(silent or ranks, silent, reports, now - began, group, number)
                    )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def explain(
        self, group: str, number: int, peers: Sequence[int], waited: float, error: Exception
    ) -> RankDiedError:
        """The error for collective `number` of a group, which failed after `waited` seconds.

        It names the ranks that ended, stalled or are behind, with their stages. It takes two and a half
        report intervals where none is known to have ended, to tell ranks that stalled from ranks that wait.
        """
        if self.store is None or self._failure:
            return RankDiedError(f"{self._place(group, number)}: {error}")
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        began = time.monotonic()
        # A rank is silent if its report has the same number before and after two and a half intervals. A rank
        # that waits in a collective, as this one did, still reports.
        before = self._read(others)
        failed = self._failed(before)
        if failed:
            return RankDiedError(failed)
        deadline = (began if self._silent_store else time.monotonic()) + 2.5 * self.interval
        while time.monotonic() < deadline:  # its connections may close before its store
            if gone := [rank for rank in others if self._is_gone(rank)]:
                reports = before or self._last_of_rank_0
                self.lost = self._describe_missing(gone, gone, reports, waited, group, number)
                return RankDiedError(self.lost)
            time.sleep(self.interval / 10)
        after = self._read(others)
        failed = self._failed(after)
        if failed:
            return RankDiedError(failed)
        silent = [
            rank
            for rank in others
            if rank not in after or rank not in before or after[rank].number == before[rank].number
        ]
        if self._silent_store and self.rank != self._server:
            self.lost = self._describe_server(waited, group, number)
            return RankDiedError(self.lost)
        if waited >= 0.9 * self.timeout:
            self.still = tuple(silent)
        # Of the ranks that report: those that have begun fewer
        # collectives of this group are being waited for, or
        # came after this one had waited for long.
        for reports in (after, before) if waited > 2 * self.interval else (after,):
            behind = [
                rank
                for rank in peers
                if rank in reports
                and rank in after
                and rank not in silent
                and dict(reports[rank].calls).get(group, 0) < number
            ]
            if behind:
                break
        if not silent and not behind:
            return RankDiedError(
                f"{self._place(group, number)} failed after {waited:.1f} s, and every rank still reports: "
                f"check the network between them: {error}"
            )
        self.lost = self._describe_missing(silent or behind, silent, reports, waited, group, number)
        return RankDiedError(self.lost)

    def _describe_server(self, waited: float, group: str, number: int) -> str:
        """A text about the process that serves the store, which gives no answer, or what it said last."""
        if failed := self._failed(self._last_of_rank_0):
            return failed
        if self._server is None:
            return (
                f"not all ranks have reached {self._place(group, number)} within {waited:.3g} s, and it is "
                "unknown which: the store of their reports, in the launcher's process, does not answer"
            )
        one = [self._server]
        if waited >= 0.9 * self.timeout:
            self.still = (self._server,)
        return self._describe_missing(one, one, self._last_of_rank_0, waited, group, number)

    def _describe_missing(
        self,
        ranks: Sequence[int],
        silent: Sequence[int],
        reports: dict[int, Report],
        waited: float,
        group: str,
        number: int,
    ) -> str:
        """A text about the `ranks` that this one waited for."""
        place, lines = self._place(group, number), []
        for rank in ranks[:MAX_SHOWN]:
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
        more = len(ranks) - MAX_SHOWN
        return "; ".join(lines) + (f"; and {more} more ranks" if more > 0 else "")

    def _place(self, group: str, number: int) -> str:
        """This thread's stage, or its collective, in words."""
        stage, _ = self._doing.get(threading.get_ident(), ("", 0.0))
        return f"stage {stage}" if stage else f"collective {number} of group {group.partition(' of ')[0]}"

    def _failed(self, reports: dict[int, Report]) -> str:
        """A line about the rank that failed first, empty if none has failed in this task."""
        # A report may still be of an earlier task of this process, whose failure is over.
        failed = {rank: each for rank, each in reports.items() if each.failure and each.task == self._task}
        # First a rank that failed by itself; those that lost a peer say what it was.
        for rank, report in sorted(failed.items(), key=lambda item: (item[1].lost, item[0])):
            self.still = tuple(report.still)
            return report.failure if report.lost else f"rank {rank} has failed: {report.failure}"
        return ""

    def _read(self, ranks: Sequence[int]) -> dict[int, Report]:
        """Reports by rank, none where the store does not answer."""
        store = self.store
        self._silent_store = store is None
        if store is None:
            return {}
        try:
            return within(READ_TIMEOUT, lambda: read_reports(store, ranks))
        except (RuntimeError, TimeoutError):  # it has ended, or stands still
            self._silent_store = True
        except TypeError:  # a rank is of another version
            pass
        return {}

    def _report_now(self) -> None:
        """Report from another thread, since the store may not answer; one that did not gets no more time."""
        if self.store is not None:
            with suppress(TimeoutError):
                within(self.interval / 10 if self._silent_store else READ_TIMEOUT, self._report)

    def _report_periodically(self) -> None:
        while not self._closed.wait(self.interval):
            self._report()
            if self.rank and not self._closed.is_set():
                assert self.store is not None
                with self._close_if_store_is_gone():
                    self._last_of_rank_0 = read_reports(self.store, [0])

    @contextmanager
    def _close_if_store_is_gone(self) -> Iterator[None]:
        """Stop the reports where the store has ended, with the rank that served it."""
        try:
            yield
        except RuntimeError:
            self.close()

    def _report(self) -> None:
        assert self.store is not None
        with self._reporting, self._close_if_store_is_gone():
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
                self._peer_failed,
                self.still,
            )
            self.store.set(key_of(self.rank), json.dumps(vars(report)))
