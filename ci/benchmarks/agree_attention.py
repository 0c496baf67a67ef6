"""Attention beside the field's public references.

    python ci/benchmarks/agree_attention.py --source NAME=FILE

FILE is a Python file of somebody's checkout that holds a PyTorch reference (`attention_references`).

Each option of `tritonrec.ops.hstu_attention` is mapped to the reference's own arguments, or the row says why
the two do not meet. Where they meet, the truth is the reference itself in float64, on empty sequences,
sequences of one token and of more than a block, with |alpha q k| up to 8; out and all gradients are compared:

    formula    our float64 reference against theirs: largest difference over the largest element, below 1e-12
    ours       largest error of the CPU kernel in float32, for the tensor where it compares worst
    theirs     that of their function in float32; ours may be twice that and half a unit in the last place of
               the largest element

Exit status 1 if a row disagrees.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from attention_references import (
    DIM_QK,
    DIM_V,
    FAMILIES,
    HEADS,
    Case,
    DoesNotMeet,
    Functions,
    N,
    Tensors,
    dense,
    load,
)  # fmt: skip

from tritonrec.ops import HSTUBias, HSTUMask, hstu_attention

LENGTHS = [70, 0, 4, 1, 17, 33, 3, 64]
TARGETS = [30, 0, 1, 1, 0, 29, 0, 9]
IN_CONTEXT = [0, 0, 1, 2, 3, 4, 5, 6]


def biased(by_time: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    options: dict[str, Any] = {"pos_weights": torch.randn(2 * N - 1, generator=generator)}
    if by_time:
        times = [torch.randint(0, 10**6, (n,), generator=generator).sort().values for n in LENGTHS]
        following = [torch.cat([t[1:], t[-1:]]) for t in times]  # HSTU takes the time of the next token
        options["ts_weights"] = torch.randn(24, generator=generator)
        options["timestamps"], options["query_timestamps"] = torch.cat(times), torch.cat(following)
    return options


def cases() -> dict[str, Case]:
    targets = torch.tensor(TARGETS)
    window = {"max_attn_len": 7}
    per_token = torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(3))
    long = [70, 0, 4, 17, 33, 3, 64]  # no sequence has fewer history than contextual tokens
    of_long = torch.tensor([30, 0, 1, 0, 29, 0, 9])
    return {
        "causal": Case(LENGTHS, {}),
        "targets": Case(LENGTHS, {"num_targets": targets}),
        "target groups of 3": Case(LENGTHS, {"num_targets": targets, "target_group_size": 3}),
        "contexts": Case(long, {"contextual_seq_len": 3}),
        "contexts, targets": Case(long, {"contextual_seq_len": 3, "num_targets": of_long}),
        "more contexts than tokens": Case([5, 2, 3, 1], {"contextual_seq_len": 3}),
        "contexts per sample": Case([9, 0, 4, 5, 17, 33, 5, 64], {"num_contexts": torch.tensor(IN_CONTEXT)}),
        "window": Case(LENGTHS, window),
        "window, targets": Case(LENGTHS, {**window, "num_targets": targets}),
        "window, contexts": Case(long, {**window, "contextual_seq_len": 3}),
        "window, full rows": Case(LENGTHS, {**window, "min_full_attn_seq_len": 5}),
        "window, full rows, contexts, targets": Case(
            long, {**window, "min_full_attn_seq_len": 5, "contextual_seq_len": 3, "num_targets": of_long}
        ),
        "window, prefix": Case(LENGTHS, {**window, "attn_prefix_len": 4}),
        "scale of one element": Case(LENGTHS, {"attn_scale": torch.tensor(0.3)}),
        "scale per token": Case(LENGTHS, {"attn_scale": per_token}),
        "two delta queries": Case([70, 4, 17, 33, 3, 64], {}, [2] * 6),
        "delta queries": Case([70, 0, 4, 1, 17], {}, [3, 0, 4, 1, 16]),
        "bias by position": Case(LENGTHS, biased(by_time=False)),
        "bias by position and time": Case(LENGTHS, biased(by_time=True)),
    }


def inputs(case: Case) -> tuple[dict[str, torch.Tensor], float]:
    """do, q, k, v and the tables in float32, and alpha with max |alpha q k| = 8."""
    generator = torch.Generator().manual_seed(len(case.lengths) + sum(case.lengths))
    tokens = sum(case.lengths)
    rows = tokens if case.queries is None else sum(case.queries)
    shapes = {"do": (rows, DIM_V), "q": (rows, DIM_QK), "k": (tokens, DIM_QK), "v": (tokens, DIM_V)}
    given = {
        name: torch.randn(count, HEADS, dim, generator=generator) * 1.5 + 0.2
        for name, (count, dim) in shapes.items()
    }
    scores = torch.einsum("ihd,jhd->hij", given["q"].double(), given["k"].double())
    given |= {name: case.options[name] for name in ("pos_weights", "ts_weights") if name in case.options}
    return given, float(8 / scores.abs().max())


def ours(case: Case, alpha: float, given: Tensors, impl: str) -> torch.Tensor:
    options = case.options | {name: given[name] for name in ("pos_weights", "ts_weights") if name in given}
    if "pos_weights" in options:
        options["scaled_by_alpha"] = case.scaled
    if "attn_scale" not in options:
        options["scaling_seqlen"] = N
    delta = None if case.queries is None else case.query_offsets
    mask, bias = (
        kind(**{field.name: options.pop(field.name) for field in fields(kind) if field.name in options})
        for kind in (HSTUMask, HSTUBias)
    )
    return hstu_attention(
        given["q"],
        given["k"],
        given["v"],
        case.offsets,
        N,
        alpha=alpha,
        delta_offsets=delta,
        impl=impl,
        mask=mask,
        bias=bias,
        **options,
    )


def gradients(
    call: Callable, given: Tensors, dtype: torch.dtype, tables: torch.dtype
) -> dict[str, torch.Tensor]:
    """out and the gradient of everything else, by name."""
    do = given["do"].to(dtype)
    leaves = {
        name: tensor.to(dtype if tensor.dim() == 3 else tables, copy=True).requires_grad_()
        for name, tensor in given.items()
        if name != "do"
    }
    out = call(leaves)
    grads = torch.autograd.grad(out, list(leaves.values()), do)
    return {"out": out.detach()} | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


class Row(NamedTuple):
    """One line of the table; `meets` says why not, or is empty."""

    case: str
    meets: str
    formula: float = 0.0
    tensor: str = ""
    ours: float = 0.0
    theirs: float = 0.0
    least: float = 0.0

    @property
    def agrees(self) -> bool:
        small = self.ours <= 2 * self.theirs + self.least
        return not self.meets and self.formula < 1e-12 and small


def compare(name: str, case: Case, family: Callable, functions: Functions) -> Row:
    """Our kernel and their function in float32, both against their function in float64."""
    given, alpha = inputs(case)
    case = case._replace(scaled=family is dense)
    try:
        exact = gradients(lambda x: family(functions, case, alpha, x), given, torch.float64, torch.float64)
    except DoesNotMeet as reason:
        return Row(name, str(reason))
    single = torch.float32
    theirs = gradients(lambda x: family(functions, case, alpha, x), given, single, single)
    mine = gradients(lambda x: ours(case, alpha, x, "cpu"), given, single, single)
    formula = gradients(lambda x: ours(case, alpha, x, "reference"), given, torch.float64, single)

    def error(got: Tensors, what: str) -> float:
        largest = (got[what].double() - exact[what]).abs().max()
        return float(largest.nan_to_num(torch.inf))

    def least(what: str) -> float:
        return max(2.0**-24 * float(exact[what].abs().max()), sys.float_info.min)

    worst = max(exact, key=lambda what: error(mine, what) / (2 * error(theirs, what) + least(what)))
    apart = max(error(formula, what) / (2.0**24 * least(what)) for what in ("out", "dq", "dk", "dv"))
    return Row(name, "", apart, worst, error(mine, worst), error(theirs, worst), least(worst))


def table(rows: list[Row]) -> str:
    """Markdown: a line for each option that meets, then the others with their reasons."""
    lines = ["| option | | formula | worst | ours | theirs |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        if not row.meets:
            verdict = "agrees" if row.agrees else "DISAGREES"
            errors = f"{row.formula:.0e} | {row.tensor} | {row.ours:.1e} | {row.theirs:.1e}"
            lines.append(f"| {row.case} | {verdict} | {errors} |")
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.meets:
            reasons.setdefault(row.meets, []).append(row.case)
    for reason, names in reasons.items():
        lines.append(f"\nDoes not meet, {reason}: {'; '.join(names)}.")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source", action="append", required=True, metavar="NAME=FILE", help="a reference; may be repeated"
    )
    disagreements = 0
    for source in parser.parse_args(arguments).source:
        name, _, file = source.partition("=")
        if not file or not Path(file).is_file():
            parser.error(f"--source {source}: give NAME=FILE with a Python file that exists")
        functions = load(Path(file))
        family = next((call for needed, call in FAMILIES if needed <= functions.keys()), None)
        if family is None:
            known = "; ".join(" and ".join(sorted(needed)) for needed, _ in FAMILIES)
            parser.error(f"--source {source}: the file defines no reference that is known: {known}")
        rows = [compare(title, case, family, functions) for title, case in cases().items()]
        agree, meet = sum(row.agrees for row in rows), sum(not row.meets for row in rows)
        print(f"### {name}\n\n{table(rows)}\n\n{agree} of {meet} that meet agree.\n")
        disagreements += meet - agree
    return 1 if disagreements else 0


if __name__ == "__main__":
    sys.exit(main())
