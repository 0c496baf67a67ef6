"""Scores from cached keys and values beside recomputation, of one user and of eight.

    python ci/benchmarks/measure_cached.py
    python ci/benchmarks/measure_cached.py --tokens 512 --rounds 5 --json FILE

An HSTU, plain and with times, and a SASRec, of two layers, 64 dimensions, two heads of 32, on one thread. A
user has so many events, 97 % of which are cached; the rest have just come. Both give the best 100 of 10,000
items. Results are compared in every bit before a time counts. The two take turns. A ratio is the median over
rounds of that within a round, of the processor's time, and its smallest and largest; the last one is that of
wall clock.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from frame import options_of, record

from tritonrec import Communicators, FeatureConfig, HashTableCollection, RowOptimizer, Trainer
from tritonrec.data import NextItemLoader, load
from tritonrec.nn import HSTU, HSTUConfig, NextItemModel, SASRec, SASRecConfig
from tritonrec.serving import Predictor, export
from tritonrec.serving.cached import CachedPredictor

ITEMS, K, CACHED = 10_000, 100, 0.97
MODELS: dict[str, Callable[[int], NextItemModel]] = {
    "HSTU": lambda tokens: HSTU(HSTUConfig(max_seq_len=tokens)),
    "HSTU with times": lambda tokens: HSTU(HSTUConfig(max_seq_len=tokens, relative_bias=True)),
    "SASRec": lambda tokens: SASRec(SASRecConfig(max_seq_len=tokens)),
}


def exported(folder: Path, tokens: int, name: str) -> tuple[Path, NextItemModel]:
    """A model that has been trained for a step."""
    torch.manual_seed(tokens)
    model = MODELS[name](tokens)
    loader = NextItemLoader(load(f"zipf:users=200,items={ITEMS},exponent=0.2,seed=3"), 64, 50, 8, 0)
    tables = HashTableCollection([FeatureConfig("item", 64)], RowOptimizer("adam", lr=1e-3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with Trainer(model, tables, optimizer, Communicators.local()) as trainer:
        trainer.step(loader.batch(0))
        trainer.save(folder / "run")
    export(folder / "run", folder / "out", model)
    return folder / "out", model


def measure(tokens: int, users: int, name: str, rounds: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(tokens + users)
    with tempfile.TemporaryDirectory() as folder:
        path, model = exported(Path(folder), tokens, name)
        full, cached = Predictor.load(path), CachedPredictor.load(path, model)
    old = int(tokens * CACHED)
    ids = torch.randint(0, ITEMS, (users, tokens), generator=draw)
    times = torch.randint(0, 10**6, (users, tokens), generator=draw).sort(1).values
    histories, stamps = list(ids), times.flatten()
    ours: list[tuple[float, float]] = []  # milliseconds of processor and wall clock
    theirs: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        for user in range(users):
            cached.replace(user, ids[user, :old], times[user, :old])
        cached.encode(range(users))
        began = now()
        want = full.retrieve(histories, K, timestamps=stamps)
        between = now()
        for user in range(users):
            cached.append(user, ids[user, old:], times[user, old:])
        got = cached.retrieve(range(users), K)
        ended = now()
        if not all(map(torch.equal, got, want)):
            raise SystemExit(f"{tokens} tokens, {users} users: the results differ; no time is printed")
        if number:  # the first round compiles
            theirs.append((between[0] - began[0], between[1] - began[1]))
            ours.append((ended[0] - between[0], ended[1] - between[1]))
    ratios, of_wall = ([a[at] / b[at] for a, b in zip(theirs, ours, strict=True)] for at in (0, 1))
    stats = cached.stats()
    row = {
        "tokens": tokens, "users": users, "model": name, "cached_tokens": old,
        "recomputed_ms": median(each[0] for each in theirs), "cached_ms": median(each[0] for each in ours),
        "ratio": median(ratios), "least": min(ratios), "most": max(ratios), "wall_ratio": median(of_wall),
        "rounds": rounds,
        "bytes_a_user": stats.page_bytes * stats.pages_used // users,
    }  # fmt: skip
    print(
        f"{tokens:5,} tokens, {users} user(s), {name}: recomputed "
        f"{row['recomputed_ms']:8.2f} ms, cached {row['cached_ms']:7.2f} ms, {row['ratio']:5.1f} times "
        f"({row['least']:.1f} to {row['most']:.1f}), wall {row['wall_ratio']:.1f}",
        flush=True,
    )
    return row


def now() -> tuple[float, float]:
    """Milliseconds of the processor and of wall clock."""
    return time.process_time() * 1e3, time.perf_counter() * 1e3


def main() -> None:
    options = options_of(__doc__, tokens=(512, 1024, 4096), users=(1, 8), model=tuple(MODELS), rounds=15)
    torch.set_num_threads(1)
    rows = [
        measure(tokens, users, name, options.rounds)
        for tokens in options.tokens
        for users in options.users
        for name in options.model
    ]
    record(options, rows=rows)


if __name__ == "__main__":
    main()
