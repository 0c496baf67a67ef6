"""NestPipe (arXiv 2604.06956)."""

from __future__ import annotations

from typing import Any

from .row import Row, only, simulated


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


SYSTEMS = ("TorchRec", "2D-SP", "UniEmb", "NestPipe")
STEPS = "{:,.2f} / {:,.2f} / {:,.2f} / {:,.2f} ms"

ROWS = [
    Row(
        "Hybrid architecture, prior work (Fig. 1, Table I)",
        "works",
        "Tables over all ranks by hash, dense model on each; Table I compares published systems in words",
        link="training.md",
    ),
    Row(
        "Five stages of dual-buffer pipelining (IV.A, Fig. 3)",
        "works",
        "One lane a stage, two buffers, check of every schedule before it runs. Stage 1 reads the caller's "
        "batches on its lane",
        link="training.md",
    ),
    Row(
        "Dual-buffer synchronisation (IV.B, Fig. 4)",
        "differs",
        "Copies rows of both batches, as there. The intersection and the second dedup run on the host where "
        "the tables are there; a GPU has run the step, with no overlap to see",
        "under 2 ms",
        lambda f: f"{_lab(f, 'nestpipe')['row_copy'] * 1e3:.2f} ms",
        "lab",
        "lab.md",
    ),
    Row(
        "Host and device memory (IV)",
        "differs",
        "Tables in host memory, in device memory or cached between them; proved on emulated devices only",
        link="embedding.md#where-a-table-is",
    ),
    Row(
        "Frozen-window pipelining (V.A), exposed ratio 1/N",
        "differs",
        "N = 8 on links of 30 Mbit/s. Dense gradients are reduced after the last micro-batch, so it is above "
        "1/8 = 12.5 %",
        "1/N",
        lambda f: f"{_lab(f, 'nestpipe')['exposed_ratio']:.1%}",
        "lab",
        "lab.md",
    ),
    Row(
        "Stream scheduling (V.B, Fig. 5)",
        "works",
        "Exchanges are queued first in a window; every edge is seen honoured in recorded traces",
        link="traces.md",
    ),
    Row(
        "Key-centric clustering (V.C)",
        "works",
        "Weak where negatives are drawn: random ones are shared by chance alone. Without them it saves 18 to "
        "23 % on MovieLens; offline swaps save 5 to 7 % more. First use sends each row once, which no order "
        "of the samples can better, so no partitioner is here",
        "512 workers, 32 micro-batches: exposed 27.71 ms",
        lambda f: _payload(f, 8),
        "switches",
        "scale.md",
    ),
    Row(
        "Propositions 1, 2, corollary 1, eq. 1 to 5",
        "works",
        "Every mode has the bits of synchronous training, not only its equations; the whole contract is in "
        "the linked page",
        "proof on paper",
        lambda f: f"{f['identical']} of {f['cases']} cases identical in every bit",
        "contract",
        "verifying.md",
    ),
    Row(
        "Fig. 2, shares of TorchRec's step at 128 and 1,536 workers",
        "differs",
        "Simulated; the share of lookup at 128 workers is 9 % off",
        "lookup 24.4 and 49.6 %, communication 9.2 and 20.5 %",
        simulated(
            "lookup {:.1f} / {:.1f} %, communication {:.1f} / {:.1f} %",
            *(
                f"Fig. 2, TorchRec, {part} share %, {workers} npu"
                for part in ("lookup", "communication")
                for workers in (128, 1536)
            ),
        ),
        "simulate",
        "simulator.md",
    ),
    Row(
        "Table II, steps on 1,536 NPUs: TorchRec, 2D-SP, UniEmb, NestPipe",
        "works",
        "Simulated; TorchRec's row is fitted. The predictions are closed forms of the fitted costs",
        "5,793.83 / 4,914.01 / 2,919.76 / 1,895.98 ms",
        simulated(STEPS, *(f"Table II, {system}, step ms, 1536 npu" for system in SYSTEMS)),
        "simulate",
        "simulator.md#closed-forms",
    ),
    Row(
        "Table II, exposed lookup and communication of NestPipe",
        "differs",
        "Mean costs hide all of the lookup; the payload of clustered micro-batches is 14 % too large",
        "30.19 and 154.23 ms",
        simulated(
            "{:.2f} and {:.2f} ms",
            "Table II, NestPipe, lookup ms, 1536 npu",
            "Table II, NestPipe, exposed ms, 1536 npu",
        ),
        "simulate",
        "simulator.md#accuracy",
    ),
    Row(
        "Table II, 128 GPUs, steps",
        "works",
        "Simulated; TorchRec's row is fitted",
        "4,207.94 / 4,052.98 / 3,384.05 / 3,090.45 ms",
        simulated(STEPS, *(f"Table II, {system}, step ms, 128 gpu" for system in SYSTEMS)),
        "simulate",
        "simulator.md",
    ),
    Row(
        "Table II as an ablation: DBP alone hides 98 % of the lookup",
        "works",
        "Measured on four ranks with real transfers; lookup and computation have emulated shares",
        "98 %",
        lambda f: f"{_lab(f, 'dbp')['hidden_lookup']:.1%}",
        "lab",
        "lab.md#a-recorded-run",
    ),
    Row(
        "Table II as an ablation: FWP alone exposes 13 %",
        "differs",
        "The same run; above 13 % for the same reason as the frozen window",
        "13 %",
        lambda f: f"{_lab(f, 'fwp')['exposed_ratio']:.1%}",
        "lab",
        "lab.md#a-recorded-run",
    ),
    Row(
        "Speedup over synchronous training",
        "works",
        "The same run. With these shares NestPipe can reach 1 / (0.296 + 0.208 / 8) = 3.1 by arithmetic",
        "3.06x on 1,536 NPUs",
        _speedups,
        "lab",
        "lab.md#a-recorded-run",
    ),
    Row(
        "Table III, NestPipe's QPS (1e5) at 128 to 1,536",
        "works",
        "Simulated",
        "0.37, 0.72, 1.43, 2.80, 4.14",
        simulated(
            "{:.2f}, {:.2f}, {:.2f}, {:.2f}, {:.2f}",
            *(f"Table III, NestPipe, QPS 1e5, {workers} npu" for workers in (128, 256, 512, 1024, 1536)),
        ),
        "simulate",
        "simulator.md",
    ),
    Row(
        "Table III, scaling factors at 1,536: TorchRec, 2D-SP, UniEmb, NestPipe",
        "works",
        "Simulated",
        "44.34, 49.32, 67.62, 94.07 %",
        simulated(
            "{:.2f}, {:.2f}, {:.2f}, {:.2f} %",
            *(f"Table III, {system}, scaling %, 1536 npu" for system in SYSTEMS),
        ),
        "simulate",
        "simulator.md",
    ),
    Row(
        "Table IV, NestPipe + 2D-SP: communication, exposed, QPS",
        "differs",
        "Simulated; a quarter of the workers costs the model 0.41 of the communication, the paper 0.36",
        "452.34 ms, 55.64 ms, 4.32",
        simulated(
            "{:.2f} ms, {:.2f} ms, {:.2f}",
            *(
                f"Table IV, NestPipe+2D-SP, {part}, 1536 npu"
                for part in ("communication ms", "exposed ms", "QPS 1e5")
            ),
        ),
        "simulate",
        "simulator.md",
    ),
    Row(
        "Fig. 6, loss, HR and NDCG of FuXi",
        "differs",
        "MovieLens-100K, three seeds, two ranks; KuaiRand-27K is not here. UniEmb's place has a run of stale "
        "rows. nestpipe is compared with synchronous training in every bit first",
        "HR@10 minus TorchRec's: UniEmb -2.1e-3, 2D-SP -1.0e-3, NestPipe within 0.3e-3",
        lambda f: "HR@10 minus synchronous: " + _apart(f, "fuxi", "HR@10"),
        "curves",
        "scale.md#what-approximate-updates-change",
    ),
    Row(
        "Fig. 6 for HSTU",
        "differs",
        "The same run. Stale rows raise the loss, and their HR@10 moves by less than it scatters",
        "no figure in the text",
        lambda f: "HR@10 minus synchronous: " + _apart(f, "hstu", "HR@10"),
        "curves",
        "scale.md#what-approximate-updates-change",
    ),
    Row(
        "Fig. 7, latency breakdown over cluster sizes",
        "differs",
        "`tritonrec simulate --json FILE` has the parts of a step at each size (`scaling`), and no picture "
        "of them; the paper prints no figures",
    ),
    Row(
        "Fig. 8, utilization of TorchRec and 2D-SP at 1,536",
        "works",
        "Simulated",
        "29.6 and 34.8 %",
        simulated(
            "{:.1f} and {:.1f} %",
            "Fig. 8, TorchRec, utilization %, 1536 npu",
            "Fig. 8, 2D-SP, utilization %, 1536 npu",
        ),
        "simulate",
        "simulator.md",
    ),
    Row(
        "Fig. 9, collapse at micro-batches of 16",
        "differs",
        "Not predicted: communication is shorter than the computation beside it, also at the paper's own "
        "1,331 ms",
        "25.2 % exposed of 1,331.33 ms",
        simulated(
            "{:.1f} % of {:.2f} ms",
            "Fig. 9, micro-batch 16, plain, exposed %, 512 npu",
            "Fig. 9, micro-batch 16, plain, communication ms, 512 npu",
        ),
        "simulate",
        "simulator.md#accuracy",
    ),
    Row(
        "Fig. 10a, b: dimension 1,024",
        "works",
        "Simulated; computation grows by dim²",
        "12.9 % exposed",
        simulated("{:.1f} % exposed", "Fig. 10, dimension 1024, exposed %, 1536 npu"),
        "simulate",
        "simulator.md#fitted-constants",
    ),
    Row(
        "Fig. 10c, d: 2 and 8 layers",
        "differs",
        "Simulated; communication is 14 % too long, and at two layers little hides it",
        "compute 892.78 and 3,393.12 ms, exposed 27.9 % and 146.23 ms",
        simulated(
            "compute {:,.2f} and {:,.2f} ms, exposed {:.1f} % and {:.2f} ms",
            "Fig. 10, 2 layers, compute ms, 1536 npu",
            "Fig. 10, 8 layers, compute ms, 1536 npu",
            "Fig. 10, 2 layers, exposed %, 1536 npu",
            "Fig. 10, 8 layers, exposed ms, 1536 npu",
        ),
        "simulate",
        "simulator.md#accuracy",
    ),
    Row(
        "Fig. 10e: 512 and 2,048 tokens",
        "differs",
        "Simulated; the paper's communication hardly grows with the tokens, the model's keys by 1.79",
        "compute 850.08 and 3,399.96 ms, exposed 165.12 ms at 2,048",
        simulated(
            "compute {:,.2f} and {:,.2f} ms, exposed {:.2f} ms",
            "Fig. 10, 512 tokens, compute ms, 1536 npu",
            "Fig. 10, 2048 tokens, compute ms, 1536 npu",
            "Fig. 10, 2048 tokens, exposed ms, 1536 npu",
        ),
        "simulate",
        "simulator.md#accuracy",
    ),
    Row(
        "Models: HSTU and FuXi-alpha",
        "works",
        "FuXi-alpha's RMS norm is `FuXiConfig(norm=\"rms\")`; the default is HSTU's layer norm",
        link="models.md#fuxi",
    ),
    Row(
        "Data sets: KuaiRand-27K and an industrial log",
        "not here",
        "A reader for KuaiRand's files is here, the files and the industrial log are not",
        link="data.md",
    ),
    Row(
        "Beyond the text: TurboGR, semi-asynchronous",
        "not here",
        "None of the five texts has its figures, so there is nothing to simulate beside NestPipe's",
    ),
]
