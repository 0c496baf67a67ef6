"""How far balancing levels the tokens of the ranks, as a table: ``python ci/benchmarks/measure_balance.py``.

One epoch of next-item batches, dealt three ways: round robin, by tokens (``balance=SequenceCost(1, 0)``) and
by Algorithm 1 (`DynamicBatchLoader`, target at its default). `balancing.TokenSpread` explains the columns.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tritonrec.data.balancing import SequenceCost, SupportsTokenCounts, token_spread
from tritonrec.data.dynamic_loader import DynamicBatchLoader
from tritonrec.data.loader import NextItemLoader
from tritonrec.data.sources import load_interactions


def measure(
    data: Annotated[str, typer.Option(help="a source, as in `tritonrec.data.load`")] = "ml-100k",
    batch_size: Annotated[int, typer.Option(help="samples of a global batch")] = 128,
    max_seq_len: Annotated[int, typer.Option(help="most tokens of a sample")] = 200,
    ranks: Annotated[list[int] | None, typer.Option(help="world sizes, 4 and 8 by default")] = None,
) -> None:
    """Print the spread of the ranks' tokens over one epoch."""
    log = load_interactions(data)
    print(f"{data}, {batch_size} samples a global batch, at most {max_seq_len} tokens a sample")
    print("ranks  dealt            steps  max/mean  worst  max - min (tokens)")
    for world_size in ranks or (4, 8):
        plain = NextItemLoader(log, batch_size, max_seq_len, 0, seed=0, world_size=world_size)
        by_tokens = NextItemLoader(
            log, batch_size, max_seq_len, 0, seed=0, world_size=world_size, balance=SequenceCost(1, 0)
        )
        dynamic = DynamicBatchLoader(plain)
        ways: list[tuple[str, SupportsTokenCounts, int]] = [
            ("round robin", plain, plain.steps_per_epoch),
            ("by tokens", by_tokens, by_tokens.steps_per_epoch),
            ("dynamic batches", dynamic, dynamic.steps_per_epoch),
        ]
        for name, loader, steps in ways:
            found = token_spread(loader, range(steps))
            print(
                f"{world_size:5}  {name:15} {steps:6}  {found.ratio:8.3f} {found.worst_ratio:6.2f} "
                f"{found.spread:19.1f}"
            )


if __name__ == "__main__":
    typer.run(measure)
