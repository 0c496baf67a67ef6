"""A chart of a few steps: lanes as rows, one panel per rank, stages by colour, micro-batches by number."""

from __future__ import annotations

import os
from typing import Any

from ..files import atomic_write
from ..files.places import Place, place_of
from ..optional import pyplot
from .analysis import COMMUNICATION_LANES, exposed, intersection, summarise
from .events import LANES
from .reader import Span, Trace

# Okabe and Ito's palette, safe for colour-blind readers: warm for computation, blue for communication, green
# for lookup and write-back.
STAGE_COLOURS = {
    "prefetch": "#d9d9d9",
    "h2d": "#b5b5b5",
    "route": "#a8dcc6",
    "retrieve": "#009e73",
    "copy_kept_rows": "#f0e442",
    "early_gradients": "#f2c14e",
    "compute": "#e69f00",
    "sparse_update": "#d55e00",
    "dense_update": "#a84300",
    "exchange": "#56b4e9",
    "gradient_exchange": "#0072b2",
    "replica_reduce": "#8a5a9e",
    "average": "#5d3a6b",
    "early_dense_reduce": "#dba6c4",
    "dense_reduce": "#cc79a7",
    "gradient_norm": "#e3a6c6",
    "write_back": "#5b8c7b",
}
_OTHER, _EXPOSED = "#999999", "#d00000"
_DARK = frozenset(
    {
        "retrieve",
        "sparse_update",
        "dense_update",
        "gradient_exchange",
        "replica_reduce",
        "average",
        "write_back",
    }
)
_INCHES_PER_LANE, _WIDTH = 0.3, 13.0
_CHARACTER, _THIN = 0.075, 0.06  # inches: width of a character, and of slices without an edge


