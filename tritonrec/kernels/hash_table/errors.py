"""The error of an insert that does not fit."""

from __future__ import annotations

import torch

from tritonrec.kernels.padding import report


class HashTableFullError(RuntimeError):
    """The new keys do not fit into the free slots; the table is unchanged."""


def report_refused(
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    free: int,
    next_row: int | torch.Tensor,
    refused: torch.Tensor | int,
    status: torch.Tensor | None,
) -> None:
    """Report how many keys were refused (`padding.report`); `free`: rows that were given to be reused."""
    report(refused, status, lambda new: _refusal(slot_rows, keys.numel(), new, int(next_row), free))


def _refusal(slot_rows: torch.Tensor, keys: int, new: int, next_row: int, free: int) -> Exception:
    occupied = int((slot_rows >= 0).sum())
    if occupied + new <= slot_rows.numel():
        return ValueError(f"{new - free} new keys from row {next_row} pass the last int32 row")
    return HashTableFullError(
        f"{keys} keys do not fit into a table of {slot_rows.numel()} slots with {occupied} occupied: "
        "grow it with hash_grow first; nothing was inserted"
    )
