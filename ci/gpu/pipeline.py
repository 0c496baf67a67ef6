"""NestPipe steps on a GPU beside other modes, with tables in host memory, in its memory, and cached there.

Samples, buffers of looked-up rows, the model and its gradients are on the device. Lookups, dedup and updates
of rows run where the tables are. Every mode and storage, with graphs of micro-batches and without, must give
the losses of the sequential one with tables in host memory, bit for bit; against the CPU they agree to
rounding only.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median

import torch

from tritonrec.distributed import Communicators
from tritonrec.embedding import Placement
from tritonrec.harness.devices import Target
from tritonrec.harness.job import Job
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import ExchangeConfig, MicroBatchGraphs, Trainer, WindowConfig
from tritonrec.trace import Recorder

MODEL = HSTUConfig(dim=64, layers=2, heads=2, qk_dim=32, v_dim=32, max_seq_len=50, dropout=0.2)


def run(
    job: Job, mode: str, storage: str, steps: int, device: str, trace: Path | None = None,
    graphs: MicroBatchGraphs | None = None,
):  # fmt: skip
    """Losses of all steps, in float64, and the median seconds of a step."""
    placement = Placement(storage, cache_rows=1 << 16)
    model, tables, dense = replace(job, placement=placement, target=Target(device=device)).build("adam")
    recorder = Recorder(0, 1) if trace else None
    exchange = ExchangeConfig(first_use=True, taper=0.7, skip_fetch=mode == "nestpipe")
    config = WindowConfig(4, "batch", seed=job.seed, exchange=exchange)
    loader, losses, times = job.loader(), [], []
    with Trainer(
        model, tables, dense, Communicators.local(), mode, config, recorder, device=device, graphs=graphs
    ) as trainer:
        began = time.perf_counter()
        for result in trainer.run(loader.batch(step) for step in range(steps)):
            losses.append(result.losses.double().cpu())
            times.append(time.perf_counter() - began)
            began = time.perf_counter()
    if recorder and trace:
        recorder.save(str(trace))
    return torch.cat(losses), median(times[len(times) // 4 :])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--trace", type=Path)
    arguments = parser.parse_args()
    job = Job("zipf", batch_size=arguments.batch_size, num_negatives=32, sizes=MODEL)
    report: dict = {
        "device": arguments.device,
        "steps": arguments.steps,
        "seconds": {},
    }
    code, expected = 0, None
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    modes = ("sequential", "dbp", "fwp", "nestpipe", "nestpipe graphs")
    for storage, mode in product(("host", "device", "cached"), modes):
        name = f"{mode} {storage}"
        trace = arguments.trace if name == "nestpipe device" else None
        graphs = MicroBatchGraphs() if mode.endswith("graphs") and arguments.device != "cpu" else None
        try:
            losses, took = run(
                job, mode.split()[0], storage, arguments.steps, arguments.device, trace, graphs
            )
        except Exception as error:
            traceback.print_exc()
            report.setdefault("errors", {})[name] = f"{type(error).__name__}: {error}"
            code = 1
            continue
        expected = losses if expected is None else expected
        report["seconds"][name] = round(took, 5)
        print(f"{name}: {took:.5f} s a step", flush=True)
        report.setdefault("identical", {})[name] = bool(torch.equal(losses, expected))
        code |= not report["identical"][name]
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")  # kept if time runs out
    if arguments.device != "cpu" and expected is not None:
        on_cpu, _ = run(job, "sequential", "host", arguments.steps, "cpu")
        report["largest_difference_to_cpu"] = float((on_cpu - expected).abs().max())
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return code


if __name__ == "__main__":
    sys.exit(main())
