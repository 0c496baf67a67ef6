"""Promise: models of torch's modules at random, converted, have the same bits for any cut of the batch."""

import random
from itertools import pairwise

import pytest
import torch
from speeds import slow_except

from tritonrec import nn

tnn = torch.nn
pytestmark = pytest.mark.filterwarnings("ignore:dropout option adds dropout")


def block(draw, dim):
    heads = draw.choice([heads for heads in (1, 2, 3, 4) if dim % heads == 0])
    made = {
        "linear": lambda: tnn.Linear(dim, dim),
        "layer_norm": lambda: tnn.LayerNorm(dim),
        "rms_norm": lambda: tnn.RMSNorm(dim),
        "dropout": lambda: tnn.Dropout(0.3),
        "curves": lambda: tnn.Sequential(tnn.SiLU(), tnn.Linear(dim, dim, bias=False), tnn.Sigmoid()),
        "encoder": lambda: tnn.TransformerEncoderLayer(
            dim, heads, draw.randrange(1, 9), draw.choice([0.0, 0.2]), draw.choice(["relu", "gelu"]),
            batch_first=draw.random() < 0.5, norm_first=draw.random() < 0.5, bias=draw.random() < 0.7,
        ),
        "gru": lambda: tnn.GRU(dim, dim, draw.randrange(1, 3), batch_first=True, dropout=0.1),
        "conv": lambda: tnn.Conv1d(
            dim, dim, draw.randrange(1, 4), padding="same", dilation=draw.randrange(1, 3)
        ),
        "attention": lambda: tnn.MultiheadAttention(dim, heads, 0.1, batch_first=True),
    }  # fmt: skip
    kind = draw.choice(list(made))
    return kind, made[kind]()


class Stack(tnn.Module):
    """A few blocks over (B, T, dim), the first one perhaps twice."""

    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.dim, self.most = draw.randrange(1, 13), draw.randrange(1, 9)
        self.positions = tnn.Embedding(self.most, self.dim)
        kinds, blocks = zip(*(block(draw, self.dim) for _ in range(draw.randrange(1, 5))), strict=True)
        self.kinds, self.blocks = kinds, tnn.ModuleList(blocks)
        self.side, self.twice = draw.choice(["left", "right"]), draw.random() < 0.3

    def forward(self, x, hidden):
        x = x + self.positions(torch.arange(self.most)[None])
        later = torch.ones(self.most, self.most, dtype=torch.bool).triu(1)
        steps = list(zip(self.kinds, self.blocks, strict=True))
        for kind, module in [*steps, *steps[: self.twice]]:
            if kind == "gru":
                x = module(x)[0]
            elif kind == "conv":
                x = x + module(x.transpose(1, 2)).transpose(1, 2)
            elif kind == "attention":
                x = x + module(x, x * 0.7, x, key_padding_mask=hidden, attn_mask=later)[0]
            elif kind == "encoder" and not module.self_attn.batch_first:
                x = module(x.transpose(0, 1), src_key_padding_mask=hidden).transpose(0, 1)
            else:
                x = module(x, src_key_padding_mask=hidden) if kind == "encoder" else module(x)
        return x


def run(model, lengths, rows, cotangent, sample_ids, cut, seed):
    """Output and gradient of the rows of each sample, and the exact sums of the parameters."""
    accumulator, found = nn.GradientAccumulator(model), {}
    pieces, slopes = rows.split(lengths), cotangent.split(lengths)
    for members in cut:
        offsets = torch.tensor([0, *(lengths[sample] for sample in members)]).cumsum(0)
        x = torch.cat([pieces[sample] for sample in members]).requires_grad_()
        numbers = sample_ids[list(members)]
        with accumulator.active(), nn.samples(model, numbers, offsets, seed, num_tokens=len(x)) as now:
            y = model(x, offsets)
            now.backward = True
            y.backward(torch.cat([slopes[sample] for sample in members]))
        for sample, (start, stop) in zip(members, pairwise(offsets.tolist()), strict=True):
            found[sample] = y.detach()[start:stop], x.grad[start:stop]
    return found, accumulator.take()


# 52: a feed-forward network of one unit over one place, where torch's own GELU has another path
@pytest.mark.parametrize("seed", slow_except([0, 3, 17, 52], range(150)))
def test_any_cut_has_the_same_bits(seed):
    stack = Stack(seed)
    assert nn.convert(stack).left == {}
    model, draw = nn.Padded(stack, stack.most, stack.side), random.Random(seed + 1)
    count = draw.randrange(1, 7)
    lengths = [draw.randrange(0, stack.most + 1) for _ in range(count)]
    rows, cotangent = torch.randn(2, sum(lengths), stack.dim).unbind()
    given = model, lengths, rows, cotangent, torch.randperm(50)[:count]
    whole, sums = run(*given, [range(count)], seed)
    halves = [part for part in (range(0, count, 2), range(1, count, 2)) if part]
    for cut in ([[sample] for sample in range(count)], [range(count)[::-1]], halves):
        found, others = run(*given, cut, seed)
        for sample, values in found.items():
            assert all(map(torch.equal, values, whole[sample])), (stack.kinds, sample)
        assert all(torch.equal(value, others[name]) for name, value in sums.items()), stack.kinds
