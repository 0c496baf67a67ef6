"""What a case of `bench_kernels` is, and its inputs.

A case builds its inputs on a device and gives what is called: ours, the peers, and a check of an output,
which each contender passes before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Call = Callable[[], Any]
SEED = 0


@dataclass
class Case:
    """Contenders by name; ours is ``tritonrec``."""

    workload: str
    calls: dict[str, Call]
    check: Callable[[Any], None]


CASES: dict[str, Callable[[torch.device], Case]] = {}
ON_GPU_ONLY = set()


def case(function=None, *, gpu_only: bool = False):
    def add(build):
        CASES[build.__name__] = build
        if gpu_only:
            ON_GPU_ONLY.add(build.__name__)
        return build

    return add(function) if function else add


def randn(*shape: int, scale: float = 1.0, offset: float = 0.1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED + sum(shape))
    return torch.randn(shape, generator=generator) * scale + offset


def zipf(count: int, catalogue: int, exponent: float = 1.05) -> torch.Tensor:
    """Ids as a recommender sees them: few of them make up most."""
    rng = np.random.default_rng(SEED)
    cumulative = np.cumsum(np.arange(1, catalogue + 1, dtype=np.float64) ** -exponent)
    ranks = np.searchsorted(cumulative, rng.random(count) * cumulative[-1])
    return torch.from_numpy(rng.permutation(catalogue)[np.minimum(ranks, catalogue - 1)])


def close(exact: torch.Tensor, rtol: float = 1e-4, atol: float = 1e-4) -> Callable[[Any], None]:
    def check(got):
        torch.testing.assert_close(got.double().cpu(), exact.double().cpu(), rtol=rtol, atol=atol)

    return check


def same(exact: torch.Tensor) -> Callable[[Any], None]:
    def check(got):
        assert torch.equal(got.cpu(), exact.cpu())

    return check
