"""Tables of other pages that are made from the same runs."""

from __future__ import annotations

from typing import Any


def curves(figures: Any) -> str:
    """The last epoch of each method, and how far it is from synchronous training."""
    lines = [
        "| model | method | loss | HR@10 | HR@50 | NDCG@10 | HR@10 minus synchronous, deviation over seeds |",
        "| --- | --- | --: | --: | --: | --: | --: |",
    ]
    for row in figures["summary"]:
        exact = row["method"] in ("synchronous", "nestpipe")
        name = row["method"] if exact else f"{row['method']}, **approximate**"
        apart = f"{row['HR@10 minus synchronous']:+.4f}, {row['HR@10 deviation']:.4f}"
        shown = {"synchronous": "", "nestpipe": "0, every bit equal"}.get(row["method"], apart)
        values = " | ".join(f"{row[metric]:.4f}" for metric in ("loss", "HR@10", "HR@50", "NDCG@10"))
        lines.append(f"| {row['model']} | {name} | {values} | {shown} |")
    return "\n".join(lines)


def grm(figures: Any) -> str:
    """Settings one after another: tokens per CPU second over the first's, and counts of a step."""
    lines = [
        "| model, ranks | added | tokens per CPU second, ratio (rounds) | lookups | keys sent | rows read | "
        "MB sent | longest rank over mean |",
        "| --- | --- | --: | --: | --: | --: | --: | --: |",
    ]
    for row in figures["rows"]:
        least, most = (1 / ratio for ratio in reversed(row["cpu_per_1000_tokens_range"]))
        cells = (
            f"{row['size']}, {row['ranks']}",
            row["setting"].removeprefix("+ "),
            f"{1 / row['cpu_per_1000_tokens_ratio']:.2f} ({least:.2f} to {most:.2f})",
            *(f"{row[name]:,.0f}" for name in ("lookups", "keys_exchanged", "rows_read")),
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['longest_over_mean']:.3f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def mch(figures: Any) -> str:
    """Both tables at each capacity."""
    lines = [
        "| capacity of the fixed table | M ids/s: ours, fixed | ratio (rounds) | ids on its shared row | "
        "MB: ours, fixed |",
        "| --: | --: | --: | --: | --: |",
    ]
    for row in figures["rows"]:
        lines.append(
            f"| {row['capacity']:,} | {row['ours_million_per_second']:.1f}, "
            f"{row['peer_million_per_second']:.1f} | {row['ratio']:.2f} ({min(row['ratios']):.2f} to "
            f"{max(row['ratios']):.2f}) | {row['on_the_shared_row']:.1%} | "
            f"{row['ours_bytes'] / 1e6:.0f}, {row['peer_bytes'] / 1e6:.0f} |"
        )
    return "\n".join(lines)


def lab(figures: Any) -> str:
    """Each half of NestPipe alone, and both."""
    paper = {
        "dbp": "hides about 98 % of the lookup",
        "fwp": "exposes 13 %",
        "nestpipe": "3.06 times as fast, exposes 13.0 %",
    }
    lines = [
        "| | N | speedup | its rounds | exposed | lookup hidden | the paper |",
        "| --- | --: | --: | --- | --: | --: | --- |",
    ]
    for row in figures["rows"]:
        mode, rounds = row["mode"], row["speedups"]
        alone = " alone" if mode in ("dbp", "fwp") else ""
        between = f"{min(rounds):.2f} to {max(rounds):.2f}" if mode in paper else ""
        lines.append(
            f"| {mode}{alone} | {row['micro_batches']} | {row['speedup']:.2f} | {between} | "
            f"{row['exposed_ratio']:.1%} | {row['hidden_lookup']:.1%} | {paper.get(mode, '')} |"
        )
    return "\n".join(lines)


TABLES = {"curves": curves, "grm": grm, "lab": lab, "mch": mch}
"""By run."""
