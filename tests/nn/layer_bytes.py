"""A layer made of single ops beside the fused one, and the bytes that either keeps for backward."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tritonrec import ops
from tritonrec.nn import FuXiLayer, HSTUConfig, HSTULayer, Tokens

SIZES = {
    "d 64, 2 heads of 32": HSTUConfig(dim=64, heads=2, qk_dim=32, v_dim=32, max_seq_len=50),
    "d 256, 4 heads of 64": HSTUConfig(dim=256, heads=4, qk_dim=64, v_dim=64, max_seq_len=200),
}
SAMPLES, SEED = 64, 7
CHOICES: list[tuple[str, ...]] = [
    (), ("norm",), ("uvqk",), ("silu",), ("attention",), ("gate",), ("norm", "silu", "gate"),
    ("norm", "uvqk", "silu"), ("norm", "uvqk", "silu", "gate"),
    ("norm", "uvqk", "silu", "attention", "gate"),
]  # fmt: skip

Call = Callable[[torch.Tensor, Tokens, int], torch.Tensor]


def single_ops(layer: torch.nn.Module) -> Call:
    """The same layer made of single ops, each with its own autograd."""
    config = layer.config

    def call(x: torch.Tensor, tokens: Tokens, seed: int) -> torch.Tensor:
        offsets = tokens.seq_offsets
        uvqk = ops.silu(layer.uvqk(layer.norm(x), offsets))
        u, *vqk = uvqk.split(layer.sizes, 1)
        v, q, k = (part.unflatten(1, (config.heads, -1)) for part in vqk)
        bias = getattr(layer, "bias", None)
        times = tokens.timestamps, tokens.query_timestamps
        relative = None if bias is None else ops.HSTUBias(bias.pos_weights, bias.ts_weights, *times)
        attended = ops.hstu_attention(
            q, k, v, offsets, config.max_seq_len, alpha=config.qk_dim**-0.5,
            scaling_seqlen=config.max_seq_len, mask=ops.HSTUMask(tokens.num_targets), bias=relative,
        ).flatten(1)  # fmt: skip
        if isinstance(layer, FuXiLayer):
            positional = layer.by_position(v, offsets, config.max_seq_len)
            temporal = layer.by_time(v, offsets, config.max_seq_len, tokens.timestamps)
            attended = torch.cat([positional.flatten(1), temporal.flatten(1), attended], 1)
        y = x + layer.output(layer.gate(attended, u, seed, tokens.sample_ids, tokens.positions), offsets)
        return y + layer.ffn(layer.ffn_norm(y), offsets) if isinstance(layer, FuXiLayer) else y

    return call


def saved_bytes(layer: torch.nn.Module, x: torch.Tensor, tokens: Tokens, call: Call | None = None) -> int:
    """Bytes of float tensors that backward keeps, without x and parameters; views of a buffer count once."""
    buffers = {}
    known = {tensor.data_ptr() for tensor in (x, *layer.parameters())}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.data_ptr() not in known:
            buffers[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        (call or layer)(x, tokens, SEED)
    return sum(buffers.values())


def workload(config: HSTUConfig) -> tuple[torch.Tensor, Tokens]:
    """Samples of any length up to the most."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, config.max_seq_len + 1, (SAMPLES,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    x = torch.randn(int(offsets[-1]), config.dim, generator=generator)
    return x.requires_grad_(), Tokens.place(offsets, torch.arange(SAMPLES), config.max_seq_len)


def layer_with(config: HSTUConfig, recompute: tuple[str, ...]) -> HSTULayer:
    torch.manual_seed(0)
    return HSTULayer(HSTUConfig(**{**vars(config), "recompute": recompute}))
