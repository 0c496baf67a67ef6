"""The section on traces: figures of each file, its dependencies checked, the picture beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...trace import read
from ...trace.analysis import check_trace, summarise
from .section import Picture, Section, Table


def traces(files: Sequence[Path], source: str) -> Section:
    """Figures of rank 0 in each trace; ValueError naming the file that is none."""
    rows, pictures, bad = [], [], set()
    for number, file in enumerate(files):
        try:
            trace = read(file)
            about = trace.metadata
            edges = check_trace(trace)
            ours = summarise(trace.spans)[0]
        except ValueError as error:
            raise ValueError(f"{file} is no trace of a run: {error}") from error
        if edges.instances and not edges.honoured:
            bad.add(number)
        rows.append((
            about.get("mode", file.stem), str(about["world_size"]), f"{ours.step_ns / 1e6:.1f} ms",
            _percent(ours.exposed_ratio), _percent(ours.hidden_lookup_ratio),
            "VIOLATED" if number in bad else f"{sum(edges.instances.values()):,} honoured",
        ))  # fmt: skip
        png = file.with_suffix(".png")
        if png.is_file():
            pictures.append(Picture(str(about.get("mode", file.stem)), png=png.read_bytes()))
    return Section(
        "Traces",
        "Exposed: share of the communication during which a rank does not compute. Hidden: share of the "
        "lookup beside other work. Edges: dependencies of the schedule, seen honoured in the recorded order.",
        source,
        [Table("Modes", ("mode", "ranks", "step", "exposed", "hidden", "edges"), rows, frozenset(bad))],
        pictures,
        passed=not bad,
    )


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.0%}"
