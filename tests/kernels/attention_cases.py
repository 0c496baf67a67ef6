"""HSTU attention with masks, bias and delta queries: cases, and the judge of their results.

`judge` holds the worst element and the worst block of every result to twice the error of plain float32.
"""

from dataclasses import fields

import numpy as np
import torch
from float_error import assert_error_at_most_twice
from impls import on

from tritonrec.kernels.hstu_attention import checks
from tritonrec.kernels.hstu_attention.call import Call, HSTUBias, HSTUMask
from tritonrec.kernels.hstu_attention.op import HSTU_ATTENTION, HSTU_ATTENTION_BACKWARD

RESULTS = ("out", "dq", "dk", "dv", "dpos", "dts")
N = 11

# name: lengths, targets, contexts, (group, window, full, prefix), queries, bias, further options
CASES = {
    "contexts": ([70, 5, 0, 9, 1], [3, 1, 0, 0, 0], [4, 2, 0, 9, 1], (1, 0, 0, 0), None, "", ""),
    "groups": ([40, 9, 1], [23, 9, 1], None, (5, 0, 0, 0), None, "", ""),
    "window": ([70, 0, 33], [4, 0, 1], None, (1, 7, 0, 0), None, "", ""),
    "window_of_blocks": ([150], [20], [3], (1, 33, 0, 0), None, "", ""),
    "semi_local": ([90, 6, 40], [9, 0, 40], [3, 6, 0], (4, 9, 0, 12), None, "", ""),
    "full_rows": ([90, 6, 40], [9, 2, 0], [3, 0, 1], (1, 9, 20, 0), None, "", ""),
    "positions": ([40, 1, 0, 18], [3, 0, 0, 0], None, (1, 0, 0, 0), None, "one", ""),
    "positions_both_ways": ([66, 9], [3, 2], [5, 4], (1, 8, 0, 3), None, "two", ""),
    "times": ([34, 1, 0, 9], None, None, (1, 0, 0, 0), None, "times", ""),
    "both": ([34, 0, 40], [5, 0, 0], [2, 0, 3], (2, 12, 4, 2), None, "two times", "nvidia scales shifted"),
    "delta": ([70, 0, 33, 12], [3, 0, 1, 2], None, (1, 0, 0, 0), [5, 0, 33, 0], "", ""),
    "delta_of_everything": (
        [70, 0, 33, 12], [9, 0, 1, 2], [2, 0, 0, 1], (3, 9, 3, 2), [6, 0, 33, 0], "two times", "scales",
    ),
    "one_scale": ([20, 3], None, None, (1, 0, 0, 0), None, "", "scale"),
}  # fmt: skip


def make(lengths, targets, contexts, numbers, queries, bias, options, dims=(2, 8, 6), seed=7):
    """(do, q, k, v) and the call; |alpha q k| up to 8."""
    heads, dim_qk, dim_v = dims
    generator = torch.Generator().manual_seed(seed)
    tokens, rows = sum(lengths), sum(lengths if queries is None else queries)
    longest = max(lengths)

    def draw(*shape):
        return torch.randn(shape, generator=generator) * 1.5 + 0.2

    tensors = (draw(rows, heads, dim_v), draw(rows, heads, dim_qk), draw(tokens, heads, dim_qk))
    tensors = (*tensors, draw(tokens, heads, dim_v))
    top = max((torch.einsum("ihd,jhd->hij", *tensors[1:3]).abs().max().item(), 1e-3)) if rows else 1.0
    alpha = 8 / top
    positions = {"one": longest, "two": 2 * longest - 1}.get(bias.split(" ")[0])
    has_times = "times" in bias
    times = torch.randint(-3, 300, (tokens,), generator=generator).cumsum(0) if has_times else None
    scale = {"scales": torch.rand(rows, generator=generator) / N, "scale": torch.tensor(0.3)}
    group, window, full, prefix = numbers
    return tensors, Call(
        torch.tensor([0, *np.cumsum(lengths)]), longest, alpha, 1 if "scale" in options else N,
        next((scale[word] for word in options.split() if word in scale), None),
        None if targets is None else torch.tensor(targets), group,
        None if contexts is None else torch.tensor(contexts), window, full, prefix,
        draw(positions) if positions else None, draw(9) if has_times else None, times,
        torch.cat([times[1:], times[-1:]]) if has_times and "shifted" in options else None,
        alpha if "nvidia" in options else 1.0,
        None if queries is None else torch.tensor([0, *np.cumsum(queries)]),
    )  # fmt: skip


def grouped(**options):
    """Options of `hstu_attention` by name, those of mask and bias in their objects."""
    mask = {field.name: options.pop(field.name) for field in fields(HSTUMask) if field.name in options}
    bias = {field.name: options.pop(field.name) for field in fields(HSTUBias) if field.name in options}
    return {**options, "mask": HSTUMask(**mask), "bias": HSTUBias(**bias)}


def run(impl, tensors, call):
    do, q, k, v = (on(impl, tensor) for tensor in tensors)
    call = Call(*(on(impl, value) for value in call))
    if q.dtype != torch.float64:
        checks.check(q, k, v, *call)
    out = HSTU_ATTENTION.launch(q, k, v, *call, impl=impl)
    results = (out, *HSTU_ATTENTION_BACKWARD.launch(do, q, k, v, *call, impl=impl))
    return [result.cpu() for result in results]


def doubled(values):
    return [
        value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for value in values
    ]


def judge(tensors, call, got, plain, exact):
    """AssertionError unless every result, and every block of 16 rows of one, is as good as plain float32."""
    for what, one, two, three in zip(RESULTS, got, plain, exact, strict=True):
        assert_error_at_most_twice(one, two, three, what)
        for start in range(0, len(three), 16):
            error = (one[start : start + 16].double() - three[start : start + 16]).norm()
            block = three[start : start + 16]
            allowed = 6 * (two.double() - three).norm() / max(1, len(three) / 16) ** 0.5
            assert error <= allowed + 1e-6 * block.norm() + 1e-9, f"{what}, rows from {start}: {error:.3g}"
