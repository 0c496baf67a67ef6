"""BERT4Rec of torch's modules: items are hidden at random, and found from those on both sides of them.

python docs/examples/bert4rec.py
torchrun --nproc-per-node 2 docs/examples/bert4rec.py       # the same digits
"""

import argparse

import torch
from gru4rec import DIM, LENGTH, main

from tritonrec import nn, ops


class Encoder(torch.nn.Module):
    """Sun et al. 2019: x (B, T, D + 1) rows, and 1 behind those to hide; hidden (B, T) True for no token."""

    def __init__(self, dropout, share):
        super().__init__()
        self.positions, self.mask = torch.nn.Embedding(LENGTH, DIM), torch.nn.Embedding(1, DIM)
        for each in (self.positions, self.mask):
            torch.nn.init.normal_(each.weight, std=0.02)
        self.drop, self.hide = torch.nn.Dropout(dropout), torch.nn.Dropout(share)
        layer = torch.nn.TransformerEncoderLayer(DIM, 2, DIM, dropout, batch_first=True, norm_first=True)
        norm = torch.nn.LayerNorm(DIM)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)

    def forward(self, x, hidden):
        x, last = x.split([DIM, 1], -1)
        is_masked = (self.hide(torch.ones_like(last)) == 0) | (last > 0)
        x = torch.where(is_masked, self.mask(torch.zeros_like(hidden, dtype=torch.int64)), x * DIM**0.5)
        x = self.drop(x + self.positions(torch.arange(LENGTH)[None]))
        return torch.cat([self.encoder(x, src_key_padding_mask=hidden), is_masked.to(x.dtype)], -1)


class BERT4Rec(nn.PaddedNextItem):
    """Takes the labels, each the item behind a token of the batch: the last place is the next item's."""

    def __init__(self, dropout=0.2, share=0.3):
        super().__init__(Encoder(dropout, share), LENGTH)

    def encode(self, batch, rows):
        """Hidden states (L, D): behind each user's items but the first one the next one's place, hidden."""
        last = rows.new_zeros(len(rows), 1).index_fill(0, batch.offsets[1:] - 1, 1.0)
        return self.body(torch.cat([rows.roll(-1, 0), last], 1), batch.offsets)[:, :DIM]

    def forward(self, batch, rows, seed):
        """Losses (B,) of the items that were hidden."""
        tokens, count = batch.negatives.shape
        _, labels, sampled = rows["item"].split([tokens, tokens, tokens * count])
        out = self.body(torch.cat([labels, labels.new_zeros(tokens, 1)], 1), batch.offsets)
        hidden, is_masked = out.split([DIM, 1], -1)
        valid = batch.negatives != batch.labels[:, None]
        losses = ops.sampled_softmax(hidden, labels, sampled.unflatten(0, (tokens, count)), valid, 1.0)
        return nn.sum_by_sample(losses * is_masked[:, 0], batch.offsets)


def model_of(dropout=0.2, share=0.3):
    """With torch's modules as ours of the same names."""
    model = BERT4Rec(dropout, share)
    nn.convert(model)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="BERT4Rec on a log of interactions.")
    parser.add_argument("--data", default="ml-100k")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--patience", type=int, default=40)  # it stands still for twenty epochs
    options = parser.parse_args()
    main(options.data, options.epochs, options.patience, make=model_of)
