"""`tritonrec verify`: the contract table, injected faults, recorded traces, and their report."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from datetime import timedelta
from queue import SimpleQueue
from typing import TypeVar

from rich.console import Console
from rich.progress import TimeElapsedColumn

from ...distributed import TIMEOUT, RankDiedError, RankPool
from ...files import ScratchFolder
from ...pipeline import ScheduleError, check, schedule_of
from ..devices import rank_pool
from ..job import Job
from ..progress import CommandProgress
from .cases import Case
from .faults import Fault
from .references import References
from .report import CaseResult, FaultResult, Report, print_report
from .run_case import RankReport, Stretch, run_case
from .state import earliest
from .thread_ranks import ThreadPool

MAX_SHRINKS = 12
"""Simpler cases tried after a difference; each is one short run."""
AT_ONCE = 4
"""Cases that run beside each other at most, each on ranks of its own: a case waits half of its time, for its
ranks and its drawn delays."""

Item = TypeVar("Item", Case, Fault)
Result = TypeVar("Result", CaseResult, FaultResult)


class Verifier:
    """Runs cases on a pool of ranks against references recorded once.

    Args:
        job: the training job.
        pool: of the meshes of the cases, processes or threads. It is restarted when a rank
            has died.
        timeout: of the collectives of cases that have processes of their own.
    """

    def __init__(self, job: Job, pool: RankPool | ThreadPool, timeout: timedelta = TIMEOUT):
        self.job, self._pool, self._timeout = job, pool, timeout
        self._references = References()
        self._clean: dict[Case, CaseResult] = {}  # of faults' cases, which several may share

    def beside(self, pool: RankPool) -> Verifier:
        """The same on other ranks, for another thread: references and clean cases are shared."""
        other = copy(self)
        other._pool = pool
        return other

    def record(self, cases: Iterable[Case]) -> None:
        """Record the references that `cases` need and that are not there yet."""
        self._references.record(self.job, cases)

    def run(self, case: Case, fault: str | None = None) -> CaseResult:
        """Run one case on all its ranks."""
        self.record([case])
        try:
            reports = self._run(case, fault)
        except RankDiedError as error:
            # Restart: surviving ranks may still block in a collective.
            self._pool.restart()
            return CaseResult(case, False, error=str(error))
        first = earliest([report.first_difference for report in reports])
        counts = sum((Counter(report.counts) for report in reports), Counter())
        idle = [name for name in case.shows if not counts[name]]
        wrong = f"the case proves nothing of {case.variant}: {', '.join(idle)} is zero" if idle else None
        if first is not None and fault is None and case.consistency == "batch":
            wrong = self._references.doubt(case.reference(self.job)) or wrong
        return CaseResult(
            case,
            first is None and not idle,
            first,
            sum(report.tensors_compared for report in reports),
            sum(report.bytes_compared for report in reports),
            max(report.seconds for report in reports),
            dict(counts),
            wrong,
        )

    def _run(self, case: Case, fault: str | None) -> list[RankReport]:
        args = (self.job, case, self._references.path, fault)
        ranks = {"replicas": case.replicas, "nodes": case.nodes}
        if case.changes.on_ranks is not None:
            return case.changes.on_ranks(*args, self._timeout)
        with ScratchFolder() as folder:
            if not case.restart:
                stretch = Stretch(0, case.steps, folder=folder)
                return self._pool.run(run_case, case.world_size, *args, stretch, **ranks)
            half = case.steps // 2
            stretch = Stretch(0, half, save=folder)
            before = self._pool.run(run_case, case.world_size, *args, stretch, **ranks)
            rest = Stretch(half, case.steps, load=folder)
            args = (self.job, case.resumed(), self._references.path, fault)
            return before + self._pool.run(run_case, case.restart, *args, rest)

    def shrink(self, failed: CaseResult) -> CaseResult:
        """The simplest case found that still fails; by other bits, where `failed` does."""
        smallest, tries = failed, 0
        if failed.first_difference:
            shorter = replace(failed.case, steps=failed.first_difference.step + 1)
            smallest = replace(failed, case=shorter)
        progress = True
        while progress and tries < MAX_SHRINKS:
            progress = False
            for simpler in smallest.case.simpler():
                if simpler.mesh not in self._pool.meshes:
                    continue
                tries += 1
                result = self.run(simpler)
                if result.first_difference or not (failed.first_difference or result.identical):
                    smallest, progress = result, True
                    if result.first_difference:
                        steps = result.first_difference.step + 1
                        smallest = replace(result, case=replace(simpler, steps=steps))
                    break
                if tries >= MAX_SHRINKS:
                    break
        return smallest

    def run_clean(self, case: Case) -> CaseResult:
        """Run a fault's case without the fault, once for all faults that share it."""
        if case not in self._clean:
            self._clean[case] = self.run(case)
        return self._clean[case]

    def run_fault(self, fault: Fault) -> FaultResult:
        """Inject a fault and see who notices; the same case without it must be identical.

        It is caught as it declares: by other bits, or by the error that it names.
        """
        by, evidence, where = [], [], ""
        if fault.injection.schedule is not None:
            try:
                schedule = schedule_of(
                    fault.case.mode, fault.case.window(0), fault.case.replicas, fault.case.nodes
                )
                check(fault.injection.schedule(schedule), fault.case.micro_batches)
            except ScheduleError as error:
                by.append("check")
                evidence.append(str(error))
        clean = self.run_clean(fault.case)
        if not clean.identical:
            evidence.append(f"the clean case is not identical: {clean.error or clean.first_difference}")
            return FaultResult(fault, False, by, "; ".join(evidence))
        result = self.run(fault.case, fault.name)
        if result.first_difference:
            by.append("bits")
            evidence.append(str(result.first_difference))
            where = f"step {result.first_difference.step}, {result.first_difference.tensor}"
        elif result.error:
            by.append("error")
            evidence.append(result.error.splitlines()[0])
        told = fault.says in (result.error or "") if fault.says else result.first_difference is not None
        if not told:
            evidence.append(
                f"must end in {f'an error that says {fault.says!r}' if fault.says else 'other bits'}"
            )
        return FaultResult(fault, told, by, "; ".join(evidence), where)

    def forget(self) -> None:
        """Delete the references that were recorded so far."""
        self._references.forget()

    def close(self) -> None:
        """Drop the references."""
        self._references.cleanup()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def verify_contract(
    job: Job,
    cases: list[Case],
    faults: Sequence[Fault] = (),
    console: Console | None = None,
    timeout: timedelta = TIMEOUT,
) -> Report:
    """Run the contract table and inject `faults`; prints progress and tables on `console`.

    As many cases run at once as the machine has processors, `AT_ONCE` at most; on GPUs one. Where one
    raises, or Ctrl-C ends all, those under way end after their step.
    """
    console = console or Console()
    clean = [*dict.fromkeys(fault.case for fault in faults)]
    report = Report(job)
    with (
        _verifiers(job, [*cases, *clean], timeout) as (verifiers, threads),
        CommandProgress(console, TimeElapsedColumn()) as progress,
    ):
        task = progress.add_task("recording references", total=len(cases) + len(clean) + len(faults))
        verifiers[0].record([*cases, *clean])
        free: SimpleQueue[Verifier] = SimpleQueue()
        for each in verifiers:
            free.put(each)

        def run_all(
            run: Callable[[Verifier, Item], Result], items: Sequence[Item], name: Callable[[Item], str]
        ) -> Iterable[Result]:
            """Results in the order of `items`."""

            def on_free_ranks(item: Item) -> Result:
                verifier = free.get()
                progress.update(task, description=name(item))
                try:
                    return run(verifier, item)
                finally:
                    free.put(verifier)
                    progress.advance(task)

            return threads.map(on_free_ranks, items)

        report.cases += run_all(Verifier.run, cases, str)
        list(run_all(Verifier.run_clean, clean, lambda case: f"without a fault: {case}"))
        report.faults += run_all(Verifier.run_fault, faults, lambda fault: f"injected fault: {fault.name}")
        failed = [result for result in report.cases if not result.identical]
        if failed:
            progress.update(task, description="looking for the smallest case that fails")
            report.smallest = verifiers[0].shrink(min(failed, key=_size))
    print_report(report, console)
    return report


@contextmanager
def _verifiers(
    job: Job, cases: Sequence[Case], timeout: timedelta
) -> Iterator[tuple[list[Verifier], ThreadPoolExecutor]]:
    """One for each case that runs at once, on ranks of its own, and as many threads."""
    meshes = {case.mesh for case in cases} | {(case.restart, 1, 1) for case in cases if case.restart}
    at_once = 1 if job.target.device != "cpu" else min(AT_ONCE, os.cpu_count() or 1, max(len(cases), 1))
    with ExitStack() as stack:
        pools = [stack.enter_context(rank_pool(job.target.device, meshes, timeout)) for _ in range(at_once)]
        first = stack.enter_context(Verifier(job, pools[0], timeout))
        threads = stack.enter_context(ThreadPoolExecutor(at_once))
        try:
            yield [first, *map(first.beside, pools[1:])], threads
        except BaseException:
            for pool in pools:
                pool.request_stop()
            raise


def _size(result: CaseResult) -> tuple[int, ...]:
    case = result.case
    return (result.error is not None, case.world_size, case.micro_batches, case.clustering, case.steps)
