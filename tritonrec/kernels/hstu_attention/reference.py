"""HSTU attention one sequence and head at a time, with the mask spelled out; any float dtype."""

from __future__ import annotations

import torch


def visible(length: int, targets: int) -> torch.Tensor:
    """(length, length) bool: the query of a row sees the key of a column.

    Three history tokens and two targets::

        1 . . . .
        1 1 . . .
        1 1 1 . .
        1 1 1 1 .      a target sees history and itself
        1 1 1 . 1
    """
    row, column = torch.arange(length)[:, None], torch.arange(length)[None, :]
    return (row == column) | ((column < row) & (column < length - targets))


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_offsets: torch.Tensor, alpha: float,
    scaling_seqlen: int, targets: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    for b, (start, stop) in enumerate(zip(seq_offsets[:-1].tolist(), seq_offsets[1:].tolist(), strict=True)):
        mask = visible(stop - start, int(targets[b])).to(q.device)
        for h in range(q.shape[1]):
            s = alpha * (q[start:stop, h] @ k[start:stop, h].t())
            p = s / (1 + torch.exp(-s)) * mask / scaling_seqlen
            out[start:stop, h] = p @ v[start:stop, h]
    return out


def backward(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_offsets: torch.Tensor,
    alpha: float, scaling_seqlen: int, targets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    dq, dk, dv = (tensor.new_zeros(tensor.shape) for tensor in (q, k, v))
    for b, (start, stop) in enumerate(zip(seq_offsets[:-1].tolist(), seq_offsets[1:].tolist(), strict=True)):
        mask = visible(stop - start, int(targets[b])).to(q.device) / scaling_seqlen
        for h in range(q.shape[1]):
            qh, kh, vh, doh = (tensor[start:stop, h] for tensor in (q, k, v, do))
            s = alpha * (qh @ kh.t())
            sigmoid = 1 / (1 + torch.exp(-s))
            ds = (doh @ vh.t()) * sigmoid * (1 + s * (1 - sigmoid)) * mask
            dq[start:stop, h] = alpha * ds @ kh
            dk[start:stop, h] = alpha * ds.t() @ qh
            dv[start:stop, h] = (s * sigmoid * mask).t() @ doh
    return dq, dk, dv
