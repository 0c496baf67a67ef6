"""Arguments that an op takes, drawn at random: by registered op, under the names of its schema.

`calls` names the ops as they are called: ``unique`` is the function of `tritonrec.ops`, ``registered.unique``
the op behind it, through ``torch.ops`` and `ops.registered`. Sizes are small, so that a call takes a
millisecond and every edge (empty, one, a block) is met often.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tritonrec import ops

Arguments = dict[str, Any]


class Draw:
    """Random tensors and numbers."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng

    def size(self, most: int = 9) -> int:
        return int(self.rng.choice([0, 1, 2, 3, int(self.rng.integers(0, most + 1))]))

    def maybe(self, value: Any) -> Any:
        return value if self.rng.random() < 0.5 else None

    def keys(self, count: int, distinct: bool = False) -> torch.Tensor:
        extremes = np.array([0, 1, -1, -(2**63), 2**63 - 1])
        wide = self.rng.integers(-(2**63), 2**63 - 1, count + 8)
        narrow = self.rng.integers(-9, 9, count + 8)
        pool = self.rng.permutation(np.concatenate([extremes, wide, narrow]))
        if distinct:
            pool = self.rng.permutation(np.unique(pool))
        return torch.from_numpy(pool[:count].copy())

    def rows(self, count: int, limit: int, distinct: bool = False) -> torch.Tensor:
        if distinct:
            return torch.from_numpy(self.rng.permutation(limit)[:count].copy())
        return torch.from_numpy(self.rng.integers(0, max(limit, 1), count))

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape).astype(np.float32))

    def whole(self, *shape: int) -> torch.Tensor:
        bits = int(self.rng.integers(0, 62))
        return torch.from_numpy(self.rng.integers(-(2**bits), 2**bits, shape))

    def scalar(self, most: int) -> torch.Tensor:
        return torch.tensor(int(self.rng.integers(0, most + 2)))

    def offsets(self, tokens: int) -> torch.Tensor:
        cuts = np.sort(self.rng.integers(0, tokens + 1, self.size(4)))
        whole = torch.from_numpy(np.concatenate([[0], cuts, [tokens]]))
        return whole if self.rng.random() < 0.7 else whole.int()


def keys(d: Draw) -> Arguments:
    count = d.size(200)
    return {"keys": d.keys(count), "count": d.maybe(d.scalar(count))}


def routed(d: Draw) -> Arguments:
    return {**keys(d), "world_size": int(d.rng.integers(1, 9))}


def two_lists(d: Draw) -> Arguments:
    left, right = d.size(200), d.size(200)
    both = d.keys(left + right, distinct=True)
    return {
        "left": both[:left],
        "right": torch.cat([both[:right], d.keys(3)]).unique()[:right],
        "left_count": d.maybe(d.scalar(left)),
        "right_count": d.maybe(d.scalar(right)),
    }


