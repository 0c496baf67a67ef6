"""What this machine can do at most: bytes per second of a copy, operations per second of a matrix product."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch


def seconds(call, device: str) -> float:
    """Median of a call."""
    if device == "cuda":
        from triton.testing import do_bench

        return do_bench(call, return_mode="median") / 1e3
    times = []
    for _ in range(5):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    device = arguments.device
    count, edge = (1 << 30, 8192) if device == "cuda" else (1 << 22, 256)
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    roofs = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "copy_bytes_per_second": 2 * count / seconds(lambda: target.copy_(source), device),
    }
    for name in ("bfloat16", "float32"):
        a = torch.ones(edge, edge, dtype=getattr(torch, name), device=device)
        took = seconds(lambda a=a: a @ a, device)
        roofs[f"matmul_{name}_flop_per_second"] = 2 * edge**3 / took
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(roofs, indent=1) + "\n")
    print(roofs)


if __name__ == "__main__":
    main()
