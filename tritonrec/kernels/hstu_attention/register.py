"""Registration of `hstu_attention` and its derivative."""

from __future__ import annotations

import torch

from tritonrec.kernels.autocast import FLOAT32, LOWER
from tritonrec.kernels.hstu_attention import checks, reference
from tritonrec.kernels.hstu_attention.call import Call
from tritonrec.kernels.op import Op
from tritonrec.kernels.row_terms import RowTerms

CALL = (
    "Tensor seq_offsets, int max_seq_len, float alpha, int scaling_seqlen, Tensor? attn_scale, "
    "Tensor? num_targets, int target_group_size, Tensor? num_contexts, int max_attn_len, "
    "int min_full_attn_seq_len, int attn_prefix_len, Tensor? pos_weights, Tensor? ts_weights, "
    "Tensor? timestamps, Tensor? query_timestamps, float bias_factor, Tensor? delta_offsets, "
    "bool deterministic"
)
"""The fields of `Call`."""


def _fake(q, v):
    return v.new_empty(q.shape[0], q.shape[1], v.shape[2])


def _fake_backward(q, k, v, *described):
    return *(each.new_empty(each.shape) for each in (q, k, v)), *Call(*described).new_table_gradients()


def _fake_into(v, *described):
    return Call(*described).new_table_gradients()


def _save(ctx, inputs, output):
    *arguments, ctx.impl = inputs
    ctx.save_for_backward(*(each if isinstance(each, torch.Tensor) else None for each in arguments))
    ctx.rest = [None if isinstance(each, torch.Tensor) else each for each in arguments]


def _backward(ctx, do):
    pairs = zip(ctx.saved_tensors, ctx.rest, strict=True)
    q, k, v, *described = (other if tensor is None else tensor for tensor, other in pairs)
    dq, dk, dv, dpos, dts = HSTU_ATTENTION_BACKWARD(do, q, k, v, *described, impl=ctx.impl)
    call, rest = Call(*described), dict.fromkeys(Call._fields)
    for name, terms in (("pos_weights", dpos), ("ts_weights", dts)):
        if getattr(call, name) is not None:
            rest[name] = RowTerms(terms)
    return dq, dk, dv, *rest.values()


HSTU_ATTENTION = Op(
    f"hstu_attention(Tensor q, Tensor k, Tensor v, {CALL}) -> Tensor",
    reference=reference.hstu_attention, cpu="cpu_attention:hstu_attention",
    triton="triton_attention:hstu_attention", check=checks.check, check_memory=checks.check_memory,
    fake=_fake, save=_save, backward=_backward, widens=True,
    autocast=dict.fromkeys("qkv", LOWER)
    | dict.fromkeys(("attn_scale", "pos_weights", "ts_weights"), FLOAT32),
)  # fmt: skip
HSTU_ATTENTION_BACKWARD = Op(
    f"hstu_attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, {CALL}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=reference.hstu_attention_backward, cpu="cpu_attention:hstu_attention_backward",
    triton="triton_attention:hstu_attention_backward", check=(checks.check, checks.check_backward),
    check_memory=checks.check_memory, fake=_fake_backward, widens=True,
)  # fmt: skip
HSTU_ATTENTION_BACKWARD_INTO = Op(
    "hstu_attention_backward_into(Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor do, Tensor q, "
    f"Tensor k, Tensor v, {CALL}) -> (Tensor, Tensor)",
    reference=reference.hstu_attention_backward_into, cpu="cpu_attention:hstu_attention_backward_into",
    triton="triton_attention:hstu_attention_backward_into",
    check=(checks.check, checks.check_backward, checks.check_into), check_memory=checks.check_memory,
    fake=_fake_into, widens=True,
)  # fmt: skip
