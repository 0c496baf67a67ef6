"""A call of a next-item model of HSTU layers on the CPU, as one node of autograd's graph.

A micro-batch of a few hundred tokens pays for each module, op and node more than for its loops. Here kernels
follow each other without them, with the same bits. `plan` says whether a model fits, once for many
micro-batches, and `Plan.step` whether a batch does; what does not fit takes the modules one by one, with
their errors.

Dimensions: L tokens, B samples, K negatives, d model dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from .. import ops
from ..kernels.autocast import autocast_dtype
from ..kernels.dispatch import implementation
from ..kernels.gradients import Accumulator, Targets, Terms, current, sum_terms, targets_of
from ..kernels.hstu_layer import cpu_hstu_layer
from ..kernels.norm_mul_dropout.op import (
    NORM_MUL_DROPOUT,
    NORM_MUL_DROPOUT_BACKWARD,
    NORM_MUL_DROPOUT_BACKWARD_EXACT,
)
from ..kernels.offsets import check_offsets
from ..kernels.op import annotation
from ..kernels.row_terms import RowTerms
from ..kernels.rows.op import IndexedTerms
from ..kernels.sampled_softmax import cpu_by_sample
from .context import has_global_hooks, has_hooks, hooks_of
from .hstu_layer import Parameters, prepared_layer, whole_backward
from .modules import LayerNorm, PositionalEmbedding, TokenDropout
from .next_item import NextItemModel
from .tokens import Tokens

NO_DROPOUT = 0.0, 0, None, None
_plans: WeakKeyDictionary[Accumulator, Plan] = WeakKeyDictionary()


def losses_by_one_op(
    model: NextItemModel, batch: Any, item: ops.IndexedRows, seed: int
) -> torch.Tensor | None:
    """Losses (B,) of a call of the model, or None where its modules have to be called one by one.

    They are where no accumulator takes the gradients of the rows: outside of a trainer.
    """
    accumulator = current()
    if accumulator is None or not accumulator.holds(item.values) or accumulator.scale_exponent:
        return None
    if autocast_dtype(item.values.device) is not None:
        return None
    with torch.no_grad():
        found = _plans.get(accumulator)
        if found is None or found.model is not model or not found.stands():
            found = plan(model, accumulator)
            if found is None:
                return None
            _plans[accumulator] = found
        step = found.step(batch, item, seed)
    if step is None:
        return None
    # `values` is an input so that autograd calls backward, which gives the gradient to the accumulator
    # itself.
    given = [each for each in found.parameters if each.requires_grad and not accumulator.holds(each)]
    return _Call.apply(step, item.values, *given)


class _Call(torch.autograd.Function):
    """Losses (B,) of a `Step`; `given` are the parameters whose gradients autograd takes."""

    @staticmethod
    def forward(ctx: Any, step: Step, values: torch.Tensor, *given: torch.Tensor):
        ctx.step, ctx.accumulator, ctx.given = step, current(), [id(each) for each in given]
        return step.forward()

    @staticmethod
    def backward(ctx: Any, dlosses: torch.Tensor):
        if torch.is_grad_enabled():
            raise RuntimeError("a call of HSTU by one op has no second derivative: leave create_graph out")
        step: Step = ctx.step
        rows, found = step.backward(ctx.accumulator, dlosses.contiguous())
        ctx.accumulator.add(step.item.values, rows)
        of = {id(each): gradient for each, gradient in zip(step.plan.parameters, found, strict=False)}
        return None, None, *map(of.__getitem__, ctx.given)


class RowGradients(Terms):
    """The gradients of a micro-batch's rows, occurrence by occurrence; the next one may overwrite them.

    Args:
        rows: (L + L + L*K,) int64, of ids, labels and negatives, which are taken to be right.
        values: (L + L, d), of ids and labels.
        hidden: (L, d), slopes: (L * K,): a negative's is its slope times its token's hidden state.
    """

    def __init__(self, rows: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor, slopes: torch.Tensor):
        self.rows, self.values, self.hidden, self.slopes = rows, values, hidden, slopes

    def add_to(self, sums: torch.Tensor, fraction_bits: int, name: str) -> None:
        """As `Terms.add_to`."""
        self._add(sums, "batch", fraction_bits, f"gradient of {name}")

    def add_in_order(self, sums: torch.Tensor, scale_exponent: int = 0) -> None:
        """As `Terms.add_in_order`; the loss is not scaled."""
        self._add(sums, "window", 0, "gradient")

    def _add(self, sums: torch.Tensor, consistency: str, fraction_bits: int, name: str) -> None:
        from ..kernels.rows.numba_segment_sum import add_products, segment_sum_into

        count = len(self.values)
        how = consistency, fraction_bits, name
        segment_sum_into(sums, self.values, self.rows[:count], len(sums), *how, None, None)
        add_products(sums, self.hidden, self.slopes, self.rows[count:], *how, count)


class _Layer(NamedTuple):
    prepared: cpu_hstu_layer.Layer
    own: Parameters
    targets: Targets | None


class Plan:
    """What the micro-batches of a model share, while its parts and its parameters' memory stay as they are.

    Args:
        accumulator: takes the gradients of the parameters. It has the plan (`_plans`), which holds its sums.
        ends: the weights of positions, and weight and bias of the norm.
    """

    def __init__(
        self, model: NextItemModel, accumulator: Accumulator, ends: list[torch.Tensor], layers: list[_Layer]
    ):
        self.model, self.layers = model, layers
        self.factor, self.scale = model.config.dim**0.5, 1 / model.config.temperature
        self.positions, *norm = ends
        self.norm = norm[0], norm[1]
        self.position_targets = targets_of(accumulator, self.positions)
        self.norm_targets = targets_of(accumulator, *self.norm)
        self.parameters = [*ends, *(each for layer in layers for each in layer.own if each is not None)]
        self._addresses = [each.data_ptr() for each in self.parameters]
        parts = _parts(model)
        self._own, self._hooks = list(map(vars, parts)), hooks_of(parts)
        self._counts = list(map(len, self._hooks))
        self._modules = list(model.modules())
        self._switches = self._now()

    def stands(self) -> bool:
        """Whether this holds still: no part has other hooks, another `forward` or mode, no parameter other
        memory.
        """
        return (
            list(map(len, self._hooks)) == self._counts
            and self._now() == self._switches
            and not has_global_hooks()
            and not any("forward" in own for own in self._own)
            # Kernels have addresses and no tensors: memory that has moved must not be read.
            and [each.data_ptr() for each in self.parameters] == self._addresses
        )

    def _now(self) -> list[bool]:
        trained = [each.requires_grad for each in self.parameters]
        return trained + [module.training for module in self._modules]

    def step(self, batch: Any, item: ops.IndexedRows, seed: int) -> Step | None:
        """The micro-batch's call, or None where the modules have to be called one by one.

        Raises ValueError for samples that are too long, and for offsets that cut the tokens into none.

        Args:
            batch: a `NextItemInput`.
            item: rows of a matrix (R, d) float32: L + L + L*K of ids, labels and negatives. Numbers of rows
                are taken to be right.
            seed: of dropout.
        """
        config, negatives, times = self.model.config, batch.negatives, batch.timestamps
        matrix, rows_at = item
        if negatives.dim() != 2 or matrix.dim() != 2 or matrix.shape[1] != config.dim:
            return None
        tokens, count = negatives.shape
        if matrix.dtype != torch.float32 or not matrix.is_cpu or not matrix.is_contiguous():
            return None
        if not _is_list(rows_at, (tokens * (2 + count),)):
            return None
        timed = times if config.relative_bias else None
        offsets, ids, labels = batch.offsets, batch.sample_ids, batch.labels
        samples = ids.numel()
        if not (
            tokens and _is_list(offsets, (samples + 1,)) and _is_list(ids, (samples,))
            and _is_list(labels, (tokens,)) and _is_list(negatives, (tokens, count))
            and (timed is None or _is_list(timed, (tokens,)))
        ):  # fmt: skip
            return None
        rows = torch.index_select(matrix, 0, rows_at[: 2 * tokens])  # which looks at the numbers
        check_offsets("offsets", offsets, tokens)
        placed = Tokens.place(offsets, ids, config.max_seq_len, timed)
        if timed is not None:
            placed = placed.with_next_query_timestamps()
        x = rows[:tokens].mul(self.factor).add_(torch.index_select(self.positions, 0, placed.positions))
        valid = (negatives != labels[:, None]).contiguous()
        at = cpu_hstu_layer.Place(
            offsets, placed.sample_ids, placed.positions, timed, None, placed.query_timestamps
        )
        layers = [
            cpu_hstu_layer.Bound(layer.prepared, at, tokens, ops.derive_seed(seed, number, 0))
            for number, layer in enumerate(self.layers)
        ]
        losses = cpu_by_sample.Bound(valid, offsets, self.scale, config.dim)
        return Step(self, placed, x, layers, losses, item, rows)


class Step:
    """The call of one micro-batch."""

    def __init__(
        self,
        plan: Plan,
        placed: Tokens,
        x: torch.Tensor,
        layers: list[cpu_hstu_layer.Bound],
        losses: cpu_by_sample.Bound,
        item: ops.IndexedRows,
        rows: torch.Tensor,
    ):
        self.plan, self.item, self._placed, self._layers, self._losses = plan, item, placed, layers, losses
        self._x, self._rows, self._tokens = x, rows, len(x)
        negatives = item.rows[2 * self._tokens :]
        self._items = rows[self._tokens :], item.values, negatives  # labels, and where negatives lie
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # by layer its input and what it keeps

    def forward(self) -> torch.Tensor:
        """Losses (B,)."""
        plan, x = self.plan, self._x
        for bound in self._layers:
            with annotation("hstu_layer"):
                out, of_layer = bound.forward(x)
            self._kept.append((x, of_layer))
            x = out
        self._hidden, *rows = NORM_MUL_DROPOUT.launch(x, None, *plan.norm, plan.model.norm.eps, *NO_DROPOUT)
        self._normed = x, None, *plan.norm, *NO_DROPOUT, *rows
        with annotation("sampled_softmax_by_sample"):
            return self._losses.forward_rows(self._hidden, *self._items)

    def backward(
        self, accumulator: Accumulator, dlosses: torch.Tensor
    ) -> tuple[RowGradients, list[torch.Tensor | None]]:
        """The gradients of the rows and of each parameter, which is None where the accumulator took it.

        Args:
            accumulator: of the plan. dlosses: (B,) the gradients of the losses.
        """
        plan, tokens = self.plan, self._tokens
        drows = torch.empty_like(self._rows)
        with annotation("sampled_softmax_by_sample_backward"):
            dhidden, slopes = self._losses.backward_rows(dlosses, self._hidden, *self._items, drows[tokens:])
        dx, of_norm = self._norm_backward(accumulator, dhidden)
        _note_complete(accumulator, plan.norm, of_norm)
        of_layers: list[torch.Tensor | None] = []
        for layer, bound in zip(reversed(plan.layers), reversed(self._layers), strict=True):
            x, of_layer = self._kept.pop()
            with annotation("hstu_layer_backward"):
                dx, found = whole_backward(
                    accumulator, layer.own, bound, dx, x, of_layer, self._placed.seq_offsets, layer.targets
                )
            _note_complete(accumulator, layer.own, found)
            # Layers come last to first, their gradients stand first to last.
            of_layers[:0] = (each for each, own in zip(found, layer.own, strict=True) if own is not None)
        torch.mul(dx, plan.factor, out=drows[:tokens])
        # dx is the gradient of x[0] = factor * row + position by now.
        gradients = RowGradients(self.item.rows, drows, self._hidden, slopes)
        return gradients, [self._take_positions(accumulator, dx), *of_norm, *of_layers]

    def _take_positions(self, accumulator: Accumulator, dx: torch.Tensor) -> torch.Tensor | None:
        plan, positions = self.plan, self._placed.positions
        if plan.position_targets is None:
            terms = IndexedTerms(dx, positions, len(plan.positions))
            return sum_terms(accumulator, plan.positions, terms)
        from ..kernels.rows.numba_segment_sum import segment_sum_into

        (sums,), bits, (name,) = plan.position_targets
        segment_sum_into(sums, dx, positions, len(sums), "batch", bits, f"gradient of {name}", None, None)
        return None

    def _norm_backward(
        self, accumulator: Accumulator, dhidden: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        plan = self.plan
        if plan.norm_targets is not None:
            sums, *rest = plan.norm_targets
            given = *sums, None, dhidden, *self._normed, *rest
            return NORM_MUL_DROPOUT_BACKWARD_EXACT.launch(*given), [None, None]
        dx, _, *terms = NORM_MUL_DROPOUT_BACKWARD.launch(dhidden, *self._normed)
        pairs = zip(plan.norm, terms, strict=True)
        return dx, [sum_terms(accumulator, own, RowTerms(values)) for own, values in pairs]


def _note_complete(accumulator: Accumulator, parameters: Sequence[Any], found: list[Any]) -> None:
    if accumulator.complete is not None and all(each is None for each in found):  # else autograd takes them
        accumulator.complete(parameters)


def _is_list(tensor: torch.Tensor, shape: tuple[int, ...]) -> bool:
    return tensor.shape == shape and tensor.dtype == torch.int64 and tensor.is_contiguous() and tensor.is_cpu


def plan(model: NextItemModel, accumulator: Accumulator) -> Plan | None:
    """The plan of a model, or None where its modules have to be called one by one.

    That is on an accelerator, and with modules or hooks of others, or a parameter in two places.
    """
    if not _has_plain_parts(model):
        return None
    config, ends = model.config, list[torch.Tensor]()
    if implementation("auto", model.positions.weight) != "cpu" or config.temperature <= 0:
        return None
    shapes = (config.max_seq_len, config.dim), (config.dim,), (config.dim,)
    parameters = model.positions.weight, model.norm.weight, model.norm.bias
    for each, shape in zip(parameters, shapes, strict=True):
        if each is None or each.shape != shape or each.dtype != torch.float32 or not each.is_contiguous():
            return None
        ends.append(each)
    layers = []
    for module in model.layers:
        own, prepared = prepared_layer(module, config.dim)
        if prepared is None:
            return None
        targets = targets_of(accumulator, *(each for each in own if each is not None))
        layers.append(_Layer(prepared, own, targets))
    found = Plan(model, accumulator, ends, layers)
    return found if len(set(map(id, found.parameters))) == len(found.parameters) else None


def _has_plain_parts(model: NextItemModel) -> bool:
    """Whether a call of the model and of each part is that of its class, with nothing around it."""
    if not isinstance(model.norm.weight, torch.nn.Parameter) or {"encode", "place"} & vars(model).keys():
        return False
    if model.drop.training and model.drop.p:
        return False
    kinds = type(model), PositionalEmbedding, TokenDropout, LayerNorm, *(model.layer for _ in model.layers)
    return all(
        type(part) is kind and "forward" not in vars(part) and not has_hooks(part)
        for part, kind in zip(_parts(model), kinds, strict=True)
    )


def _parts(model: NextItemModel) -> list[torch.nn.Module]:
    """The modules that a call of the model calls in turn, itself first."""
    return [model, model.positions, model.drop, model.norm, *model.layers]
