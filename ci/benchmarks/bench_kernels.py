"""Every kernel beside its peers.

    pytest ci/benchmarks/bench_kernels.py                   one thread on the CPU
    pytest ci/benchmarks/bench_kernels.py -m gpu            on a GPU
    pytest ci/benchmarks/bench_kernels.py -k "unique or silu"

The cases are in `kernel_cases_of_keys`, `_of_rows`, `_of_tokens` and `_of_attention`. Peers are the same
formula in plain torch, through torch.compile where a GPU is used, and numpy, pandas or a dict where they have
the operation. MurmurHash3 is timed as part of `owner_of`. Rounds take turns among inputs of three seeds, and
every output is checked (`honest`). On a GPU a call is timed until it has finished, and between two events for
`device_milliseconds`.
"""

import os
from functools import lru_cache
from statistics import median

import kernel_cases_of_attention  # noqa: F401  fills CASES, as the next ones do
import kernel_cases_of_keys  # noqa: F401
import kernel_cases_of_rows  # noqa: F401
import kernel_cases_of_tokens  # noqa: F401
import numpy as np
import pandas as pd
import pytest
import torch
from honest import by_events, by_turns, in_turn, time_rounds
from kernel_cases import CASES, PEERS, SEED

pytestmark = pytest.mark.usefixtures("one_thread")
SEEDS = range(SEED, SEED + 3)
TURNS_ON_DEVICE = 100

PAIRS = [(name, who) for name in CASES for who in ("tritonrec", *PEERS[name])]


@lru_cache(maxsize=1)
def built(name, device):
    return [CASES[name](torch.device(device), seed) for seed in SEEDS]


@pytest.mark.parametrize(("name", "contender"), PAIRS, ids=lambda text: text)
def test_kernel(benchmark, device, name, contender):
    cases = built(name, device)
    if contender not in cases[0].calls:
        pytest.skip(f"{contender} is no peer on {device}")
    rounds = in_turn([each.given(contender) for each in cases])
    least_bytes = min(each.least_bytes for each in cases)
    threads = os.cpu_count() or 1 if contender.endswith("all_threads") else 1
    torch.set_num_threads(threads)
    benchmark.group = name if device == "cpu" else f"{name} {device}"
    benchmark.extra_info.update(
        ours=contender == "tritonrec", contender=contender, workload=cases[0].workload, threads=threads,
        seed=SEED, versions={each.__name__: each.__version__ for each in (torch, np, pd)},
    )  # fmt: skip
    if device == "cuda":
        times = by_turns({contender: rounds}, TURNS_ON_DEVICE, least_bytes, by_events, device)
        benchmark.extra_info["device_milliseconds"] = 1e3 * median(times[contender])
    time_rounds(benchmark, rounds, least_bytes, device)
