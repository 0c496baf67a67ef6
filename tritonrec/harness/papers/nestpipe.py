"""NestPipe (arXiv 2604.06956)."""

from __future__ import annotations

from typing import Any

from .page import only, simulated


def _lab(figures: Any, mode: str) -> Any:
    return only(figures["rows"], mode=mode)


def _speedups(figures: Any) -> str:
    shown = (f"{row['mode']} {row['speedup']:.2f}x" for row in figures["rows"] if row["mode"] != "sequential")
    return ", ".join(shown)


def _payload(figures: Any, count: int) -> str:
    rows = {row["payload"]: row["rows"] for row in figures["payload"] if row["N"] == count}
    return (
        f"N = {count}: payload over the batch's {rows['as in the paper']:.2f}, clustered "
        f"{rows['clustered']:.2f}, first use {rows['first use']:.2f}"
    )


def _by_count(figures: Any) -> str:
    """Exposed share and physical communication at each N, plain and clustered."""
    shown = []
    for name, switches in (("plain", {}), ("clustered", {"clustering": True})):
        rows = [r for r in figures["rows"] if r["mode"] == "nestpipe" and r["switches"] == switches]
        each = (f"N = {r['micro_batches']}: {r['exposed'] / r['communication']:.1%} of "
                f"{r['communication'] * 1e3:.0f} ms" for r in rows)  # fmt: skip
        shown.append(f"{name} {', '.join(each)}")
    return "; ".join(shown)


def _busy(figures: Any) -> str:
    """Share of a step in which the compute lane is at work."""
    rows = [row for row in figures["rows"] if not row["switches"] and row["micro_batches"] in (1, 8)]
    return ", ".join(f"{row['mode']} {row['compute'] / row['step']:.1%}" for row in rows)


def _apart(figures: Any, model: str, metric: str) -> str:
    shown = []
    for row in figures["summary"]:
        if row["model"] != model or row["method"] == "synchronous":
            continue
        if row["method"] == "nestpipe":
            shown.append(f"nestpipe {row[f'{metric} minus synchronous']:g}")
        else:
            apart, spread = row[f"{metric} minus synchronous"] * 1e3, row[f"{metric} deviation"] * 1e3
            shown.append(f"{row['method']} {apart:+.1f}e-3 (deviation {spread:.1f}e-3)")
    return ", ".join(shown)


def _shapes(figures: Any) -> str:
    """Exposed share and computation of each shape."""
    return "; ".join(
        f"{row['shape']}: {row['exposed_ratio']:.1%} of {row['communication_ms']:.0f} ms beside "
        f"{row['compute_ms']:.0f} ms"
        for row in figures["rows"]
    )


def _parts(figures: Any) -> str:
    """Of each number of ranks and mode the step, and its exposed lookup and communication."""
    return "; ".join(
        f"{ranks} ranks " + ", ".join(
            f"{row['mode']} {row['step_ms']:.0f} ms ({row['lookup_ms']:.0f}, {row['communication_ms']:.0f})"
            for row in figures["rows"] if row["ranks"] == ranks
        )
        for ranks in dict.fromkeys(row["ranks"] for row in figures["rows"])
    )  # fmt: skip


def _computing(figures: Any) -> str:
    """Share of a step in which the compute lane is at work, by number of ranks."""
    modes = dict.fromkeys(row["mode"] for row in figures["rows"])
    shares = {
        mode: [row["busy"]["compute"] for row in figures["rows"] if row["mode"] == mode] for mode in modes
    }
    return "; ".join(
        f"{mode} {', '.join(f'{share:.1%}' for share in found)}" for mode, found in shares.items()
    )


SYSTEMS = ("TorchRec", "2D-SP", "UniEmb", "NestPipe")
STEPS = "{:,.2f} / {:,.2f} / {:,.2f} / {:,.2f} ms"

