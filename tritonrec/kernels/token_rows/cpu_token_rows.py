"""Where the tokens of a batch stand, and their rows plus positions, in one call of the CPU, for trainers.

The bits are those of `tritonrec.nn.Tokens.place` and of ``rows * factor + gather_rows(weight, positions)``.
Dimensions: L tokens, B samples, D features.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch


class TokenRows(NamedTuple):
    """What `place_rows` finds: (L,) int64 for each token, and its input."""

    sample_ids: torch.Tensor
    positions: torch.Tensor
    query_timestamps: torch.Tensor | None  # of the sample's next token, of the last one its own
    x: torch.Tensor  # (L, D) float32


def place_rows(
    rows: torch.Tensor,
    weight: torch.Tensor,
    factor: float,
    seq_offsets: torch.Tensor,
    sample_ids: torch.Tensor,
    timestamps: torch.Tensor | None,
) -> TokenRows | None:
    """The tokens' places, and ``x = rows * factor + weight[positions]``.

    Args:
        rows: (>= L, D) float32, of which the first L are the tokens'. weight: (longest sequence, D).
        seq_offsets: (B + 1,). sample_ids: (B,). timestamps: (L,), where tokens ask at the next one's.

    None for arguments of other kinds, and for offsets that cut [0, L) into no sequences or too long ones.
    """
    from tritonrec.kernels.token_rows import numba_token_rows as at

    samples = sample_ids.numel()
    if seq_offsets.shape != (samples + 1,) or rows.dim() != 2 or weight.shape[1:] != rows.shape[1:]:
        return None
    given = (rows, torch.float32), (weight, torch.float32), (seq_offsets, torch.int64)
    for tensor, dtype in (*given, (sample_ids, torch.int64)):
        if tensor.dtype != dtype or not tensor.is_contiguous() or not tensor.is_cpu or tensor.is_neg():
            return None
    tokens, dim = int(seq_offsets[-1]), rows.shape[1]
    if not 0 < tokens <= rows.shape[0]:
        return None
    if timestamps is not None and (
        timestamps.shape != (tokens,) or timestamps.dtype != torch.int64 or not timestamps.is_contiguous()
    ):
        return None
    places = seq_offsets.new_empty(2 if timestamps is None else 3, tokens)
    x = rows.new_empty(tokens, dim)
    lists = seq_offsets.data_ptr(), sample_ids.data_ptr(), 0 if timestamps is None else timestamps.data_ptr()
    memory = rows.data_ptr(), weight.data_ptr(), places.data_ptr(), x.data_ptr()
    table = np.array([samples, tokens, dim, len(weight), *lists, *memory], np.int64)
    if not at.place(table, np.float32(factor)):
        return None
    owners, positions, *asked = places.unbind()
    return TokenRows(owners, positions, asked[0] if asked else None, x)
