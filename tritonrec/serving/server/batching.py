"""Requests that come at one time are computed together, by one thread, in the order in which they came."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Any

from .errors import ServerError


@dataclass
class Job:
    """A request, the number of its users, and where its answer goes."""

    request: Any
    size: int
    came: float
    answer: Future[Any] = field(default_factory=Future)


class Batcher:
    """A queue and the thread that computes what is in it.

    A batch begins with the oldest request. It is computed when `most` users are there, or `latency` seconds
    after that request came. Requests that come during a batch wait for the next one, so batches grow with the
    load at a `latency` of 0 too, and a request that comes alone does not wait.

    Args:
        compute: gives an answer or an exception for each request of a batch, in their order.
        most: users of a batch; a request of more is a batch by itself. latency: seconds.
        longest: users in the queue. observe: gets the number of users of each batch.
    """

    def __init__(
        self,
        compute: Callable[[list[Any]], Sequence[Any]],
        most: int,
        latency: float,
        longest: int,
        observe: Callable[[int], object] = lambda users: None,
    ):
        self._compute, self._most, self._latency, self._longest = compute, most, latency, longest
        self._observe = observe
        self._jobs: deque[Job] = deque()
        self._waiting = 0
        self._closed = False
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="tritonrec batches", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Users in the queue."""
        return self._waiting

    def submit(self, request: Any, size: int = 1) -> Future[Any]:
        """Put a request behind the others. Raises `ServerError` where the queue is full or was closed."""
        with self._changed:
            if self._closed:
                raise ServerError("stopping", "the server stops, and takes no more requests")
            if self._waiting + size > self._longest:
                raise ServerError(
                    "queue_full", f"{self._waiting} users wait, of {self._longest} at most: come back later"
                )
            job = Job(request, size, time.monotonic())
            self._jobs.append(job)
            self._waiting += size
            self._changed.notify()
        return job.answer

    def close(self) -> None:
        """Compute what is in the queue, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._next():
            jobs = [job for job in batch if job.answer.set_running_or_notify_cancel()]
            if not jobs:
                continue
            self._observe(sum(job.size for job in jobs))
            try:
                answers: Sequence[Any] = self._compute([job.request for job in jobs])
            except BaseException as error:  # the thread goes on, whatever a batch does
                answers = [error] * len(jobs)
            for job, answer in zip(jobs, answers, strict=True):
                if isinstance(answer, BaseException):
                    job.answer.set_exception(answer)
                else:
                    job.answer.set_result(answer)

    def _next(self) -> list[Job]:
        """The next batch; none where the queue was closed and is empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if not self._jobs:
                return []
            until = self._jobs[0].came + self._latency
            while self._waiting < self._most and not self._closed and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            batch: list[Job] = []
            users = 0
            while self._jobs and (not batch or users + self._jobs[0].size <= self._most):
                batch.append(job := self._jobs.popleft())
                users += job.size
            self._waiting -= users
            return batch
