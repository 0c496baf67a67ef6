"""Recording what every stage did and when, reading it back, measuring it and checking it."""

from .reader import Span, Trace, read
from .recorder import LANES, NullRecorder, Recorder, SupportsRecording, save_joined

__all__ = [
    "LANES",
    "NullRecorder",
    "Recorder",
    "Span",
    "SupportsRecording",
    "Trace",
    "read",
    "save_joined",
]