def hash_table(d: Draw) -> Arguments:
    slots = 8 << int(d.rng.integers(0, 4))
    slot_keys, slot_rows = torch.zeros(slots, dtype=torch.int64), torch.full((slots,), -1, dtype=torch.int32)
    present = d.keys(int(d.rng.integers(0, slots // 2)), distinct=True)
    ops.hash_insert(slot_keys, slot_rows, present, 0)
    ops.hash_erase(slot_keys, slot_rows, present[::3].clone())
    count = d.size(20)
    asked = torch.cat([present, d.keys(count)]).unique()
    asked = asked[torch.from_numpy(d.rng.permutation(len(asked)))][:count]
    count = len(asked)
    return {
        "slot_keys": slot_keys,
        "slot_rows": slot_rows,
        "keys": asked.clone(),
        "rows": d.rows(count, 2**31) if d.rng.random() < 0.5 else d.rows(count, 99).int(),
        "next_row": len(present),
        "free_rows": d.maybe(1000 + d.rows(3, 50, distinct=True)),
        "count": d.maybe(d.scalar(count)),
        "row_counter": d.maybe(torch.tensor(len(present))),
        "status": d.maybe(torch.tensor(0)),
    }


def moved(d: Draw) -> Arguments:
    places, width, count = d.size(30), d.size(70), d.size(30)
    count = min(count, places)
    dtype = [torch.float32, torch.int64, torch.float16, torch.bool, torch.uint8][int(d.rng.integers(0, 5))]
    taken = d.rng.random() < 0.5 and count > 0
    length = 1 + d.size(9) if taken else count
    return {
        "source": d.rows(count, length) if taken else None,
        "destination": d.floats(places, width).mul(9).to(dtype),
        "rows": d.rows(count, places, distinct=True),
        "values": d.floats(length, width).mul(9).to(dtype),
        "count": d.maybe(d.scalar(count)),
    }


def gathered(d: Draw) -> Arguments:
    given = moved(d)
    return {"source": given["destination"], "rows": given["rows"], "count": given["count"]}


def summed(d: Draw) -> Arguments:
    count, width, segments = d.size(40), d.size(40), d.size(9) + 1
    level = "window" if d.rng.random() < 0.4 else "batch"
    terms = level == "batch" and d.rng.random() < 0.4
    return {
        "values": d.whole(count, width) if terms else d.floats(count, width),
        "segments": d.rows(count, segments),
        "num_segments": segments,
        "level": level,
        "out": torch.zeros(segments, width, dtype=torch.float32 if level == "window" else torch.int64),
        "bits": int(d.rng.integers(20, 40)),
        "name": "tensor",
        "count": d.maybe(d.scalar(count)),
        "status": d.maybe(torch.tensor(0)),
    }


def grid(d: Draw) -> Arguments:
    shape = tuple(d.size(5) for _ in range(d.size(3)))
    values = {"values": d.floats(*shape), "sums": d.whole(*shape), "status": torch.tensor(0)}
    return {**values, "bits": int(d.rng.integers(0, 50)), "name": "tensor", "divisor": 3.5}


def packed(d: Draw) -> Arguments:
    length, width, count = d.size(20) + 1, d.size(40), d.size(30)
    values, rows = d.whole(length, width), d.rows(count, length)
    widths, data = ops.pack_rows(values, rows, impl="reference")
    segments = d.size(9) + 1
    return {
        "values": values,
        "rows": rows,
        "out": torch.zeros(segments, width, dtype=torch.int64),
        "segments": d.rows(count, segments),
        "widths": widths,
        "packed": data,
        "name": "tensor",
        "bits": 36,
        "counts": [len(widths)],
        "dim": width,
    }


def drawn(d: Draw) -> Arguments:
    count = d.size(20)
    return {
        "seed": int(d.rng.integers(-(2**63), 2**63 - 1)), "table": int(d.rng.integers(0, 2**32)),
        "keys": d.keys(count), "dim": d.size(40), "scale": 0.25, "stream": 3, "step": 17,
        "sample_ids": d.keys(count), "positions": d.keys(count), "count": d.size(9), "upper": 1 + d.size(99),
    }  # fmt: skip


def updated(d: Draw) -> Arguments:
    places, width = d.size(20), d.size(40)
    count = min(d.size(20), places)
    return {
        "weight": d.floats(places, width), "state": d.floats(places, 1).abs(),
        "exp_avg": d.floats(places, width), "exp_avg_sq": d.floats(places, width).abs(),
        "indices": d.rows(count, places, distinct=True), "grad": d.floats(count, width),
        "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "step": 1 + d.size(9),
        "count": d.maybe(d.scalar(count)),
    }  # fmt: skip


def layer(d: Draw) -> Arguments:
    """Of silu, linear, norm_mul_dropout, norm_linear_silu and their backwards."""
    tokens, inner, columns = d.size(20), d.size(30), d.size(30)
    kept = d.rng.random() < 0.5
    p = 0.4 if d.rng.random() < 0.5 else 0.0
    return {
        "x": d.floats(tokens, inner), "u": d.maybe(d.floats(tokens, inner)),
        "dy": d.floats(tokens, inner), "du": d.floats(tokens, inner), "dout": d.floats(tokens, columns),
        "norm_weight": d.floats(inner), "norm_bias": d.floats(inner),
        "weight": d.floats(columns, inner), "bias": d.maybe(d.floats(columns)),
        "eps": 1e-6, "p": p, "seed": 5,
        "sample_ids": d.keys(tokens) if p else None, "positions": d.keys(tokens) if p else None,
        "means": d.floats(tokens), "rstds": d.floats(tokens).abs() + 0.1,
        "z": d.floats(tokens if kept else 0, columns), "normed": d.floats(tokens * kept, inner),
        "keep_normed": kept, "keep_linear": d.rng.random() < 0.5, "bits": 36, "name": "tensor",
        "grid": torch.zeros(columns, inner, dtype=torch.int64), "seq_offsets": d.offsets(tokens),
    }  # fmt: skip


def norm(d: Draw) -> Arguments:
    given = layer(d)
    return {**given, "weight": given["norm_weight"], "bias": given["norm_bias"]}


def gated(d: Draw) -> Arguments:
    given = norm(d)
    return {**given, "u": d.floats(*given["x"].shape)}


def front(d: Draw) -> Arguments:
    given = layer(d)
    return {**given, "dy": given["dout"]}


def sequences(d: Draw) -> Arguments:
    """Of hstu_attention and relative_aggregate."""
    tokens, heads, dim_qk, dim_v, buckets = (
        d.size(24),
        1 + d.size(2),
        1 + d.size(9),
        1 + d.size(9),
        1 + d.size(9),
    )
    offsets = d.offsets(tokens)
    lengths = offsets[1:] - offsets[:-1]
    most = int(lengths.max()) + d.size(3)
    longest = max(most, 1)
    timed, delta = d.rng.random() < 0.4, d.rng.random() < 0.3
    queries = (lengths.double() * torch.from_numpy(d.rng.random(len(lengths)))).long() if delta else lengths
    of_row, of_token = int(queries.sum()), d.floats(tokens, heads, dim_v)
    targets = (queries * 0.5).long()
    both = d.rng.random() < 0.5
    return {
        "do": d.floats(of_row, heads, dim_v), "q": d.floats(of_row, heads, dim_qk),
        "k": d.floats(tokens, heads, dim_qk), "v": of_token,
        "dq": d.floats(of_row, heads, dim_qk), "dk": d.floats(tokens, heads, dim_qk),
        "dv": d.floats(tokens, heads, dim_v), "seq_offsets": offsets, "max_seq_len": longest,
        "alpha": 0.5, "scaling_seqlen": 1 + d.size(9),
        "mask_numbers": [1 + d.size(2), d.size(3), d.size(3), d.size(2)],
        "num_targets": d.maybe(targets), "num_contexts": d.maybe((lengths - targets) // 2) if both else None,
        "delta_offsets": torch.cat([torch.zeros(1, dtype=torch.int64), queries.cumsum(0)]) if delta else None,
        "attn_scale": d.maybe(d.floats(of_row if d.rng.random() < 0.5 else 1)),
        "pos_weights": d.maybe(d.floats(2 * longest - 1 if both else longest)),
        "ts_weights": d.floats(buckets) if timed else None, "timestamps": d.keys(tokens) if timed else None,
        "query_timestamps": d.keys(tokens) if timed and d.rng.random() < 0.5 else None,
        "bias_factor": 1.0, "deterministic": True, "table": d.floats(heads, buckets),
    }  # fmt: skip


def aggregated(d: Draw) -> Arguments:
    given = sequences(d)
    return {**given, "do": d.floats(*given["v"].shape), "timestamps": d.maybe(d.keys(len(given["v"])))}


def sampled(d: Draw) -> Arguments:
    tokens, dim, count = d.size(9), d.size(20), d.size(9)
    return {
        "dloss": d.floats(tokens), "hidden": d.floats(tokens, dim), "positive": d.floats(tokens, dim),
        "negatives": d.floats(tokens, count, dim), "valid": d.floats(tokens, count) > 0, "scale": 0.7,
    }  # fmt: skip


# registered op -> how its arguments are drawn
DRAWN: dict[str, Callable[[Draw], Arguments]] = {
    "unique": keys, "unique_padded": keys, "owner_of": routed, "bucketize": routed,
    "intersect": two_lists, "intersect_padded": two_lists,
    "hash_insert": hash_table, "hash_insert_padded": hash_table, "hash_find": hash_table,
    "hash_assign": hash_table, "hash_erase": hash_table, "hash_grow": hash_table,
    "gather_rows": gathered, "scatter_rows": moved,
    "segment_sum": summed, "segment_sum_into": summed,
    "to_grid": grid, "to_grid_status": grid, "from_grid": grid,
    "pack_rows": packed, "add_packed_rows": packed,
    "initial_rows": drawn, "random_indices": drawn,
    "sparse_sgd": updated, "sparse_rowwise_adagrad": updated, "sparse_adam": updated,
    "silu": layer, "silu_backward": layer, "linear": layer, "linear_weight_grad": front,
    "norm_mul_dropout": norm, "norm_mul_dropout_backward": norm, "norm_mul_dropout_backward_into": gated,
    "norm_linear_silu": front, "norm_linear_silu_backward": front,
    "relative_aggregate": aggregated, "relative_aggregate_backward": aggregated,
    "hstu_attention": sequences, "hstu_attention_backward": sequences,
    "hstu_attention_backward_into": sequences,
    "sampled_softmax": sampled, "sampled_softmax_backward": sampled,
}  # fmt: skip
# arguments without repeats, where results are specified
DISTINCT = {
    "intersect": ["left", "right"], "intersect_padded": ["left", "right"], "scatter_rows": ["rows"],
    "sparse_sgd": ["indices"], "sparse_rowwise_adagrad": ["indices"], "sparse_adam": ["indices"],
    "hash_insert": ["keys"], "hash_insert_padded": ["keys"], "hash_assign": ["keys"], "hash_erase": ["keys"],
}  # fmt: skip
# ops that agree with their reference up to rounding; all others in every bit
ROUNDED = {
    "silu", "silu_backward", "linear", "linear_weight_grad", "norm_mul_dropout", "norm_mul_dropout_backward",
    "norm_mul_dropout_backward_into", "norm_linear_silu", "norm_linear_silu_backward", "relative_aggregate",
    "relative_aggregate_backward", "hstu_attention", "hstu_attention_backward",
    "hstu_attention_backward_into", "sampled_softmax", "sampled_softmax_backward",
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
    group, window, full, prefix = given.pop("mask_numbers")
    given["bias_scaled_by_alpha"] = given.pop("bias_factor") != 1.0
    if given["attn_scale"] is not None:
        given["scaling_seqlen"] = None
    return ops.hstu_attention(
        **given,
        target_group_size=group,
        max_attn_len=window,
        min_full_attn_seq_len=full,
        attn_prefix_len=prefix,
    )


def insert(row_counter: Any, next_row: Any, **given: Any) -> Any:
    return ops.hash_insert(next_row=next_row if row_counter is None else row_counter, **given)


def front_of_layer(keep_normed: bool, keep_linear: bool, **given: Any) -> torch.Tensor:
    return ops.norm_linear_silu(
        recompute=("norm",) * (not keep_normed) + ("linear",) * (not keep_linear), **given
    )


def sum_into(out: Any, **given: Any) -> torch.Tensor:
    level = "batch" if getattr(out, "dtype", None) == torch.int64 else "window"
    return ops.segment_sum(out=out, num_segments=len(out) if out is not None else 1, level=level, **given)


# public function -> the registered op whose arguments it takes, and the call where names differ
PUBLIC: dict[str, tuple[str, Callable[..., Any]]] = {
    **{name: (name, getattr(ops, name)) for name in DRAWN if hasattr(ops, name)},
    "unique padded": ("unique_padded", lambda **given: ops.unique(padded=True, **given)),
    "intersect padded": ("intersect_padded", lambda **given: ops.intersect(padded=True, **given)),
    "hash_insert padded": ("hash_insert_padded", insert),
    "segment_sum into": ("segment_sum_into", sum_into),
    "to_grid status": ("to_grid_status", ops.to_grid),
    "norm_mul_dropout": ("norm_mul_dropout", lambda p, **given: ops.norm_mul_dropout(dropout=p, **given)),
    "norm_linear_silu": ("norm_linear_silu", front_of_layer),
    "hstu_attention": ("hstu_attention", attention),
    "sampled_softmax": (
        "sampled_softmax",
        lambda scale, **given: ops.sampled_softmax(temperature=1 / scale if scale else scale, **given),
    ),
}


def registered(op: str, names: list[str]) -> list[Callable[..., Any]]:
    """The registered op, at its two doors."""
    by_torch, by_us = getattr(torch.ops.tritonrec, op), getattr(ops.registered, op)
    return [
        lambda **given: by_torch(*(given[name] for name in names)),
        lambda **given: by_us(*(given[name] for name in names)),
    ]


def calls() -> dict[str, Call]:
    """By name."""
    assert set(DRAWN) == set(dir(ops.registered))
    found = {}
    for name, (op, function) in PUBLIC.items():
        found[name] = Call(name, op, [a.name for a in _schema(op)], [function], _written(op))
    for op in DRAWN:
        names = [a.name for a in _schema(op)]
        found[f"registered.{op}"] = Call(f"registered.{op}", op, names, registered(op, names), _written(op))
    return found
