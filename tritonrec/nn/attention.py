"""torch's attention modules over `ops.softmax_attention`: exact gradients, and no sample sees another.

Dimensions: B samples, T queries and S keys of a sample, E embedding dimension, H heads; L tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .. import ops
from ..kernels.philox.device_seed import DeviceSeed
from . import context
from .exact import gelu, product
from .layers import Dropout, LayerNorm, Linear, new_parameter, refuse


def _hiding(mask: torch.Tensor, hidden: bool) -> torch.Tensor:
    """A float bias of a mask: a bool mask hides where it is `hidden`, a float one is added.

    Raises ValueError for a mask that requires a gradient, which it would not get.
    """
    if mask.requires_grad:
        raise ValueError("a mask gets no gradient: detach it; ops.hstu_attention has learned biases")
    if mask.dtype != torch.bool:
        return mask.float()
    bias = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return bias.masked_fill(mask if hidden else ~mask, -torch.inf)


def _draws(module: torch.nn.Module, p: float, samples: int, device: torch.device) -> dict[str, Any]:
    """Dropout's arguments of `ops.softmax_attention`; outside of a trainer from torch's global generator."""
    if not p:
        return {}
    now = context.current()
    if now is None:
        seed = int(torch.randint(2**62, (), dtype=torch.int64))
        return {"dropout": p, "seed": seed, "sample_ids": torch.arange(samples, device=device)}
    drawn = now.draw_seed(module)
    if isinstance(drawn, DeviceSeed):
        raise ValueError("the dropout of softmax attention is in no graph of micro-batches: set it to 0")
    return {"dropout": p, "seed": drawn, "sample_ids": now.sample_ids}


class MultiheadAttention(torch.nn.Module):
    """``torch.nn.MultiheadAttention`` without weights as output; a query that sees no key gives 0, not NaN.

    Rows are padded, (B, T, E) or with ``batch_first=False`` (T, B, E); or (L, E), which are the jagged tokens
    of the trainer's batch, and outside of one a single sequence, as in torch.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        refuse(
            "MultiheadAttention", add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn,
            kdim=None if kdim == embed_dim else kdim, vdim=None if vdim == embed_dim else vdim,
        )  # fmt: skip
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is no positive multiple of num_heads {num_heads}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {dropout}")
        self.embed_dim, self.num_heads, self.dropout, self.batch_first = (
            embed_dim, num_heads, dropout, batch_first,
        )  # fmt: skip
        options = {"device": device, "dtype": dtype}
        self.in_proj_weight = new_parameter(3 * embed_dim, embed_dim, **options)
        self.in_proj_bias = new_parameter(3 * embed_dim, **options) if bias else None
        self.out_proj = Linear(embed_dim, embed_dim, bias, **options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """torch's: Xavier's uniform, and biases of zero."""
        torch.nn.init.xavier_uniform_(self.in_proj_weight)
        if self.in_proj_bias is not None and self.out_proj.bias is not None:
            torch.nn.init.zeros_(self.in_proj_bias)
            torch.nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """The output, of the query's shape, and None.

        Args:
            key_padding_mask: (B, S), bool, True where a key is hidden, or float, added.
            need_weights: False; True is refused.
            attn_mask: (T, S) or (B H, T, S), as `key_padding_mask`; no gradient.
            is_causal: query i sees keys up to i, with or without a mask that says so.
        """
        refuse("MultiheadAttention", need_weights=need_weights)
        if query.dim() == 2:
            return self._of_tokens(query, key, value, key_padding_mask, attn_mask, is_causal), None
        if not query.dim() == key.dim() == value.dim() == 3:
            raise ValueError(f"query, key and value must be (B, T, E), got query {tuple(query.shape)}")
        same, same_values = query is key and key is value, key is value
        if not self.batch_first:
            query = query.transpose(0, 1)
            key = query if same else key.transpose(0, 1)
            value = key if same_values else value.transpose(0, 1)
        (count, queries, _), keys = query.shape, key.shape[1]
        cuts = torch.arange(count + 1, device=query.device)
        offsets, key_offsets = cuts * queries, None if keys == queries else cuts * keys
        if context.sums_exactly(self.in_proj_weight) and context.current() is not None:
            context.row_offsets((count, queries), self.in_proj_weight, self, query.device)
        flat = query.flatten(0, 1)
        others = (flat, flat)
        if not same:
            others = (key.flatten(0, 1), value.flatten(0, 1))
            others = (others[0], others[0]) if same_values else others
        bias = self._bias(key_padding_mask, attn_mask, count, queries, keys)
        out = self._attend(flat, *others, offsets, key_offsets, max(queries, keys), bias, is_causal)
        out = self.out_proj(out, offsets).unflatten(0, (count, queries))
        return out if self.batch_first else out.transpose(0, 1), None

    def _of_tokens(self, query, key, value, key_padding_mask, attn_mask, is_causal) -> torch.Tensor:
        """(L, E) -> (L, E), of the batch's sequences, or of one."""
        now = context.current()
        if now is None:
            bias = self._bias(
                None if key_padding_mask is None else key_padding_mask[None],
                attn_mask,
                1,
                len(query),
                len(key),
            )
            cuts = torch.arange(2, device=query.device)
            offsets, longest = cuts * len(query), max(len(query), len(key))
            key_offsets = None if len(query) == len(key) else cuts * len(key)
        else:
            if key_padding_mask is not None:
                raise ValueError("nn.MultiheadAttention has no key_padding_mask for jagged rows (L, E)")
            offsets, key_offsets = now.row_offsets(tuple(query.shape[:1]), self), None
            longest = int(offsets.diff().max()) if offsets.shape[0] > 1 else 0  # waits for an accelerator
            bias = None
            if attn_mask is not None:
                bias = _hiding(attn_mask, hidden=True).expand(offsets.shape[0] - 1, self.num_heads, -1, -1)
        out = self._attend(query, key, value, offsets, key_offsets, longest, bias, is_causal)
        return self.out_proj(out, offsets)

    def _attend(self, query, key, value, offsets, key_offsets, longest, bias, is_causal) -> torch.Tensor:
        """Projections and attention of flat rows: (M, E) -> (M, E)."""
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.shape[-1] != self.embed_dim:
                raise ValueError(f"{name} must have {self.embed_dim} features, got {x.shape[-1]}")
        weight, e = (self.in_proj_weight, self.in_proj_bias), self.embed_dim
        of_keys = offsets if key_offsets is None else key_offsets
        if query is key and key is value:
            q, k, v = product(query, *weight, offsets).chunk(3, 1)
        elif key is value:
            q = product(query, *weight, offsets, 0, e)
            k, v = product(key, *weight, of_keys, e, 3 * e).chunk(2, 1)
        else:
            q = product(query, *weight, offsets, 0, e)
            k, v = (
                product(x, *weight, of_keys, n * e, (n + 1) * e) for n, x in enumerate((key, value), start=1)
            )
        q, k, v = (x.unflatten(1, (self.num_heads, e // self.num_heads)) for x in (q, k, v))
        draws = _draws(self, self.dropout if self.training else 0.0, offsets.shape[0] - 1, query.device)
        out = ops.softmax_attention(
            q, k, v, offsets, longest, causal=is_causal, key_offsets=key_offsets, bias=bias,
            **draws,
        )  # fmt: skip
        return out.flatten(1)

    def _bias(self, key_padding_mask, attn_mask, count, queries, keys) -> torch.Tensor | None:
        """Both masks as one (B, H, T, S)."""
        shape, bias = (count, self.num_heads, queries, keys), None
        if attn_mask is not None:
            wanted = (queries, keys) if attn_mask.dim() == 2 else (count * self.num_heads, queries, keys)
            if attn_mask.shape != wanted:
                raise ValueError(f"attn_mask must be {wanted}, got {tuple(attn_mask.shape)}")
            bias = _hiding(attn_mask, hidden=True)
            bias = bias.unflatten(0, shape[:2]) if attn_mask.dim() == 3 else bias.expand(shape)
        if key_padding_mask is not None:
            if key_padding_mask.shape != (count, keys):
                raise ValueError(
                    f"key_padding_mask must be {(count, keys)}, got {tuple(key_padding_mask.shape)}"
                )
            padding = _hiding(key_padding_mask, hidden=True)[:, None, None].expand(shape)
            bias = padding if bias is None else bias + padding
        return bias

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, dropout={self.dropout}, batch_first={self.batch_first}"


class TransformerEncoderLayer(torch.nn.Module):
    """``torch.nn.TransformerEncoderLayer`` of modules of ours, without torch's fast path of evaluation."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[torch.Tensor], torch.Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device=None,
        dtype=None,
    ):
        super().__init__()
        options = {"device": device, "dtype": dtype}
        self.self_attn = MultiheadAttention(
            d_model, nhead, dropout, bias, batch_first=batch_first, device=device, dtype=dtype
        )
        self.linear1 = Linear(d_model, dim_feedforward, bias, **options)
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias, **options)
        self.norm_first = norm_first
        self.norm1 = LayerNorm(d_model, layer_norm_eps, bias=bias, **options)
        self.norm2 = LayerNorm(d_model, layer_norm_eps, bias=bias, **options)
        self.dropout1, self.dropout2 = Dropout(dropout), Dropout(dropout)
        if isinstance(activation, str):
            if activation not in ("relu", "gelu"):
                raise ValueError(f"activation must be 'relu', 'gelu' or a function, got {activation!r}")
            activation = F.relu if activation == "relu" else gelu
        self.activation = activation

    def forward(
        self,
        src: torch.Tensor,
        src_mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """(B, T, E), (T, B, E) without `batch_first`, or jagged (L, E) -> the same shape."""
        turned = src.dim() == 3 and not self.self_attn.batch_first
        x = src.transpose(0, 1) if turned else src
        masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask, "is_causal": is_causal}
        if self.norm_first:
            x = x + self._attention(self.norm1(x), turned, masks)
            x = x + self._feed_forward(self.norm2(x))
        else:
            x = self.norm1(x + self._attention(x, turned, masks))
            x = self.norm2(x + self._feed_forward(x))
        return x.transpose(0, 1) if turned else x

    def _attention(self, x: torch.Tensor, turned: bool, masks: dict) -> torch.Tensor:
        x = x.transpose(0, 1) if turned else x
        x = self.self_attn(x, x, x, **masks)[0]
        return self.dropout1(x.transpose(0, 1) if turned else x)

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))
