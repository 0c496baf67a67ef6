"""Counts and times of the server, for Prometheus."""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
"""Where the workers of one server count together; set before this module is imported."""
SECONDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 2, 4, 8)


class Metrics:
    """Of one process, or of all workers where `DIRECTORY` is set."""

    def __init__(self) -> None:
        self._registry = own = CollectorRegistry()
        self.requests = Counter(
            "tritonrec_requests", "Answered requests.", ["endpoint", "status"], registry=own
        )
        self.seconds = Histogram(
            "tritonrec_request_seconds", "Time of a request.", ["endpoint"], registry=own, buckets=SECONDS
        )
        self.batches = Histogram(
            "tritonrec_batch_users", "Users of a batch.", registry=own, buckets=[2**n for n in range(11)]
        )
        self.reloads = Counter("tritonrec_reloads", "Reloads of the model.", ["result"], registry=own)
        self.step = self._gauge("step", "Of the model, the oldest of all workers.", "livemin")
        self.sequence = self._gauge(
            "sequence", "Of the followed delta, the oldest of all workers.", "livemin"
        )
        self.lag = self._gauge("lag_seconds", "Behind the followed trainer.", "livemax")
        self.queue = self._gauge("queue_users", "That wait.", "livesum")
        self.users = self._gauge("users", "With a history.", "livesum")

    def _gauge(self, name: str, what: str, mode: str) -> Gauge:
        return Gauge(f"tritonrec_{name}", what, registry=self._registry, multiprocess_mode=mode)  # type: ignore[arg-type]

    def text(self) -> bytes:
        """In Prometheus' format."""
        if os.environ.get(DIRECTORY):
            every = CollectorRegistry()
            MultiProcessCollector(every)
            return generate_latest(every)
        return generate_latest(self._registry)
