"""Retrieval, evaluation, AUC and GAUC beside plain torch, sklearn, torchmetrics and pandas.

    python ci/benchmarks/measure_serving.py                        # peers that are not installed are left out
    python ci/benchmarks/measure_serving.py --only retrieve --json FILE

One thread. Contenders take turns, and each output is compared with ours before a time counts. A retrieval is
that of a loaded export whose user vector is the last item's row: eager torch has the same rows, its matmul,
-inf for the history, and topk. A figure is the peer's median over ours, of wall clock and processor; above 1
we are faster.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from frame import by_turns, options_of, record

from tritonrec.data import NextItemLoader, auc, evaluate, gauc, load
from tritonrec.host_memory import keep_freed_memory
from tritonrec.serving import ExportedTable, Predictor

K, DIM = 100, 64
Calls = dict[str, Callable[[], Any]]


def measure(title: str, calls: Calls, same: Callable[[Any, Any], bool], rounds: int) -> dict[str, Any]:
    """Print and return a row of each contender; the first is ours."""
    found = by_turns(calls, rounds, same)
    ours, row = next(iter(found.values())), {}
    print(title)
    for name, times in found.items():
        p50, p99 = 1e3 * np.percentile(times.wall, [50, 99])
        cpu = 1e3 * median(times.cpu)
        ratios = [median(times.wall) / median(ours.wall), median(times.cpu) / median(ours.cpu)]
        print(
            f"  {name:24s} p50 {p50:9.2f} ms  p99 {p99:9.2f} ms  cpu {cpu:9.2f} ms  "
            f"over ours {ratios[0]:5.2f} wall {ratios[1]:5.2f} cpu",
            flush=True,
        )
        row[name] = {"p50_ms": p50, "p99_ms": p99, "cpu_ms": cpu, "over_ours": ratios}
    return row


def retrieval(items: int, users: int, rounds: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(items + users)
    weights = torch.randn(items, DIM, generator=draw)
    table = ExportedTable(torch.arange(items) * 3, weights, 5, 6, 0.5, "initial")
    manifest = {
        "step": 3,
        "features": {"item": {"table": "items", "pooling": "none"}},
        "dense": {"kind": "next_item", "max_seq_len": 50, "timestamps": False},
    }
    predictor = Predictor(manifest, {"items": table}, lambda rows, offsets, times: rows[offsets[1:] - 1])
    places = [torch.randint(0, items, (40,), generator=draw) for _ in range(users)]
    histories = [each * 3 for each in places]
    owners = torch.repeat_interleave(torch.arange(users), 40)
    together = torch.cat(places)

    def eager() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            vectors = weights[torch.stack(places)[:, -1]]
            scores = vectors @ weights.t()
            scores[owners, together] = -torch.inf
            best = scores.topk(K)
            return best.indices * 3, best.values

    def close(ours: Any, theirs: Any) -> bool:
        """Scores up to rounding; items where neighbours are further apart than that."""
        if not torch.allclose(ours[1], theirs[1], rtol=1e-4, atol=1e-4):
            return False
        return float((ours[0] == theirs[0]).double().mean()) > 0.99

    calls: Calls = {"retrieve": lambda: predictor.retrieve(histories, K), "eager torch": eager}
    return measure(f"the best {K} of {items:,} items, {users} user(s)", calls, close, rounds)


def evaluation(users: int, items: int, rounds: int) -> dict[str, Any]:
    log = load(f"zipf:users={users},items={items},median_length=30,exponent=0.6,seed=1")
    loader = NextItemLoader(log, 256, 50, 1, 3)
    draw = torch.Generator().manual_seed(5)
    weights = torch.randn(loader.num_items, DIM, generator=draw)
    vectors = torch.randn(2 * users + 8, DIM, generator=draw)

    def scores(history: Any) -> torch.Tensor:
        return vectors[history.sample_ids] @ weights.t()

    def by_topk() -> dict[str, float]:
        hits = {10: 0, 50: 0}
        count = 0
        for batch in loader.evaluation_batches(256):
            found = scores(batch.history)
            own = found.gather(1, batch.targets.clamp(min=0)[:, None])
            found[batch.seen_users, batch.seen_items] = -torch.inf
            found.scatter_(1, batch.targets.clamp(min=0)[:, None], own)
            best = found.topk(50).indices == batch.targets[:, None]
            for k in hits:
                hits[k] += int(best[:, :k].sum())
            count += len(best)
        return {f"HR@{k}": n / count for k, n in hits.items()}

    def same(ours: dict[str, float], theirs: dict[str, float]) -> bool:
        return all(abs(ours[name] - value) < 1e-9 for name, value in theirs.items())

    calls: Calls = {
        "evaluate": lambda: evaluate(scores, loader, (10, 50)),
        "matmul + topk": by_topk,
    }
    return measure(f"evaluate, {loader.num_items:,} items, {users} users", calls, same, rounds)


def areas(count: int, rounds: int) -> dict[str, dict[str, Any]]:
    draw = torch.Generator().manual_seed(7)
    labels = torch.randint(0, 2, (count,), generator=draw)
    scores = torch.sigmoid(torch.randn(count, generator=draw) + labels * 0.7)
    users = (torch.rand(count, generator=draw) ** 2 * (count // 40)).long()
    calls: Calls = {"auc": lambda: auc(scores, labels)}
    if importlib.util.find_spec("sklearn"):
        from sklearn.metrics import roc_auc_score

        calls["sklearn"] = lambda: float(roc_auc_score(labels.numpy(), scores.numpy()))
    if importlib.util.find_spec("torchmetrics"):
        from torchmetrics.functional.classification import binary_auroc

        calls["torchmetrics"] = lambda: float(binary_auroc(scores, labels))

    def by_argsort() -> float:
        order = scores.argsort()
        kinds = labels[order]
        below = (1 - kinds).cumsum(0)
        return float((below * kinds).sum()) / float(kinds.sum() * (1 - kinds).sum())

    calls["torch argsort, no ties"] = by_argsort
    found = {"auc": measure(f"AUC of {count:,}", calls, lambda a, b: abs(a - b) < 1e-5, rounds)}
    groups: Calls = {"gauc": lambda: gauc(users, scores, labels).value}
    if importlib.util.find_spec("pandas"):
        import pandas

        def by_pandas() -> float:
            frame = pandas.DataFrame({"u": users.numpy(), "s": scores.numpy(), "y": labels.numpy()})
            frame["r"] = frame.groupby("u")["s"].rank()
            frame["p"] = frame["r"] * frame["y"]
            each = frame.groupby("u").agg(n=("y", "size"), pos=("y", "sum"), ranks=("p", "sum"))
            each = each[(each["pos"] > 0) & (each["pos"] < each["n"])]
            area = (each["ranks"] - each["pos"] * (each["pos"] + 1) / 2) / (
                each["pos"] * (each["n"] - each["pos"])
            )
            return float((area * each["n"]).sum() / each["n"].sum())

        groups["pandas rank"] = by_pandas
    found["gauc"] = measure(f"GAUC of {count:,}", groups, lambda a, b: abs(a - b) < 1e-9, max(rounds // 2, 2))
    return found


def main() -> None:
    parts = ["retrieve", "evaluate", "auc"]
    options = options_of(
        __doc__, only={"choices": parts, "default": parts}, items=(100_000, 1_000_000), users=(1, 32),
        rounds=20,
        count={"default": 10_000_000, "help": "impressions of AUC and GAUC"},
    )  # fmt: skip
    torch.set_num_threads(1)
    keep_freed_memory()
    sys.path.append(
        str(Path(__file__).resolve().parents[2] / "out" / "torchrec")
    )  # torchmetrics, by torchrec.sh
    only, rows = options.only, {}
    if "retrieve" in only:
        for items in options.items:
            for users in options.users:
                rows[f"retrieve {items} {users}"] = retrieval(items, users, options.rounds)
    if "evaluate" in only:
        rows["evaluate"] = evaluation(1500, 100_000, 4)
    if "auc" in only:
        rows |= areas(options.count, 4)
    record(options, rows=rows)


if __name__ == "__main__":
    main()
