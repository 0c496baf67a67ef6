"""Models of ours as plain eager torch, with their weights: the peers of `measure_serving.py`.

As one would write a small service: histories padded to the longest, dense tables, `torch.nn.functional`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tritonrec.nn import DLRM, HSTU, SASRec

Encode = Callable[[Sequence[Tensor]], Tensor]
EPS = 1e-6


def normed(x: Tensor, norm: torch.nn.Module) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, EPS)  # type: ignore[arg-type]


def linear(x: Tensor, layer: torch.nn.Module) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)  # type: ignore[arg-type]


def heads(x: Tensor, count: int) -> Tensor:
    """(B, N, H * D) as (B, H, N, D)."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def hstu_layer(layer: torch.nn.Module, x: Tensor) -> Tensor:
    config, places = layer.config, x.shape[1]
    u, v, q, k = F.silu(linear(normed(x, layer.norm), layer.uvqk)).split(layer.sizes, -1)
    q, k, v = (heads(each, config.heads) for each in (q, k, v))
    weights = F.silu(q @ k.transpose(-1, -2) * config.qk_dim**-0.5) / config.max_seq_len
    causal = torch.ones(places, places, dtype=torch.bool, device="cpu").tril()
    attended = (weights * causal @ v).transpose(1, 2).flatten(2)
    return x + linear(normed(attended, layer.gate) * u, layer.output)


def sasrec_layer(layer: torch.nn.Module, x: Tensor) -> Tensor:
    q, k, v = (
        heads(each, layer.config.heads)
        for each in linear(normed(x, layer.norm), layer.qkv).split(layer.sizes, -1)
    )
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = x + linear(attended, layer.output)
    return x + linear(F.relu(linear(normed(x, layer.ffn_norm), layer.inner)), layer.outer)


def encoder(model: HSTU | SASRec, table: Tensor) -> Encode:
    """Users' vectors (B, d) of their histories, places in `table` (I, d)."""
    layer = hstu_layer if isinstance(model, HSTU) else sasrec_layer

    def encode(histories: Sequence[Tensor]) -> Tensor:
        lengths = torch.tensor([len(each) for each in histories], dtype=torch.int64, device="cpu")
        x = table[pad_sequence(list(histories), batch_first=True)] * model.config.dim**0.5
        x = x + model.positions.weight[: x.shape[1]]
        for each in model.layers:
            x = layer(each, x)
        return normed(x[torch.arange(len(histories), device="cpu"), lengths - 1], model.norm)

    return encode


def clicks(model: DLRM, tables: Sequence[Tensor]) -> Callable[[Tensor, Sequence[Tensor]], Tensor]:
    """Probabilities (B,) of dense features (B, F) and of each feature's places (B,)."""
    rows, columns = torch.tril_indices(len(tables) + 1, len(tables) + 1, -1)

    def mlp(x: Tensor, layers: torch.nn.Module) -> Tensor:
        linears = [each for each in layers.modules() if hasattr(each, "in_features")]
        for before, _ in pairwise(linears):
            x = F.relu(linear(x, before))
        return linear(x, linears[-1])

    def predict(dense: Tensor, places: Sequence[Tensor]) -> Tensor:
        x = F.relu(mlp(dense, model.bottom))
        vectors = torch.stack(
            [x, *(F.embedding(at, table) for at, table in zip(places, tables, strict=True))], 1
        )
        pairs = (vectors @ vectors.transpose(1, 2))[:, rows, columns]
        return torch.sigmoid(mlp(torch.cat([x, pairs], 1), model.top)).squeeze(1)

    return predict
