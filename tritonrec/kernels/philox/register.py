"""Registration of `initial_rows` and `random_indices`."""

from __future__ import annotations

import torch

from tritonrec.kernels.op import Op
from tritonrec.kernels.philox import reference


def _check_initial_rows(table, keys, dim, scale) -> None:
    if keys.dim() != 1 or keys.dtype != torch.int64:
        raise ValueError(f"keys must be (K,) int64, got {tuple(keys.shape)} {keys.dtype}")
    if not 0 <= table < 2**32:
        raise ValueError(f"table must lie in [0, 2**32), got {table}")
    if not 0 <= dim < 2**30:
        raise ValueError(f"dim must lie in [0, 2**30), got {dim}")
    if not 0 <= scale < 3e38:
        raise ValueError(f"scale must be finite and not negative, got {scale}")


def _fake_initial_rows(keys, dim):
    return keys.new_empty(keys.shape[0], dim, dtype=torch.float32)


INITIAL_ROWS = Op(
    "initial_rows(int seed, int table, Tensor keys, int dim, float scale) -> Tensor",
    reference=reference.initial_rows, cpu="numba_philox:initial_rows", triton="triton_philox:initial_rows",
    check=_check_initial_rows, fake=_fake_initial_rows,
)  # fmt: skip


def _check_random_indices(sample_ids, positions, count, upper) -> None:
    for name, tensor in (("sample_ids", sample_ids), ("positions", positions)):
        if tensor.dim() != 1 or tensor.dtype != torch.int64:
            raise ValueError(f"{name} must be (T,) int64, got {tuple(tensor.shape)} {tensor.dtype}")
    if sample_ids.shape[0] != positions.shape[0]:
        raise ValueError(f"{sample_ids.shape[0]} sample_ids but {positions.shape[0]} positions")
    if not 0 <= count < 2**30:
        raise ValueError(f"count must lie in [0, 2**30), got {count}")
    if not 1 <= upper <= 2**32:
        raise ValueError(f"upper must lie in [1, 2**32], got {upper}")


def _fake_random_indices(sample_ids, count):
    return sample_ids.new_empty(sample_ids.shape[0], count)


RANDOM_INDICES = Op(
    "random_indices(int seed, int stream, int step, Tensor sample_ids, Tensor positions, int count, "
    "int upper) -> Tensor",
    reference=reference.random_indices, cpu="numba_philox:random_indices",
    triton="triton_philox:random_indices",
    check=_check_random_indices, fake=_fake_random_indices,
)  # fmt: skip
