"""Everything that describes one call of HSTU attention beside q, k and v."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tritonrec.kernels.hstu_attention.masks import Mask


class Call(NamedTuple):
    """The arguments of `hstu_attention`, checked and brought into one form; what is None is not asked for."""

    seq_offsets: torch.Tensor
    max_seq_len: int
    alpha: float
    scaling_seqlen: int
    mask_numbers: list[int]
    num_targets: torch.Tensor | None = None
    num_contexts: torch.Tensor | None = None
    delta_offsets: torch.Tensor | None = None
    attn_scale: torch.Tensor | None = None
    pos_weights: torch.Tensor | None = None
    ts_weights: torch.Tensor | None = None
    timestamps: torch.Tensor | None = None
    query_timestamps: torch.Tensor | None = None
    bias_factor: float = 1.0
    deterministic: bool = True
    impl: str = "auto"

    @property
    def mask(self) -> Mask:
        """Numbers beyond every sequence mean what its length means, and sums with them could overflow."""
        most = max(self.max_seq_len, 1)
        return Mask(*(min(number, most) for number in self.mask_numbers))

    @property
    def num_sequences(self) -> int:
        return self.seq_offsets.shape[0] - 1

    @property
    def has_bias(self) -> bool:
        return self.pos_weights is not None or self.ts_weights is not None

    @property
    def position_index(self) -> tuple[int, int]:
        """(base, sign): the weight of a pair is ``pos_weights[base + sign * (column - row)]``."""
        assert self.pos_weights is not None
        two_sided = len(self.pos_weights) == 2 * self.max_seq_len - 1
        return (self.max_seq_len - 1, 1) if two_sided else (0, -1)

    def new_table_gradients(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros (B, entries) for both tables, (B, 0) for one that is not there."""
        tables = (self.pos_weights, self.ts_weights)
        dpos, dts = (
            torch.zeros(
                self.num_sequences, 0 if table is None else len(table),
                dtype=dtype, device=self.seq_offsets.device,
            )
            for table in tables
        )  # fmt: skip
        return dpos, dts
