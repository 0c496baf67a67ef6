"""The layer that HSTU, GRM and FuXi share, as one step of autograd that recomputes what its caller chooses.

    n = norm(x),   z = linear(n),   u, v, q, k = silu(z)
    a = [channels of v by relative position and time,] attention(q, k, v)
    g = dropout(norm(a) * u),   out = x + linear(g)        or g = dropout(norm(a * u)), as the gate says

Backward needs n, z, uvqk, a and g. `RECOMPUTED` names them in this order; those in a configuration's
``recompute`` are not kept but computed again, by the same kernels from the same inputs, so to the same bits
(dropout is a function of seed, sample and position). The gradients of u, v, q and k are written into one
buffer, (L, sizes of all), by the kernels that make them; in place it becomes the gradient of z. With an exact
accumulator the kernels of the backward add the gradients of parameters to its sums themselves.

Dimensions: L tokens, H heads, d model dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from .. import ops
from ..kernels.autocast import autocast_dtype, to_dtype, without_autocast
from ..kernels.dispatch import default_impl, implementation
from ..kernels.gradients import Accumulator, Targets, Terms, current, sum_terms, targets_of
from ..kernels.hstu_attention.call import Call as AttentionCall
from ..kernels.hstu_attention.call import HSTUBias, HSTUMask, describe
from ..kernels.hstu_attention.op import HSTU_ATTENTION, HSTU_ATTENTION_BACKWARD_INTO
from ..kernels.hstu_layer import cpu_hstu_layer as whole
from ..kernels.linear.op import LINEAR, ProductTerms, add_gradients
from ..kernels.norm_linear_silu.op import (
    NORM_LINEAR_SILU,
    NORM_LINEAR_SILU_BACKWARD_EXACT,
    NORM_LINEAR_SILU_BACKWARD_INTO,
)
from ..kernels.norm_mul_dropout.op import (
    NORM_MUL_DROPOUT,
    NORM_MUL_DROPOUT_BACKWARD_EXACT,
    NORM_MUL_DROPOUT_BACKWARD_INTO,
)
from ..kernels.op import Op, annotation
from ..kernels.relative_aggregate.op import RELATIVE_AGGREGATE, RELATIVE_AGGREGATE_BACKWARD
from ..kernels.row_terms import RowTerms
from .tokens import Tokens

RECOMPUTED = ("norm", "uvqk", "silu", "attention", "gate")
CHANNELS = ("by_position", "by_time")  # beside attention


def check_recompute(names: tuple[str, ...]) -> None:
    """Raise ValueError for a name that is not in `RECOMPUTED`."""
    if unknown := sorted(set(names).difference(RECOMPUTED)):
        raise ValueError(f"recompute takes some of {', '.join(RECOMPUTED)}, got {', '.join(unknown)}")


class Parameters(NamedTuple):
    """Of one layer; tables that it does not have are None."""

    norm_weight: torch.Tensor
    norm_bias: torch.Tensor
    uvqk_weight: torch.Tensor
    uvqk_bias: torch.Tensor
    gate_weight: torch.Tensor
    gate_bias: torch.Tensor
    output_weight: torch.Tensor
    output_bias: torch.Tensor
    pos_weights: torch.Tensor | None = None  # of attention's bias
    ts_weights: torch.Tensor | None = None
    by_position: torch.Tensor | None = None  # of channels beside attention
    by_time: torch.Tensor | None = None

    def cast(self, dtype: torch.dtype | None) -> Parameters:
        """As autocast of this dtype has them, where there is one: those of products alone are lower."""
        if dtype is None:
            return self
        # Norms and tables stay float32 under autocast, as torch's own rules have them.
        lower = ("uvqk_weight", "uvqk_bias", "output_weight", "output_bias")
        return self._replace(**{name: to_dtype(getattr(self, name), dtype) for name in lower})


class Call(NamedTuple):
    """The arguments of one call of a layer beside x and its parameters."""

    tokens: Tokens
    heads: int
    qk_dim: int
    v_dim: int
    max_seq_len: int
    eps: float  # of the norm
    gate_eps: float
    norm_product: bool  # the gate norms a * u
    dropout: float
    seed: int
    recompute: tuple[str, ...]
    channels: int

    @property
    def sizes(self) -> list[int]:
        """Columns of u, v, q and k."""
        values, keys = self.heads * self.v_dim, self.heads * self.qk_dim
        return [self.channels * values, values, keys, keys]

    def parts(self, uvqk: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views u (L, sizes[0]), v (L, H, v_dim), q and k (L, H, qk_dim) of a buffer (L, sum of sizes)."""
        u, *vqk = uvqk.split(self.sizes, 1)
        return u, *(part.unflatten(1, (self.heads, -1)) for part in vqk)

    def draws(self) -> tuple[Any, ...]:
        """What dropout is a function of."""
        sites = (self.tokens.sample_ids, self.tokens.positions) if self.dropout else (None, None)
        return self.dropout, self.seed, *sites

    def attention(self, parameters: Parameters) -> AttentionCall:
        """The arguments of attention after q, k and v."""
        timed = parameters.ts_weights is not None
        bias = HSTUBias(
            parameters.pos_weights, parameters.ts_weights, self.tokens.timestamps if timed else None,
            self.tokens.query_timestamps if timed else None,
        )  # fmt: skip
        return describe(
            self.tokens.seq_offsets, self.max_seq_len, alpha=self.qk_dim**-0.5,
            scaling_seqlen=self.max_seq_len, mask=HSTUMask(self.tokens.num_targets), bias=bias,
        )  # fmt: skip

    def tables(self, parameters: Parameters) -> list[tuple[str, torch.Tensor, torch.Tensor | None]]:
        """(name, table, timestamps) of each channel beside attention."""
        times = {"by_position": None, "by_time": self.tokens.timestamps}
        every = [(name, getattr(parameters, name), times[name]) for name in CHANNELS]
        return [channel for channel in every if channel[1] is not None]


