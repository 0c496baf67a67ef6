"""A next-item model of HSTU layers in a trainer on the CPU: forward and backward as one step of autograd.

A micro-batch of a few hundred tokens pays for each module, op and node of the graph more than for its loops.
Here the model's calls follow each other without them, with the same bits: `bind` says whether a model and a
batch fit, and what does not fit takes the modules one by one, with their errors.

Dimensions: L tokens, B samples, K negatives, d model dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import ops
from ..kernels.autocast import autocast_dtype
from ..kernels.dispatch import default_impl, implementation, is_compiling, use_impl
from ..kernels.gradients import Accumulator, current, sum_terms, targets_of
from ..kernels.hstu_layer import cpu_hstu_layer
from ..kernels.op import annotation
from ..kernels.row_terms import RowTerms, add_terms
from ..kernels.rows.register import IndexedTerms
from ..kernels.sampled_softmax import cpu_by_sample
from ..kernels.token_rows.cpu_token_rows import TokenRows, place_rows
from .context import has_hooks
from .hstu_layer import Parameters, described, whole_backward
from .hstu_layer import bind as bind_layer
from .modules import LayerNorm, PositionalEmbedding, TokenDropout
from .tokens import Tokens


class _Layer(NamedTuple):
    bound: cpu_hstu_layer.Bound
    own: Parameters


class Step:
    """One call of a model, whose `parameters` are those of positions, layers and norm, in this order."""

    def __init__(
        self,
        model: Any,
        accumulator: Accumulator,
        placed: TokenRows,
        layers: list[_Layer],
        losses: cpu_by_sample.Bound,
    ):
        self.impl, self.tokens = default_impl(), len(placed.x)
        self._accumulator, self._placed, self._layers, self._losses = accumulator, placed, layers, losses
        self._factor, self._eps = model.config.dim**0.5, model.norm.eps
        self._ends = model.positions.weight, model.norm.weight, model.norm.bias
        positions, *norm = self._ends
        self.parameters = [positions, *(each for layer in layers for each in layer.own[:10]), *norm]
        self._there = [each for each in self.parameters if each is not None]

    def has_distinct_parameters(self) -> bool:
        """Whether none is in two places, whose gradients autograd would add in an order of its own."""
        return len(set(map(id, self._there))) == len(self._there)

    @property
    def of_autograd(self) -> list[torch.Tensor | None]:
        """`parameters`, unless the accumulator takes the gradients of them all."""
        return [] if all(map(self._accumulator.holds, self._there)) else self.parameters

    def refuse_exact(self) -> None:
        """Raise RuntimeError where the accumulator takes terms, whose sums have no derivative."""
        for each in self.parameters:
            targets_of(self._accumulator, each)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Losses (B,), and what backward needs."""
        from ..kernels.norm_mul_dropout.numba_norm import norm_mul_dropout

        x, kept = self._placed.x, []
        for layer in self._layers:
            with annotation("hstu_layer"):
                out, of_layer = layer.bound.forward(x, layer.own[:10])
            kept += [x, of_layer]
            x = out
        with annotation("norm_mul_dropout"):
            hidden, *stats = norm_mul_dropout(x, None, *self._ends[1:], self._eps, 0.0, 0, None, None)
        with annotation("sampled_softmax_by_sample"):
            losses = self._losses.forward(hidden, rows[self.tokens :])
        return losses, [*kept, x, hidden, *stats]

    def backward(
        self, dlosses: torch.Tensor, rows: torch.Tensor, parameters: list[torch.Tensor], kept: list[Any]
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradient of `rows`, and of the parameters those that the accumulator has not taken."""
        drows = torch.empty_like(rows)
        dx, *of_norm = self._end(dlosses, rows, drows, parameters, kept)
        of_layers: list[torch.Tensor | None] = []
        for number in reversed(range(len(self._layers))):
            layer, of_layer, x = self._layers[number], kept.pop(), kept.pop()
            own = parameters[1 + 10 * number : 11 + 10 * number]
            offsets = self._losses.offsets
            with annotation("hstu_layer_backward"):
                dx, found = whole_backward(
                    self._accumulator, layer.own, layer.bound, dx, x, of_layer, tuple(own), offsets
                )
            of_layers[:0] = found[:10]
        positions, weight = self._placed.positions, self._ends[0]
        terms = IndexedTerms(dx, positions, len(weight))
        dpositions = sum_terms(self._accumulator, weight, terms)
        torch.mul(dx, self._factor, out=drows[: self.tokens])
        return drows, dpositions, *of_layers, *of_norm

    def _end(
        self,
        dlosses: torch.Tensor,
        rows: torch.Tensor,
        drows: torch.Tensor,
        parameters: list[torch.Tensor],
        kept: list[Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The gradient of the norm's input, and of its parameters; writes that of items in `drows`."""
        from ..kernels.norm_mul_dropout.numba_norm import norm_mul_dropout_backward_into

        x, hidden, means, rstds = kept[-4:]
        del kept[-4:]
        weight, bias = parameters[-2:]
        with annotation("sampled_softmax_by_sample_backward"):
            dhidden = self._losses.backward(dlosses, hidden, rows[self.tokens :], drows[self.tokens :])
        with annotation("norm_mul_dropout_backward"):
            dx, *terms = norm_mul_dropout_backward_into(
                x.new_empty(0, x.shape[1]), dhidden, x, None, weight, bias, 0.0, 0, None, None, means, rstds
            )
        targets = targets_of(self._accumulator, *self._ends[1:])
        if targets is not None:
            add_terms(targets.sums, terms, targets.fraction_bits, targets.names)
            return dx, None, None
        pairs = zip(self._ends[1:], terms, strict=True)
        dweight, dbias = (sum_terms(self._accumulator, own, RowTerms(values)) for own, values in pairs)
        return dx, dweight, dbias


class _Model(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Step, rows, *parameters):
        ctx.step, ctx.count = step, len(parameters)
        losses, kept = step.forward(rows)
        ctx.save_for_backward(rows, *step.parameters, *kept)
        return losses

    @staticmethod
    def backward(ctx: Any, dlosses):
        rows, *saved = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()
        step, count = ctx.step, len(ctx.step.parameters)
        parameters, kept = saved[:count], saved[count:]
        del saved
        again = torch.is_grad_enabled()
        if again:
            step.refuse_exact()
        with use_impl(step.impl), torch.no_grad():
            found = step.backward(dlosses.resolve_neg().contiguous(), rows, parameters, kept)
        if again:
            found = tuple(each if each is None else _Last.apply(each, rows) for each in found)
        return None, *found[: 1 + ctx.count]


class _Last(torch.autograd.Function):
    """A gradient, whose own derivative is refused."""

    @staticmethod
    def forward(ctx: Any, gradient, rows):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *given):
        raise NotImplementedError("the gradient of a next-item model in a trainer has no derivative")


