"""What is said of a hostile call: how a refusal has to read, which results equal those of the reference."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch
from doors import DISTINCT, ROUNDED, Call
from hostile import Hostile

from tritonrec.ops import ExactSumError, HSTUMask

# names in errors that are no names of a schema
ALSO = [
    "beta",
    "betas",
    "momentum",
    "eta",
    "l1",
    "dropout",
    "temperature",
    "gradient of",
    "step counts",
    "next_row",
    "a sequence",
]
ALSO += [field.name for field in fields(HSTUMask)]

FLOATS = ["alpha", "scale", "bias_factor", "eps", "p", "dropout", "temperature"]
"""Of rounded ops; a whole number given for one is a float, too."""

Outcome = tuple[str, str]  # "accepted", "refused", "unnamed", "spoiled", "difference", and the reason


def judge_refusal(call: Call, error: Exception, given: dict[str, Any]) -> Outcome:
    """A refusal names an argument; Python's own TypeError for what is no number at all passes."""
    message = str(error)
    text = f"{type(error).__name__}: {message}"
    named = _names(tuple(given)).search(message) is not None or call.op in message
    named |= isinstance(error, ExactSumError)  # by the name it was given
    plain = isinstance(error, TypeError) or out_of_memory(error)
    # torch's dispatcher refuses None for a tensor, and a copy of a negated view that is written to
    plain |= call.name.startswith("registered.") and bool(
        re.search("Expected Tensor|cloned_mutable|negation fallback", text)
    )
    return ("refused" if named or plain else "unnamed"), text.splitlines()[0]


@lru_cache
def _names(arguments: tuple[str, ...]) -> re.Pattern[str]:
    """One of these arguments, as a word of its own: `p` is none in ``tuple``."""
    return re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in [*arguments, *ALSO]))


def out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or bool(re.search("(not enough|allocate) memory", str(error)))


def comparable(call: Call, hostile: Hostile, given: dict[str, Any]) -> bool:
    """Whether the results are specified: lists without repeats, and for rounded ones, small numbers."""
    if set(hostile.replaced.values()) & {"meta", "requires_grad", "negated"}:
        return False
    for name in DISTINCT.get(call.op, ()):
        if len(given[name].unique()) < len(given[name]):
            return False
    if call.op.startswith("norm_") and _rows_without_variance(given["x"]):
        return False
    if call.op in ROUNDED:
        floats = [v for v in given.values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
        if any(v.numel() and not v.abs().max() < 100 for v in floats):
            return False
        if call.op == "softmax_attention_backward" and not (given["total"] > 1e-3).all():
            return False  # a sum of exponentials, of which one is 1
        numbers = {
            n: v
            for n, v in given.items()
            if type(v) is float or (type(v) is int and (n in FLOATS or abs(v) > 2**63))
        }
        return all(abs(v) < 100 and (name != "eps" or v > 1e-9) for name, v in numbers.items())
    return True


def _rows_without_variance(x: torch.Tensor) -> bool:
    """Whether a row is nearly constant: its norm multiplies the rounding of its mean by 1 / sqrt(eps)."""
    if x.dim() != 2 or x.numel() == 0 or x.shape[1] == 1:
        return False
    x = x.double()
    return bool((x.std(1, correction=0) < 1e-3 * x.abs().amax(1)).any())


def flat(result: Any) -> list[Any]:
    if isinstance(result, tuple | list):
        return [one for part in result for one in flat(part)]
    return [] if result is None else [result]


def compare(call: Call, results: list[Any], references: list[Any]) -> Outcome:
    for place, (got, expected) in enumerate(zip(results, references, strict=True)):
        if not isinstance(got, torch.Tensor):
            if got != expected:
                return "difference", f"result {place}: {got} for {expected}"
            continue
        if got.shape != expected.shape or got.dtype != expected.dtype:
            shapes = f"{got.shape} {got.dtype} for {expected.shape} {expected.dtype}"
            return "difference", f"result {place}: {shapes}"
        got, expected = got.detach(), expected.detach()
        if torch.equal(got, expected):
            continue
        if call.op in ROUNDED and got.is_floating_point():
            scale = float(expected.nan_to_num(0.0).abs().max()) if expected.numel() else 1.0
            near = torch.isclose(got, expected, rtol=1e-3, atol=1e-4 * max(scale, 1.0), equal_nan=True)
        elif call.op in ROUNDED:
            near = (got - expected).abs() < 2**26
        else:
            near = (got == expected) | ((got != got) & (expected != expected))
        if not near.all():
            at = near.logical_not().nonzero()[0].tolist()
            return "difference", f"result {place}{at}: {got[tuple(at)]} for {expected[tuple(at)]}"
    return "accepted", ""
