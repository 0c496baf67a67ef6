"""Lanes, and the tuples that a `Recorder` collects and the writer turns into packets."""

from typing import Any

# One thread track each, drawn in this order: the way of a batch from the log to the table and back.
LANES = (
    "prefetch",
    "h2d",
    "routing",
    "retrieval",
    "copy",
    "compute",
    "communication",
    "replica",
    "reduce",
    "write_back",
)
OPERATORS = " operators"
"""How the name of a track of operators ends; before it comes their thread."""

SpanEvent = tuple[str, str, int, int, dict[str, Any]]  # lane, name, start ns, end ns, args
CounterEvent = tuple[str, int, float]  # name, time ns, value
OperatorEvent = tuple[str, str, int, int]  # thread, name, start ns, end ns
