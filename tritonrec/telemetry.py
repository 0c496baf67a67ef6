"""Metrics and spans for OpenTelemetry, by the providers that the program or its launcher has set."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any

from .optional import require
from .version import __version__

OPEN_STEPS = 16
"""Steps whose spans are kept open, more than a pipeline has in flight."""


class OpenTelemetryLogger:
    """A `tritonrec.loggers.Logger`: a gauge for each name, and ``tritonrec.step``.

    ``loss`` is ``tritonrec.loss``, and ``HR@10`` is ``tritonrec.hr_10``, as names are there.

    Args:
        attributes: of every measurement, such as ``{"run": "nightly"}``.
    """

    def __init__(self, attributes: Mapping[str, Any] | None = None) -> None:
        require("opentelemetry", "OpenTelemetryLogger")
        from opentelemetry import metrics

        self._meter, self._metrics = metrics.get_meter("tritonrec", __version__), metrics
        self._attributes = dict(attributes or {})
        self._gauges: dict[str, Any] = {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """As of `Logger`."""
        for name, value in {"step": step, **values}.items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(
                    "tritonrec." + re.sub(r"[^\w./-]", "_", name).lower()
                )
            self._gauges[name].set(value, self._attributes)

    def close(self) -> None:
        """As of `Logger`."""
        _flush(self._metrics.get_meter_provider())


class OpenTelemetryRecorder:
    """A trace for each step, with a span for each stage: ``Trainer(..., recorder=OpenTelemetryRecorder())``.

    It stands in the place of a `tritonrec.trace.Recorder`, and its spans have the same names and annotations.

    Args:
        attributes: of every step's span, such as ``{"rank": 0}``.
    """

    def __init__(self, attributes: Mapping[str, Any] | None = None) -> None:
        require("opentelemetry", "OpenTelemetryRecorder")
        from opentelemetry import trace

        self.metadata: dict[str, Any] = {}
        self._tracer, self._trace = trace.get_tracer("tritonrec", __version__), trace
        self._attributes = dict(attributes or {})
        self._since = time.time_ns() - time.perf_counter_ns()  # of spans that come with a clock's times
        self._lock = Lock()
        self._steps: dict[int, list[Any]] = {}  # span, and the end of its last stage

    @contextmanager
    def span(
        self, lane: str, name: str, *, batch: int, micro_batch: int | None = None, **args: Any
    ) -> Iterator[dict[str, Any]]:
        """As of `Recorder`."""
        start = time.perf_counter_ns()
        args |= {} if micro_batch is None else {"micro_batch": micro_batch}
        try:
            yield args
        except BaseException as error:
            args["error"] = type(error).__name__
            raise
        finally:
            self.add(lane, name, start, time.perf_counter_ns(), batch=batch, **args)

    def add(self, lane: str, name: str, start_ns: int, end_ns: int, *, batch: int, **args: Any) -> None:
        """As of `Recorder`."""
        start, end = start_ns + self._since, end_ns + self._since
        with self._lock:
            if batch not in self._steps:
                if len(self._steps) == OPEN_STEPS:
                    self._end(min(self._steps))
                about = {"batch": batch, **self._attributes}
                self._steps[batch] = [
                    self._tracer.start_span("step", start_time=start, attributes=about),
                    end,
                ]
            step = self._steps[batch]
            step[1] = max(step[1], end)
        about = {"lane": lane, "batch": batch, **args}
        within = self._trace.set_span_in_context(step[0])
        self._tracer.start_span(name, within, start_time=start, attributes=about).end(end)

    def counter(self, name: str, value: float) -> None:
        """As of `Recorder`; counters are no spans."""

    def close(self) -> None:
        """End the spans of the last steps, and send what is not sent."""
        with self._lock:
            while self._steps:
                self._end(min(self._steps))
        _flush(self._trace.get_tracer_provider())

    def _end(self, batch: int) -> None:
        span, end = self._steps.pop(batch)
        span.end(end)


def _flush(provider: Any) -> None:
    """Providers of the SDK send what waits; others have nothing."""
    getattr(provider, "force_flush", lambda: None)()
