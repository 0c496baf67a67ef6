"""Recording what every stage did and when, reading it back, and measuring and checking it."""

from tritonrec.trace.recorder import LANES, NullRecorder, Recorder, SupportsRecording, save_joined

__all__ = ["LANES", "NullRecorder", "Recorder", "SupportsRecording", "save_joined"]