FIGURES = {
    "Dual-buffer synchronisation (IV.B, Fig. 4)": lambda f: (
        f"{f['intersection_ms']:.2f} ms intersection, {f['copy_ms']:.2f} ms copy of {f['shared']:,.0f} of "
        f"{f['rows']:,.0f} rows"
    ),
    "Frozen-window pipelining (V.A), exposed ratio 1/N": lambda f: (
        f"{_lab(f, 'nestpipe')['exposed_ratio']:.1%}"
    ),
    "Key-centric clustering (V.C)": lambda f: _payload(f, 8),
    "Propositions 1, 2, corollary 1, eq. 1 to 5": lambda f: (
        f"{f['identical']} of {f['cases']} cases identical in every bit"
    ),
    "Fig. 2, shares of TorchRec's step at 128 and 1,536 workers": simulated(
        "lookup {:.1f} / {:.1f} %, communication {:.1f} / {:.1f} %",
        *(
            f"Fig. 2, TorchRec, {part} share %, {workers} npu"
            for part in ("lookup", "communication")
            for workers in (128, 1536)
        ),
    ),
    "Table II, steps on 1,536 NPUs: TorchRec, 2D-SP, UniEmb, NestPipe": simulated(
        STEPS, *(f"Table II, {system}, step ms, 1536 npu" for system in SYSTEMS)
    ),
    "Table II, exposed lookup and communication of NestPipe": simulated(
        "{:.2f} and {:.2f} ms",
        "Table II, NestPipe, lookup ms, 1536 npu",
        "Table II, NestPipe, exposed ms, 1536 npu",
    ),
    "Table II, 128 GPUs, steps": simulated(
        STEPS, *(f"Table II, {system}, step ms, 128 gpu" for system in SYSTEMS)
    ),
    "Table II as an ablation: DBP alone hides 98 % of the lookup": lambda f: (
        f"{_lab(f, 'dbp')['hidden_lookup']:.1%}"
    ),
    "Table II as an ablation: FWP alone exposes 13 %": lambda f: f"{_lab(f, 'fwp')['exposed_ratio']:.1%}",
    "Speedup over synchronous training": _speedups,
    "Table III, NestPipe's QPS (1e5) at 128 to 1,536": simulated(
        "{:.2f}, {:.2f}, {:.2f}, {:.2f}, {:.2f}",
        *(f"Table III, NestPipe, QPS 1e5, {workers} npu" for workers in (128, 256, 512, 1024, 1536)),
    ),
    "Table III, scaling factors at 1,536: TorchRec, 2D-SP, UniEmb, NestPipe": simulated(
        "{:.2f}, {:.2f}, {:.2f}, {:.2f} %",
        *(f"Table III, {system}, scaling %, 1536 npu" for system in SYSTEMS),
    ),
    "Table IV, NestPipe + 2D-SP: communication, exposed, QPS": simulated(
        "{:.2f} ms, {:.2f} ms, {:.2f}",
        *(
            f"Table IV, NestPipe+2D-SP, {part}, 1536 npu"
            for part in ("communication ms", "exposed ms", "QPS 1e5")
        ),
    ),
    "Fig. 6, loss, HR and NDCG of FuXi": lambda f: "HR@10 minus synchronous: " + _apart(f, "fuxi", "HR@10"),
    "Fig. 6 for HSTU": lambda f: "HR@10 minus synchronous: " + _apart(f, "hstu", "HR@10"),
    "Fig. 8, utilization of TorchRec and 2D-SP at 1,536": simulated(
        "{:.1f} and {:.1f} %",
        "Fig. 8, TorchRec, utilization %, 1536 npu",
        "Fig. 8, 2D-SP, utilization %, 1536 npu",
    ),
    "Fig. 9, collapse at micro-batches of 16": simulated(
        "{:.1f} % of {:.2f} ms",
        "Fig. 9, micro-batch 16, plain, exposed %, 512 npu",
        "Fig. 9, micro-batch 16, plain, communication ms, 512 npu",
    ),
    "Fig. 7 in the lab: parts of a step at 2, 4 and 8 ranks": _parts,
    "Fig. 8 in the lab: the compute lane at 2, 4 and 8 ranks": _computing,
    "Fig. 8 in the lab: the compute lane's share of a step": _busy,
    "Fig. 9 in the lab: N = 2 to 64": _by_count,
    "Fig. 10 in the lab: dimension, layers, tokens": _shapes,
    "Fig. 10a, b: dimension 1,024": simulated(
        "{:.1f} % exposed", "Fig. 10, dimension 1024, exposed %, 1536 npu"
    ),
    "Fig. 10c, d: 2 and 8 layers": simulated(
        "compute {:,.2f} and {:,.2f} ms, exposed {:.1f} % and {:.2f} ms",
        "Fig. 10, 2 layers, compute ms, 1536 npu",
        "Fig. 10, 8 layers, compute ms, 1536 npu",
        "Fig. 10, 2 layers, exposed %, 1536 npu",
        "Fig. 10, 8 layers, exposed ms, 1536 npu",
    ),
    "Fig. 10e: 512 and 2,048 tokens": simulated(
        "compute {:,.2f} and {:,.2f} ms, exposed {:.2f} ms",
        "Fig. 10, 512 tokens, compute ms, 1536 npu",
        "Fig. 10, 2048 tokens, compute ms, 1536 npu",
        "Fig. 10, 2048 tokens, exposed ms, 1536 npu",
    ),
}
