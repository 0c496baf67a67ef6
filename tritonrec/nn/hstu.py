"""HSTU, the sequence model (Zhai et al., "Actions speak louder than words", ICML 2024, section 3).

    u, v, q, k = silu(linear(norm(x)))          pointwise projection, equation 1
    a = attention(q, k, v)                      pointwise aggregated attention, equation 2
    x = x + linear(dropout(norm(a) * u))        pointwise transformation, equation 3

With `HSTUConfig.relative_bias` the scores of attention get equation 2's relative attention bias: one learned
weight for each place back, one for each power of two of the time since. As in the published model, a token
asks at the time of the next one, which is known when the next item is to be found.

Dimensions: L tokens, H heads, d model dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .. import ops
from ..settings import check_number, setting, typed
from .context import takes_indexed_rows
from .hstu_layer import hstu_layer, hstu_layer_over
from .modules import GatedNorm, LayerNorm, Linear, RelativeBias
from .next_item import LayerConfig, NextItemInput, NextItemModel
from .next_item_step import losses_by_one_op
from .tokens import Tokens


@typed
@dataclass(frozen=True)
class HSTUConfig(LayerConfig):
    """Sizes of an HSTU model, beside those of `LayerConfig`.

    Args:
        relative_bias: add learned biases of relative position and time to the attention's scores.
        temperature: of the sampled softmax.
    """

    relative_bias: bool = setting(False, "hstu, grm: learned biases of position and time.")
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("temperature", self.temperature, positive=True)


class HSTULayer(torch.nn.Module):
    """One layer: (L, d) -> (L, d).

    Args:
        norm_product: the last step is ``linear(dropout(norm(a * u)))``, as MTGRBoost writes it.
    """

    def __init__(self, config: HSTUConfig, norm_product: bool = False):
        super().__init__()
        self.config = config
        width, qk_width = config.heads * config.v_dim, config.heads * config.qk_dim
        self.sizes = [width, width, qk_width, qk_width]
        self.norm = LayerNorm(config.dim)
        self.uvqk = Linear(config.dim, sum(self.sizes))
        self.gate = GatedNorm(width, config.dropout, norm_product=norm_product)
        self.output = Linear(width, config.dim)
        self.bias = RelativeBias(config.max_seq_len, config.time_buckets) if config.relative_bias else None

    def forward(self, x: torch.Tensor, tokens: Tokens, seed: int) -> torch.Tensor:
        """`tokens` with timestamps where there is a relative bias; `seed`: of this layer's dropout."""
        if self.bias is not None and tokens.timestamps is None:
            raise ValueError("an HSTU layer with a relative bias needs the tokens' timestamps")
        return hstu_layer(self, x, tokens, seed, **self.tables())

    over = hstu_layer_over

    def tables(self) -> dict[str, torch.Tensor]:
        """The weights of the relative bias, where there is one, by their names in `hstu_layer`."""
        if self.bias is None:
            return {}
        return {"pos_weights": self.bias.pos_weights, "ts_weights": self.bias.ts_weights}


class HSTU(NextItemModel):
    """Next-item model: rows of items plus positions, HSTU layers, sampled softmax."""

    layer = HSTULayer

    def place(self, batch: NextItemInput) -> Tokens:
        """Where the batch's tokens stand, and when they ask."""
        tokens = super().place(batch)
        return tokens.with_next_query_timestamps() if self.config.relative_bias else tokens

    @partial(takes_indexed_rows, on_the_cpu=True)
    def forward(self, batch: NextItemInput, rows: dict[str, Any], seed: int) -> torch.Tensor:
        """Losses (B,); see `NextItemModel`."""
        item = rows["item"]
        if type(self) is HSTU and isinstance(item, ops.IndexedRows) and item.values.is_cpu:
            losses = losses_by_one_op(self, batch, item, seed)
            if losses is not None:
                return losses
            rows = {**rows, "item": item.gathered()}
        return super().forward(batch, rows, seed)