def hstu_layer(
    layer: Any, x: torch.Tensor, tokens: Tokens, seed: int, **tables: torch.Tensor
) -> torch.Tensor:
    """(L, d) -> (L, d), the residual added. Gradients of parameters go to the active
    accumulator, where there is one, sample by sample.

    Args:
        layer: a module with ``config`` (a `LayerConfig`), ``norm``, ``uvqk``, ``gate`` and ``output``.
        seed: of dropout. tables: of `Parameters`.
    """
    if torch.compiler.is_dynamo_compiling():  # a graph ends here: the layer's steps are no ops, but kernels
        return torch.compiler.disable(hstu_layer)(layer, x, tokens, seed, **tables)
    call, parameters = described(layer, tokens, seed, **tables)
    return _HSTULayer.apply(current(), call, x, *parameters)


def described(layer: Any, tokens: Tokens, seed: int, **tables: torch.Tensor) -> tuple[Call, Parameters]:
    """The arguments of `hstu_layer` as its steps take them."""
    config, norm, uvqk, gate, output = layer.config, layer.norm, layer.uvqk, layer.gate, layer.output
    parameters = Parameters(
        norm.weight, norm.bias, uvqk.weight, uvqk.bias, gate.weight, gate.bias, output.weight, output.bias,
        **tables,
    )  # fmt: skip
    call = Call(
        tokens, config.heads, config.qk_dim, config.v_dim, config.max_seq_len, norm.eps, gate.eps,
        gate.norm_product, gate.dropout if gate.training else 0.0, seed,
        config.recompute if torch.is_grad_enabled() else RECOMPUTED,
        channels=1 + sum(name in CHANNELS for name in tables),
    )  # fmt: skip
    return call, parameters


