"""Keys go to the owner their hash names, stable inside a bucket, evenly over the ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonrec.kernels.bucketize import bucketize, owner_of
from tritonrec.kernels.murmur import mix64

GPU = torch.cuda.is_available()
TRITON = pytest.param("triton", marks=pytest.mark.gpu if GPU else pytest.mark.interpreter)
IMPLS = ["reference", "cpu", TRITON]
EXTREMES = [-(2**63), 2**63 - 1, -1, 0, 1]


def on(impl, tensor):
    return tensor.cuda() if impl == "triton" and GPU else tensor


def keys_of(size):
    rng = np.random.default_rng(4)
    return torch.tensor([*EXTREMES, *rng.integers(-(2**63), 2**63 - 1, size)][:size], dtype=torch.int64)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 97])
@pytest.mark.parametrize("size", [0, 1, 5, 1023, 1025])
@pytest.mark.parametrize("impl", IMPLS)
def test_groups_by_owner_and_keeps_order(impl, size, world_size):
    keys = keys_of(size)
    owners = owner_of(on(impl, keys), world_size, impl).cpu()
    permutation, counts = (part.cpu() for part in bucketize(on(impl, keys), world_size, impl))
    assert torch.equal(permutation, torch.argsort(owners, stable=True))
    assert torch.equal(counts, torch.bincount(owners, minlength=world_size))


@pytest.mark.parametrize("world_size", [1, 2, 3, 1000, 2**31 - 1])
@pytest.mark.parametrize("impl", IMPLS)
def test_owner_is_the_scaled_high_half_of_the_hash(impl, world_size):
    keys = keys_of(40)
    expected = [(mix64(key) // 2**32) * world_size // 2**32 for key in keys.tolist()]
    assert owner_of(on(impl, keys), world_size, impl).tolist() == expected


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_consecutive_ids_spread_evenly(world_size):
    """Each rank within five standard deviations of its share."""
    counts = bucketize(torch.arange(20_000), world_size)[1].double()
    share = 20_000 / world_size
    assert (counts - share).abs().max() < 5 * share**0.5


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30), st.integers(1, 12))
def test_all_implementations_agree(keys, world_size):
    keys = torch.tensor(keys, dtype=torch.int64)
    expected = bucketize(keys, world_size, "reference")
    for impl in ["cpu"] if GPU else ["cpu", "triton"]:
        for ours, theirs in zip(bucketize(keys, world_size, impl), expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("world_size", [0, -1, 2**31])
def test_refuses_impossible_world_sizes(world_size):
    with pytest.raises(ValueError, match=f"world_size must be in .*, got {world_size}"):
        bucketize(torch.arange(3), world_size)
    with pytest.raises(ValueError, match="world_size"):
        owner_of(torch.arange(3), world_size)


def test_refuses_other_keys():
    with pytest.raises(ValueError, match=r"\(K,\) int64, got shape \(3,\) torch.int32"):
        bucketize(torch.zeros(3, dtype=torch.int32), 2)


def test_compiles_without_a_graph_break():
    def route(keys):
        permutation, counts = bucketize(keys, 3)
        return keys[permutation], counts, owner_of(keys, 3)

    keys = keys_of(50)
    compiled = torch.compile(route, fullgraph=True, backend="aot_eager")
    for ours, expected in zip(compiled(keys), route(keys), strict=True):
        assert torch.equal(ours, expected)


def test_registration():
    torch.library.opcheck(torch.ops.tritonrec.bucketize, (keys_of(20), 3, "cpu"))
    torch.library.opcheck(torch.ops.tritonrec.owner_of, (keys_of(20), 3, "cpu"))
