"""Runs every case of ci/compile/launches.py, on a GPU or interpreted, under a sanitizer or a profiler.

python ci/gpu/launch_all.py --json out/launches.json
python ci/gpu/launch_all.py --profile out/kernels.trace.json --rows 65539
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import sys
import time
from pathlib import Path

import torch

import tritonrec.kernels

interpreted = os.environ.get("TRITON_INTERPRET") == "1"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose label contains this")
    parser.add_argument("--part", default="0/1", help="K/N: every Nth case from the Kth on")
    parser.add_argument("--rows", type=int, help="size of the cases; small without --profile")
    parser.add_argument("--profile", type=Path, help="write a Chrome trace here")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    if interpreted:  # before `launches` asks for compiled kernels
        for module in pkgutil.walk_packages(tritonrec.kernels.__path__, "tritonrec.kernels."):
            if module.name.split(".")[-1].startswith("triton_"):
                importlib.import_module(module.name)
    import launches

    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
    rows = arguments.rows or (65_539 if arguments.profile and not interpreted else 99)
    device = "cpu" if interpreted else "cuda"
    report = {"device": torch.cuda.get_device_name() if device == "cuda" else "interpreter", "cases": {}}
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else []
    failed = []
    part, parts = (int(each) for each in arguments.part.split("/"))
    chosen = [label for label in launches.CASES if arguments.only in label][part::parts]
    cases = {label: launches.CASES[label] for label in chosen}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    with launches.sized(rows, 512 if rows > 10_000 else 64), torch.device(device):
        profiler = torch.profiler.profile(activities=activities) if arguments.profile else None
        if profiler:
            for case in cases.values():  # compiled before it is profiled
                attempt(case)
            profiler.start()
        for label, case in cases.items():
            began = time.perf_counter()
            error = attempt(case)
            seconds = round(time.perf_counter() - began, 4)
            report["cases"][label] = {"seconds": seconds, **({"error": error} if error else {})}
            failed += [label] if error else []
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")  # kept if time runs out
            if error:
                print(f"{label}: {error}", flush=True)
        if profiler:
            profiler.stop()
            arguments.profile.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(arguments.profile))
            key = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
            events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, key))[:60]
            report["microseconds"] = {event.key: round(getattr(event, key), 1) for event in events}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{len(report['cases'])} cases on {report['device']}, {len(failed)} failed: {', '.join(failed)}")
    return 1 if failed else 0


def attempt(case) -> str:
    """Run a case to its end; the error's message, or nothing."""
    try:
        case()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