def hstu_layer_over(
    layer: Any,
    x: torch.Tensor,
    tokens: Tokens,
    fresh_offsets: torch.Tensor,
    keep: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    wanted: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows of `hstu_layer`, to the bit, for the last tokens of each sample; the others are keys and values.

    No gradients and no dropout.

    Args:
        x: (M, d), the last tokens of each sample, ``fresh_offsets`` (B + 1,).
        tokens: all L tokens of the samples.
        keep: takes the keys (M, H, qk_dim) and values (M, H, v_dim) of x, and gives those of all tokens,
            (L, H, qk_dim) and (L, H, v_dim).
        wanted: (B,) int64, one row of x for each sample whose output is wanted: that of its last token.
    Returns:
        (M, d), or (B, d) of the `wanted` rows.
    """
    call, own = described(layer, tokens, 0, **layer.tables())
    if call.channels > 1 or call.dropout or call.norm_product:
        raise ValueError("hstu_layer_over has no dropout, no norm_product and no channels beside attention")
    low = autocast_dtype(x.device)
    with torch.no_grad(), without_autocast(x.device):
        p, x = own.cast(low), x if low is None else to_dtype(x, torch.float32)
        front = x, p.norm_weight, p.norm_bias, p.uvqk_weight, p.uvqk_bias, call.eps, False, False
        u, v, q, k = call.parts(NORM_LINEAR_SILU.launch(*front)[0])
        k, v = keep(k, v)
        if wanted is not None:
            x, u, q = x[wanted], u[wanted], q[wanted]
            fresh_offsets = torch.arange(fresh_offsets.shape[0], device=x.device)
        attention = call.attention(p)._replace(delta_offsets=fresh_offsets)
        attended = HSTU_ATTENTION.launch(q, k, v, *attention).flatten(1)
        gate = attended, u, p.gate_weight, p.gate_bias, call.gate_eps, *call.draws()
        out = LINEAR.launch(NORM_MUL_DROPOUT.launch(*gate)[0], p.output_weight, p.output_bias)
        return out.add_(x) if out.dtype == x.dtype else x + out


def bind(accumulator: Accumulator | None, call: Call, x: torch.Tensor, p: Parameters) -> whole.Bound | None:
    """In a trainer on the CPU the whole layer in one call, where it takes these arguments."""
    if accumulator is None or implementation("auto", x) != "cpu":
        return None
    shape, at = _shape(call, x.shape[-1]), call.tokens
    place = whole.Place(
        at.seq_offsets, at.sample_ids, at.positions, at.timestamps, at.num_targets, at.query_timestamps
    )
    return None if shape is None else whole.bind(shape, place, x, p[:10], call.seed)


def prepared_layer(layer: Any, dim: int) -> tuple[Parameters, whole.Layer | None]:
    """A module's parameters, and the whole layer for many calls where it takes this one."""
    call, own = described(layer, cast(Tokens, None), 0, **layer.tables())  # tokens come with each call
    shape = _shape(call._replace(recompute=layer.config.recompute), dim)
    return own, None if shape is None else whole.prepare(shape, own[:10])


def _shape(call: Call, dim: int) -> whole.Shape | None:
    """Sizes and numbers of the layer for calls as a whole, None for a layer with other parts."""
    if call.channels > 1 or call.norm_product or not {"norm"}.issuperset(call.recompute):
        return None
    return whole.Shape(
        dim, call.heads, call.qk_dim, call.v_dim, call.max_seq_len, call.eps, call.gate_eps, call.dropout,
        "norm" not in call.recompute,
    )  # fmt: skip


def _front(x: torch.Tensor, p: Parameters, call: Call, keep_normed: bool, keep_linear: bool):
    return NORM_LINEAR_SILU(
        x, p.norm_weight, p.norm_bias, p.uvqk_weight, p.uvqk_bias, call.eps, keep_normed, keep_linear
    )


def _attend(parts: tuple[torch.Tensor, ...], p: Parameters, call: Call) -> torch.Tensor:
    _, v, q, k = parts
    attended = HSTU_ATTENTION(q, k, v, *call.attention(p)).flatten(1)
    offsets = call.tokens.seq_offsets
    channels = [
        RELATIVE_AGGREGATE(v, table, offsets, call.max_seq_len, times).flatten(1)
        for _, table, times in call.tables(p)
    ]
    return torch.cat([*channels, attended], 1) if channels else attended


def _gate(attended: torch.Tensor, u: torch.Tensor, p: Parameters, call: Call):
    if call.norm_product:
        attended, u = attended * u, torch.ones_like(u)
    return NORM_MUL_DROPOUT(attended, u, p.gate_weight, p.gate_bias, call.gate_eps, *call.draws())


def _plain(accumulator: Accumulator | None) -> Callable[[Op], Callable[..., Any]]:
    """How backward calls ops: in a trainer the kernels alone, whose arguments forward has checked."""
    alone = accumulator is not None and not torch.is_grad_enabled()
    return (lambda op: op.launch) if alone else (lambda op: op)


def _attend_backward(
    kernel: Callable[[Op], Callable[..., Any]],
    dattended: torch.Tensor,
    parts: tuple[torch.Tensor, ...],
    dparts: tuple[torch.Tensor, ...],
    p: Parameters,
    call: Call,
) -> dict[str, Terms]:
    """Overwrites the gradients of v, q and k; each sample's gradients of the tables."""
    (_, v, q, k), (_, dv, dq, dk) = parts, dparts
    *dchannels, dout = (part.unflatten(1, (call.heads, -1)) for part in dattended.chunk(call.channels, 1))
    dpos, dts = kernel(HSTU_ATTENTION_BACKWARD_INTO)(dq, dk, dv, dout, q, k, v, *call.attention(p))
    terms: dict[str, Terms] = {"pos_weights": RowTerms(dpos), "ts_weights": RowTerms(dts)}
    of_channels: torch.Tensor | None = None
    # The reverse of the forward, as autograd would: gradients of v are added up in that order.
    for (name, table, times), dchannel in reversed(list(zip(call.tables(p), dchannels, strict=True))):
        dvalues, dtable = kernel(RELATIVE_AGGREGATE_BACKWARD)(
            dchannel, v, table, call.tokens.seq_offsets, call.max_seq_len, times
        )
        terms[name] = RowTerms(dtable)
        of_channels = dvalues if of_channels is None else of_channels.add_(dvalues)
    if of_channels is not None:
        dv += of_channels
    return terms


class _Gradients:
    """The gradients of the parameters `own`: their sums, or None where the accumulator takes their terms."""

    def __init__(self, accumulator: Accumulator | None, own: Parameters):
        self._accumulator, self._own = accumulator, own
        self._found: dict[str, torch.Tensor | None] = {}

    def take(self, **terms: Terms) -> None:
        for name, gradient in terms.items():
            if (parameter := getattr(self._own, name)) is not None:
                self._found[name] = sum_terms(self._accumulator, parameter, gradient)

    def take_linear(
        self, name: str, dout: torch.Tensor, inner: torch.Tensor, seq_offsets: torch.Tensor
    ) -> None:
        weight, bias = f"{name}_weight", f"{name}_bias"
        targets = targets_of(self._accumulator, getattr(self._own, weight), getattr(self._own, bias))
        if targets is None:
            self.take(**{weight: ProductTerms(dout, inner, seq_offsets), bias: RowTerms(dout)})
        else:
            add_gradients(targets, dout, inner, seq_offsets)

    def in_order(self) -> list[torch.Tensor | None]:
        return [self._found.get(name) for name in Parameters._fields]


def whole_backward(
    accumulator: Accumulator | None,
    own: Parameters,
    bound: whole.Bound,
    dy: torch.Tensor,
    x: torch.Tensor,
    kept: torch.Tensor,
    seq_offsets: torch.Tensor,
    targets: Targets | None,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """dx, and the gradients of `own`, None where the accumulator has taken their terms.

    Args:
        x, kept: of the call's forward, as they were saved. targets: of all that `own` has.
    """
    if targets is not None and bound.is_small():
        return bound.backward_exact(dy, x, kept, targets), [None] * len(own)
    dx, terms = bound.backward(dy, x, kept)
    gradients = _Gradients(accumulator, own)
    gradients.take_linear("output", dy, terms.gated, seq_offsets)
    for name in ("gate_weight", "gate_bias", "pos_weights", "ts_weights", "norm_weight", "norm_bias"):
        gradients.take(**{name: RowTerms(getattr(terms, name))})
    gradients.take_linear("uvqk", terms.duvqk, terms.normed, seq_offsets)
    return dx, gradients.in_order()


class _HSTULayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, accumulator: Accumulator | None, call: Call, x, *parameters):
        ctx.low = autocast_dtype(x.device)
        with without_autocast(x.device):
            return _HSTULayer._forward(ctx, accumulator, call, x, *parameters)

    @staticmethod
    def _forward(ctx, accumulator: Accumulator | None, call: Call, x, *parameters):
        own, again = Parameters(*parameters), call.recompute
        ctx.accumulator, ctx.call, ctx.own = accumulator, call, own  # it knows these very tensors
        ctx.impl = default_impl()
        ctx.bound = bind(accumulator, call, x, own) if ctx.low is None else None
        if ctx.bound is not None:
            with annotation("hstu_layer"):
                out, kept = ctx.bound.forward(x)
            ctx.save_for_backward(x, kept, *parameters)
            return out
        p, x = own.cast(ctx.low), x if ctx.low is None else to_dtype(x, torch.float32)
        uvqk, z, normed, *norm_rows = _front(x, p, call, "norm" not in again, "uvqk" not in again)
        parts = call.parts(uvqk)
        attended = _attend(parts, p, call)
        gated, *gate_rows = _gate(attended, parts[0], p, call)
        out = ops.linear(gated, p.output_weight, p.output_bias)
        stages = dict(zip(RECOMPUTED, (normed, z, uvqk, attended, gated), strict=True))
        kept = (None if name in again else value for name, value in stages.items())
        ctx.save_for_backward(x, *norm_rows, *gate_rows, *kept, *parameters)
        return out.add_(x) if out.dtype == x.dtype else x + out

    @staticmethod
    def backward(ctx, dy):
        with ops.use_impl(ctx.impl), without_autocast(dy.device):
            if ctx.bound is not None and not torch.is_grad_enabled():
                with annotation("hstu_layer_backward"):
                    return _HSTULayer._whole_backward(ctx, dy.resolve_neg().contiguous())
            return _HSTULayer._backward(ctx, dy)

    @staticmethod
    def _whole_backward(ctx, dy):
        x, kept, *_ = ctx.saved_tensors  # which tells where a parameter has changed
        ctx.maybe_clear_saved_tensors()
        offsets = ctx.call.tokens.seq_offsets
        targets = targets_of(ctx.accumulator, *(each for each in ctx.own if each is not None))
        dx, gradients = whole_backward(ctx.accumulator, ctx.own, ctx.bound, dy, x, kept, offsets, targets)
        return None, None, dx, *gradients

    @staticmethod
    def _backward(ctx, dy):
        accumulator, call, own, dy = ctx.accumulator, ctx.call, ctx.own, dy.contiguous()
        if ctx.bound is None:
            x, *saved = ctx.saved_tensors
        else:
            x, kept, *parameters = ctx.saved_tensors
            saved = [*ctx.bound.saved(kept), *parameters]
        means, rstds, gate_means, gate_rstds, normed, z, uvqk, attended, gated, *rest = saved
        # Unless the graph is kept; what is done with below is free at once. torch.compile knows no such call
        # and leaves the layer out of its graphs: torch 2.11 traces it to wrong gradients.
        ctx.maybe_clear_saved_tensors()
        if torch.is_grad_enabled():  # a derivative of these gradients is refused by the ops
            rest = [None if tensor is None else tensor.detach() for tensor in rest]
        p = Parameters(*rest).cast(ctx.low)
        dout = to_dtype(dy, p.output_weight.dtype)
        kernel, gradients = _plain(accumulator), _Gradients(accumulator, own)
        take, offsets = gradients.take, call.tokens.seq_offsets

        if uvqk is None and z is not None:
            uvqk = ops.silu(z)
        elif uvqk is None:
            uvqk, z, again, *_ = _front(x, p, call, normed is None, True)
            normed = again if normed is None else normed
        parts = call.parts(uvqk)
        attended = _attend(parts, p, call) if attended is None else attended
        gated = _gate(attended, parts[0], p, call)[0] if gated is None else gated
        gradients.take_linear("output", dout, gated, offsets)
        del gated

        duvqk = torch.empty_like(uvqk)
        dparts = call.parts(duvqk)
        of_factors = dparts[0], attended, parts[0]
        if call.norm_product:
            ones = torch.ones_like(parts[0])
            of_factors = ones.new_empty(ones.shape), attended * parts[0], ones
        du, normed_by_gate, factor = of_factors
        of_gate = (
            du, ops.linear(dout, p.output_weight.t()), normed_by_gate, factor, p.gate_weight, p.gate_bias,
            *call.draws(), gate_means, gate_rstds,
        )  # fmt: skip
        targets = targets_of(accumulator, own.gate_weight, own.gate_bias)
        if targets is None:
            dattended, dweight, dbias = kernel(NORM_MUL_DROPOUT_BACKWARD_INTO)(*of_gate)
            take(gate_weight=RowTerms(dweight), gate_bias=RowTerms(dbias))
            del dweight, dbias
        else:
            dattended = NORM_MUL_DROPOUT_BACKWARD_EXACT.launch(*targets.sums, *of_gate, *targets[1:])
        if call.norm_product:
            torch.mul(dattended, attended, out=dparts[0])
            dattended = dattended * parts[0]
        del attended, of_factors, du, normed_by_gate, factor, of_gate
        take(**_attend_backward(kernel, dattended, parts, dparts, p, call))
        del uvqk, parts, dattended

        z = duvqk.new_empty(0, duvqk.shape[1]) if z is None else z
        of_front = (
            duvqk, x, p.norm_weight, p.norm_bias, p.uvqk_weight, p.uvqk_bias, call.eps, z,
            duvqk.new_empty(0, x.shape[1]) if normed is None else normed, means, rstds,
        )  # fmt: skip
        targets = targets_of(accumulator, own.norm_weight, own.norm_bias, own.uvqk_weight, own.uvqk_bias)
        if targets is None:
            dx, dweight, dbias, again = kernel(NORM_LINEAR_SILU_BACKWARD_INTO)(*of_front)
            take(norm_weight=RowTerms(dweight), norm_bias=RowTerms(dbias))
            gradients.take_linear("uvqk", duvqk, again if normed is None else normed, offsets)
        else:
            rest = offsets, *targets[1:]
            dx = NORM_LINEAR_SILU_BACKWARD_EXACT.launch(*targets.sums, *of_front, *rest)
        return None, None, dx.add_(dy), *gradients.in_order()
