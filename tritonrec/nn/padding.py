"""Jagged rows as a padded batch and back, for models that are written for (B, T, D).

T is a fixed `max_seq_len`, never the longest sample of the batch: the length of a sum, the place of a
left-padded token and the columns of a mask would depend on which samples are together. Two samples of 2 and 3
tokens, T = 4::

    rows          a0 a1 b0 b1 b2         seq_offsets  0 2 5
    side="left"   .  .  a0 a1            hidden   True  True  False False
                  .  b0 b1 b2                     True  False False False
    side="right"  a0 a1 .  .             hidden   False False True  True
                  b0 b1 b2 .                      False False False True

Dimensions: L tokens, B samples, T places, D features.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from .. import ops
from ..kernels.autocast import widen, without_autocast
from . import context
from .layers import LayerNorm, refuse
from .losses import binary_cross_entropy
from .tokens import check_longest, sum_by_sample

Side = Literal["left", "right"]


def padded_places(seq_offsets: torch.Tensor, max_seq_len: int, num_tokens: int, side: Side) -> torch.Tensor:
    """(L,) int64: the place of each token among B * T.

    Raises ValueError for a sample of more than `max_seq_len` tokens; on an accelerator asynchronously.
    """
    if side not in ("left", "right"):
        raise ValueError(f"side must be 'left' or 'right', got {side!r}")
    lengths = seq_offsets.diff()
    check_longest(lengths, max_seq_len)
    starts = torch.arange(lengths.shape[0], device=lengths.device) * max_seq_len
    if side == "left":
        starts = starts + max_seq_len - lengths
    shift = torch.repeat_interleave(starts - seq_offsets[:-1], lengths, output_size=num_tokens)
    return torch.arange(num_tokens, device=lengths.device) + shift


def pad(
    rows: torch.Tensor, seq_offsets: torch.Tensor, max_seq_len: int, side: Side = "left"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Jagged rows (L, ...) as (B, T, ...), zeros where there is no token, and (B, T) bool, True there.

    Args:
        rows: any dtype, such as ids (L,) int64 or embeddings (L, D) float32. seq_offsets: (B + 1,) int64.
        max_seq_len: T, the same for every batch.
    Returns:
        Differentiable in float rows; a move, so no bit changes.
    """
    places = padded_places(seq_offsets, max_seq_len, rows.shape[0], side)
    samples = seq_offsets.shape[0] - 1
    flat = rows.flatten(1) if rows.dim() > 1 else rows[:, None]
    wide = flat.new_zeros(samples * max_seq_len, flat.shape[1])
    ops.scatter_rows(wide, places, flat)
    hidden = torch.ones(samples * max_seq_len, dtype=torch.bool, device=rows.device)
    hidden[places] = False
    return wide.view(samples, max_seq_len, *rows.shape[1:]), hidden.view(samples, max_seq_len)


def unpad(
    rows: torch.Tensor, seq_offsets: torch.Tensor, num_tokens: int, side: Side = "left"
) -> torch.Tensor:
    """(B, T, ...) as jagged rows (L, ...): what `pad` did, taken back; differentiable."""
    places = padded_places(seq_offsets, rows.shape[1], num_tokens, side)
    flat = rows.flatten(0, 1)
    return ops.gather_rows(flat.flatten(1), places).view(num_tokens, *rows.shape[2:])


class Padded(torch.nn.Module):
    """A padded encoder called with jagged rows: ``encoder(x (B, T, D), hidden (B, T)) -> (B, T, D')``.

    `hidden` is True where there is no token, as a ``key_padding_mask``. Inside, modules of `tritonrec.nn`
    take the first dimension for the samples.

    Args:
        max_seq_len: T, the same for every batch. side: of the padding.
    """

    def __init__(self, encoder: torch.nn.Module, max_seq_len: int, side: Side = "left"):
        super().__init__()
        self.encoder, self.max_seq_len, self.side = encoder, max_seq_len, side

    def forward(self, rows: torch.Tensor, seq_offsets: torch.Tensor) -> torch.Tensor:
        """(L, D) -> (L, D')."""
        x, hidden = pad(rows, seq_offsets, self.max_seq_len, self.side)
        with context.padded():
            out = self.encoder(x, hidden)
        if isinstance(out, tuple):
            raise TypeError(
                "the encoder must return (B, T, D'), it returned a tuple: wrap it and take the first"
            )
        return unpad(out, seq_offsets, rows.shape[0], self.side)


