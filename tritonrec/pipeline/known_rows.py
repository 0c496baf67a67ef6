"""Rows of a table by their keys, as the guard gives them to calls of a model beside its training."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..embedding.table import DynamicTable
from ..kernels import launch


@dataclass(frozen=True)
class KnownRows:
    """Rows of one table: keys (K,) int64, ascending, and values (K, dim) float32."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, inverse: torch.Tensor) -> KnownRows:
        """From keys (n,) with repeats, whose values are ``values[inverse]``."""
        # One key of each row: a few of a batch's many occurrences are sorted, and no row is copied twice.
        one = torch.full((len(values),), -1, dtype=torch.int64, device=keys.device)
        one[inverse] = torch.arange(len(keys), dtype=torch.int64, device=keys.device)
        used = (one >= 0).nonzero()[:, 0]
        distinct, order = keys[one[used]].sort()
        return cls(distinct, launch.gather_rows(values, used[order]).to(torch.float32))

    def restricted(self, keys: torch.Tensor, table: DynamicTable) -> KnownRows:
        """Rows of keys (n,) alone, with repeats; those not here have the initial rows of their `table`."""
        wanted = torch.unique(keys)
        values = table.initial_rows(wanted)[:, : table.dim].to(wanted.device)
        if len(self.keys):
            places = self.places(wanted).clamp_(max=len(self.keys) - 1)
            values = torch.where((self.keys[places] == wanted)[:, None], self.values[places], values)
        return KnownRows(wanted, values)

    def places(self, keys: torch.Tensor) -> torch.Tensor:
        """(n,) int64 of keys (n,)."""
        return torch.searchsorted(self.keys, keys)
