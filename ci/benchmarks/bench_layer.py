"""The fused HSTU layer: what it keeps for backward, and what computing it again costs.

    python ci/benchmarks/bench_layer.py                    prints the table
    python ci/benchmarks/bench_layer.py --update           also writes it to docs/models.md

A row is a choice of `LayerConfig.recompute`. Bytes are counted on what autograd saves, exactly, each buffer
once: float tensors of the layer, without its input (the residual stream has it anyway) and parameters; "at
most" is what one layer's forward and backward hold at a time, by torch's profiler. Times
are forward and backward of one layer on one thread, CPU time, as ratios to the layer made of single ops, in
interleaved rounds. These take turns among inputs of three seeds; after its time is taken, every variant must
have given the bits of the single ops (`honest`). "window" has float gradients, "batch" adds them sample by
sample to exact sums.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from honest import Check, Given, by_turns, clocked, in_turn
from kernel_cases import moved
from torch.profiler import ProfilerActivity, profile

from tritonrec import ops
from tritonrec.nn import FuXiLayer, GradientAccumulator, HSTUConfig, HSTULayer, Tokens

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "models.md"
SIZES = {
    "d 64, 2 heads of 32": HSTUConfig(dim=64, heads=2, qk_dim=32, v_dim=32, max_seq_len=50),
    "d 256, 4 heads of 64": HSTUConfig(dim=256, heads=4, qk_dim=64, v_dim=64, max_seq_len=200),
}
SAMPLES, INPUTS = 64, 3
SEED = 7
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


def most_bytes(layer: torch.nn.Module, x: torch.Tensor, tokens: Tokens, call: Call) -> int:
    """Most bytes that forward and backward of one layer hold at a time, beside x and parameters."""
    step(layer, x, tokens, call)  # compiled, and gone
    x.grad = None
    layer.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call(x, tokens, SEED).backward(x.detach())
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def workload(config: HSTUConfig, number: int = 0) -> tuple[torch.Tensor, Tokens]:
    """Samples of any length up to the most; another `number` has other values in the same tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, config.max_seq_len + 1, (SAMPLES,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    for _ in range(number + 1):
        x = torch.randn(int(offsets[-1]), config.dim, generator=generator)
    return x.requires_grad_(), Tokens.place(offsets, torch.arange(SAMPLES), config.max_seq_len)


def layer_with(config: HSTUConfig, recompute: tuple[str, ...]) -> HSTULayer:
    torch.manual_seed(0)
    return HSTULayer(HSTUConfig(**{**vars(config), "recompute": recompute}))


def step(
    layer: torch.nn.Module, x: torch.Tensor, tokens: Tokens, call: Call, bits: int | None = None
) -> list[torch.Tensor]:
    """Forward and backward as a trainer has them; dx and the parameters' gradients or sums."""
    x.grad = None
    accumulator = GradientAccumulator(layer, bits)
    with accumulator.active():
        call(x, tokens, SEED).backward(x.detach())
    return [x.grad, *accumulator.take().values()]


def measure(config: HSTUConfig, rounds: int) -> list[tuple[str, float, float, list[float]]]:
    """Of each variant: choice, bytes a token kept and at most, CPU times over single ops."""
    x, tokens = workload(config)
    reference = layer_with(config, ())
    variants = [("single ops", reference, single_ops(reference))]
    for names in CHOICES:
        layer = layer_with(config, names)
        variants.append((", ".join(names) or "nothing", layer, layer))
    sizes = [saved_bytes(layer, x, tokens, call) / len(x) for _, layer, call in variants]
    most = [most_bytes(layer, x, tokens, call) / len(x) for _, layer, call in variants]
    ratios: list[list[float]] = [[] for _ in variants]
    inputs = [workload(config, number)[0] for number in range(INPUTS)]
    least_bytes = moved(x, x, *reference.parameters(), times=2)  # x and dy in, dx out, each parameter twice
    for bits in (None, ops.FRACTION_BITS):
        single = variants[0][2]
        wants = []
        for x in inputs:
            reference.zero_grad(set_to_none=True)
            wants.append([each.clone() for each in step(reference, x, tokens, single, bits)])

        def same(name: str, want: list[torch.Tensor]) -> Check:
            def check(got: list[torch.Tensor], _x: torch.Tensor) -> None:
                assert all(map(torch.equal, got, want)), f"other bits where {name} is computed again"

            return check

        rounds_of = {}
        for name, layer, call in variants:

            def timed(x, layer=layer, call=call, bits=bits):
                return step(layer, x, tokens, call, bits)

            def prepare(x, layer=layer):
                layer.zero_grad(set_to_none=True)  # float32 gradients add to those of the step before
                return (x,)

            rounds_of[name] = in_turn(
                [
                    Given(timed, (x,), same(name, want), prepare=prepare)
                    for x, want in zip(inputs, wants, strict=True)
                ]
            )
        seconds = by_turns(rounds_of, rounds, least_bytes, clocked(time.process_time), until=math.inf)
        single_times = seconds["single ops"]
        for found, spent in zip(ratios, seconds.values(), strict=True):
            found.append(statistics.median(a / b for a, b in zip(spent, single_times, strict=True)))
    return [(name, *rest) for (name, _, _), *rest in zip(variants, sizes, most, ratios, strict=True)]


def table(rounds: int) -> str:
    lines = []
    for title, config in SIZES.items():
        x, _ = workload(config)
        lines += [f"{title}; {SAMPLES} samples of 1 to {config.max_seq_len} tokens, {len(x)} in all:", ""]
        lines += ["| computed again | bytes kept a token | at most | time, window | time, batch |"]
        lines += ["| --- | --: | --: | --: | --: |"]
        for name, kept, most, (window, batch) in measure(config, rounds):
            lines.append(f"| {name} | {kept:,.0f} | {most:,.0f} | {window:.2f} | {batch:.2f} |")
        lines.append("")
    return "\n".join(lines).strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="of each variant, interleaved")
    parser.add_argument("--update", action="store_true", help="write the table to docs/models.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = table(arguments.rounds)
    print(text)
    if arguments.update:
        sys.path.append(str(ROOT / "ci" / "compile"))
        from compile_matrix import put_between

        DOCS.write_text(put_between(DOCS.read_text(), "layer", text))


if __name__ == "__main__":
    main()
