"""Tables of other pages that are made from the same runs."""

from __future__ import annotations

from typing import Any

from ..shown import markdown


def curves(figures: Any) -> str:
    """The last epoch of each method, and how far it is from synchronous training."""
    head = ("model", "method", "loss", "HR@10", "HR@50", "NDCG@10")
    lines = []
    for row in figures["summary"]:
        exact = row["method"] in ("synchronous", "nestpipe")
        name = row["method"] if exact else f"{row['method']}, **approximate**"
        apart = f"{row['HR@10 minus synchronous']:+.4f}, {row['HR@10 deviation']:.4f}"
        shown = {"synchronous": "", "nestpipe": "0, every bit equal"}.get(row["method"], apart)
        lines.append((row["model"], name, *(f"{row[metric]:.4f}" for metric in head[2:]), shown))
    return markdown((*head, "HR@10 minus synchronous, deviation over seeds"), "llrrrrr", lines)


def grm(figures: Any) -> str:
    """Settings one after another: tokens per CPU second over the first's, and counts of a step."""
    head = (
        "model, ranks", "added", "tokens per CPU second, ratio (rounds)", "lookups", "keys sent", "rows read",
        "MB sent", "longest rank over mean",
    )  # fmt: skip
    lines = []
    for row in figures["rows"]:
        least, most = (1 / ratio for ratio in reversed(row["cpu_per_1000_tokens_range"]))
        lines.append(
            (
                f"{row['size']}, {row['ranks']}",
                row["setting"].removeprefix("+ "),
                f"{1 / row['cpu_per_1000_tokens_ratio']:.2f} ({least:.2f} to {most:.2f})",
                *(f"{row[name]:,.0f}" for name in ("lookups", "keys_exchanged", "rows_read")),
                f"{row['bytes'] / 1e6:.2f}",
                f"{row['longest_over_mean']:.3f}",
            )
        )
    return markdown(head, "llrrrrrr", lines)


def mch(figures: Any) -> str:
    """Both tables at each capacity."""
    head = (
        "capacity of the fixed table", "M ids/s: ours, fixed", "ratio (rounds)", "ids on its shared row",
        "MB: ours, fixed",
    )  # fmt: skip
    lines = [
        (
            f"{row['capacity']:,}",
            f"{row['ours_million_per_second']:.1f}, {row['peer_million_per_second']:.1f}",
            f"{row['ratio']:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})",
            f"{row['on_the_shared_row']:.1%}",
            f"{row['ours_bytes'] / 1e6:.0f}, {row['peer_bytes'] / 1e6:.0f}",
        )
        for row in figures["rows"]
    ]
    return markdown(head, "rrrrr", lines)


def lab(figures: Any) -> str:
    """Each half of NestPipe alone, and both."""
    paper = {
        "dbp": "hides about 98 % of the lookup",
        "fwp": "exposes 13 %",
        "nestpipe": "3.06 times as fast, exposes 13.0 %",
    }
    lines = []
    for row in figures["rows"]:
        mode, rounds = row["mode"], row["speedups"]
        alone = " alone" if mode in ("dbp", "fwp") else ""
        between = f"{min(rounds):.2f} to {max(rounds):.2f}" if mode in paper else ""
        lines.append(
            (
                f"{mode}{alone}", str(row["micro_batches"]), f"{row['speedup']:.2f}", between,
                f"{row['exposed_ratio']:.1%}", f"{row['hidden_lookup']:.1%}", paper.get(mode, ""),
            )
        )  # fmt: skip
    return markdown(
        ("", "N", "speedup", "its rounds", "exposed", "lookup hidden", "the paper"), "lrrlrrl", lines
    )


def frontier(figures: Any) -> str:
    """Speed and lost accuracy, mean and half the width of the 95 % interval over the seeds."""
    names = ("inputs", "whole_speedup", "accuracy", "AUC")
    head = (
        "classified",
        "drop at most",
        "inputs of the whole run",
        "whole run",
        "accuracy, points",
        "AUC, points",
    )
    forms = ("{:.2f} ± {:.2f}", "{:.2f} ± {:.2f}", "{:+.2f} ± {:.2f}", "{:+.2f} ± {:.2f}")
    lines = [
        (
            {"half": "half way", "early": "after 3 %"}[row["plan"]],
            f"{row['drop']:.0%}{' at random' if row['at_random'] else ''}",
            *(form.format(*row[name]) for name, form in zip(names, forms, strict=True)),
        )
        for row in figures["rows"]
    ]
    return markdown(head, "llrrrr", lines)


def scaling(figures: Any) -> str:
    """Shares of the ideal by number of GPUs."""
    gpus = list(figures["rows"][0]["shares"])
    lines = [
        (row["model"], row["how"], *(f"{row['shares'][count]:.1%}" for count in gpus))
        for row in figures["rows"]
    ]
    return markdown(
        ("model", "exchanges", *(f"{count} GPUs" for count in gpus)), "ll" + "r" * len(gpus), lines
    )


def clustering(figures: Any) -> str:
    """Keys that micro-batches exchange over those of the batch, by log and number of micro-batches."""
    head = "log", "N", "plain", "clustered", "offline", "no cut below", "ms: clustered, offline"
    lines = [
        (
            row["log"], str(row["micro-batches"]),
            *(f"{row[name]:.3f}" for name in ("plain", "clustered", "offline", "bound")),
            f"{row['clustered ms']:.1f}, {row['offline ms']:.0f}",
        )
        for row in figures["rows"]
    ]  # fmt: skip
    return markdown(head, "lrrrrrr", lines)


def lanes(figures: Any) -> str:
    """Share of a step in which each lane is at work, by number of ranks and mode."""
    names = dict.fromkeys(lane for row in figures["rows"] for lane in row["busy"])
    lines = [
        (str(row["ranks"]), row["mode"], *(f"{row['busy'].get(lane, 0.0):.0%}" for lane in names))
        for row in figures["rows"]
    ]
    return markdown(("ranks", "mode", *names), "rl" + "r" * len(names), lines)


TABLES = {
    "averaging": curves,
    "cluster-sizes": lanes,
    "clustering": clustering,
    "curves": curves,
    "frontier": frontier,
    "grm": grm,
    "lab": lab,
    "mch": mch,
    "scaling": scaling,
}
"""By run."""
