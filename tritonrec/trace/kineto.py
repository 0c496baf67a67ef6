"""Export to the JSON dialect of torch.profiler's Kineto, a file per rank, for Holistic Trace Analysis.

Stages become ``## stage ##`` user annotations, the labels that TorchRec's pipelines use. Times are
microseconds from ``baseTimeNanoseconds``, the earliest moment of all ranks, so that the files align.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..files.places import local_path
from .events import LANES
from .reader import Span, Trace


def export(trace: Trace, folder: str | os.PathLike[str]) -> list[Path]:
    """Write ``rank_R.json`` for every rank of `trace` into `folder`; returns the paths in order of rank."""
    target = local_path(folder, "a folder for PyTorch's profiler")
    target.mkdir(parents=True, exist_ok=True)
    base = min((span.start_ns for span in trace.spans), default=0)
    paths = []
    for rank in trace.ranks:
        spans = [span for span in trace.spans if span.rank == rank]
        content = {
            "schemaVersion": 1,
            "distributedInfo": {"rank": rank, "world_size": trace.metadata["world_size"]},
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": base,
            "traceEvents": [*_names(rank), *(_event(span, base) for span in spans)],
        }
        path = target / f"rank_{rank}.json"
        path.write_text(json.dumps(content))
        paths.append(path)
    return paths


def _event(span: Span, base: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": f"## {span.name} ##",
        "pid": span.rank,
        "tid": LANES.index(span.lane),
        "ts": (span.start_ns - base) / 1e3,
        "dur": span.duration_ns / 1e3,
        "args": dict(span.args),
    }


def _names(rank: int) -> list[dict[str, Any]]:
    process = {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    lanes = [
        {"ph": "M", "name": name, "pid": rank, "tid": tid, "args": args}
        for tid, lane in enumerate(LANES)
        for name, args in (("thread_name", {"name": lane}), ("thread_sort_index", {"sort_index": tid}))
    ]
    return [process, *lanes]
