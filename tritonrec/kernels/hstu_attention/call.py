"""The arguments of HSTU attention beside q, k and v: a mask and a bias for users, a `Call` for kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tritonrec.kernels.arguments import as_float, check_tensors, check_whole
from tritonrec.kernels.offsets import check_offsets_shape


@dataclass(frozen=True)
class HSTUMask:
    """Which keys a query sees beside the causal rule; all options combine. `masks` draws them.

    Args:
        num_targets: (B,) int32 or int64: the last so many tokens of a sequence see the tokens before them
            all and themselves, not each other. In groups of `target_group_size` they also see the earlier
            ones of their group.
        num_contexts: (B,) int32 or int64: the first so many tokens of a sequence see each other and all of
            history. Or `contextual_seq_len`, the same number for all sequences; one that is shorter without
            its targets has no history then.
        max_attn_len: history and targets see at most so many places back, and themselves; 0: no limit.
        min_full_attn_seq_len: the last so many rows of history, and the targets, have no such limit.
        attn_prefix_len: nor do the first so many tokens of a sequence, as keys.
    """

    num_targets: torch.Tensor | None = None
    target_group_size: int = 1
    num_contexts: torch.Tensor | None = None
    contextual_seq_len: int = 0
    max_attn_len: int = 0
    min_full_attn_seq_len: int = 0
    attn_prefix_len: int = 0


@dataclass(frozen=True)
class HSTUBias:
    """The relative attention bias, added to the scores: a weight by position, one by time, or both.

    Args:
        pos_weights: (2 N - 1,) float32 with N = max_seq_len, weight of query i and key j at j - i + N - 1; or
            (N,), at i - j, for masks without contextual tokens. One table for all heads.
        ts_weights: (buckets,) float32; floor(log2(max(1, t_i - t_j))), at most the last bucket, exact for all
            int64. timestamps: (L,) int64, needed with it. query_timestamps: (L,) int64, the t_i where they
            are others (HSTU takes the time of the next token).
        scaled_by_alpha: False: alpha * q k + bias, as Meta's code has it. True: alpha * (q k + bias), as
            NVIDIA's and FBGEMM's.
    """

    pos_weights: torch.Tensor | None = None
    ts_weights: torch.Tensor | None = None
    timestamps: torch.Tensor | None = None
    query_timestamps: torch.Tensor | None = None
    scaled_by_alpha: bool = False


class Call(NamedTuple):
    """The arguments of the registered op after q, k and v, in the order of its schema."""

    seq_offsets: torch.Tensor
    max_seq_len: int
    alpha: float
    scaling_seqlen: int = 1
    attn_scale: torch.Tensor | None = None
    num_targets: torch.Tensor | None = None
    target_group_size: int = 1
    num_contexts: torch.Tensor | None = None
    max_attn_len: int = 0
    min_full_attn_seq_len: int = 0
    attn_prefix_len: int = 0
    pos_weights: torch.Tensor | None = None
    ts_weights: torch.Tensor | None = None
    timestamps: torch.Tensor | None = None
    query_timestamps: torch.Tensor | None = None
    bias_factor: float = 1.0
    delta_offsets: torch.Tensor | None = None
    deterministic: bool = True

    @property
    def mask(self) -> HSTUMask:
        """Numbers beyond every sequence mean what its length means, and sums with them could overflow."""
        most = max(self.max_seq_len, 1)
        return HSTUMask(
            target_group_size=min(self.target_group_size, most), max_attn_len=min(self.max_attn_len, most),
            min_full_attn_seq_len=min(self.min_full_attn_seq_len, most),
            attn_prefix_len=min(self.attn_prefix_len, most),
        )  # fmt: skip

    @property
    def num_sequences(self) -> int:
        return self.seq_offsets.shape[0] - 1

    @property
    def has_bias(self) -> bool:
        return self.pos_weights is not None or self.ts_weights is not None

    @property
    def position_index(self) -> tuple[int, int]:
        """(base, sign): the weight of a pair is ``pos_weights[base + sign * (column - row)]``."""
        if self.pos_weights is None:
            return 0, 0
        two_sided = len(self.pos_weights) == 2 * self.max_seq_len - 1
        return (self.max_seq_len - 1, 1) if two_sided else (0, -1)

    def new_table_gradients(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros (B, entries) for both tables, (B, 0) for one that is not there."""
        dpos, dts = (
            torch.zeros(
                self.num_sequences, 0 if table is None else len(table),
                dtype=dtype, device=self.seq_offsets.device,
            )
            for table in (self.pos_weights, self.ts_weights)
        )  # fmt: skip
        return dpos, dts


def describe(
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    *,
    alpha: float,
    scaling_seqlen: int | None = None,
    attn_scale: torch.Tensor | None = None,
    mask: HSTUMask | None = None,
    bias: HSTUBias | None = None,
    delta_offsets: torch.Tensor | None = None,
    deterministic: bool = True,
) -> Call:
    """The `Call` of `hstu_attention`'s arguments."""
    mask, bias = mask or HSTUMask(), bias or HSTUBias()
    alpha = as_float("alpha", alpha)
    check_whole(
        max_seq_len=max_seq_len, scaling_seqlen=1 if scaling_seqlen is None else scaling_seqlen,
        target_group_size=mask.target_group_size, contextual_seq_len=mask.contextual_seq_len,
        max_attn_len=mask.max_attn_len, min_full_attn_seq_len=mask.min_full_attn_seq_len,
        attn_prefix_len=mask.attn_prefix_len,
    )  # fmt: skip
    num_contexts = mask.num_contexts
    if mask.contextual_seq_len:
        if mask.contextual_seq_len < 0:
            raise ValueError(f"contextual_seq_len must be at least 0, got {mask.contextual_seq_len}")
        if num_contexts is not None:
            raise ValueError("give num_contexts or contextual_seq_len, not both")
        check_offsets_shape("seq_offsets", seq_offsets)
        check_tensors(("num_targets",), seq_offsets=seq_offsets, num_targets=mask.num_targets)
        rest = seq_offsets[1:] - seq_offsets[:-1]
        rest = rest if mask.num_targets is None else rest - mask.num_targets
        num_contexts = rest.clamp(0, mask.contextual_seq_len)
    return Call(
        seq_offsets, max_seq_len, alpha, 1 if scaling_seqlen is None else scaling_seqlen, attn_scale,
        mask.num_targets, mask.target_group_size, num_contexts, mask.max_attn_len, mask.min_full_attn_seq_len,
        mask.attn_prefix_len, bias.pos_weights, bias.ts_weights, bias.timestamps, bias.query_timestamps,
        alpha if bias.scaled_by_alpha else 1.0, delta_offsets, deterministic,
    )  # fmt: skip


def is_zero(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether nothing is summed. With Dqk = 0 there still is the bias."""
    return q.shape[0] == 0 or q.shape[1] == 0 or v.numel() == 0
