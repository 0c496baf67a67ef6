"""Requests, retrieval, evaluation, AUC and GAUC beside plain torch, sklearn, torchmetrics and pandas.

    python ci/benchmarks/measure_serving.py                        # peers that are not installed are left out
    python ci/benchmarks/measure_serving.py --only retrieve --json FILE
    python ci/benchmarks/measure_serving.py --only requests clicks --users 1,4,32,256 --json FILE

Requests are those of one model: users' vectors, the best k, scores of 100 candidates, beside the same model
in eager torch (`eager_models.py`), which takes places in the table for ids and looks at no input.

One thread. Contenders take turns, and each output is compared with ours before a time counts. A retrieval is
that of a loaded export whose user vector is the last item's row: eager torch has the same rows, its matmul,
-inf for the history, and topk. A figure is the peer's median over ours, of wall clock and processor; above 1
we are faster.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from eager_models import Encode, clicks, encoder
from frame import by_turns, options_of, over, record

from tritonrec.data import NextItemLoader, auc, evaluate, gauc, load
from tritonrec.host_memory import keep_freed_memory
from tritonrec.nn import DLRM, HSTU, DLRMConfig, HSTUConfig, SASRec, SASRecConfig
from tritonrec.serving import ExportedTable, Predictor
from tritonrec.serving.programs import load_program, save_program, scorer_of, without_dispatcher

K, DIM, LONGEST = 100, 64, 200
MODELS = {
    "HSTU": lambda: HSTU(HSTUConfig(max_seq_len=LONGEST)),
    "SASRec": lambda: SASRec(SASRecConfig(max_seq_len=LONGEST)),
}
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


def table_of(items: int, dim: int, draw: torch.Generator) -> ExportedTable:
    weights = torch.randn(items, dim, generator=draw) * dim**-0.5
    return ExportedTable(torch.arange(items), weights, 5, 6, 0.5, "initial")


def predictor_of(
    model: torch.nn.Module, tables: dict[str, ExportedTable], pooling: str = "none"
) -> Predictor:
    """As `Predictor.load` of an export; a feature has its table's name."""
    dim = next(iter(tables.values())).weights.shape[1]
    scorer = scorer_of(model.eval().requires_grad_(False), dim)
    with tempfile.TemporaryDirectory() as folder:
        save_program(scorer, path := Path(folder) / "dense.pt2")
        program = without_dispatcher(load_program(path), scorer.kind)
    features = {name: {"table": name, "pooling": "none"} for name in tables}
    return Predictor({"step": 0, "features": features, "dense": scorer.described}, tables, program)


def requests(name: str, items: int, sizes: list[tuple[int, int]], rounds: int) -> list[dict[str, Any]]:
    """Rows of a model's requests of so many users and events, the longest histories of some being shorter."""
    draw = torch.Generator().manual_seed(items)
    torch.manual_seed(items)
    model, table = MODELS[name](), table_of(items, DIM, draw)
    predictor, encode = predictor_of(model, {"item": table}), encoder(model, table.weights)
    return [
        row
        for users, events in sizes
        for row in _requests(predictor, encode, users, events, draw, rounds, {"model": name, "items": items})
    ]


