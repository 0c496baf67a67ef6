"""No op writes over memory that one of its other arguments has, whichever door it is called by."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_arguments import OFFSETS, PACKED, WIDTHS, some, table, whole

from tritonrec import ops
from tritonrec.kernels import launch, overlap
from tritonrec.kernels.hstu_attention.call import Call
from tritonrec.kernels.op import OPS
from tritonrec.kernels.overlap import check_no_overlap
from tritonrec.kernels.sparse_optimizers.op import STATES

registered = torch.ops.tritonrec


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.int64)


# op -> its tensors by name, the names of those that it writes to, and a call
def attention(dq, dk, dv, do, q, k, v, seq_offsets, num_targets, pos_weights):
    call = Call(seq_offsets, 3, 0.5, 3, num_targets=num_targets, pos_weights=pos_weights)
    return registered.hstu_attention_backward_into(dq, dk, dv, do, q, k, v, *call, "cpu")


def heads(number):
    return some(4, 2, 3) + number


def norm_backward(du, dy, x, u, weight, bias, sample_ids, positions, means, rstds):
    rest = sample_ids, positions, means, rstds, "cpu"
    return registered.norm_mul_dropout_backward_into(du, dy, x, u, weight, bias, 0.5, 3, *rest)


def norm_exact(weight_sums, bias_sums, du, dy, x, u, weight, bias, sample_ids, positions, means, rstds):
    rest = weight, bias, 0.5, 3, sample_ids, positions, means, rstds, 36, ["a", "b"], "cpu"
    return registered.norm_mul_dropout_backward_exact(weight_sums, bias_sums, du, dy, x, u, *rest)


def front_exact(seq_offsets, means, rstds, z, normed, **given):
    rest = 1e-6, z, normed, means, rstds, seq_offsets, 36, ["a", "b", "c", "d"], "cpu"
    return registered.norm_linear_silu_backward_exact(*given.values(), *rest)


def front_backward(dy, x, norm_weight, norm_bias, weight, bias, z, normed, means, rstds):
    rest = 1e-6, z, normed, means, rstds, "cpu"
    return registered.norm_linear_silu_backward_into(dy, x, norm_weight, norm_bias, weight, bias, *rest)


SCALAR, ROWS, MATRIX = torch.tensor(2), whole(3, 0), some(4, 3)
UPDATE = {"weight": some(4, 3), "indices": ROWS, "grad": some(2, 3), "count": SCALAR}
FUNCTIONS = {"nesterov_sgd": partial(ops.sparse_momentum_sgd, nesterov=True)}
NARROW = {("rowwise_adagrad", "state"), ("rowwise_adam", "exp_avg_sq")}
CALLS = {
    "scatter_rows": (
        {"destination": MATRIX, "rows": ROWS, "values": some(5, 3), "source": whole(1, 4), "count": SCALAR},
        ["destination"],
        ops.scatter_rows,
    ),
    "segment_sum_into": (
        {"values": some(2, 3), "segments": ROWS, "out": zeros(4, 3), "count": SCALAR}
        | {"status": torch.tensor(0)},
        ["out", "status"],
        lambda **given: ops.segment_sum(num_segments=4, consistency="batch", **given),
    ),
    "add_packed_rows": (
        {"out": zeros(2, 3), "segments": whole(0, 1), "widths": WIDTHS, "packed": PACKED},
        ["out"],
        ops.add_packed_rows,
    ),
    "to_fixed_point_status": ({"values": some(3), "status": torch.tensor(0)}, ["status"], ops.to_fixed_point),
    **{
        f"sparse_{rule}": (
            UPDATE | {name: some(4, 1 if (rule, name) in NARROW else 3).abs() for name in states},
            ["weight", *states],
            partial(FUNCTIONS.get(rule) or getattr(ops, f"sparse_{rule}"), lr=0.1),
        )
        for rule, states in STATES.items()
    },
    "sparse_lazy_decay": (
        {name: UPDATE[name] for name in ("weight", "indices", "count")}
        | {"last_update": some(4, 1), "factors": some(5)},
        ["weight", "last_update"],
        partial(ops.sparse_lazy_decay, step=5),
    ),
    "hash_insert": (
        {**table(), "keys": whole(4, 2), "free_rows": whole(3), "count": SCALAR}
        | {"status": torch.tensor(0), "next_row": torch.tensor(5), "used": torch.tensor(0)},
        ["slot_keys", "slot_rows", "next_row", "status", "used"],
        ops.hash_insert,
    ),
    "hash_assign": (
        {**table(), "keys": whole(4, 2), "rows": whole(1, 0), "count": SCALAR},
        ["slot_rows"],
        ops.hash_assign,
    ),
    "hash_erase": (
        {**table(), "keys": whole(4, 2), "count": SCALAR, "used": torch.tensor(2)},
        ["slot_rows", "used"],
        ops.hash_erase,
    ),
    "linear_weight_grad": (
        {"accumulator": zeros(2, 3), "dy": some(4, 2), "x": some(4, 3), "seq_offsets": OFFSETS}
        | {"bias_accumulator": zeros(2)},
        ["accumulator", "bias_accumulator"],
        ops.linear_weight_grad,
    ),
    "hstu_attention_backward_into": (
        {name: heads(number) for number, name in enumerate(("dq", "dk", "dv", "do", "q", "k", "v"))}
        | {"seq_offsets": OFFSETS, "num_targets": whole(1, 0), "pos_weights": some(5)},
        ["dq", "dk", "dv"],
        lambda **given: attention(**given),
    ),
    "norm_mul_dropout_backward_into": (
        {"du": some(4, 3), "dy": some(4, 3), "x": some(4, 3), "u": some(4, 3), "weight": some(3)}
        | {"bias": some(3), "sample_ids": whole(0, 0, 0, 1), "positions": whole(0, 1, 2, 0)}
        | {"means": some(4), "rstds": some(4)},
        ["du"],
        lambda **given: norm_backward(**given),
    ),
    "norm_linear_silu_backward_into": (
        {"dy": some(4, 2), "x": some(4, 3), "norm_weight": some(3), "norm_bias": some(3)}
        | {"weight": some(2, 3), "bias": some(2), "z": some(4, 2), "normed": some(4, 3)}
        | {"means": some(4), "rstds": some(4)},
        ["dy"],
        lambda **given: front_backward(**given),
    ),
    "norm_mul_dropout_backward_exact": (
        {"weight_sums": zeros(3), "bias_sums": zeros(3), "du": some(4, 3), "dy": some(4, 3)}
        | {"x": some(4, 3), "u": some(4, 3), "weight": some(3), "bias": some(3)}
        | {"sample_ids": whole(0, 0, 0, 1), "positions": whole(0, 1, 2, 0), "means": some(4)}
        | {"rstds": some(4)},
        ["weight_sums", "bias_sums", "du"],
        norm_exact,
    ),
    "norm_linear_silu_backward_exact": (
        {"norm_weight_sums": zeros(3), "norm_bias_sums": zeros(3), "weight_sums": zeros(2, 3)}
        | {"bias_sums": zeros(2), "dy": some(4, 2), "x": some(4, 3), "norm_weight": some(3)}
        | {"norm_bias": some(3), "weight": some(2, 3), "bias": some(2), "z": some(4, 2)}
        | {"normed": some(4, 3), "means": some(4), "rstds": some(4), "seq_offsets": OFFSETS},
        ["norm_weight_sums", "norm_bias_sums", "weight_sums", "bias_sums", "dy"],
        front_exact,
    ),
}  # fmt: skip
PAIRS = [
    (op, target, other)
    for op, (tensors, targets, _) in CALLS.items()
    for target in targets
    for other in tensors
    if other != target and not (other in targets and targets.index(other) < targets.index(target))
]


def copies(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def over(target, other):
    """Two tensors with the shapes and dtypes of these that begin at one byte; the second has its values."""
    buffer = torch.zeros(8 * (target.numel() + other.numel()), dtype=torch.uint8)
    one, two = (buffer.view(of.dtype)[: of.numel()].view(of.shape) for of in (target, other))
    two.copy_(other)
    return one, two


def test_every_op_that_writes_is_here():
    schemas = {name: op.registered.default._schema for name, op in OPS.items()}
    writing = {
        name: {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        for name, schema in schemas.items()
    }
    assert {name: set(CALLS[name][1]) for name in CALLS} == {
        name: arguments for name, arguments in writing.items() if arguments
    }


@pytest.mark.parametrize("op", CALLS)
def test_arguments_apart_are_taken(op):
    tensors, _, call = CALLS[op]
    call(**copies(tensors))


@pytest.mark.parametrize(("op", "target", "other"), PAIRS)
def test_an_argument_that_shares_memory_with_one_that_is_written_is_refused(op, target, other):
    tensors, _, call = CALLS[op]
    given = copies(tensors)
    given[target], given[other] = over(given[target], given[other])
    before = given[target].clone(), given[other].clone()
    with pytest.raises(ValueError, match=f"^{target} is written to and shares memory with {other}: give"):
        call(**given)
    assert torch.equal(given[target], before[0]) and torch.equal(given[other], before[1])


NUMBERS = {
    "num_segments": 4, "consistency": "batch", "fraction_bits": 36, "name": "rows", "first_row": 0,
    "lr": 0.1, "eps": 1e-8, "beta1": 0.9, "beta2": 0.99, "step": 1,
}  # fmt: skip


@pytest.mark.parametrize("op", [op for op in CALLS if op in OPS and hasattr(launch, op)])
def test_an_implementation_alone_refuses_too(op):
    """Callers inside the package leave the dispatcher and the check of shapes out, and not this one."""
    tensors, (target, *_), _ = CALLS[op]
    given = copies(tensors)
    other = next(name for name in tensors if name != target)
    given[target], given[other] = over(given[target], given[other])
    names = [argument.name for argument in getattr(registered, op).default._schema.arguments]
    with pytest.raises(ValueError, match="is written to and shares memory with"):
        getattr(launch, op)(*((NUMBERS | given).get(name) for name in names[:-1]))


# The tests below are of the check itself, by which all of these ops refuse.


def refused(one, other):
    with pytest.raises(
        ValueError, match=r"^one is written to and shares memory with other: give other.clone"
    ):
        check_no_overlap({"one": one}, {"other": other})


def test_parts_of_one_storage_that_are_apart_pass():
    buffer = torch.randn(16, 8)
    check_no_overlap({"one": buffer[:8], "two": buffer[8:12]}, {"other": buffer[12:]})
    check_no_overlap({"one": buffer[:, :3], "two": buffer[:, 3:5]}, {"other": buffer[:, 5:]})
    check_no_overlap({"one": buffer[::2]}, {"other": buffer[1::2]})
    check_no_overlap({"one": buffer[:, ::2]}, {"other": buffer[:, 1::2]})
    check_no_overlap({"one": buffer[:8]}, {"other": buffer[8:].t()})
    refused(buffer[:9], buffer[8:])
    refused(buffer[:, :4], buffer[:, 3:])
    refused(buffer[:, ::2], buffer[:, 2:4])
    refused(buffer[3], buffer.t()[5])


def test_matrices_with_rows_of_other_lengths_are_searched():
    """Rows of 6 and of 20 floats, the first of which lie beside each other."""
    buffer = torch.zeros(48)
    refused(buffer.as_strided((8, 2), (6, 1)), buffer.as_strided((3, 2), (20, 1), 2))


def test_one_byte_is_enough():
    buffer = torch.zeros(64, dtype=torch.uint8)
    check_no_overlap({"one": buffer[:32].view(torch.float32)}, {"other": buffer[32:]})
    refused(buffer[:32].view(torch.float32), buffer[31:32])


def test_two_storages_over_the_same_memory_are_seen():
    memory = np.zeros(8, np.float32)
    refused(torch.from_numpy(memory[:5]), torch.from_numpy(memory[4:]))
    check_no_overlap({"one": torch.from_numpy(memory[:4])}, {"other": torch.from_numpy(memory[4:])})


def test_what_is_only_read_may_share_memory_and_no_memory_is_never_shared():
    buffer = torch.randn(8)
    check_no_overlap({"one": torch.zeros(2), "none": None}, {"other": buffer, "same": buffer})
    check_no_overlap({"one": buffer[:0]}, {"other": buffer[:0], "none": None})
    check_no_overlap({"one": buffer[3:3]}, {"other": buffer})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1, 4).expand(3, 4),
        torch.zeros(4, 1).expand(4, 3),
        torch.zeros(16).as_strided((4, 4), (3, 1)),
        torch.zeros(16).as_strided((2, 3, 2), (4, 2, 3)),
    ],
)
def test_elements_that_share_memory_are_refused(tensor):
    with pytest.raises(
        ValueError, match=r"^one is written to, and elements of it share memory: it has shape"
    ):
        check_no_overlap({"one": tensor}, {})
    check_no_overlap({"one": torch.zeros(2)}, {"other": tensor})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 4).t(),
        torch.zeros(9, 8)[::2, 1:5],
        torch.zeros(1, 4).as_strided((1, 4), (0, 1)),
        torch.zeros(2, 3, 5).permute(2, 0, 1)[1:, :, ::2],
    ],
)
def test_elements_apart_pass_at_any_strides(tensor):
    check_no_overlap({"one": tensor}, {})


def test_a_pair_that_takes_too_long_to_tell_counts_as_shared(monkeypatch):
    buffer = torch.zeros(64)
    one, other = buffer.as_strided((3, 3), (7, 3)), buffer.as_strided((3, 3), (11, 5), 1)
    monkeypatch.setattr(overlap.np, "shares_memory", too_hard)
    refused(one, other)


def too_hard(*arguments, **options):
    raise np.exceptions.TooHardError


views = st.tuples(
    st.integers(1, 4), st.integers(1, 4), st.integers(0, 9), st.integers(0, 5), st.integers(0, 12)
)


@given(views, views)
def test_a_view_is_refused_where_sets_of_its_elements_say_so(first, second):
    def addresses(rows, columns, row_stride, stride, start):
        return [start + row_stride * r + stride * c for r in range(rows) for c in range(columns)]

    def view(rows, columns, row_stride, stride, start):
        return torch.zeros(64).as_strided((rows, columns), (row_stride, stride), start)

    def agree(expected, *arguments):
        if not expected:
            check_no_overlap(*arguments)
            return
        with pytest.raises(ValueError, match="share"):
            check_no_overlap(*arguments)

    buffer = torch.zeros(64)
    one, other = (buffer.as_strided(v[:2], v[2:4], v[4]) for v in (first, second))
    own = addresses(*first)
    if len(set(own)) < len(own):
        agree(True, {"one": view(*first)}, {})
        return
    strides = sorted((s, n) for n, s in zip(first[:2], first[2:4], strict=True) if n > 1)
    if len(strides) == 2 and strides[1][0] <= (strides[0][1] - 1) * strides[0][0]:
        return  # rows that lie in each other's gaps: no layout of an argument that is written
    agree(bool(set(own) & set(addresses(*second))), {"one": one}, {"other": other})


def test_columns_of_one_matrix_are_told_apart_without_a_search(monkeypatch):
    matrix = torch.zeros(9, 8)
    monkeypatch.setattr(np, "shares_memory", None)
    check_no_overlap({"left": matrix[:, :5]}, {"right": matrix[:, 5:]})


def test_a_tensor_without_memory_hides_no_overlap():
    there, here = torch.zeros(3, device="meta"), torch.zeros(3)
    with pytest.raises(ValueError, match="out is written to and shares memory with x"):
        check_no_overlap({"nowhere": there, "out": here}, {"none": None, "x": here[1:]})
