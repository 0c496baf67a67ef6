"""Dropout: the mask is that of (seed, sample, position, column), in every implementation."""

import pytest
import torch
from impls import GPU, IMPLS

from tritonrec.kernels.dropout.op import dropout
from tritonrec.kernels.norm_mul_dropout.op import kept_columns
from tritonrec.kernels.philox.reference import DROPOUT

SAMPLES, POSITIONS = torch.tensor([-5, 2**33, 7, 7]), torch.tensor([0, 3, 3, 2**40 + 1])


def run(impl, x, p=0.4, seed=-9):
    device = "cuda" if impl == "triton" and GPU else "cpu"
    return dropout(x.to(device), p, seed, SAMPLES.to(device), POSITIONS.to(device), impl=impl).cpu()


@pytest.mark.smoke
@pytest.mark.parametrize("dim", [1, 4, 7, 1030])
@pytest.mark.parametrize("impl", IMPLS)
def test_the_mask_is_written_out(impl, dim):
    x = torch.randn(4, 2 * dim, generator=torch.Generator().manual_seed(0))[:, ::2] + 3
    y = run(impl, x)
    for t, (sample, position) in enumerate(zip(SAMPLES.tolist(), POSITIONS.tolist(), strict=True)):
        kept = torch.tensor(kept_columns(-9, DROPOUT, sample, position, dim, int(0.4 * 2**32)))
        assert torch.equal(y[t], torch.where(kept, x[t] * torch.tensor(1 / 0.6), 0.0))