def draw(trace: Trace, path: str | os.PathLike[str], first: int | None = None, steps: int = 3) -> Place:
    """Draw `steps` consecutive steps of a trace as a PNG.

    The chart runs from the end of the computation before batch `first` to the end of the last batch's
    computation, on the earliest and the latest rank. Boxes show the micro-batch, or the batch (``b7``) where
    a stage runs once per batch. Exposed communication is underlined.

    Args:
        trace: from `tritonrec.trace.read`.
        path: of the PNG.
        first: first batch; by default the middle of the trace, where the pipeline is full.
        steps: number of batches.

    Raises:
        ValueError: batch `first` was not computed, or no batch was.
    """
    plt = pyplot()
    batches = _window(trace.spans, first, steps)
    start, end = _times(trace.spans, batches)
    ranks = {
        rank: [lane for lane in LANES if any(s.rank == rank and s.lane == lane for s in trace.spans)]
        for rank in sorted({span.rank for span in trace.spans})
    }
    height = sum(len(lanes) for lanes in ranks.values()) * _INCHES_PER_LANE + 0.15 * len(ranks) + 1.5
    figure, panels = plt.subplots(
        len(ranks),
        1,
        figsize=(_WIDTH, height),
        height_ratios=[len(lanes) for lanes in ranks.values()],
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    try:
        for panel, (rank, lanes) in zip(panels[:, 0], ranks.items(), strict=True):
            shown = [s for s in trace.spans if s.rank == rank and s.end_ns > start and s.start_ns < end]
            _draw_rank(panel, rank, lanes, shown, start, end)
            _mark_steps(panel, [s for s in shown if s.batch in batches], start)
            _underline_exposed(panel, lanes, shown, start, end)
        panels[-1, 0].set_xlabel("milliseconds; dotted: the end of a batch's computation")
        figure.suptitle(_title(trace, batches), fontsize=11, x=0.01, ha="left")
        _legend(figure, {s.name for s in trace.spans})
        target = place_of(path)
        with atomic_write(target) as part:
            figure.savefig(part, dpi=110, format="png")
    finally:
        plt.close(figure)
    return target


def _window(spans: list[Span], first: int | None, steps: int) -> list[int]:
    computed = sorted({span.batch for span in spans if span.lane == "compute"})
    if not computed:
        raise ValueError("nothing to draw: no batch was computed in this trace")
    if first is None:
        # The middle, without the first batch, which compiles, if there are others.
        begin = max((len(computed) - steps) // 2, min(1, len(computed) - steps), 0)
    elif first in computed:
        begin = computed.index(first)
    else:
        raise ValueError(f"batch {first} was not computed in this trace; it has {computed}")
    return computed[begin : begin + steps]


def _times(spans: list[Span], batches: list[int]) -> tuple[int, int]:
    computing = [span for span in spans if span.lane == "compute"]
    end = max(span.end_ns for span in computing if span.batch in batches)
    before: dict[int, int] = {}
    for span in computing:
        if span.batch < batches[0]:
            before[span.rank] = max(before.get(span.rank, span.end_ns), span.end_ns)
    start = min(before.values()) if before else min(span.start_ns for span in spans)
    return start, end


def _draw_rank(panel: Any, rank: int, lanes: list[str], spans: list[Span], start: int, end: int) -> None:
    inches_per_ms = (_WIDTH - 1.6) / ((end - start) / 1e6)
    for span in spans:
        left, right = (max(span.start_ns, start) - start) / 1e6, (min(span.end_ns, end) - start) / 1e6
        row, width = lanes.index(span.lane), (right - left) * inches_per_ms
        colour = STAGE_COLOURS.get(span.name, _OTHER)
        panel.barh(
            row,
            right - left,
            left=left,
            height=0.8,
            color=colour,
            edgecolor="white" if width > _THIN else colour,  # a white edge would hide a thin slice
            linewidth=0.6,
        )
        label = f"b{span.batch}" if span.micro_batch is None else str(span.micro_batch)
        if width > _CHARACTER * (len(label) + 0.4):
            ink = "white" if span.name in _DARK else "black"
            panel.text((left + right) / 2, row, label, ha="center", va="center", fontsize=7, color=ink)
    panel.set_yticks(range(len(lanes)), [lane.replace("_", " ") for lane in lanes], fontsize=8)
    panel.set_ylim(len(lanes) - 0.45, -0.55)
    panel.set_xlim(0, (end - start) / 1e6)
    panel.set_ylabel(f"rank {rank}", fontsize=9, fontweight="bold")
    panel.tick_params(axis="y", length=0)
    panel.tick_params(axis="x", labelsize=8)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.grid(axis="y", color="#eeeeee", linewidth=6 * _INCHES_PER_LANE)
    panel.set_axisbelow(True)


def _mark_steps(panel: Any, spans: list[Span], start: int) -> None:
    for batch in sorted({span.batch for span in spans}):
        computing = [span for span in spans if span.batch == batch and span.lane == "compute"]
        begin = min(span.start_ns for span in computing)
        end = max(span.end_ns for span in computing)
        panel.axvline((end - start) / 1e6, color="#444444", linewidth=0.8, linestyle=":")
        middle = max((begin + end) / 2 - start, 0) / 1e6
        above = panel.get_xaxis_transform()
        panel.text(middle, 1.01, f"batch {batch}", transform=above, ha="center", va="bottom", fontsize=8)


def _underline_exposed(panel: Any, lanes: list[str], spans: list[Span], start: int, end: int) -> None:
    rows = [row for row, lane in enumerate(lanes) if lane in COMMUNICATION_LANES]
    for left, right in intersection(exposed(spans), [(start, end)]):
        panel.barh(
            max(rows) + 0.47,
            (right - left) / 1e6,
            left=(left - start) / 1e6,
            height=0.1,
            color=_EXPOSED,
        )


def _title(trace: Trace, batches: list[int]) -> str:
    about = trace.metadata
    parts = [
        str(about.get("mode", "unnamed mode")),
        f"world size {about.get('world_size', len(trace.ranks))}",
        f"N = {about['micro_batches']}" if "micro_batches" in about else "",
        f"batches {batches[0]} to {batches[-1]}",
    ]
    # The figures are of the whole trace and need one step after the warm-up.
    computed = {span.batch for span in trace.spans if span.lane == "compute"}
    summaries = summarise(trace.spans) if len(computed) > 1 else []
    physical = sum(summary.communication_ns for summary in summaries)
    exposed_ns = sum(summary.exposed_ns for summary in summaries)
    lookup = sum(summary.lookup_ns for summary in summaries)
    hidden = sum(summary.hidden_lookup_ns for summary in summaries)
    if physical:
        parts.append(f"exposed communication {exposed_ns / physical:.0%}")
    if lookup:
        parts.append(f"hidden lookup {hidden / lookup:.0%}")
    exchanges = f"\nexchanges: {about['exchanges']}" if "exchanges" in about else ""
    return "   ·   ".join(part for part in parts if part) + exchanges


def _legend(figure: Any, names: set[str]) -> None:
    from matplotlib.patches import Patch

    known = [name for name in STAGE_COLOURS if name in names]
    handles = [Patch(color=STAGE_COLOURS[name], label=name.replace("_", " ")) for name in known]
    if names - set(known):
        handles.append(Patch(color=_OTHER, label="other"))
    handles.append(Patch(color=_EXPOSED, label="exposed"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        fontsize=8,
        frameon=False,
        handlelength=1.2,
        handletextpad=0.4,
        columnspacing=1.2,
    )