def _requests(
    predictor: Predictor,
    encode: Encode,
    users: int,
    events: int,
    draw: torch.Generator,
    rounds: int,
    named: dict[str, Any],
) -> list[dict[str, Any]]:
    weights, items = predictor.tables["item"].weights, len(predictor.item_ids)
    histories = [
        torch.randint(0, items, (max(1, events - at % (events // 3 + 1)),), generator=draw)
        for at in range(users)
    ]
    candidates = torch.randint(0, items, (100,), generator=draw)
    owners = torch.repeat_interleave(torch.arange(users), torch.tensor([len(each) for each in histories]))
    seen = torch.cat(histories)

    def best() -> tuple[torch.Tensor, torch.Tensor]:
        scores = encode(histories) @ weights.t()
        scores[owners, seen] = -torch.inf
        found = scores.topk(K)
        return found.indices, found.values

    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "encode": (lambda: predictor.encode(histories), lambda: encode(histories)),
        "score": (
            lambda: predictor.scores(histories, candidates),
            lambda: encode(histories) @ weights[candidates].t(),
        ),
        "retrieve": (lambda: predictor.retrieve(histories, K), best),
    }
    if items > 100_000:  # the others do not depend on it
        pairs = {"retrieve": pairs["retrieve"]}
    rows = []
    for what, (ours, theirs) in pairs.items():
        row = {**named, "users": users, "events": events, "what": what}
        rows.append(row | beside(row, ours, theirs, rounds))
    return rows


def ranking(sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Rows of a DLRM's clicks."""
    draw = torch.Generator().manual_seed(3)
    torch.manual_seed(3)
    names = tuple(f"c{at}" for at in range(26))
    model = DLRM(DLRMConfig(names, dim=16))
    tables = {name: table_of(100_000, 16, draw) for name in names}
    predictor = predictor_of(model, tables)
    eager = clicks(model, [each.weights for each in tables.values()])

    def of(size: int) -> dict[str, Any]:
        dense = torch.randn(size, 13, generator=draw)
        ids = {name: torch.randint(0, 100_000, (size,), generator=draw) for name in names}
        row = {"model": "DLRM", "users": size, "what": "predict"}
        places = [*ids.values()]
        return row | beside(row, lambda: predictor.predict(dense, ids), lambda: eager(dense, places), rounds)

    return [of(size) for size in sizes]


def beside(
    row: dict[str, Any], ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int
) -> dict[str, Any]:
    """The peer's time over ours, of the processor and of wall clock, and how much rare calls take longer."""

    def eager() -> Any:
        with torch.inference_mode():
            return theirs()

    def close(a: Any, b: Any) -> bool:
        scores = [each[1] if isinstance(each, tuple) else each for each in (a, b)]
        return torch.allclose(*scores, rtol=1e-3, atol=1e-4)

    found = by_turns({"ours": ours, "eager": eager}, rounds, close, warm=3)
    times, peer = found["ours"], found["eager"]
    p50, p99 = np.percentile(times.cpu, [50, 99])
    made = {
        "over_ours": over(peer.cpu, times.cpu), "over_ours_wall": over(peer.wall, times.wall),
        "ms": 1e3 * p50, "eager_ms": 1e3 * median(peer.cpu), "p99_over_p50": p99 / p50,
        "eager_p99_over_p50": np.percentile(peer.cpu, 99) / median(peer.cpu),
    }  # fmt: skip
    print(
        " ".join(str(each) for each in row.values()),
        f"  ours {made['ms']:.3f} eager {made['eager_ms']:.3f} ms cpu, over ours {made['over_ours']:.2f} "
        f"({made['over_ours_wall']:.2f} wall), p99/p50 {made['p99_over_p50']:.2f}, of eager "
        f"{made['eager_p99_over_p50']:.2f}",
        flush=True,
    )
    return made


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
    parts = ["requests", "clicks", "retrieve", "evaluate", "auc"]
    options = options_of(
        __doc__, only={"choices": parts, "default": parts}, items=(100_000, 1_000_000), users=(1, 32),
        events=(10, 35, 200), model=tuple(MODELS), rounds=20,
        count={"default": 10_000_000, "help": "impressions of AUC and GAUC"},
    )  # fmt: skip
    torch.set_num_threads(1)
    keep_freed_memory()
    sys.path.append(
        str(Path(__file__).resolve().parents[2] / "out" / "torchrec")
    )  # torchmetrics, by torchrec.sh
    only, rows = options.only, {}
    if "requests" in only:
        sizes = [(users, events) for users in options.users for events in options.events]
        rows["requests"] = [
            row
            for name in options.model
            for items in options.items
            for row in requests(name, items, sizes, options.rounds)
        ]
    if "clicks" in only:
        rows["clicks"] = ranking(list(options.users), options.rounds)
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