class PaddedNextItem(torch.nn.Module):
    """A next-item model from a padded encoder, called ``model(batch, rows, seed)`` as the trainer does.

    Args:
        encoder: as `Padded` takes it; it gets the embedding rows of the tokens, (B, T, dim).
        max_seq_len: T. side: of the padding.
        loss: "sampled_softmax" over the label and the batch's negatives, or "bce", SASRec's binary cross
            entropy: the label against 1, each negative against 0. temperature: of the softmax.
        dim: a layer norm of so many features behind the encoder; None: there is none.
    """

    def __init__(
        self,
        encoder: torch.nn.Module,
        max_seq_len: int,
        side: Side = "left",
        loss: Literal["sampled_softmax", "bce"] = "sampled_softmax",
        temperature: float = 1.0,
        dim: int | None = None,
    ):
        super().__init__()
        if loss not in ("sampled_softmax", "bce"):
            raise ValueError(f"loss must be 'sampled_softmax' or 'bce', got {loss!r}")
        refuse("PaddedNextItem with bce", temperature=loss == "bce" and temperature != 1.0)
        self.body = Padded(encoder, max_seq_len, side)
        self.norm = torch.nn.Identity() if dim is None else LayerNorm(dim)
        self.loss, self.temperature = loss, temperature

    def encode(self, batch: Any, rows: torch.Tensor) -> torch.Tensor:
        """Hidden states (L, D) from the embedding rows (L, D) of the tokens."""
        return self.norm(self.body(rows, batch.offsets))

    @context.takes_indexed_rows
    def forward(self, batch: Any, rows: dict[str, Any], seed: int) -> torch.Tensor:
        """Losses (B,), sums over a sample's tokens; `rows` and `batch` as `NextItemModel` takes them."""
        tokens, count = batch.negatives.shape
        item, valid = rows["item"], batch.negatives != batch.labels[:, None]
        if isinstance(item, ops.IndexedRows):
            if self.loss == "sampled_softmax":
                near, places = item.rows[: 2 * tokens], item.rows[2 * tokens :].view(valid.shape)
                items, labels = ops.gather_rows(item.values, near).split(tokens)
                given = self.encode(batch, items), labels, item.values, valid, self.temperature
                return sum_by_sample(ops.sampled_softmax(*given, rows=places), batch.offsets)
            item = item.gathered()
        items, labels, sampled = item.split([tokens, tokens, tokens * count])
        hidden, negatives = self.encode(batch, items), sampled.unflatten(0, (tokens, count))
        if self.loss == "sampled_softmax":
            losses = ops.sampled_softmax(hidden, labels, negatives, valid, self.temperature)
        else:
            losses = _label_against_negatives(hidden, labels, negatives, valid)
        return sum_by_sample(losses, batch.offsets)


def _label_against_negatives(
    hidden: torch.Tensor, labels: torch.Tensor, negatives: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """(L,): -log s(<h, label>) - sum over valid negatives of log(1 - s(<h, negative>))."""
    rows = torch.cat([labels[:, None], negatives], 1)
    # a gather and a product with ones: torch's broadcasts and sums along a row may go by the number of rows
    owners = torch.arange(len(rows), device=rows.device).repeat_interleave(rows.shape[1])
    products = widen(rows).flatten(0, 1) * widen(ops.gather_rows(hidden, owners))
    with without_autocast(rows.device):  # scores of a loss stay float32
        logits = ops.linear(products, products.new_ones(1, products.shape[1])).view(rows.shape[:2])
    wanted = torch.zeros_like(logits)
    wanted[:, 0] = 1
    # a logit of -100 against 0 costs nothing, and `where` gives it no gradient
    logits = torch.cat([logits[:, :1], torch.where(valid, logits[:, 1:], -100.0)], 1)
    return binary_cross_entropy(logits, wanted)
