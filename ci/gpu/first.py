"""The first minutes on a GPU: every kernel that a step is made of, at sizes of work, beside the nearest peer.

python ci/gpu/first.py --json out/gpu/first.json
python ci/gpu/first.py --json out/gpu/first.json --page      the rows as Markdown, of docs/platforms.md

`seconds` is triton's `do_bench` between two events (median; the L2 cache is cleared before each call): where
the host is slower than the device it is the host's time, and `kernel_seconds`, what the profiler saw kernels
take, is less. An output is compared with a float64 reference before it is timed: `error` is the norm of the
difference over the reference's, and 0.0 where no arithmetic happens. `share` is of the roof measured in the
same run: bytes of a copy, operations of a bf16 product. Rows are written as they are measured. --device cpu
runs them small.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from tritonrec import ops

Row = tuple[str, float, str, Callable[[], Any], Callable[[], Any] | None, Callable[[], float]]
"""Name, its work, "bytes" or "flop", ours, the peer, and the error."""


def keys_of(count: int, catalogue: int, device: str) -> torch.Tensor:
    """Zipf-like: the share of rank r falls with 1 / r."""
    generator = torch.Generator().manual_seed(7)
    ranks = torch.rand(count, generator=generator).double().mul_(torch.log(torch.tensor(float(catalogue))))
    return (ranks.exp().long() * 0x9E3779B97F4A7C1).to(device)


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def different(*pairs: tuple[torch.Tensor, torch.Tensor]) -> float:
    return 0.0 if all(torch.equal(a, b) for a, b in pairs) else float("inf")


def on_keys(device: str, size: int) -> Iterator[Row]:
    keys, slots = keys_of(size, 10 * size, device), 1 << (16 * size - 1).bit_length()
    distinct = keys.unique()
    distinct = distinct[torch.randperm(len(distinct), device=device)]

    def empty():
        return (
            torch.zeros(slots, dtype=torch.int64, device=device),
            torch.full((slots,), -1, dtype=torch.int32, device=device),
        )

    table = empty()
    rows, _ = ops.hash_insert(*table, distinct, 0)
    ascending, order = distinct.sort()

    def search():
        return rows[order[torch.searchsorted(ascending, distinct)]]

    def unique_error():
        found, inverse, counts = ops.unique(keys)
        placed = found.argsort()
        exact = keys.unique(return_counts=True)
        return different((found[inverse], keys), (found[placed], exact[0]), (counts[placed], exact[1]))

    count = len(distinct)
    yield (
        f"hash_find, {count:,} keys, {slots:,} slots", 76 * count, "bytes",
        lambda: ops.hash_find(*table, distinct), search,
        lambda: different((ops.hash_find(*table, distinct).long(), rows.long())),
    )  # fmt: skip
    fresh = empty()
    yield (
        f"hash_insert, {count:,} keys that are there", 76 * count, "bytes",
        lambda: ops.hash_insert(*table, distinct, count), None,
        lambda: different(
            (ops.hash_insert(*fresh, distinct, 0)[0].sort().values.long(), torch.arange(count, device=device))
        ),
    )  # fmt: skip
    yield (
        f"unique, {size:,} Zipf keys", 24 * size, "bytes", lambda: ops.unique(keys),
        lambda: torch.unique(keys, return_inverse=True, return_counts=True), unique_error,
    )  # fmt: skip


def on_rows(device: str, size: int) -> Iterator[Row]:
    table = torch.randn(16 * size, 128, device=device)
    rows = torch.randint(16 * size, (size,), device=device)
    yield (
        f"gather_rows, {size:,} x 128 float32", size * (1024 + 8), "bytes",
        lambda: ops.gather_rows(table, rows), lambda: table.index_select(0, rows),
        lambda: different((ops.gather_rows(table, rows), table[rows])),
    )  # fmt: skip
    count = 4 * size
    values, segments = torch.randn(count, 64, device=device), keys_of(count, 2 * size, device) % (2 * size)
    exact = torch.zeros(2 * size, 64, device=device, dtype=torch.float64).index_add_(
        0, segments, values.double()
    )

    def index_add():
        return torch.zeros(2 * size, 64, device=device).index_add_(0, segments, values)

    for consistency in ("window", "batch"):

        def ours(consistency=consistency):
            return ops.segment_sum(values, segments, 2 * size, consistency=consistency)

        def wrong(ours=ours, consistency=consistency):
            got = ours()
            return error(ops.from_fixed_point(got) if got.dtype == torch.int64 else got, exact)

        yield (
            f"segment_sum {consistency}, {count:,} x 64", count * 264 + 2 * size * 256, "bytes",
            ours, index_add, wrong,
        )  # fmt: skip


def on_tokens(device: str, size: int) -> Iterator[Row]:
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        x = torch.randn(size, 1024 if size > 9999 else 64, device=device, dtype=dtype)
        weight = torch.randn(x.shape[1], x.shape[1], device=device, dtype=dtype) * 0.03
        exact = functional.linear(x[:4096].double(), weight.double())
        yield (
            f"linear {name}, {size:,} x {x.shape[1]} x {x.shape[1]}", 2 * size * x.shape[1] ** 2,
            "flop", lambda x=x, w=weight: ops.linear(x, w),
            lambda x=x, w=weight: functional.linear(x, w),
            lambda x=x, w=weight, exact=exact: error(ops.linear(x, w)[:4096], exact),
        )  # fmt: skip
        dy = torch.randn_like(x)[:, : x.shape[1] // 4].contiguous()
        sums = torch.zeros(dy.shape[1], x.shape[1], dtype=torch.int64, device=device)
        offsets = torch.arange(0, size + 1, max(size // 128, 1), device=device)
        offsets[-1] = size

        def exact_sums(x=x, dy=dy, sums=sums, offsets=offsets):
            return ops.linear_weight_grad(sums.zero_(), dy, x, offsets)

        yield (
            f"exact weight gradient {name}, {size:,} tokens, {x.shape[1]} to {dy.shape[1]}",
            2 * size * dy.shape[1] * x.shape[1], "flop", exact_sums, lambda x=x, dy=dy: dy.T @ x,
            lambda x=x, dy=dy, f=exact_sums: error(ops.from_fixed_point(f()), dy.double().T @ x.double()),
        )  # fmt: skip


def on_attention(device: str, size: int) -> Iterator[Row]:
    for dtype, batch, heads, dim, length in (
        (torch.bfloat16, 32, 4, 128, 4096),
        (torch.bfloat16, 64, 4, 64, 1024),
        (torch.float32, 64, 4, 64, 1024),
    ):
        if size < 9999:
            batch, dim, length = 2, 32, 40
        name = str(dtype).removeprefix("torch.")
        offsets = torch.arange(0, batch * length + 1, length, device=device)
        q, k, v, dy = (
            torch.randn(batch * length, heads, dim, device=device).to(dtype).requires_grad_()
            for _ in range(4)
        )
        mask = torch.ones(length, length, device=device).tril()

        def ours(q=q, k=k, v=v, offsets=offsets, length=length, dim=dim):
            return ops.hstu_attention(q, k, v, offsets, length, alpha=dim**-0.5, scaling_seqlen=length)

        def plain(q, k, v, length, dim, mask):
            a, b, c = (each.unflatten(0, (-1, length)).transpose(1, 2) for each in (q, k, v))
            weights = functional.silu(a @ b.transpose(-1, -2) * dim**-0.5) * (mask / length).to(a.dtype)
            return (weights @ c).transpose(1, 2).flatten(0, 1)

        def forward(ours=ours):
            with torch.no_grad():
                return ours()

        def padded(q=q, k=k, v=v, given=(length, dim, mask)):
            with torch.no_grad():
                return plain(q, k, v, *given)

        one = [each.detach()[:length].double().requires_grad_() for each in (q, k, v)]
        graph = plain(*one, length, dim, mask.double())
        exact = graph.detach()
        wanted = torch.autograd.grad(graph, one, dy.detach()[:length].double())
        work, label = 4 * batch * heads * length**2 * dim / 2, f"{name} B{batch} H{heads} D{dim} L{length}"
        yield (
            f"hstu_attention forward {label}", work, "flop", forward, padded,
            lambda f=forward, exact=exact: error(f()[: len(exact)], exact),
        )  # fmt: skip
        out, cotangent = ours(), dy.detach()

        def backward(out=out, leaves=(q, k, v), dy=cotangent):
            return torch.autograd.grad(out, leaves, dy, retain_graph=True)

        def backward_error(f=backward, wanted=wanted):
            return max(error(got[: len(each)], each) for got, each in zip(f(), wanted, strict=True))

        yield f"hstu_attention backward {label}", 2.5 * work, "flop", backward, None, backward_error


def seconds(call: Callable[[], Any], device: str) -> float:
    """Of a call, between two events: the median."""
    if device == "cpu":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    from triton.testing import do_bench

    return do_bench(call, warmup=10, rep=60, return_mode="median") / 1e3


def host_seconds(call: Callable[[], Any], device: str) -> float:
    """Until the call returns, the device at work: the median of 20."""
    times = []
    for _ in range(20 if device != "cpu" else 1):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def page(report: dict[str, Any]) -> str:
    """The table of a report, in Markdown."""
    lines = [
        "| kernel | between events, us | host, us | of the roof | times the peer | error |",
        "|---|---|---|---|---|---|",
    ]
    for label, row in report["rows"].items():
        peer = row["over_peer"] if row["over_peer"] is not None else ""
        lines.append(
            f"| {label} | {1e6 * row['seconds']:.0f} | {1e6 * row['host_seconds']:.0f} | {row['share']:.3f} "
            f"| {peer} | {row['error']:.1e} |"
        )
    return "\n".join(lines)


def kernel_seconds(call: Callable[[], Any], device: str) -> float | None:
    """What the device's kernels of a call take, without the gaps between them; None on the CPU."""
    if device == "cpu":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    events = profiler.key_averages()
    return sum(e.self_device_time_total for e in events if e.device_type.name == "CUDA") / 5e6


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--page", action="store_true", help="measure nothing: print the rows of the JSON file"
    )
    given = parser.parse_args()
    if given.page:
        print(page(json.loads(given.json.read_text())))
        return 0
    gpu, size = given.device != "cpu", 65_536 if given.device != "cpu" else 96
    source = torch.randn(1 << (28 if gpu else 10), device=given.device)
    square = torch.randn(8192 if gpu else 32, 8192 if gpu else 32, device=given.device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    roofs = {
        "bytes": 8 * source.numel() / seconds(lambda: target.copy_(source), given.device),
        "flop": 2 * len(square) ** 3 / seconds(lambda: square @ square, given.device),
    }
    name = torch.cuda.get_device_name() if gpu else "cpu"
    report: dict[str, Any] = {"device": name, "torch": torch.__version__, "roofs": roofs, "rows": {}}
    given.json.parent.mkdir(parents=True, exist_ok=True)
    failed = 0
    for rows, count in ((on_keys, 16 * size), (on_rows, size), (on_tokens, size), (on_attention, size)):
        try:
            for label, work, unit, ours, peer, wrong in rows(given.device, count):
                row: dict[str, Any] = {"error": wrong()}
                row["seconds"] = seconds(ours, given.device)
                row["host_seconds"] = host_seconds(ours, given.device)
                row["kernel_seconds"] = kernel_seconds(ours, given.device)
                row[f"{unit}_per_second"] = work / row["seconds"]
                row["share"] = round(work / row["seconds"] / roofs[unit], 4)
                row["over_peer"] = round(seconds(peer, given.device) / row["seconds"], 3) if peer else None
                failed += not row["error"] < 0.02
                report["rows"][label] = row
                given.json.write_text(json.dumps(report, indent=1) + "\n")
                print(
                    f"{label:75} {1e6 * row['seconds']:9.1f} us, host {1e6 * row['host_seconds']:7.1f} us, "
                    f"{row['share']:6.3f} of the roof, {row['over_peer']} times the peer, "
                    f"error {row['error']:.1e}",
                    flush=True,
                )
        except Exception:  # the other rows are wanted all the same
            traceback.print_exc()
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
