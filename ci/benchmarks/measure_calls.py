"""Calls of every day beside the plainest way to do the same: processor time of ours over its.

    python ci/benchmarks/measure_calls.py [--rows 2000000] [--rounds 9]

``from_dict`` of 1,000 features beside torch's `cat`, `diff` and `cumsum`; ``state_dict`` and
``load_state_dict`` of rows of 16 with Adam's states beside a copy of what the state has; a step of weighted
bags beside `EmbeddingBag`; a log of 200 CSV files of 200 rows beside pyarrow. One thread.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pc
import torch
from frame import by_turns, options_of, over, record

from tritonrec.data import KeyedJaggedTensor, load
from tritonrec.data.jagged import Lookup
from tritonrec.embedding import HashEmbedding, HashEmbeddingBag, HashOptimizer, RowOptimizer

Pair = tuple[Callable[[], Any], Callable[[], Any]]


def jagged(draw: torch.Generator) -> Pair:
    lookups = {}
    for number in range(1000):
        offsets = torch.randint(0, 4, (65,), generator=draw).index_fill_(0, torch.tensor([0]), 0).cumsum(0)
        lookups[f"f{number}"] = Lookup(torch.randint(100, (int(offsets[-1]),), generator=draw), offsets)

    def plain() -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.cat([each.offsets.diff() for each in lookups.values()])
        return torch.cat([each.ids for each in lookups.values()]), lengths.cumsum(0)

    return lambda: KeyedJaggedTensor.from_dict(lookups), plain


def states(rows: int, draw: torch.Generator) -> dict[str, Pair]:
    module = HashEmbedding(16, RowOptimizer("adam"))
    for ids in torch.randperm(3 * rows, generator=draw)[:rows].split(1 << 18):
        module(ids)
    state = module.state_dict()

    def copy() -> list[torch.Tensor]:
        return [values.clone() for values in state.values()]

    return {
        "state_dict": (module.state_dict, copy),
        "load_state_dict": (lambda: module.load_state_dict(state), copy),
    }


def weighted_bags(draw: torch.Generator) -> Pair:
    bags, length, dim = 8192, 20, 64
    ids = (torch.rand(bags * length, generator=draw) ** 3 * 100_000).long()
    offsets, weights = torch.arange(0, len(ids) + 1, length), torch.rand(len(ids), generator=draw)
    plain = torch.nn.EmbeddingBag(100_000, dim, mode="sum", sparse=True)
    ours = HashEmbeddingBag(dim, "sum", RowOptimizer("sgd", lr=0.1), include_last_offset=True)
    optimizers = HashOptimizer(ours), torch.optim.SGD(plain.parameters(), lr=0.1)

    def step(model: Callable[..., torch.Tensor], optimizer: Any, offsets: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(ids, offsets, per_sample_weights=weights).sum().backward()
        optimizer.step()

    return (
        lambda: step(ours, optimizers[0], offsets),
        lambda: step(plain, optimizers[1], offsets[:-1]),
    )


def many_files(folder: Path, draw: torch.Generator) -> Pair:
    for number in range(200):
        columns = {
            name: torch.randint(900, (200,), generator=draw).numpy() for name in ("user", "item", "at")
        }
        pc.write_csv(pa.table(columns), folder / f"{number:03}.csv")
    one_thread = pc.ReadOptions(use_threads=False)
    return (
        lambda: load(f"csv:{folder}?timestamp=at"),
        lambda: pa.concat_tables(
            [pc.read_csv(file, read_options=one_thread) for file in sorted(folder.glob("*.csv"))]
        ),
    )


def main() -> None:
    options = options_of(__doc__, rows=2_000_000, rounds=9)
    torch.set_num_threads(1)
    draw, ratios = torch.Generator().manual_seed(0), {}
    with tempfile.TemporaryDirectory() as name:
        pairs = {"from_dict, 1,000 features": jagged(draw), "weighted bags": weighted_bags(draw)}
        pairs |= {"200 CSV files": many_files(Path(name), draw), **states(options.rows, draw)}
        for what, (ours, plain) in pairs.items():
            times = by_turns({"ours": ours, "plain": plain}, options.rounds)
            ratios[what] = over(times["ours"].cpu, times["plain"].cpu)
            print(f"{what:28s} {ratios[what]:6.2f}", flush=True)
    record(options, ratios=ratios)


if __name__ == "__main__":
    main()
