"""The check of jagged offsets that kernels over sequences share."""

from __future__ import annotations

import torch

from tritonrec.kernels.arguments import not_a_tensor
from tritonrec.kernels.gradients import remembered

# Tokens of a sequence: places in it, and sums of a few of them, are int32 in kernels.
LONGEST = 1 << 27


def check_offsets(name: str, offsets: torch.Tensor, tokens: int) -> None:
    """Refuse offsets that do not cut [0, tokens) into sequences, naming the first bad entry.

    `offsets` is (B + 1,) int32 or int64, starts at 0, never decreases and ends at `tokens`. On an accelerator
    the check is queued on the device (`torch._assert_async`), and nothing waits for it.
    """
    check_offsets_shape(name, offsets)
    remembered(offsets, ("offsets", tokens), lambda: _check_offsets(name, offsets, tokens))


def _check_offsets(name: str, offsets: torch.Tensor, tokens: int) -> None:
    if offsets.device.type != "cpu":
        whole = (offsets[0] == 0) & (offsets[-1] == tokens) & (offsets[1:] >= offsets[:-1]).all()
        torch._assert_async(whole, f"{name} does not cut [0, {tokens}) into sequences")
        return
    values = offsets.tolist()
    if values[0] != 0:
        raise ValueError(f"{name}[0] must be 0, got {values[0]}")
    for i in range(1, len(values)):
        if values[i] < values[i - 1]:
            raise ValueError(f"{name}[{i}] = {values[i]} comes after {values[i - 1]}: offsets never decrease")
    if values[-1] != tokens:
        raise ValueError(
            f"{name} must end at the {tokens} tokens, got {name}[{len(values) - 1}] = {values[-1]}"
        )


def check_offsets_shape(name: str, offsets: torch.Tensor) -> None:
    """Refuse what is not (B + 1,) int32 or int64; no value is read."""
    if not isinstance(offsets, torch.Tensor):
        raise not_a_tensor(name, offsets)
    if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64) or offsets.numel() == 0:
        raise ValueError(
            f"{name} must be (B + 1,) int32 or int64, got {tuple(offsets.shape)} {offsets.dtype}"
        )


def check_max_seq_len(max_seq_len: int) -> None:
    if not 0 <= max_seq_len <= LONGEST:
        raise ValueError(f"max_seq_len must be in [0, 2**27], got {max_seq_len}")


def check_lengths(seq_offsets: torch.Tensor, max_seq_len: int) -> None:
    """Refuse a sequence of more than `max_seq_len` tokens, naming the first; otherwise as `check_offsets`."""
    remembered(seq_offsets, ("lengths", max_seq_len), lambda: _check_lengths(seq_offsets, max_seq_len))


def _check_lengths(seq_offsets: torch.Tensor, max_seq_len: int) -> None:
    if seq_offsets.device.type != "cpu":
        fits = (seq_offsets[1:] - seq_offsets[:-1] <= max_seq_len).all()
        torch._assert_async(fits, f"a sequence is longer than {max_seq_len=}")
        return
    offsets = seq_offsets.numpy()
    lengths = offsets[1:] - offsets[:-1]
    if lengths.size and lengths.max() > max_seq_len:
        at = int((lengths > max_seq_len).argmax())
        raise ValueError(f"sequence {at} has {int(lengths[at])} tokens, more than {max_seq_len=}")
