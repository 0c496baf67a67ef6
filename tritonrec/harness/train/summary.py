"""The printed summary of a run."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from ...callbacks import EarlyStopping
from ...files.places import place_of
from ..shown import table
from .run import Run

SHOWN = {
    "grm": ("group AUC of the last impressions", "item's rate"),
    "dlrm": ("clicks held out", "one rate for all"),
}
"""By model the metrics and the baseline in words; next-item models are alike."""


def in_words(metrics: dict[str, float]) -> str:
    """Names and values in one line."""
    return ", ".join(f"{name} {value:.6f}" for name, value in metrics.items())


def summary_table(run: Run, summary: dict[str, Any]) -> Table:
    """Metrics of the model beside those of a ranking without training."""
    ranking, simple = SHOWN.get(run.job.model, ("full ranking, leave one out", "popularity"))
    if not run.job.split.startswith("leave-one-out"):
        ranking = f"{ranking.partition(',')[0]}, {run.job.split}"
    rows = {"model": summary["metrics"], "model, validation": summary.get("validation"),
            simple: summary["baseline"]}  # fmt: skip
    cells = [
        (name, *(f"{metrics.get(each, float('nan')):.6f}" for each in summary["metrics"]))
        for name, metrics in rows.items()
        if metrics is not None
    ]
    seconds = summary["seconds_per_step"]
    pace = "too few steps to time" if seconds is None else f"{seconds * 1e3:.1f} ms per step"
    loss = "no step was left" if summary["loss"] is None else f"loss {summary['loss']:.6f}"
    title = f"{run.job.model}, {run.mode} on {run.job.data}, {summary['step']} steps: {ranking}"
    digest = f"SHA-256 of all parameters, rows and states: {summary['digest'][:16]}"
    return table(title, ("", *summary["metrics"]), cells, caption=f"{loss}, {pace}, {digest}")


def tables_line(summary: dict[str, Any]) -> str:
    """Counts of tables and lookups, in a few lines."""
    tables, lookups, steps = summary["tables"], summary["lookups"], max(summary["steps_run"], 1)
    done = ", ".join(
        f"{tables[name]:,} {name}"
        for name in ("inserted", "evicted", "rejected", "promoted", "demoted")
        if tables[name]
    )
    keys = (tables["key_structure"] + tables["metadata"]) / max(tables["rows"], 1)
    parts = [f"{tables['rows']:,} rows", done, f"{keys:.1f} bytes of keys and metadata a row"]
    lines = [f"tables: {'; '.join(part for part in parts if part)}"]
    if tables["saved_by_fp16"]:
        saved = tables["saved_by_fp16"]
        share = saved / (saved + tables["value_bytes"])
        lines.append(f"half precision saves {saved / 1e6:.2f} MB of row values ({share:.0%})")
    if lookups["occurrences"]:
        sent, read = lookups["exchanged"] / lookups["occurrences"], lookups["read"] / lookups["occurrences"]
        lines.append(
            f"lookups: {lookups['lookups'] / steps / summary['world_size']:.0f} per step and rank; of "
            f"{lookups['occurrences'] / steps:,.0f} ids a step {sent:.1%} are exchanged, {read:.1%} read"
        )
    if summary["nodes"] > 1:
        inside = lookups["node_bytes"]
        between = lookups["key_bytes"] + lookups["row_bytes"] - inside
        lines.append(
            f"{summary['nodes']} nodes: {between / steps / 1e6:.2f} MB a step between them, "
            f"{inside / steps / 1e6:.2f} MB inside"
        )
    return "\n".join(lines)


def spilled_line(run: Run, step: int) -> str:
    """Of a run whose memory has ended, and which goes on."""
    assert run.checkpoint
    return f"saved at step {step} to {place_of(run.checkpoint)}; going on with rows on disk: {run.spill}"


def stopped_early_line(stopping: EarlyStopping, step: int) -> str:
    """Step and best evaluation of a run that ended itself."""
    best = "" if stopping.best is None else f", {stopping.best:.6f} at step {stopping.best_step}"
    without = f"{stopping.waited} evaluations without a better {stopping.metric}"
    return f"stopped early at step {step}: {without}{best}"


def going_on_line(ranks: int, step: int) -> str:
    """Step and ranks of an elastic run that has lost some."""
    return f"going on with {ranks} rank{'s'[: ranks > 1]} after step {step}"


def ended_line(run: Run) -> str:
    """Of a run that is started again after its last step."""
    place = place_of(run.checkpoint or "")
    return f"the run in {place} has ended at step {run.steps}: nothing is left but its evaluation"


def stopped_line(run: Run, step: int) -> str:
    """Step and checkpoint of a run that was stopped."""
    at = f"stopped at step {step} of {run.steps}"
    if not run.checkpoint:
        return f"{at}; nothing was saved, which takes --checkpoint DIRECTORY"
    if not step:
        return f"{at}; there was nothing to save"
    return f"{at}; saved to {place_of(run.checkpoint)}; go on with --resume"
