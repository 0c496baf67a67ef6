"""Arguments that an op takes, drawn at random: by registered op, under the names of its schema.

Sizes are small, so that a call takes a millisecond and every edge (empty, one, a block) comes often.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from draws import chosen

from tritonrec import ops
from tritonrec.kernels import launch

Arguments = dict[str, Any]
EXTREMES = np.array([0, 1, -1, -(2**63), 2**63 - 1])


class Draw:
    """Random tensors and numbers."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng

    def size(self, most: int = 9) -> int:
        return chosen(self.rng, (0, 1, 2, 3, int(self.rng.integers(0, most + 1))))

    def some(self, most: int) -> int:
        """A size that is 1 or more where sizes are drawn."""
        return 1 + self.size(most)

    def maybe(self, value: Any) -> Any:
        return value if self.rng.random() < 0.5 else None

    def keys(self, count: int, distinct: bool = False) -> torch.Tensor:
        wide = self.rng.integers(-(2**63), 2**63 - 1, count + 8)
        narrow = self.rng.integers(-9, 9, count + 8)
        pool = self.rng.permutation(np.concatenate([EXTREMES, wide, narrow]))
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


def sorted_by_bucket(d: Draw) -> Arguments:
    num_buckets, count = int(d.rng.integers(1, 99)), d.size(200)
    buckets = d.rows(count, num_buckets)
    return {"buckets": buckets, "num_buckets": num_buckets, "count": d.maybe(d.scalar(count))}


def two_lists(d: Draw) -> Arguments:
    left, right = d.size(200), d.size(200)
    both = d.keys(left + right, distinct=True)
    return {
        "left": both[:left],
        "right": torch.cat([both[:right], d.keys(3)]).unique()[:right],
        "left_count": d.maybe(d.scalar(left)),
        "right_count": d.maybe(d.scalar(right)),
        "table": d.maybe(torch.from_numpy(d.rng.integers(-2, 300, 64, dtype=np.int32))),
    }


