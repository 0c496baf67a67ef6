"""Dedup in order of first occurrence, the same from every implementation, for all 2**64 keys."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonrec.kernels.murmur.reference import mix64
from tritonrec.kernels.unique import unique
from tritonrec.kernels.unique.numba_unique import BLOCK, FIRST_KEYS

GPU = torch.cuda.is_available()
TRITON = pytest.param("triton", marks=pytest.mark.gpu if GPU else pytest.mark.interpreter)
IMPLS = ["reference", "cpu", TRITON]
EXTREMES = [-(2**63), 2**63 - 1, -1, 0, 1, -2, -(2**63), 0]


def on(impl, tensor):
    return tensor.cuda() if impl == "triton" and GPU else tensor


def same_home(count):
    """Distinct keys whose hashes agree in the top bits: they all start at one group of any small table."""
    keys = [key for key in range(400_000) if mix64(key) >> 52 == 7]
    return keys[:count]


def case(name):
    rng = np.random.default_rng(1)
    keys = {
        "empty": lambda: [],
        "one_key": lambda: [-5],
        "one_key_repeated": lambda: [7] * 300,
        "extremes": lambda: EXTREMES,
        "all_distinct": lambda: rng.permutation(300) - 150,
        "block_minus_one": lambda: rng.integers(-40, 40, BLOCK - 1),
        "block": lambda: rng.integers(-40, 40, BLOCK),
        "block_plus_one": lambda: rng.integers(-40, 40, BLOCK + 1),
        "triton_block_plus_one": lambda: rng.integers(-90, 90, 257),
        "zipf": lambda: rng.zipf(1.2, 900),
        "one_home": lambda: same_home(40) * 2,
    }[name]()
    return torch.tensor(np.asarray(keys, np.int64))


NAMES = [
    "empty",
    "one_key",
    "one_key_repeated",
    "extremes",
    "all_distinct",
    "block_minus_one",
    "block",
    "block_plus_one",
    "triton_block_plus_one",
    "zipf",
    "one_home",
]


def check(keys, result):
    """The contract itself, from numpy's sorted dedup."""
    distinct, inverse, counts = (part.cpu() for part in result)
    _, first, expected_counts = np.unique(keys.numpy(), return_index=True, return_counts=True)
    order = np.argsort(first)
    assert torch.equal(distinct, keys[torch.from_numpy(first[order])])
    assert torch.equal(counts, torch.from_numpy(expected_counts[order]))
    assert torch.equal(distinct[inverse], keys)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("impl", IMPLS)
def test_first_occurrence_order(impl, name):
    keys = case(name)
    check(keys, unique(on(impl, keys), impl))


@pytest.mark.parametrize("distinct", [FIRST_KEYS - 1, FIRST_KEYS + 1, 60_000])
def test_the_table_grows_and_forgets_nothing(distinct):
    rng = np.random.default_rng(2)
    keys = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, distinct))
    keys = torch.cat([keys, keys[torch.from_numpy(rng.permutation(distinct))]])
    check(keys, unique(keys, "cpu"))


def test_a_burst_of_new_keys_after_few():
    """The rate of new keys, from which the next table is sized, says nothing of the keys to come."""
    keys = torch.cat([torch.zeros(50_000, dtype=torch.int64), torch.arange(40_000)])
    check(keys, unique(keys, "cpu"))


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_keys(impl):
    keys = torch.arange(60).view(20, 3)[:, 1] % 7
    check(keys.contiguous(), unique(on(impl, keys), impl))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(EXTREMES), st.integers(-9, 9), st.integers(-(2**63), 2**63 - 1))))
def test_all_implementations_agree(keys):
    keys = torch.tensor(keys, dtype=torch.int64)
    expected = unique(keys, "reference")
    for impl in ["cpu"] if GPU else ["cpu", "triton"]:
        for ours, theirs in zip(unique(keys, impl), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_refuses_other_keys():
    with pytest.raises(ValueError, match=r"\(K,\) int64, got shape \(3,\) torch.int32"):
        unique(torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"got shape \(2, 2\)"):
        unique(torch.zeros(2, 2, dtype=torch.int64))


def test_compiles_without_a_graph_break():
    keys = case("zipf")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(lambda keys: unique(keys * 3), fullgraph=True, backend="aot_eager")
        check(keys * 3, compiled(keys))


def test_registration():
    torch.library.opcheck(torch.ops.tritonrec.unique, (case("zipf"), "cpu"))
