"""Where the tokens of a batch stand: whose they are, in which place, and at which time.

Dimensions: L tokens, B samples.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import ops
from ..kernels.dispatch import is_compiling


class Tokens(NamedTuple):
    """Where the tokens (L,) of a batch stand. All int64; nothing here depends on a sample's neighbours."""

    seq_offsets: torch.Tensor  # (B + 1,), sample b owns tokens seq_offsets[b] : seq_offsets[b + 1]
    sample_ids: torch.Tensor  # (L,)
    positions: torch.Tensor  # (L,), in the sample, from 0
    timestamps: torch.Tensor | None = None  # (L,)
    num_targets: torch.Tensor | None = None  # (B,), the last so many tokens do not see each other
    query_timestamps: torch.Tensor | None = None  # (L,), when a token asks, where not at its own time

    @classmethod
    def place(
        cls,
        seq_offsets: torch.Tensor,
        sample_ids: torch.Tensor,
        max_seq_len: int,
        timestamps: torch.Tensor | None = None,
        num_targets: torch.Tensor | None = None,
        num_tokens: int | None = None,
    ) -> Tokens:
        """From offsets (B + 1,) and one id for each sample (B,).

        Args:
            num_tokens: L, for a device that is not to be waited for; the timestamps tell it too.

        Raises:
            ValueError: a sample is longer than `max_seq_len`; on an accelerator an asynchronous assertion.
        """
        lengths = seq_offsets.diff()
        if timestamps is not None:
            num_tokens = timestamps.shape[0]
        check_longest(lengths, max_seq_len)
        owners = torch.repeat_interleave(sample_ids, lengths, output_size=num_tokens)
        starts = torch.repeat_interleave(seq_offsets[:-1], lengths, output_size=num_tokens)
        positions = torch.arange(owners.shape[0], device=starts.device) - starts
        return cls(seq_offsets, owners, positions, timestamps, num_targets)

    def with_next_query_timestamps(self) -> Tokens:
        """The same tokens, each asking at the time of its sample's next one, the last at its own."""
        assert self.timestamps is not None
        last = self.positions.roll(-1) == 0
        times = torch.where(last, self.timestamps, self.timestamps.roll(-1))
        return self._replace(query_timestamps=times)


def check_longest(lengths: torch.Tensor, max_seq_len: int) -> None:
    """Raise ValueError for a sample of more than `max_seq_len` tokens, by lengths (B,).

    An asynchronous assertion on an accelerator, and an assertion in a graph, which reads no value when it is
    made.
    """
    if not lengths.is_cpu or is_compiling():
        torch._assert_async((lengths <= max_seq_len).all(), f"a sample has more than {max_seq_len} tokens")
    elif len(lengths) and int(lengths.max()) > max_seq_len:
        raise ValueError(f"a sample has {int(lengths.max())} tokens, the model takes {max_seq_len}")


def sum_by_sample(values: torch.Tensor, seq_offsets: torch.Tensor) -> torch.Tensor:
    """Sums (B, ...) of each sample's values (L, ...), float32, in its tokens' order; 0 for an empty one."""
    lengths = seq_offsets[1:] - seq_offsets[:-1]
    count, tokens = lengths.shape[0], values.shape[0]  # a len() would be a constant for torch.export
    numbers = torch.arange(count, device=lengths.device)
    samples = torch.repeat_interleave(numbers, lengths, output_size=tokens)
    return ops.segment_sum(values.unsqueeze(1).flatten(1), samples, count).view(count, *values.shape[1:])
