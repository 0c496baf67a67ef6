# mypy: ignore-errors
"""Jagged HSTU attention in Triton: block sizes and launches of the kernels.

Each sum runs along one sequence in blocks counted from the sequence's start, with block sizes chosen by head
dimensions and dtype alone: the bits of a sequence depend neither on its batch, nor on `max_seq_len`, nor on
the schedule. Blocks that nobody sees are skipped, and blocks that are seen whole compute no mask.

Scores are float32 sums (full float32 products for float32 inputs, never TF32); the weights are rounded to the
input's dtype for the second product, and the scale is applied to the finished sum, a scale per token in dK
and dV to each term.
"""

from __future__ import annotations

import torch
import triton

from tritonrec.kernels import tuned
from tritonrec.kernels.hstu_attention.triton_backward import columns_kernel, rows_kernel
from tritonrec.kernels.hstu_attention.triton_forward import forward_kernel
from tritonrec.kernels.hstu_attention.triton_tables import parts_kernel, positions_kernel, times_kernel
from tritonrec.kernels.hstu_attention.triton_tiles import Tiles

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def configuration(
    dim_qk: int, dim_v: int, dtype: torch.dtype, heavy: bool = False, device: torch.device = CPU
) -> dict[str, int]:
    """Block sizes and warps: by what is asked for and by the device, so that no batch changes a result.

    `heavy`: two accumulators, or a bias beside the scores.
    """
    block_qk = max(16, triton.next_power_of_2(dim_qk))
    block_v = max(16, triton.next_power_of_2(dim_v))
    klass = f"{str(dtype).removeprefix('torch.')} {tuned.row_class(max(block_qk, block_v), most=256)}"
    config = tuned.config("hstu_attention", klass + " heavy" * heavy, device)
    return {**config, "BLOCK_QK": block_qk, "BLOCK_V": block_v, "enable_fp_fusion": False}


def table_configuration(
    dim_qk: int, dim_v: int, dtype: torch.dtype, entries: int, device: torch.device = CPU
) -> dict[str, int]:
    """As `configuration`, for the gradients of a table."""
    config = configuration(dim_qk, dim_v, dtype, True, device)
    own = 32 if dtype == torch.float32 or config["OWN"] == 32 else 64
    return config | {"OWN": own, "STEP": min(own, config["STEP"]), "ENTRIES": triton.next_power_of_2(entries)}


def check(q: torch.Tensor, v: torch.Tensor) -> None:
    if q.dtype not in DTYPES:
        raise ValueError(
            f"hstu_attention in Triton takes float32, bfloat16 or float16, got {q.dtype}: "
            "take impl='reference'"
        )
    if max(q.shape[2], v.shape[2]) > 256:
        raise ValueError(
            f"hstu_attention in Triton takes heads of up to 256 features, got {q.shape[2]} and {v.shape[2]}: "
            "take more heads, or impl='reference'"
        )


class Description:
    """The arguments of kernels that describe a call."""

    def __init__(self, call, queries: int):
        def contiguous(tensor):
            return None if tensor is None else tensor.detach().contiguous()

        group, window, full, prefix = call.mask
        offsets = (call.seq_offsets, call.delta_offsets, call.num_targets, call.num_contexts)
        self.layout = tuple(map(contiguous, offsets))
        contextual = None if call.num_contexts is None else 1
        self.rules = (None if group == 1 else group, window or None, full, prefix, contextual)
        pos, ts = contiguous(call.pos_weights), contiguous(call.ts_weights)
        base, sign = (0, 0) if pos is None else call.position_index
        times = contiguous(call.timestamps)
        row_times = times if call.query_timestamps is None else contiguous(call.query_timestamps)
        self.bias = (
            pos, base, sign, 0 if pos is None else len(pos) - 1, ts, 0 if ts is None else len(ts) - 1,
            row_times, times, float(call.bias_factor),
        )  # fmt: skip
        self.scales = None
        if call.attn_scale is not None:
            self.scales = call.attn_scale.expand(queries).contiguous()
        self.numbers = (float(call.alpha), 1.0 if self.scales is not None else 1.0 / call.scaling_seqlen)


def launch(kernel, tensors, described, tiles, heads, config, **constants) -> None:
    """A program for each tile and head that there can be."""
    q, v = tensors["q"], tensors["v"]
    strides = (tensor.stride() for tensor in tensors.values() if tensor.dim() == 3)  # of tables none
    kernel[tiles.grid(heads)](
        *tensors.values(), *strides, described.layout, described.rules, described.bias, described.scales,
        tiles.listed, tiles.count, q.shape[1], q.shape[2], v.shape[2], *described.numbers,
        WIDEN=q.device.type == "cpu", **config, **constants,
    )  # fmt: skip


def forward(q, k, v, call, out) -> None:
    """Overwrite `out` (M, H, Dv), whatever it held."""
    check(q, v)
    config = configuration(q.shape[2], v.shape[2], q.dtype, call.has_bias, q.device)
    tiles = Tiles(call, len(q), config["OWN"], by_query=True)
    tensors = {"q": q, "k": k, "v": v, "out": out}
    launch(forward_kernel, tensors, Description(call, len(q)), tiles, q.shape[1], config)


def backward(do, q, k, v, call, dq, dk, dv, dpos, dts) -> None:
    """Overwrite dq (M, H, Dqk), dk (L, H, Dqk), dv (L, H, Dv) and, zero before, dpos and dts (B, entries).

    Without `call.deterministic` dq is a sum of float32 atomics.
    """
    check(q, v)
    heads, dims, described = q.shape[1], (q.shape[2], v.shape[2], q.dtype), Description(call, len(q))
    inputs = {"do": do, "q": q, "k": k, "v": v}
    if call.deterministic:
        config = configuration(*dims, call.has_bias, q.device)
        tiles = Tiles(call, len(q), config["OWN"], by_query=True)
        launch(rows_kernel, {**inputs, "dq": dq}, described, tiles, heads, config)
    summed = dq if call.deterministic else torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    config = configuration(*dims, True, q.device)
    tiles = Tiles(call, len(k), config["OWN"], by_query=False)
    tensors = {**inputs, "dk": dk, "dv": dv, "dq": summed}
    launch(columns_kernel, tensors, described, tiles, heads, config, ATOMIC=not call.deterministic)
    if not call.deterministic:
        dq.copy_(summed)
    if call.pos_weights is not None:
        config = table_configuration(*dims, 1, q.device)
        tiles = Tiles(call, len(k), config["OWN"], by_query=False)
        launch(positions_kernel, {**inputs, "dpos": dpos}, described, tiles, 1, config)
    if call.ts_weights is not None:
        config = table_configuration(*dims, dts.shape[1], q.device)
        tiles = Tiles(call, len(q), config["OWN"], by_query=True)
        parts = len(k) // config["OWN"] + call.num_sequences + 1
        parts = torch.empty(parts, config["ENTRIES"], dtype=torch.float32, device=q.device)
        launch(times_kernel, {**inputs, "parts": parts}, described, tiles, 1, config)
        parts_kernel[(call.num_sequences,)](
            parts, dts, described.layout, dts.shape[1], OWN=config["OWN"], ENTRIES=config["ENTRIES"]
        )
