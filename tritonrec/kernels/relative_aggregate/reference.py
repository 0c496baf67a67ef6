"""Relative aggregation one sequence and head at a time, with the weights spelled out; any float dtype."""

from __future__ import annotations

import torch


def buckets(length: int, timestamps: list[int] | None, count: int) -> torch.Tensor:
    """(length, length) int64: the bucket of a query (row) and a key (column), 0 where the key comes later."""
    places = torch.zeros(length, length, dtype=torch.int64)
    for i in range(length):
        for j in range(i + 1):
            if timestamps is None:
                place = i - j
            else:
                place = max(1, timestamps[i] - timestamps[j]).bit_length() - 1  # Python's own integers
            places[i, j] = min(place, count - 1)
    return places


def sequences(
    seq_offsets: torch.Tensor, timestamps: torch.Tensor | None, count: int
) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Rows, buckets and causal mask of each sequence."""
    found = []
    for start, stop in zip(seq_offsets[:-1].tolist(), seq_offsets[1:].tolist(), strict=True):
        times = None if timestamps is None else timestamps[start:stop].tolist()
        places = buckets(stop - start, times, count).to(seq_offsets.device)
        found.append((slice(start, stop), places, torch.ones_like(places).tril()))
    return found


def relative_aggregate(
    v: torch.Tensor, table: torch.Tensor, seq_offsets: torch.Tensor, max_seq_len: int,
    timestamps: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """See `tritonrec.kernels.relative_aggregate.op.relative_aggregate`."""
    out = v.new_zeros(v.shape)
    for rows, places, mask in sequences(seq_offsets, timestamps, table.shape[1]):
        for h in range(v.shape[1]):
            out[rows, h] = (table[h][places] * mask) @ v[rows, h]
    return out


def relative_aggregate_backward(
    do: torch.Tensor, v: torch.Tensor, table: torch.Tensor, seq_offsets: torch.Tensor, max_seq_len: int,
    timestamps: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """dv (L, H, D), and each sequence's gradient of the table, (B, H, R), both contiguous."""
    dv, dtable = v.new_zeros(v.shape), v.new_zeros(len(seq_offsets) - 1, *table.shape)
    for b, (rows, places, mask) in enumerate(sequences(seq_offsets, timestamps, table.shape[1])):
        for h in range(v.shape[1]):
            dv[rows, h] = (table[h][places] * mask).t() @ do[rows, h]
            scores = (do[rows, h] @ v[rows, h].t()) * mask
            for r in range(table.shape[1]):
                dtable[b, h, r] = scores[places == r].sum()
    return dv, dtable
