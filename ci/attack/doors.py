"""The doors of each op.

``unique`` is the function of `tritonrec.ops`, ``registered.unique`` the op of ``torch.ops`` behind it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from arguments import (
    Arguments,
    Draw,
    aggregated,
    drawn,
    dropped,
    fixed_point,
    front,
    gated,
    gathered,
    hash_table,
    keys,
    layer,
    moved,
    norm,
    packed,
    paired,
    routed,
    sampled,
    sequences,
    softmax,
    sorted_by_bucket,
    squared,
    summed,
    summed_front,
    summed_norm,
    two_lists,
    updated,
)

from tritonrec import ops
from tritonrec.kernels.op import OPS
from tritonrec.kernels.sparse_optimizers.op import SPARSE_UPDATES

UPDATES = [f"sparse_{rule}" for rule in SPARSE_UPDATES]
# registered op -> how its arguments are drawn
DRAWN: dict[str, Callable[[Draw], Arguments]] = {
    "unique": keys, "unique_padded": keys, "unique_table": keys, "owner_of": routed, "bucketize": routed,
    "counting_sort": sorted_by_bucket,
    "intersect": two_lists, "intersect_padded": two_lists,
    "hash_insert": hash_table, "hash_find": hash_table,
    "hash_erase": hash_table, "hash_grow": hash_table,
    "gather_rows": gathered, "scatter_rows": moved,
    "segment_sum": summed, "segment_sum_into": summed,
    "to_fixed_point": fixed_point, "to_fixed_point_status": fixed_point, "from_fixed_point": fixed_point,
    "sum_of_squares": squared,
    "pack_rows": packed, "add_packed_rows": packed,
    "initial_rows": drawn, "initial_rows_of_tables": drawn, "random_indices": drawn,
    **{op: partial(updated, row_wise="rowwise" in op) for op in UPDATES}, "sparse_lazy_decay": updated,
    "silu": layer, "silu_backward": layer, "linear": layer, "linear_weight_grad": front,
    "norm_mul_dropout": norm, "norm_mul_dropout_backward": norm, "norm_mul_dropout_backward_into": gated,
    "norm_linear_silu": front, "norm_linear_silu_backward": front, "norm_linear_silu_backward_into": front,
    "norm_mul_dropout_backward_exact": summed_norm, "norm_linear_silu_backward_exact": summed_front,
    "relative_aggregate": aggregated, "relative_aggregate_backward": aggregated,
    "dot_interaction": paired, "dot_interaction_backward": paired,
    "hstu_attention": sequences, "hstu_attention_backward": sequences,
    "hstu_attention_backward_into": sequences,
    "sampled_softmax": sampled, "sampled_softmax_backward": sampled,
    "softmax_attention": softmax, "softmax_attention_backward": softmax, "dropout": dropped,
}  # fmt: skip
# arguments without repeats, where results are specified
DISTINCT = {
    "intersect": ["left", "right"], "intersect_padded": ["left", "right"], "scatter_rows": ["rows"],
    **{op: ["indices"] for op in (*UPDATES, "sparse_lazy_decay")},
    "hash_insert": ["keys"], "hash_erase": ["keys"],
}  # fmt: skip
# ops that agree with their reference up to rounding; all others in every bit
ROUNDED = {
    "silu", "silu_backward", "linear", "linear_weight_grad", "norm_mul_dropout", "norm_mul_dropout_backward",
    "norm_mul_dropout_backward_into", "norm_linear_silu", "norm_linear_silu_backward",
    "norm_linear_silu_backward_into", "norm_mul_dropout_backward_exact",
    "norm_linear_silu_backward_exact", "relative_aggregate",
    "relative_aggregate_backward", "dot_interaction", "dot_interaction_backward",
    "hstu_attention", "hstu_attention_backward",
    "hstu_attention_backward_into", "sampled_softmax", "sampled_softmax_backward",
    "softmax_attention", "softmax_attention_backward",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Call:
    """One way to call an op."""

    name: str
    op: str  # the registered op whose arguments it takes
    names: list[str]
    doors: list[Callable[..., Any]]  # taken in turn
    written: list[str]


def _schema(op: str) -> Any:
    return getattr(torch.ops.tritonrec, op).default._schema.arguments


def _written(op: str) -> list[str]:
    return [a.name for a in _schema(op) if a.alias_info is not None and a.alias_info.is_write]


def attention(**given: Any) -> torch.Tensor:
    given["scaled_by_alpha"] = given.pop("bias_factor") != 1.0
    if given["attn_scale"] is not None:
        given["scaling_seqlen"] = None
    mask, bias = (
        kind(**{field.name: given.pop(field.name) for field in fields(kind) if field.name in given})
        for kind in (ops.HSTUMask, ops.HSTUBias)
    )
    return ops.hstu_attention(**given, mask=mask, bias=bias)


def insert(first_row: Any, next_row: Any, **given: Any) -> Any:
    return ops.hash_insert(next_row=first_row if next_row is None else next_row, **given)


def front_of_layer(keep_normed: bool, keep_linear: bool, **given: Any) -> torch.Tensor:
    return ops.norm_linear_silu(
        recompute=("norm",) * (not keep_normed) + ("linear",) * (not keep_linear), **given
    )


def update(op: str) -> Callable[..., None]:
    """The public function of a rule: without the numbers that the registered one has for all rules."""
    nesterov = op == "sparse_nesterov_sgd"
    function = ops.sparse_momentum_sgd if nesterov else getattr(ops, op)
    names = inspect.signature(function).parameters

    def call(**given: Any) -> None:
        given |= {"momentum": given["beta1"], "nesterov": nesterov}
        given |= {"eta": given["beta2"], "l1": given["beta1"]}
        function(**{name: value for name, value in given.items() if name in names})

    return call


# public function -> the registered op whose arguments it takes, and the call where names differ
PUBLIC: dict[str, tuple[str, Callable[..., Any]]] = {
    **{name: (name, getattr(ops, name)) for name in DRAWN if hasattr(ops, name)},
    "unique padded": ("unique_padded", lambda **given: ops.unique(padded=True, **given)),
    "unique with a table": ("unique_table", lambda **given: ops.unique(padded=True, table=True, **given)),
    "intersect padded": ("intersect_padded", lambda **given: ops.intersect(padded=True, **given)),
    **{op: (op, update(op)) for op in UPDATES},
    "hash_insert": ("hash_insert", insert),
    "segment_sum into": ("segment_sum_into", ops.segment_sum),
    "to_fixed_point status": ("to_fixed_point_status", ops.to_fixed_point),
    "norm_mul_dropout": ("norm_mul_dropout", lambda p, **given: ops.norm_mul_dropout(dropout=p, **given)),
    "norm_linear_silu": ("norm_linear_silu", front_of_layer),
    "hstu_attention": ("hstu_attention", attention),
    "softmax_attention": ("softmax_attention", lambda p, **given: ops.softmax_attention(dropout=p, **given)),
    "sampled_softmax": (
        "sampled_softmax",
        lambda scale, **given: ops.sampled_softmax(temperature=1 / scale if scale else scale, **given),
    ),
}


def registered(op: str, names: list[str]) -> list[Callable[..., Any]]:
    """The registered op."""
    function = getattr(torch.ops.tritonrec, op)
    return [lambda **given: function(*(given[name] for name in names))]


def calls() -> dict[str, Call]:
    """By name."""
    assert set(DRAWN) == set(OPS)
    found = {}
    for name, (op, function) in PUBLIC.items():
        found[name] = Call(name, op, [a.name for a in _schema(op)], [function], _written(op))
    for op in DRAWN:
        names = [a.name for a in _schema(op)]
        found[f"registered.{op}"] = Call(f"registered.{op}", op, names, registered(op, names), _written(op))
    return found