def hash_table(d: Draw) -> Arguments:
    slots = 8 << int(d.rng.integers(0, 4))
    slot_keys, slot_rows = torch.zeros(slots, dtype=torch.int64), torch.full((slots,), -1, dtype=torch.int32)
    present = d.keys(int(d.rng.integers(0, slots // 2)), distinct=True)
    launch.hash_insert(slot_keys, slot_rows, present, 0)
    launch.hash_erase(slot_keys, slot_rows, present[::3].clone())
    count = d.size(20)
    asked = torch.cat([present, d.keys(count)]).unique()
    asked = asked[torch.from_numpy(d.rng.permutation(len(asked)))][:count]
    count = len(asked)
    return {
        "slot_keys": slot_keys,
        "slot_rows": slot_rows,
        "keys": asked.clone(),
        "rows": d.rows(count, 2**31) if d.rng.random() < 0.5 else d.rows(count, 99).int(),
        "first_row": len(present),
        "free_rows": d.maybe(1000 + d.rows(3, 50, distinct=True)),
        "count": d.maybe(d.scalar(count)),
        "next_row": d.maybe(torch.tensor(len(present))),
        "status": d.maybe(torch.tensor(0)),
        "used": d.maybe((slot_rows >= 0).sum()),
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
    consistency = "window" if d.rng.random() < 0.4 else "batch"
    terms = consistency == "batch" and d.rng.random() < 0.4
    rows, source = count, None
    if d.rng.random() < 0.4:
        rows = d.size(40) + 1
        source = d.rows(count, rows)
    return {
        "values": d.whole(rows, width) if terms else d.floats(rows, width),
        "segments": d.rows(count, segments),
        "source": source,
        "num_segments": segments,
        "consistency": consistency,
        "out": torch.zeros(segments, width, dtype=torch.float32 if consistency == "window" else torch.int64),
        "fraction_bits": int(d.rng.integers(20, 40)),
        "name": "tensor",
        "count": d.maybe(d.scalar(count)),
        "status": d.maybe(torch.tensor(0)),
    }


def fixed_point(d: Draw) -> Arguments:
    shape = tuple(d.size(5) for _ in range(d.size(3)))
    values = {"values": d.floats(*shape), "sums": d.whole(*shape), "status": torch.tensor(0)}
    return {**values, "fraction_bits": int(d.rng.integers(0, 50)), "name": "tensor", "divisor": 3.5}


def squared(d: Draw) -> Arguments:
    shape = tuple(d.size(60) for _ in range(d.size(3)))
    values = d.floats(*shape) * 10.0 ** int(d.rng.integers(-12, 8))
    return {"values": values, "count": d.maybe(d.scalar(shape[0])) if shape else None}


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
        "fraction_bits": 36,
        "counts": [len(widths)],
        "dim": width,
    }


def drawn(d: Draw) -> Arguments:
    count = d.size(20)
    return {
        "seed": int(d.rng.integers(-(2**63), 2**63 - 1)), "table": int(d.rng.integers(0, 2**32)),
        "keys": d.keys(count), "dim": d.size(40), "scale": 0.25, "stream": 3, "step": 17,
        "tables": d.keys(count), "dims": d.rows(count, 50), "scales": d.floats(count), "width": d.size(40),
        "sample_ids": d.keys(count), "positions": d.keys(count), "count": d.size(9), "upper": 1 + d.size(99),
    }  # fmt: skip


def updated(d: Draw, row_wise: bool = False) -> Arguments:
    places, width, step = d.size(20), d.size(40), 1 + d.size(9)
    narrow = 1 if row_wise else width
    count = min(d.size(20), places)
    return {
        "weight": d.floats(places, width), "state": d.floats(places, narrow).abs(),
        "momentum_buffer": d.floats(places, width), "last_update": d.floats(places, 1),
        "linear": d.floats(places, width),
        "factors": d.floats(step + d.size(5)), "weight_decay": chosen(d.rng, (0.0, 0.1)),
        "exp_avg": d.floats(places, width), "exp_avg_sq": d.floats(places, narrow).abs(),
        "indices": d.rows(count, places, distinct=True), "grad": d.floats(count, width),
        "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "step": step,
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
        "keep_normed": kept, "keep_linear": d.rng.random() < 0.5, "fraction_bits": 36, "name": "tensor",
        "accumulator": torch.zeros(columns, inner, dtype=torch.int64), "seq_offsets": d.offsets(tokens),
        "bias_accumulator": d.maybe(torch.zeros(columns, dtype=torch.int64)), "bias_name": "bias",
        "norm_weight_sums": torch.zeros(inner, dtype=torch.int64),
        "norm_bias_sums": torch.zeros(inner, dtype=torch.int64),
    }  # fmt: skip


def norm(d: Draw) -> Arguments:
    given = layer(d)
    return {**given, "weight": given["norm_weight"], "bias": given["norm_bias"]}


def summed_norm(d: Draw) -> Arguments:
    given = norm(d)
    sums = {"weight_sums": given["norm_weight_sums"], "bias_sums": given["norm_bias_sums"]}
    return {**given, **sums, "du": None if given["u"] is None else given["du"], "names": ["weight", "bias"]}


def summed_front(d: Draw) -> Arguments:
    given = front(d)
    columns, names = len(given["weight"]), ["norm_weight", "norm_bias", "weight", "bias"]
    bias, sums = d.floats(columns), torch.zeros(columns, dtype=torch.int64)
    return {**given, "bias": bias, "weight_sums": given["accumulator"], "bias_sums": sums, "names": names}


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
        d.some(2),
        d.some(9),
        d.some(9),
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
        "target_group_size": 1 + d.size(2), "max_attn_len": d.size(3), "min_full_attn_seq_len": d.size(3),
        "attn_prefix_len": d.size(2),
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


def paired(d: Draw) -> Arguments:
    samples, count = d.size(), chosen(d.rng, (0, 1, 2, 5, int(d.rng.integers(0, 40))))
    return {
        "vectors": d.floats(samples, count, d.size(70)), "dy": d.floats(samples, count * (count - 1) // 2)
    }  # fmt: skip


def softmax(d: Draw) -> Arguments:
    given = sequences(d)
    tokens, (queries, heads, _), dim_v = len(given["v"]), given["q"].shape, given["v"].shape[2]
    p, count = 0.4 * (d.rng.random() < 0.5), len(given["seq_offsets"]) - 1
    other = given["delta_offsets"] is not None
    longest = given["max_seq_len"]
    return {
        **given, "do": d.floats(queries, heads, dim_v), "out": d.floats(queries, heads, dim_v),
        "most": d.floats(queries, heads), "total": d.floats(queries, heads).abs() + 1,
        "seq_offsets": given["delta_offsets"] if other else given["seq_offsets"],
        "key_offsets": given["seq_offsets"] if other or queries != tokens else None,
        "scale": 0.5, "causal": d.rng.random() < 0.5, "p": p, "seed": 5,
        "bias": d.maybe(d.floats(count * heads * longest, longest).view(count, heads, longest, longest)),
        "sample_ids": d.keys(count) if p else None,
    }  # fmt: skip


def dropped(d: Draw) -> Arguments:
    rows = d.size(20)
    return {
        "x": d.floats(rows, d.size(30)), "p": 0.4, "seed": 5, "sample_ids": d.keys(rows),
        "positions": d.keys(rows),
    }  # fmt: skip


def sampled(d: Draw) -> Arguments:
    tokens, dim, count = d.size(9), d.size(20), d.size(9)
    given, length = d.rng.random() < 0.5, 1 + d.size(9)
    return {
        "dloss": d.floats(tokens), "hidden": d.floats(tokens, dim), "positive": d.floats(tokens, dim),
        "negatives": d.floats(length, dim) if given else d.floats(tokens, count, dim),
        "valid": d.floats(tokens, count) > 0, "scale": 0.7,
        "rows": d.rows(tokens * count, length).view(tokens, count) if given else None,
    }  # fmt: skip
