"""The kernels without a suite of their own beside a peer each, and all of them on a GPU.

    pytest ci/benchmarks/bench_kernels.py             one thread on the CPU
    pytest ci/benchmarks/bench_kernels.py -m gpu      on a GPU, also the kernels of the other suites

The cases are in `kernel_cases_of_rows` and `kernel_cases_of_tokens`. Peers are the same formula in plain
torch, through torch.compile where a GPU is used, and numpy where it has the operation. MurmurHash3 is timed
as part of `owner_of`. Rounds take turns among inputs of three seeds, and every output is checked (`honest`).
On a GPU a call is timed until it has finished, and between two events for `device_milliseconds`.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import median

import kernel_cases_of_rows  # noqa: F401  fills CASES, as the next one does
import kernel_cases_of_tokens  # noqa: F401
import numpy as np
import pytest
import torch
from honest import by_events, by_turns, in_turn, time_rounds
from kernel_cases import CASES, ON_GPU_ONLY, SEED

pytestmark = pytest.mark.usefixtures("one_thread")
SEEDS = range(SEED, SEED + 3)
TURNS_ON_DEVICE = 100

# The names of the contenders of each case, known before it is built so that a test each can be collected.
PEERS = {
    "bucketize": ("torch_stable_sort",),
    "gather_rows": ("torch_index_select", "torch_embedding"),
    "scatter_rows": ("torch_index_copy",),
    "packed_rows": ("int64_rows", "torch_int64"),
    "norm_mul_dropout": ("torch", "torch_compile"),
    "initial_rows": ("torch_uniform", "numpy_philox"),
    "random_indices": ("torch_randint",),
    "sampled_softmax": ("torch", "torch_compile"),
    "relative_aggregate": ("torch_each_sequence",),
    "softmax_attention": ("torch_each_sequence", "torch_padded"),
    "unique": ("torch_unique",),
    "intersect": ("torch_searchsorted",),
    "hash_find": ("torch_searchsorted",),
    "segment_sum": ("torch_index_add",),
    "hstu_attention_forward": ("torch_each_sequence", "torch_compile"),
    "hstu_attention_backward": ("torch_each_sequence", "torch_compile"),
}
PAIRS = [(name, who) for name in CASES for who in ("tritonrec", *PEERS.get(name, ("torch",)))]


@lru_cache(maxsize=1)
def built(name, device):
    return [CASES[name](torch.device(device), seed) for seed in SEEDS]


@pytest.mark.parametrize(("name", "contender"), PAIRS, ids=lambda text: text)
def test_kernel(benchmark, device, name, contender):
    if device == "cpu" and name in ON_GPU_ONLY:
        pytest.skip("has a suite of its own on the CPU")
    cases = built(name, device)
    if contender not in cases[0].calls:
        pytest.skip(f"{contender} is no peer on {device}")
    rounds = in_turn([each.given(contender) for each in cases])
    least_bytes = min(each.least_bytes for each in cases)
    benchmark.group = f"{name} {device}"
    benchmark.extra_info.update(
        ours=contender == "tritonrec", workload=cases[0].workload, threads=1, seed=SEED,
        versions={"torch": torch.__version__, "numpy": np.__version__},
    )  # fmt: skip
    if device == "cuda":
        times = by_turns({contender: rounds}, TURNS_ON_DEVICE, least_bytes, by_events, device)
        benchmark.extra_info["device_milliseconds"] = 1e3 * median(times[contender])
    time_rounds(benchmark, rounds, least_bytes, device)
