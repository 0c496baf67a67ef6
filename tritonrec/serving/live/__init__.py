"""Live deltas: a trainer publishes what changed, and replicas follow it with the same bits."""

from .follower import Follower
from .publisher import Publisher
from .sinks import DirectorySink, RedisSink, Sink, sink_of
from .wire import (
    CorruptDeltaError,
    GapError,
    LiveError,
    OtherRunError,
    OutOfOrderError,
    SinkError,
)

__all__ = [
    "CorruptDeltaError",
    "DirectorySink",
    "Follower",
    "GapError",
    "LiveError",
    "OtherRunError",
    "OutOfOrderError",
    "Publisher",
    "RedisSink",
    "Sink",
    "SinkError",
    "sink_of",
]
