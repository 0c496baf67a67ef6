"""What a case of `bench_kernels` is, and its inputs.

A case builds its inputs of a seed on a device and gives what is called with them: ours, the peers, and a
check of an output. Cases of other seeds differ in values, not in the amount of work.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from honest import Check, Given

SEED = 0


@dataclass
class Case:
    """Contenders by name, of which ours is ``tritonrec``.

    `checks` has other checks than `check` of single contenders; `least_bytes` is what any implementation
    reads and writes at least, each row once. `writes` and `prepare` are those of `honest.Given`.
    """

    workload: str
    arguments: tuple[Any, ...]
    calls: dict[str, Callable[..., Any]]
    check: Check
    least_bytes: int
    writes: tuple[int, ...] = ()
    prepare: dict[str, Callable[..., tuple[Any, ...]]] = field(default_factory=dict)
    checks: dict[str, Check] = field(default_factory=dict)

    def given(self, contender: str) -> Given:
        check, prepare = self.checks.get(contender, self.check), self.prepare.get(contender)
        return Given(self.calls[contender], self.arguments, check, self.writes, prepare)


CASES: dict[str, Callable[[torch.device, int], Case]] = {}
PEERS: dict[str, tuple[str, ...]] = {}
"""The peers of each case, known before it is built so that a test each can be collected."""


def case(*peers: str, workloads: dict[str, tuple[Any, ...]] | None = None):
    """Register what builds a case under its name; of several `workloads` under that and theirs.

    It gets a device, a seed, and the values of the workload. A peer that is not on this device is left out
    of the calls. One peer is called ``torch`` unless told otherwise.
    """

    def add(build):
        for words, given in (workloads or {"": ()}).items():
            name = f"{build.__name__} {words}".strip()
            CASES[name] = lambda device, seed, given=given: build(device, seed, *given)
            PEERS[name] = peers or ("torch",)
        return build

    return add


def where_installed(make: Callable[[], dict[str, Callable[..., Any]]]) -> dict[str, Callable[..., Any]]:
    """What `make` gives; nothing where it raises ImportError."""
    with suppress(ImportError):
        return make()
    return {}


def randn(*shape: int, scale: float = 1.0, offset: float = 0.1, seed: int = SEED) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000_003 * seed + sum(shape))
    return torch.randn(shape, generator=generator) * scale + offset


def randperm(count: int, seed: int = SEED) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def zipf(count: int, catalogue: int, exponent: float = 1.05, seed: int = SEED) -> torch.Tensor:
    """Ids as a recommender sees them: few of them make up most."""
    rng = np.random.default_rng(seed)
    cumulative = np.cumsum(np.arange(1, catalogue + 1, dtype=np.float64) ** -exponent)
    ranks = np.searchsorted(cumulative, rng.random(count) * cumulative[-1])
    return torch.from_numpy(rng.permutation(catalogue)[np.minimum(ranks, catalogue - 1)])


def moved(*tensors: torch.Tensor, times: int = 1) -> int:
    """Bytes of tensors that are read or written once."""
    return times * sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def rows_moved(source: torch.Tensor, rows: torch.Tensor) -> int:
    """Bytes of the distinct rows of `source` that `rows` names, and of `rows`."""
    return len(rows.unique()) * source[0].numel() * source.element_size() + moved(rows)


def close(exact: torch.Tensor, rtol: float = 1e-4, atol: float = 1e-4) -> Check:
    def check(got, *_arguments):
        torch.testing.assert_close(got.double().cpu(), exact.double().cpu(), rtol=rtol, atol=atol)

    return check


def same(exact: torch.Tensor) -> Check:
    def check(got, *_arguments):
        assert torch.equal(torch.as_tensor(got).to(exact.device), exact), "not the exact answer"

    return check
