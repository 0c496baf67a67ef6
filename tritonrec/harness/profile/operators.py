"""What torch.profiler sees, on the recorder's clock: the operators of every thread, named by its lane."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from time import perf_counter_ns, time_ns
from typing import Any

from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

from ...files import ScratchFolder
from ...kernels.op import annotated_launches
from ...trace import Recorder

MAIN = "main"
"""Name of the thread that calls the trainer; it runs every lane of sequential modes."""

LANE_THREAD = "lane "
"""How the names of the executor's threads begin."""
ROWS = 15
"""Of torch's table."""


@dataclass
class Operators:
    """What a profiler needs from a run, and gives.

    Attributes:
        names: of threads, by their native id; `name_threads` notes them.
        table: torch's own, of the operators that take most, once the block is left.
    """

    names: dict[int, str] = field(default_factory=dict)
    table: str = ""


@contextmanager
def operators(recorder: Recorder) -> Iterator[Operators]:
    """Record the operators that all threads of this process run inside the ``with`` block.

    Call `name_threads` on its names before the lanes end, as a thread that has ended has no
    name any more. Leave the block with no operator under way.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or Kineto tells that it starts and stops
    found = Operators()
    before = _offset_ns()
    everywhere = _ExperimentalConfig(profile_all_threads=True)  # the lanes' threads are up already
    with (
        profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as profiler,
        annotated_launches(),
    ):
        yield found
    offset = (before + _offset_ns()) // 2
    with ScratchFolder() as scratch:
        file = Path(scratch) / "operators.json"
        profiler.export_chrome_trace(str(file))
        # Microseconds with three digits, since an epoch: a float does not hold them.
        content = json.loads(file.read_bytes(), parse_float=Decimal)
    _record(recorder, content, found.names, offset)
    averages = profiler.key_averages()
    found.table = averages.table("self_cpu_time_total", row_limit=ROWS, max_name_column_width=40)


def name_threads(names: dict[int, str]) -> None:
    """Note the name of each of this process's threads, for those of lanes the lane's."""
    for thread in threading.enumerate():
        if thread.native_id is not None:
            main = thread is threading.main_thread()
            names[thread.native_id] = MAIN if main else thread.name.removeprefix(LANE_THREAD)


def _record(recorder: Recorder, content: dict[str, Any], names: dict[int, str], offset: int) -> None:
    base = content["baseTimeNanoseconds"] - offset
    for event in content["traceEvents"]:
        ours = event.get("cat") == "user_annotation" and event["name"].startswith("tritonrec::")
        if (event.get("cat") == "cpu_op" or ours) and event["ph"] == "X":
            start, duration = int(event["ts"] * 1000), int(event["dur"] * 1000)
            thread = names.get(event["tid"], f"thread {event['tid']}")
            recorder.operator(thread, event["name"], base + start, base + start + duration)


def _offset_ns() -> int:
    """Nanoseconds from the recorder's clock to the epoch's, which the profiler reports."""
    before = perf_counter_ns()
    now = time_ns()
    return now - (before + perf_counter_ns()) // 2