def run(step: Step, rows: torch.Tensor) -> torch.Tensor:
    """Losses (B,) of the call that `bind` made."""
    return _Model.apply(step, rows, *step.of_autograd)


def bind(model: Any, batch: Any, rows: torch.Tensor, seed: int) -> Step | None:
    """The call of a `NextItemModel`, or None where the modules have to be called one by one.

    That is outside of a trainer, under autocast or torch.compile, on an accelerator, and with modules or
    hooks of others; and for arguments of other kinds or of other shapes.
    """
    if is_compiling() or (accumulator := current()) is None or not torch.is_grad_enabled():
        return None
    config, layers = model.config, list(model.layers)
    if autocast_dtype(rows.device) is not None:
        return None
    if implementation("auto", rows) != "cpu" or config.temperature <= 0 or not _has_plain_parts(model):
        return None
    offsets, times, negatives = batch.offsets, batch.timestamps, batch.negatives
    asked = times if config.relative_bias else None
    weight = model.positions.weight
    if weight.shape[0] != config.max_seq_len or not rows.requires_grad:
        return None
    placed = place_rows(rows.detach(), weight, config.dim**0.5, offsets, batch.sample_ids, asked)
    if placed is None or batch.labels.shape != (len(placed.x),) or negatives.shape[:1] != batch.labels.shape:
        return None
    tokens = Tokens(offsets, placed.sample_ids, placed.positions, times, None, placed.query_timestamps)
    bound = []
    for number, layer in enumerate(layers):
        call, own = described(layer, tokens, ops.derive_seed(seed, number, 0), **layer.tables(tokens))
        of_layer = bind_layer(accumulator, call, placed.x, own)
        if of_layer is None:
            return None
        bound.append(_Layer(of_layer, own))
    valid = negatives != batch.labels[:, None]
    losses = cpu_by_sample.bind(placed.x, rows[len(placed.x) :], valid, offsets, 1 / config.temperature)
    step = None if losses is None else Step(model, accumulator, placed, bound, losses)
    return step if step is not None and step.has_distinct_parameters() else None


def _has_plain_parts(model: Any) -> bool:
    """Whether a call of each part of the model is that of its class, with nothing around it."""
    if not isinstance(model.norm.weight, torch.nn.Parameter) or {"encode", "place"} & vars(model).keys():
        return False
    kinds = (model.positions, PositionalEmbedding), (model.drop, TokenDropout), (model.norm, LayerNorm)
    parts = [*kinds, *((layer, model.layer) for layer in model.layers)]
    if model.drop.training and model.drop.p:
        return False
    return all(type(part) is kind and "forward" not in vars(part) for part, kind in parts) and not any(
        has_hooks(part) for part, _ in parts
    )
