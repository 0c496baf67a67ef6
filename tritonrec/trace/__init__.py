"""Traces of a run's stages: recording, reading, measuring and checking."""

from .events import LANES
from .reader import Operator, Span, Trace, read
from .recorder import NullRecorder, Recorder, SupportsRecording, save_joined

__all__ = [
    "LANES",
    "NullRecorder",
    "Operator",
    "Recorder",
    "Span",
    "SupportsRecording",
    "Trace",
    "read",
    "save_joined",
]
