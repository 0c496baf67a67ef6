"""The hash is MurmurHash3's 64-bit finaliser in every implementation."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from impls import GPU
from murmur_inverse import key_with_hash
from numba import njit

from tritonrec.kernels.murmur import mix64
from tritonrec.kernels.murmur.numba_murmur import mix64 as numba_mix64
from tritonrec.kernels.murmur.triton_murmur import mix64 as triton_mix64

MASK = 2**64 - 1
SMALLEST, LARGEST = -(2**63), 2**63 - 1
KNOWN = {0: 0, 1: 0xB456BCFC34C2CB2C, -1: 0x64B5720B4B825F21}


@njit
def numba_hashes(keys, hashes):
    for i in range(len(keys)):
        hashes[i] = numba_mix64(keys[i])


@triton.jit
def hash_kernel(keys_ptr, hashes_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(hashes_ptr + offsets, triton_mix64(tl.load(keys_ptr + offsets)))


def murmur3_x64_128(data: bytes) -> str:
    """The whole of MurmurHash3_x64_128 with seed 0 for up to eight bytes, around our finaliser."""
    word = int.from_bytes(data, "little") * 0x87C37B91114253D5 & MASK
    word = (word << 31 | word >> 33) & MASK
    h1 = (word * 0x4CF5AD432745937F & MASK) ^ len(data)
    h2 = len(data)
    h1, h2 = (h1 + h2) & MASK, (h1 + 2 * h2) & MASK
    h1, h2 = mix64(h1), mix64(h2)
    return f"{(h1 + h2) & MASK:016x}{(h1 + 2 * h2) & MASK:016x}"


def test_known_answers():
    assert {key: mix64(key) for key in KNOWN} == KNOWN
    assert murmur3_x64_128(b"hello") == "cbd8a7b341bd9b025b1e906a48ae1d19"


@pytest.mark.parametrize("impl", ["cpu", pytest.param("triton", marks=pytest.mark.interpreter)])
def test_equals_the_reference(impl):
    edges = torch.tensor([*KNOWN, SMALLEST, LARGEST, 2**32, -(2**32), 2**31, -(2**31)])
    random = torch.randint(SMALLEST, LARGEST, (55,), generator=torch.Generator().manual_seed(0))
    keys = torch.cat([edges, random])
    hashes = torch.full_like(keys, -77)
    if impl == "cpu":
        numba_hashes(keys.numpy().view(np.uint64), hashes.numpy().view(np.uint64))
    else:
        device = "cuda" if GPU else "cpu"
        hashes = hashes.to(device)
        hash_kernel[(1,)](keys.to(device), hashes, BLOCK=len(keys))
    assert [hashed & MASK for hashed in hashes.tolist()] == [mix64(key) for key in keys.tolist()]


@given(key=st.integers(SMALLEST, LARGEST), bit=st.integers(0, 63))
def test_is_a_bijection_that_spreads_every_bit(key, bit):
    assert key_with_hash(mix64(key)) == key
    assert 4 <= (mix64(key) ^ mix64(key ^ (1 << bit))).bit_count() <= 60
