"""MTGRBoost (arXiv 2505.12663)."""

from __future__ import annotations

from typing import Any

from .page import only


def _setting(figures: Any, size: str, ranks: int, setting: str) -> Any:
    return only(figures["rows"], size=size, ranks=ranks, setting=setting)


def _grm(figures: Any, size: str, ranks: int, *settings: str) -> str:
    return ", ".join(
        f"{setting.removeprefix('+ ')} "
        f"{1 / _setting(figures, size, ranks, setting)['cpu_per_1000_tokens_ratio']:.2f}x"
        for setting in settings
    )


def _counts(figures: Any, ranks: int, key: str) -> str:
    names = {
        "+ merging": "none", "+ dedup before the exchange": "exchange",
        "+ dedup before the lookup": "lookup", "+ both": "both",
    }  # fmt: skip
    return ", ".join(
        f"{short} {_setting(figures, 'small', ranks, setting)[key]:,.0f}" for setting, short in names.items()
    )


def _spread(figures: Any, ranks: int) -> str:
    before, after = (
        only(figures["rows"], ranks=ranks, dealt=dealt)["spread"] for dealt in ("round robin", "Algorithm 1")
    )
    return f"max - min of {before:,.0f} tokens becomes {after:,.0f} ({ranks} ranks)"


def _scaling(figures: Any) -> str:
    shown = []
    for model in dict.fromkeys(row["model"] for row in figures["rows"]):
        nothing, all_of_it = (
            only(figures["rows"], model=model, how=how)["shares"]["128"] for how in ("exposed", "overlapped")
        )
        shown.append(f"{model} {nothing:.0%}, {all_of_it:.0%}")
    return "without and with overlap: " + "; ".join(shown)


def _complexity(figures: Any) -> str:
    rows = figures["rows"]
    counts = [row["operations"] / 1e9 for row in rows]
    return (
        f"{counts[0]:.1f} and {counts[1]:.0f} G ({counts[1] / counts[0]:.1f}x); as printed at "
        f"{rows[0]['length']:.0f} and {rows[1]['length']:.0f} tokens"
    )


def _curves(figures: Any) -> str:
    """GAUC of both sides after the last step."""
    (steps, theirs), (_, ours) = (figures["curves"][name][-1] for name in ("TorchRec", "sequential, batch"))
    return f"after {steps} steps: " + ", ".join(
        f"{task} {ours[f'GAUC/{task}']:.4f} beside {theirs[f'GAUC/{task}']:.4f}"
        for task in ("click", "conversion")
    )


def _parts(figures: Any) -> str:
    """TorchRec's time of each part over ours."""
    shown = []
    for ranks in dict.fromkeys(row["ranks"] for row in figures["rows"]):
        peer, ours = (
            only(figures["rows"], ranks=ranks, system=name) for name in ("TorchRec", "sequential, window")
        )
        parts = (f"{part} {peer[part] / ours[part]:.2f}x" for part in ("lookup", "forward", "rest", "whole"))
        exact = only(figures["rows"], ranks=ranks, system="sequential, batch")["ratio"]
        shown.append(f"{ranks} rank{'s'[: ranks > 1]}: {', '.join(parts)} (at batch {exact:.2f}x)")
    return "; ".join(shown)


def _over_links(figures: Any, *settings: str) -> str:
    """Tokens per second over the first setting's."""
    ratios = (_setting(figures, "small", 4, each)["tokens_per_second_ratio"] for each in settings)
    names = (each.removeprefix("+ ") for each in settings)
    return ", ".join(f"{name} {ratio:.2f}x" for name, ratio in zip(names, ratios, strict=True))


ADDED = ("+ merging", "+ both", "+ balancing")
DEDUP = ("+ dedup before the exchange", "+ dedup before the lookup", "+ both")

FIGURES = {
    "Table 1: operations of a forward pass": _complexity,
    "Grouped parallel probing, eq. 5; Theorem 1, eq. 6": lambda f: (
        f"{f['probe_sequences']:,} keys visit every slot of their table once"
    ),
    "Capacity expansion above load 0.75 (4.1, Fig. 6c)": lambda f: (
        f"largest load {f['largest_load']:.3f} of {f['keys']:,} keys"
    ),
    "Eq. 8 and Fig. 7: ids of merged tables": lambda f: f"{f['merged_tables']} tables without a clash",
    "Two-stage dedup (4.3, Fig. 8): keys exchanged in a step": lambda f: _counts(f, 2, "keys_exchanged"),
    "Two-stage dedup: rows read in a step": lambda f: _counts(f, 2, "rows_read"),
    "Algorithm 1, dynamic sequence batching (5.1, Figs 9, 10, 15)": lambda f: _spread(f, 8),
    "Fig. 11: GAUC over training": _curves,
    "Fig. 12: time of lookup, forward and backward": _parts,
    "Fig. 13: throughput as techniques are added": lambda f: (
        "GRM 4G: " + _grm(f, "GRM-4G", 2, *ADDED) + "; small: " + _grm(f, "small", 2, *ADDED)
    ),
    "Fig. 16: four dedup strategies": lambda f: "small, 2 ranks: " + _grm(f, "small", 2, *DEDUP),
    "Figs 13 and 16 over links of limited rate": lambda f: _over_links(f, ADDED[0], *DEDUP, ADDED[2]),
    "Table 3: dynamic table beside MCH, throughput": lambda f: ", ".join(
        f"{row['ratio']:.2f}x" for row in f["rows"]
    ),
    "Table 3: memory; ids without a row of their own": lambda f: "; ".join(
        f"{row['ours_bytes'] / 1e6:.0f} and {row['peer_bytes'] / 1e6:.0f} MB, "
        f"{row['on_the_shared_row']:.0%} of ids on the peer's shared row"
        for row in f["rows"]
    ),
    "Fig. 17: scaling to 128 GPUs": _scaling,
}
