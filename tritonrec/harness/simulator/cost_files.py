"""Reading stage costs: from their own files, from reports of the lab, from recorded traces."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from statistics import mean, median
from typing import Any

import numpy as np

from tritonrec.files.places import read_document
from tritonrec.pipeline.schedule import NESTPIPE
from tritonrec.trace import Trace, read

from .stage_costs import PER_MICRO_BATCH, STAGES, Link, Measured, StageCosts

WARMUP = 2
"""Batches of a trace left out: the pipeline is full after them."""
COLLECTIVES = frozenset(
    stage.name for stage in NESTPIPE.stages if any(a.mode == "update" and a.group for a in stage.touches)
)


def load(path: str | os.PathLike[str]) -> StageCosts:
    """Costs from a file of `as_json`, or from a report of ``tritonrec lab --json``.

    Raises ValueError where the file is neither, OSError where it cannot be read.
    """
    document = load_json(path)
    try:
        if "rows" in document:
            return from_lab(document)
        if unknown := sorted(
            document.keys() - {"world_size", "jitter", "link", "kept", "emulated", "measured"}
        ):
            raise ValueError(f"{path}: unknown {', '.join(unknown)}; docs/simulator.md has the format")
        return StageCosts(
            document["world_size"],
            [_run(entry["micro_batches"], entry["stages"]) for entry in document["measured"]],
            _link(document.get("link", {})),
            document.get("jitter", 0.0),
            kept=document.get("kept"),
            emulated=frozenset(document.get("emulated", ())),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} holds no stage costs: {type(error).__name__} {error}; docs/simulator.md has the format"
        ) from error


def as_json(costs: StageCosts) -> dict[str, Any]:
    """The document that `load` reads."""

    def stage(run: Measured, name: str) -> dict[str, float]:
        tasks = run.micro_batches if name in PER_MICRO_BATCH else 1
        sent = run.sent.get(name, 0.0)
        return {"tasks": tasks, "seconds": run.seconds[name] / tasks, "bytes": sent / tasks}

    return {
        "world_size": costs.world_size,
        "jitter": costs.jitter,
        "link": asdict(costs.link),
        "kept": costs.kept,
        "emulated": sorted(costs.emulated),
        "measured": [
            {"micro_batches": run.micro_batches, "stages": {name: stage(run, name) for name in STAGES}}
            for run in costs.measured
        ],
    }


def from_lab(document: Mapping[str, Any]) -> StageCosts:
    """Costs from a report of the lab: sequential rows are timed, all rows without switches tell bytes.

    A row of a mode with two buffers tells which share of the rows stays.
    """
    about = document["environment"]
    if "machines" in about and about["machines"] != about["world_size"]:
        raise ValueError(
            f"in this report of the lab {about['world_size']} ranks share the links of {about['machines']} "
            "machines, which the model does not know: run the lab without --nodes"
        )
    plain = [row for row in document["rows"] if not row["switches"]]
    timed = [_run(row["micro_batches"], row["stages"]) for row in plain if row["mode"] == "sequential"]
    if not timed:
        raise ValueError("this report of the lab has no sequential row, and other rows' stages overlap")
    others = {row["micro_batches"]: _run(row["micro_batches"], row["stages"]).sent for row in plain}
    rate = float(about["link_mbit_per_second"]) * 1e6 / 8
    # Every row of a mode with two buffers has seen which rows stay; a plain one where there is one.
    exact = [row for row in document["rows"] if not row.get("approximate")]  # others run empty now and then
    staying = [row["kept"] for row in sorted(exact, key=_switched) if row.get("kept")]
    return StageCosts(
        about["world_size"],
        timed,
        Link(bytes_per_second=rate),
        sent_at=others,
        kept=staying[0] if staying else None,
        emulated=frozenset(document.get("emulated", {}).get("seconds_per_step", ())),
    )


def _switched(row: Mapping[str, Any]) -> int:
    return len(row["switches"])


def from_trace(path: str | os.PathLike[str], link: Link | None = None) -> StageCosts:
    """Costs from a recorded trace of all ranks; the first two batches are left out.

    A collective's slice on a rank that is early includes its wait for the others: the shortest slice of all
    ranks counts. Of other stages the mean over the ranks counts, and of batches the median. The jitter is
    that of `compute`.

    Raises ValueError where the trace is too short, or lacks a stage.
    """
    trace = read(path)
    if len(trace.ranks) != trace.metadata["world_size"]:
        raise ValueError(
            f"{path} has ranks {', '.join(map(str, trace.ranks))} of {trace.metadata['world_size']}, and a "
            "collective's time is known from all: give the trace of the whole run"
        )
    batches = sorted({span.batch for span in trace.spans})[WARMUP:]
    if not batches:
        raise ValueError(f"{path} has no more than {WARMUP} batches, which are warm-up: record more")
    # A mode with one buffer has no copy between two: it costs nothing.
    absent = set(STAGES) - {"copy_kept_rows"} - {span.name for span in trace.spans}
    if absent:
        raise ValueError(f"{path} has no slices of {', '.join(sorted(absent))}: no trace of a pipelined mode")
    seconds: dict[str, float] = {}
    sent: dict[str, float] = {}
    for name in STAGES:
        pick: Callable[[Sequence[float]], float] = min if name in COLLECTIVES else mean
        per_batch, moved = [], 0.0
        for batch in batches:
            tasks: dict[int | None, list[float]] = {}
            for span in trace.spans:
                if span.name == name and span.batch == batch:
                    tasks.setdefault(span.micro_batch, []).append(span.duration_ns / 1e9)
                    moved += span.args.get("bytes", 0)
            per_batch.append(sum(pick(found) for found in tasks.values()))
        seconds[name] = median(per_batch)
        sent[name] = moved / len(batches) / len(trace.ranks)
    count = trace.metadata.get("micro_batches") or 1
    run = Measured(count, seconds, sent)
    return StageCosts(trace.metadata["world_size"], [run], link or Link(), _jitter(trace, batches[0]))


def load_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A JSON object from a file; ValueError where the file holds something else."""
    try:
        document = json.loads(read_document(path, "file of costs"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds a {type(document).__name__}, not an object")
    return document


def _jitter(trace: Trace, first: int) -> float:
    """Standard deviation over the ranks of the logarithms of one computation's times."""
    found: dict[tuple[int, int | None], list[float]] = {}
    for span in trace.spans:
        if span.name == "compute" and span.batch >= first and span.duration_ns:
            found.setdefault((span.batch, span.micro_batch), []).append(float(np.log(span.duration_ns)))
    spread = [float(np.var(logs, ddof=1)) for logs in found.values() if len(logs) > 1]
    return float(np.sqrt(mean(spread))) if spread else 0.0


def _run(micro_batches: int, stages: Mapping[str, Mapping[str, Any]]) -> Measured:
    unknown = sorted(set(stages) - set(STAGES))
    if unknown:
        raise ValueError(f"unknown stages {', '.join(unknown)}; the stages are {', '.join(STAGES)}")
    seconds = {name: float(cost["tasks"]) * float(cost["seconds"]) for name, cost in stages.items()}
    sent = {name: float(cost["tasks"]) * float(cost.get("bytes") or 0) for name, cost in stages.items()}
    return Measured(micro_batches, {"copy_kept_rows": 0.0, **seconds}, sent)


def _link(values: Mapping[str, Any]) -> Link:
    known = [each.name for each in fields(Link)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"link: unknown {', '.join(unknown)}; known are {', '.join(known)}")
    return Link(**values)
