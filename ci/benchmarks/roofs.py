"""Bytes and operations per second of each op beside the machine's own copy and matmul.

    python ci/benchmarks/roofs.py --json ci/baselines/roofs.json

One thread and its processor time; a copy, a matmul and every op take turns, and medians are compared. Bytes
are what an op reads and writes at least, each input and output once, in a workload too large for the
second-level cache; a copy of 32 MB counts its reads and its writes. Operations are floating-point additions,
multiplications and divisions of the formula; the matmul is torch's (MKL) of 1024 by 1024 float32 matrices,
whose fused multiply-add counts as two. An op near neither roof is bound by something else: the order of a
sum, integer work, or a cache miss for each key.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from kernel_cases import randn, zipf

from tritonrec import ops
from tritonrec.harness.environment import environment_of_times
from tritonrec.host_memory import keep_freed_memory

TOKENS, DIM, ROWS, TABLE = 6_400, 64, 32_768, 200_000
"""Outputs stay below the 32 MB from which glibc maps memory anew for each call."""
COPY = 1 << 24  # bytes read, and as many written
MATRIX = 1024
EXP = 22
"""Operations of `numba_float.exp`."""


@dataclass
class Work:
    """A call with the bytes that it moves and the operations that it does, at least."""

    call: Callable[[], object]
    bytes: int
    operations: int = 0


def works() -> dict[str, Work]:
    keys, table = zipf(1_000_000, 10_000_000), randn(TABLE, DIM)
    rows, values = zipf(ROWS, TABLE), randn(ROWS, DIM)
    some = torch.randperm(TABLE, generator=torch.Generator().manual_seed(0))[:ROWS]
    x, weight, dy = randn(TOKENS, DIM), randn(256, DIM), randn(TOKENS, 256)
    offsets = torch.arange(0, TOKENS + 1, 50)
    sums, exact = torch.zeros(256, DIM, dtype=torch.int64), ops.to_fixed_point(values)
    widths, packed = ops.pack_rows(exact, torch.arange(ROWS))
    out, out_float = torch.zeros_like(exact), torch.empty(8_192, DIM)
    state = [torch.zeros(TABLE, DIM) for _ in range(2)]
    segments = rows % 8_192
    distinct = len(ops.unique(keys)[0])
    linear, moved = 2 * TOKENS * weight.numel(), 4 * (x.numel() + weight.numel() + dy.numel())
    size = values.nbytes
    return {
        "`unique`, 1,000,000 Zipf keys": Work(lambda: ops.unique(keys), 16 * len(keys) + 16 * distinct),
        "`gather_rows`": Work(lambda: ops.gather_rows(table, rows), 2 * size),
        "`scatter_rows`": Work(lambda: ops.scatter_rows(table, some, values), 2 * size),
        "`segment_sum`, window": Work(
            lambda: ops.segment_sum(values, segments, 8_192), size + out_float.nbytes, values.numel()
        ),
        "`segment_sum`, batch": Work(
            lambda: ops.segment_sum(values, segments, 8_192, consistency="batch"),
            size + 2 * out_float.nbytes, 3 * values.numel(),
        ),
        "`to_fixed_point`": Work(lambda: ops.to_fixed_point(values), 3 * size, 2 * values.numel()),
        "`from_fixed_point`": Work(lambda: ops.from_fixed_point(exact), 3 * size, 2 * values.numel()),
        "`pack_rows`": Work(lambda: ops.pack_rows(exact, torch.arange(ROWS)), 2 * size + packed.nbytes),
        "`add_packed_rows`": Work(
            lambda: ops.add_packed_rows(out.zero_(), torch.arange(ROWS), widths, packed),
            3 * 2 * size + packed.nbytes, values.numel(),
        ),
        "`sparse_adam`": Work(
            lambda: ops.sparse_adam(table, *state, some, values, 0.1, step=3), 7 * size, 14 * values.numel()
        ),
        "`initial_rows`": Work(lambda: ops.initial_rows(7, 1, some, DIM, 0.05), size),
        "`silu`, 6,400 tokens of 256": Work(lambda: ops.silu(dy), 2 * dy.nbytes, (EXP + 3) * dy.numel()),
        "`linear` 64->256": Work(lambda: ops.linear(x, weight), moved, linear),
        "`linear` 64->256, weight gradient": Work(
            lambda: ops.linear_weight_grad(sums.zero_(), dy, x, offsets), moved + 4 * weight.numel(), linear
        ),
    }  # fmt: skip


def measure(rounds: int) -> dict[str, dict[str, float]]:
    source, target = torch.ones(COPY, dtype=torch.uint8), torch.empty(COPY, dtype=torch.uint8)
    left, right = randn(MATRIX, MATRIX), randn(MATRIX, MATRIX, scale=0.5)
    wide = right.double()
    all_works = {
        "copy": Work(lambda: target.copy_(source), 2 * COPY),
        "matmul": Work(lambda: left @ right, 12 * MATRIX**2, 2 * MATRIX**3),
        "matmul, float64": Work(lambda: wide @ wide, 24 * MATRIX**2, 2 * MATRIX**3),
        **works(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in all_works}
    for number in range(rounds + 1):
        for name, work in all_works.items():
            began = time.thread_time()
            work.call()
            if number:  # the first call compiles
                seconds[name].append(time.thread_time() - began)
    took = {name: statistics.median(each) for name, each in seconds.items()}
    copy = all_works["copy"].bytes / took["copy"]
    matmul = all_works["matmul"].operations / took["matmul"]
    return {
        name: {
            "milliseconds": 1e3 * took[name],
            "gigabytes per second": work.bytes / took[name] / 1e9,
            "of a copy": work.bytes / took[name] / copy,
            "gigaoperations per second": work.operations / took[name] / 1e9,
            "of a matmul": work.operations / took[name] / matmul,
        }
        for name, work in all_works.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    rows = measure(options.rounds)
    print("| op | ms | GB/s | of a copy | Gop/s | of a matmul |\n| --- | --: | --: | --: | --: | --: |")
    for name, row in rows.items():
        ms, *rest = row.values()
        print(
            f"| {name} | {ms:.3g} | " + " | ".join(f"{value:.2f}" if value else "" for value in rest) + " |"
        )
    if options.json:
        options.json.write_text(
            json.dumps({"environment": environment_of_times(), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
