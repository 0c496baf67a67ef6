"""Arguments that are no tensors, or lie on different devices, are refused by name."""

import pytest
import torch
from attention_cases import grouped

from tritonrec import ops


def whole(*values):
    return torch.tensor(values)


def some(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def table():
    return {
        "slot_keys": torch.zeros(16, dtype=torch.int64),
        "slot_rows": torch.full((16,), -1, dtype=torch.int32),
    }


KEYS, COUNT, OFFSETS = whole(3, -1, 3, 9), torch.tensor(2), whole(0, 3, 4)
GRID = torch.zeros(2, 3, dtype=torch.int64)
WIDTHS, PACKED = ops.pack_rows(GRID + 7, whole(1, 0))


# op -> all of its tensors by name, and the rest
def hstu_attention(**given):
    """Its mask and bias by their fields."""
    return ops.hstu_attention(**grouped(**given), scaling_seqlen=None if "attn_scale" in given else 3)


CALLS = {
    ops.unique: ({"keys": KEYS, "count": COUNT}, {}),
    ops.owner_of: ({"keys": KEYS}, {"world_size": 3}),
    ops.bucketize: ({"keys": KEYS, "count": COUNT}, {"world_size": 3}),
    ops.counting_sort: ({"buckets": whole(3, 0, 3, 1), "count": COUNT}, {"num_buckets": 4}),
    ops.intersect: ({"left": whole(1, 5), "right": whole(5), "left_count": COUNT, "right_count": COUNT}
                    | {"table": torch.full((4,), -1, dtype=torch.int32)}, {}),
    ops.hash_insert: (
        {**table(), "keys": whole(4, 2), "free_rows": whole(3), "count": COUNT, "status": torch.tensor(0)}
        | {"used": torch.tensor(0)},
        {"next_row": 0},
    ),
    ops.hash_find: ({**table(), "keys": KEYS, "count": COUNT}, {}),
    ops.hash_assign: ({**table(), "keys": whole(4, 2), "rows": whole(1, 0), "count": COUNT}, {}),
    ops.hash_erase: ({**table(), "keys": KEYS, "count": COUNT, "used": torch.tensor(2)}, {}),
    ops.hash_grow: (table(), {}),
    ops.gather_rows: ({"source": some(4, 3), "rows": whole(3, 0), "count": COUNT}, {}),
    ops.scatter_rows: (
        {"destination": some(4, 3), "rows": whole(3, 0), "values": some(5, 3), "source": whole(1, 1)}
        | {"count": COUNT},
        {},
    ),
    ops.segment_sum: (
        {
            "values": some(2, 3), "segments": whole(1, 0), "out": some(4, 3), "count": COUNT,
            "source": whole(0, 1),
        },
        {"num_segments": 4},
    ),
    ops.to_fixed_point: ({"values": some(3), "status": torch.tensor(0)}, {}),
    ops.from_fixed_point: ({"sums": GRID}, {}),
    ops.sum_of_squares: ({"values": some(4, 3), "count": COUNT}, {}),
    ops.pack_rows: ({"values": GRID, "rows": whole(1)}, {}),
    ops.add_packed_rows: (
        {"out": GRID.clone(), "segments": whole(0, 1), "widths": WIDTHS, "packed": PACKED},
        {},
    ),
    ops.initial_rows: ({"keys": KEYS}, {"seed": 1, "table": 2, "dim": 3, "scale": 0.5}),
    ops.random_indices: (
        {"sample_ids": KEYS, "positions": whole(0, 7, 2, 1)},
        {"seed": 1, "stream": 2, "step": 3, "count": 5, "upper": 100},
    ),
    ops.sparse_sgd: (
        {"weight": some(4, 3), "indices": whole(2, 0), "grad": some(2, 3), "count": COUNT},
        {"lr": 0.1},
    ),
    ops.sparse_momentum_sgd: (
        {"weight": some(4, 3), "momentum_buffer": some(4, 3), "indices": whole(2, 0), "grad": some(2, 3)},
        {"lr": 0.1},
    ),
    ops.sparse_adagrad: (
        {"weight": some(4, 3), "state": some(4, 3).abs(), "indices": whole(2, 0), "grad": some(2, 3)},
        {"lr": 0.1},
    ),
    ops.sparse_rowwise_adagrad: (
        {"weight": some(4, 3), "state": some(4, 1).abs(), "indices": whole(2, 0), "grad": some(2, 3)},
        {"lr": 0.1},
    ),
    ops.sparse_adam: (
        {"weight": some(4, 3), "exp_avg": some(4, 3), "exp_avg_sq": some(4, 3).abs()}
        | {"indices": whole(2, 0), "grad": some(2, 3)},
        {"lr": 0.1},
    ),
    ops.sparse_adamw: (
        {"weight": some(4, 3), "exp_avg": some(4, 3), "exp_avg_sq": some(4, 3).abs()}
        | {"indices": whole(2, 0), "grad": some(2, 3)},
        {"lr": 0.1},
    ),
    ops.sparse_rowwise_adam: (
        {"weight": some(4, 3), "exp_avg": some(4, 3), "exp_avg_sq": some(4, 1).abs()}
        | {"indices": whole(2, 0), "grad": some(2, 3)},
        {"lr": 0.1},
    ),
    ops.sparse_lazy_decay: (
        {"weight": some(4, 3), "last_update": some(4, 1).abs(), "indices": whole(2, 0), "factors": some(5)},
        {"step": 5},
    ),
    ops.silu: ({"x": some(4)}, {}),
    ops.linear: ({"x": some(4, 3), "weight": some(2, 3), "bias": some(2)}, {}),
    ops.linear_weight_grad: (
        {"accumulator": GRID.clone(), "dy": some(4, 2), "x": some(4, 3), "seq_offsets": OFFSETS}
        | {"bias_accumulator": GRID[:, 0].clone()},
        {},
    ),
    ops.norm_mul_dropout: (
        {"x": some(4, 3), "u": some(4, 3), "weight": some(3), "bias": some(3)}
        | {"sample_ids": whole(0, 0, 0, 1), "positions": whole(0, 1, 2, 0)},
        {"eps": 1e-5, "dropout": 0.5, "seed": 3},
    ),
    ops.norm_linear_silu: (
        {"x": some(4, 3), "norm_weight": some(3), "norm_bias": some(3)}
        | {"weight": some(2, 3), "bias": some(2)},
        {"recompute": "norm"},
    ),
    ops.relative_aggregate: (
        {"v": some(4, 2, 3), "table": some(2, 5), "seq_offsets": OFFSETS, "timestamps": whole(1, 5, 7, 0)},
        {"max_seq_len": 3},
    ),
    hstu_attention: (
        {"q": some(4, 2, 3), "k": some(4, 2, 3), "v": some(4, 2, 5), "seq_offsets": OFFSETS}
        | {"num_targets": whole(1, 0), "num_contexts": whole(0, 1), "delta_offsets": OFFSETS}
        | {"attn_scale": some(4), "pos_weights": some(5), "ts_weights": some(6)}
        | {"timestamps": whole(1, 5, 7, 0), "query_timestamps": whole(5, 7, 7, 0)},
        {"max_seq_len": 3, "alpha": 0.5},
    ),
    ops.softmax_attention: (
        {"q": some(4, 2, 3), "k": some(4, 2, 3), "v": some(4, 2, 5), "seq_offsets": OFFSETS}
        | {"key_offsets": OFFSETS, "bias": some(2, 2, 3, 3), "sample_ids": whole(0, 1)},
        {"max_seq_len": 3, "dropout": 0.5},
    ),
    ops.dropout: (
        {"x": some(4, 3), "sample_ids": whole(0, 0, 0, 1), "positions": whole(0, 1, 2, 0)},
        {"p": 0.5, "seed": 3},
    ),
    ops.sampled_softmax: (
        {"hidden": some(2, 3), "positive": some(2, 3), "negatives": some(5, 3)}
        | {"valid": torch.ones(2, 4, dtype=torch.bool), "rows": whole(0, 4, 2, 2, 1, 0, 3, 4).view(2, 4)},
        {},
    ),
}  # fmt: skip


def call(op, **changed):
    tensors, rest = CALLS[op]
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return op(**{**copies, **rest, **changed})


def label(value):
    return value.__name__ if callable(value) else value


def test_one_name_to_recompute_is_a_name():
    assert torch.equal(call(ops.norm_linear_silu), call(ops.norm_linear_silu, recompute=("norm",)))
    with pytest.raises(ValueError, match=r"got \['silu'\]"):
        call(ops.norm_linear_silu, recompute="silu")


def test_a_norm_is_in_float32():
    message = r"weight and bias must be torch.float32 like x, or float32, got torch.float64"
    with pytest.raises(ValueError, match=message):
        call(ops.norm_mul_dropout, weight=some(3).double())


def test_rows_of_float64_have_no_gradient():
    rows = ops.gather_rows(some(4, 3).double().requires_grad_(), whole(2))
    with pytest.raises(ValueError, match=r"gather_rows is differentiable .*, got torch\.float64"):
        rows.sum().backward()
