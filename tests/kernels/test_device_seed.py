"""Promise: a seed in device memory draws what the same number draws, and what is written to it later."""

import pytest
import torch
from impls import GPU

from tritonrec.kernels.deferred import DeferredErrors
from tritonrec.kernels.dropout.op import DROPOUT_ROWS
from tritonrec.kernels.norm_mul_dropout.op import (
    NORM_MUL_DROPOUT,
    NORM_MUL_DROPOUT_BACKWARD_EXACT,
    NORM_MUL_DROPOUT_BACKWARD_INTO,
)
from tritonrec.kernels.philox.device_seed import DeviceSeeds, in_kernel
from tritonrec.kernels.philox.op import derive_seed

DEVICE = torch.device("cuda" if GPU else "cpu")
triton = pytest.mark.gpu if GPU else pytest.mark.interpreter
SEEDS = [0, 7, -3, 2**62 + 5, -(2**63)]


def rows(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(DEVICE)


IDS = torch.arange(9, device=DEVICE) * 11
X, VECTOR, LINE = rows(9, 6), rows(6), rows(9)


def dropped(seed):
    return [DROPOUT_ROWS.launch(X, 0.4, seed, IDS, IDS, impl="triton")]


def normed(seed):
    given = X, X * 2, VECTOR, VECTOR, 1e-6, 0.4, seed, IDS, IDS
    return list(NORM_MUL_DROPOUT.launch(*given, impl="triton"))


def gradients(seed):
    du, given = torch.empty_like(X), (X, X * 2, X * 3, VECTOR, VECTOR, 0.4, seed, IDS, IDS, LINE, LINE)
    return [*NORM_MUL_DROPOUT_BACKWARD_INTO.launch(du, *given, impl="triton"), du]


def exact_gradients(seed):
    du, given = torch.empty_like(X), (X, X * 2, X * 3, VECTOR, VECTOR, 0.4, seed, IDS, IDS, LINE, LINE)
    sums = [torch.zeros(6, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    with DeferredErrors().active():
        dx = NORM_MUL_DROPOUT_BACKWARD_EXACT.launch(*sums, du, *given, 36, ["w", "b"], impl="triton")
    return [dx, du, *sums]


@triton
@pytest.mark.parametrize("call", [dropped, normed, gradients, exact_gradients])
def test_kernels_draw_from_what_was_written_last(call):
    seeds = DeviceSeeds(DEVICE, 2)
    first, second = seeds.root(), derive_seed(seeds.root(), 3, 0)
    call(first), call(second)  # as they are recorded
    for seed in SEEDS if call is dropped else SEEDS[1:3]:
        seeds.write(seed)
        for given, number in ((first, seed), (second, derive_seed(seed, 3, 0))):
            assert all(map(torch.equal, call(given), call(number)))


@triton
def test_another_seed_draws_something_else():
    assert len({tuple(dropped(seed)[0].flatten().tolist()) for seed in SEEDS}) == len(SEEDS)


def test_seeds_are_derived_in_turn_and_have_one_place_each():
    seeds = DeviceSeeds(torch.device("cpu"), 3)
    chain = derive_seed(derive_seed(seeds.root(), -7, 4), 0, 1)
    again = derive_seed(derive_seed(seeds.root(), -7, 4), 0, 1)
    assert chain.tensor().data_ptr() == again.tensor().data_ptr() != seeds.root().tensor().data_ptr()
    for seed in SEEDS:
        seeds.write(seed)
        assert int(chain.tensor()) == derive_seed(derive_seed(seed, -7, 4), 0, 1)
        assert int(seeds.root().tensor()) == seed
    derive_seed(seeds.root(), 1, 1).tensor()
    with pytest.raises(RuntimeError, match="space for 3 seeds, and draws from more"):
        derive_seed(seeds.root(), 1, 2).tensor()


def test_a_recording_that_draws_nothing_writes_nothing():
    seeds = DeviceSeeds(torch.device("cpu"), 3)
    seeds.write(5)
    assert not seeds.values.any()


def test_a_kernel_without_dropout_takes_no_seed():
    assert in_kernel(5, 0.0) == (0, None) and in_kernel(5, 0.4) == (5, None)
