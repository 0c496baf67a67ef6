"""A model's layers for new tokens in one call of the CPU (`numba_layers`): weights as its loops read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data.jagged import offsets_of
from ...kernels.autocast import Precision
from ...kernels.linear.numba_linear import laid_out
from ...kernels.workers import over_ranges
from ...nn import HSTU, HSTULayer, NextItemModel, SASRec, SASRecLayer
from .encoder import Encoder, Step, encode_new

CACHE_LINE = 16  # of float32


class Whole:
    """`encode_new` of a float32 HSTU or SASRec, with its bits.

    Attributes:
        positions: (max_seq_len, d), rows that are added to the embeddings.
    """

    def __init__(self, model: NextItemModel):
        from . import numba_layers

        config, norm = model.config, model.norm
        first: Any = model.layers[0]
        parts = [_parts(each) for each in model.layers]
        self.dim, widths = config.dim, [config.dim, config.heads, config.qk_dim, config.v_dim]
        scales = [config.qk_dim**-0.5, config.dim**0.5]
        if isinstance(model, HSTU):
            self._kernel: Callable[..., bool] = numba_layers.hstu
            eps = [first.norm.eps, first.gate.eps, norm.eps]
            scales[1:1] = [1 / config.max_seq_len]
        else:
            self._kernel = numba_layers.sasrec
            eps = [first.norm.eps, first.ffn_norm.eps, norm.eps]
            widths.append(first.inner.out_features)
        layers, at = _behind_each_other(parts)
        shared, shared_at = _behind_each_other([[model.positions.weight, norm.weight, norm.bias]])
        self.positions = shared[0, : shared_at[0, 1]].reshape(-1, config.dim)  # a view
        self._arguments = (
            layers, at, shared[0], shared_at, tuple(map(np.uintp, widths)),
            np.array([*eps, *scales], np.float32),
        )  # fmt: skip
        self._cost = 2.0 * layers.size, 4.0 * len(parts) * config.heads * (config.qk_dim + config.v_dim)

    def encode(self, rows: Tensor, step: Step, store: Tensor) -> Tensor:
        """See `encode_new`."""
        fresh, offsets = offsets_of(step.lengths - step.known), step.offsets
        users = tuple(each.numpy() for each in (fresh, step.known, offsets, step.places, step.timestamps))
        count, out = len(step.lengths), torch.empty(len(step.lengths), self.dim, dtype=torch.float32)
        given = rows.numpy().reshape(-1), users, store.numpy(), out.numpy().reshape(-1)

        def run(start: int, stop: int) -> bool:
            return self._kernel(*self._arguments, *given, start, stop)

        of_token, of_pair = self._cost
        finite = over_ranges(run, count, len(rows) * of_token + float(step.pairs) * of_pair)
        if not all(finite):
            raise ValueError("a key or value is not finite: no cache can be exact with it")
        return out


def encoder_of(model: NextItemModel, precision: Precision) -> Encoder:
    """`encode_new` of a model, in one call where its layers and precision are those of a kernel."""
    layer = {HSTU: HSTULayer, SASRec: SASRecLayer}.get(type(model))
    if precision == "float32" and layer and {type(each) for each in model.layers} == {layer}:
        return Whole(model).encode
    return partial(encode_new, model, precision)


def _parts(layer: Any) -> list[Any]:
    """Parameters of a layer in the order of its kernel; weights of products (inner, columns), laid out."""
    modules, rest = [layer.norm], []
    if isinstance(layer, HSTULayer):
        modules += [layer.uvqk, layer.gate, layer.output]
        none = torch.empty(0, dtype=torch.float32)
        rest = [layer.tables().get(name, none) for name in ("pos_weights", "ts_weights")]
    else:
        modules += [layer.qkv, layer.output, layer.ffn_norm, layer.inner, layer.outer]
    weights = [each.weight if each.weight.dim() == 1 else laid_out(each.weight.t()) for each in modules]
    return [
        part for weight, each in zip(weights, modules, strict=True) for part in (weight, each.bias)
    ] + rest


def _behind_each_other(parts: Sequence[Sequence[Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of equal parts: an array (rows, n), and where each part begins (on a cache line) and ends."""
    sizes = [np.size(each) if isinstance(each, np.ndarray) else each.numel() for each in parts[0]]
    starts = np.cumsum([0, *(-(-size // CACHE_LINE) * CACHE_LINE for size in sizes)])
    found = torch.zeros(len(parts), int(starts[-1]), dtype=torch.float32)
    for row, of_row in zip(found, parts, strict=True):
        for part, start, size in zip(of_row, starts, sizes, strict=False):
            row[start : start + size] = torch.as_tensor(part, dtype=torch.float32).detach().flatten()
    return found.numpy(), np.stack([starts[:-1], starts[:-1] + sizes], 1)
