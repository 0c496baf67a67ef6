"""Row moves as loops."""

import torch


def gather_rows(source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """See `tritonrec.kernels.gather_rows.gather_rows`."""
    out = source.new_empty((rows.numel(), source.shape[1]))
    for position, row in enumerate(rows.tolist()):
        out[position] = source[row]
    return out


def scatter_rows(
    destination: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, source: torch.Tensor | None = None
) -> None:
    """See `tritonrec.kernels.gather_rows.scatter_rows`."""
    for position, row in enumerate(rows.tolist()):
        destination[row] = values[position if source is None else source[position]]
