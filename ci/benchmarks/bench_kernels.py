"""The kernels without a suite of their own beside a peer each, and all of them on a GPU.

    pytest ci/benchmarks/bench_kernels.py             one thread on the CPU
    pytest ci/benchmarks/bench_kernels.py -m gpu      on a GPU, also the kernels of the other suites

The cases are in `kernel_cases_of_rows` and `kernel_cases_of_tokens`. Peers are the same formula in plain
torch, through torch.compile where a GPU is used, and numpy where it has the operation. MurmurHash3 is timed
as part of `owner_of`. Calls on a GPU are timed until it has finished.
"""

from __future__ import annotations

import kernel_cases_of_rows  # noqa: F401  fills CASES, as the next one does
import kernel_cases_of_tokens  # noqa: F401
import numpy as np
import pytest
import torch
from kernel_cases import CASES, ON_GPU_ONLY, SEED

pytestmark = pytest.mark.usefixtures("one_thread")

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


@pytest.mark.parametrize(("name", "contender"), PAIRS, ids=lambda text: text)
def test_kernel(benchmark, device, name, contender):
    if device == "cpu" and name in ON_GPU_ONLY:
        pytest.skip("has a suite of its own on the CPU")
    built = CASES[name](torch.device(device))
    if contender not in built.calls:
        pytest.skip(f"{contender} is no peer on {device}")
    call = built.calls[contender]
    built.check(call())
    benchmark.group = f"{name} {device}"
    benchmark.extra_info.update(
        ours=contender == "tritonrec", workload=built.workload, threads=1, seed=SEED,
        versions={"torch": torch.__version__, "numpy": np.__version__},
    )  # fmt: skip
    if device == "cpu":
        benchmark(call)
        return
    from triton.testing import do_bench

    benchmark.extra_info["device_milliseconds"] = do_bench(call, return_mode="median")

    def until_done():
        call()
        torch.cuda.synchronize()

    benchmark(until_done)
