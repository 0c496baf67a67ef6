"""Calls of every registered op, drawn by their sizes: what the promises of this folder are held to.

The arguments are those of `ci/attack`, where an op that is new says how its arguments are drawn.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache
from itertools import chain, cycle
from typing import Any

import numpy as np
import torch
from arguments import Draw
from doors import DRAWN, PUBLIC, ROUNDED, Call
from impls import on
from verdicts import flat

from tritonrec.kernels.op import OPS

__all__ = ["DRAWN", "PUBLIC", "ROUNDED"]

Arguments = dict[str, Any]
PLANS = {
    "empty": (0, 0), "one": (1, 1), "no_rows": (0, 3), "no_columns": (3, 0), "ample": (19, 18),
    "zero_second": (3, 0, 2, 3), "zero_third": (3, 2, 0, 3), "zero_fourth": (3, 2, 3, 0),
}  # fmt: skip
"""Name -> the first size that is drawn, and those that follow it, again and again."""
SIZES = (*PLANS, "any_0", "any_1", "any_2")
SCHEMAS = {op: record.registered.default._schema.arguments for op, record in OPS.items()}
NAMES = {op: [each.name for each in schema if each.name != "impl"] for op, schema in SCHEMAS.items()}
WRITTEN = {
    op: [each.name for each in schema if each.alias_info is not None and each.alias_info.is_write]
    for op, schema in SCHEMAS.items()
}
CASES = [(op, size) for op in OPS for size in SIZES]
CONSTANT = {("hstu_attention", "attn_scale"), ("hstu_attention_backward_into", "attn_scale")}
CONSTANT |= {("softmax_attention", "bias")}
"""Floats that have no gradient."""
DIFFERENTIABLE = [op for op in OPS if OPS[op].has_derivative]


class SizedDraw(Draw):
    """Draws whose sizes are given."""

    def __init__(self, rng: np.random.Generator, first: int, *others: int):
        super().__init__(rng)
        self.sizes = chain([first], cycle(others))

    def size(self, most: int = 9) -> int:
        return min(next(self.sizes), most)

    def some(self, most: int) -> int:
        return self.size(most)

    def maybe(self, value: Any) -> Any:
        return value


@lru_cache(None)
def drawn(op: str, size: str) -> Arguments:
    if op not in DRAWN:
        raise LookupError(f"{op} has no cases: DRAWN of ci/attack/doors.py says how its arguments are drawn")
    rng = np.random.default_rng([11, zlib.crc32(op.encode()), SIZES.index(size)])
    given = DRAWN[op](SizedDraw(rng, *PLANS[size]) if size in PLANS else Draw(rng))
    if "table" in NAMES[op] and op.startswith("intersect"):
        given["table"] = None  # of other keys: `test_unique_table` has its promise
    if op.startswith("norm_linear_silu_backward") and given["weight"].numel():
        names = "x norm_weight norm_bias weight bias eps keep_normed keep_linear"
        kept = OPS["norm_linear_silu"].launch(*(given[name] for name in names.split()), impl="reference")
        given |= dict(zip(("z", "normed", "means", "rstds"), kept[1:], strict=True))
    if op == "softmax_attention_backward":
        kept = OPS["softmax_attention"].launch(
            *(given[n] for n in NAMES["softmax_attention"]), impl="reference"
        )
        given |= dict(zip(("out", "most", "total"), kept, strict=True))
    return {name: given[name] for name in NAMES[op]}


def copied(value: Any) -> Any:
    """A tensor of its own, whose strides are those of a new one; anything else as it is."""
    return value.clone(memory_format=torch.contiguous_format) if isinstance(value, torch.Tensor) else value


def arguments(op: str, size: str, impl: str = "cpu") -> Arguments:
    """By the names of the schema, without `impl`; new tensors at each call, with the same values."""
    return {name: on(impl, copied(value)) for name, value in drawn(op, size).items()}


def tensors_of(given: Arguments) -> dict[str, torch.Tensor]:
    return {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}


def results(op: str, given: Arguments, impl: str, call: Callable[..., Any] | None = None) -> list[Any]:
    """What a call returns and what it wrote to, on the host, without what an implementation is free in."""
    call = call or OPS[op]
    found = flat(call(*given.values(), impl=impl))
    if op == "unique_table":
        found = found[:4]  # the table is one for an accelerator
    written = [given[name] for name in WRITTEN[op] if given[name] is not None]
    found, written = [*map(to_host, found)], [*map(to_host, written)]
    if op == "hash_insert":
        written = in_order(written)
    elif op == "hash_grow":
        found = in_order(found)
    return [*found, *written]


def in_order(slots: list[Any]) -> list[Any]:
    """Keys and rows of a table by row: of keys with one home any may take the first slot."""
    order = slots[0].argsort(stable=True)
    order = order[slots[1][order].argsort(stable=True)]
    return [*(each[order] for each in slots[:2]), *slots[2:]]


def to_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def outcome(op: str, given: Arguments, impl: str, call: Callable[..., Any] | None = None) -> Any:
    """The results, or a refusal as a text."""
    try:
        return results(op, given, impl, call)
    except (ValueError, TypeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"


def by_names(op: str) -> Call:
    """The op as `ci/attack` describes it."""
    return Call(op, op, NAMES[op], [], WRITTEN[op])


@lru_cache(None)
def accepted(op: str) -> list[str]:
    """The sizes whose arguments the op takes.

    Of the reference, which compiles nothing: files of this folder draw their parameters by it while they are
    collected, and each process of tests would wait there for the kernels of all ops.
    """
    return [size for size in SIZES if not isinstance(outcome(op, arguments(op, size), "reference"), str)]
