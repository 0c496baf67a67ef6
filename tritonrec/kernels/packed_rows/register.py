"""Registration of `pack_rows` and `add_packed_rows`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tritonrec.kernels.dispatch import on_host
from tritonrec.kernels.fixed_point.errors import check_fraction_bits
from tritonrec.kernels.op import Op
from tritonrec.kernels.packed_rows import reference
from tritonrec.kernels.packed_rows.reference import FLOAT
from tritonrec.kernels.row_layout import check_matrix, check_rows


def _check_list(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dim() != 1 or tensor.dtype != dtype:
        raise ValueError(f"{name} must be 1-D {dtype}, got {tuple(tensor.shape)} {tensor.dtype}")


def check_widths(widths: torch.Tensor, dim: int, packed: torch.Tensor | None = None) -> None:
    """Refuse an invalid width, and bytes of another number than the rows have; waits for the device once."""
    bad: Any
    if on_host(widths):  # a call of numpy takes a fifth of torch's time
        values = widths.numpy()
        bad = (values > 8) & (values != FLOAT)
        wrong, total = bad.any(), int((values & 0x7F).sum(dtype=np.int64))
    else:
        bad = (widths > 8) & (widths != FLOAT)
        wrong, total = torch.stack([bad.any().long(), (widths & 0x7F).sum()]).tolist()
        bad = bad.byte()
    if wrong:
        first = int(bad.argmax())
        raise ValueError(f"widths[{first}] = {int(widths[first])} must be 0 to 8 or {FLOAT}")
    total *= dim
    if packed is not None and len(packed) != total:
        raise ValueError(
            f"packed must have the {total} bytes of rows of these widths and dim {dim}, got {len(packed)}"
        )


def _check_pack(values, rows) -> None:
    check_matrix("values", values, torch.int64)
    _check_list("rows", rows, torch.int64)


def _check_row_numbers(values, rows) -> None:
    check_rows("rows", rows, values.shape[0])


def _fake_pack(values, rows):
    size = torch.library.get_ctx().new_dynamic_size()
    return tuple(values.new_empty(length, dtype=torch.uint8) for length in (rows.shape[0], size))


PACK_ROWS = Op(
    "pack_rows(Tensor values, Tensor rows) -> (Tensor, Tensor)",
    reference=reference.pack_rows, cpu="numba_packed_rows:pack_rows", triton="triton_packed_rows:pack_rows",
    check=_check_pack, check_memory=_check_row_numbers, fake=_fake_pack,
)  # fmt: skip


def _check_add(out, segments, widths, packed, fraction_bits) -> None:
    check_matrix("out", out, torch.int64, in_place=True)
    _check_list("segments", segments, torch.int64)
    _check_list("widths", widths, torch.uint8)
    _check_list("packed", packed, torch.uint8)
    if widths.shape != segments.shape:
        raise ValueError(f"widths must be one for each of {len(segments)} segments, got {len(widths)}")
    check_fraction_bits(fraction_bits)


def _check_bytes(out, segments, widths, packed) -> None:
    check_widths(widths, out.shape[1], packed)
    check_rows("segments", segments, out.shape[0])


ADD_PACKED_ROWS = Op(
    "add_packed_rows(Tensor(a!) out, Tensor segments, Tensor widths, Tensor packed, str name, "
    "int fraction_bits) -> ()",
    reference=reference.add_packed_rows, cpu="numba_packed_rows:add_packed_rows",
    triton="triton_packed_rows:add_packed_rows",
    check=_check_add, check_memory=_check_bytes,
)  # fmt: skip
