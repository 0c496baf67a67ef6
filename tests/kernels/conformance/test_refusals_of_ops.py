"""What an op cannot take is refused by the name of an argument, and nothing has been written then."""

import numpy as np
import pytest
import torch
from drawn import (
    CASES,
    CONSTANT,
    NAMES,
    SCHEMAS,
    WRITTEN,
    accepted,
    arguments,
    by_names,
    outcome,
    results,
    tensors_of,
)
from impls import HOST_TRITON
from torch.autograd import forward_ad
from verdicts import compare, judge_refusal

from tritonrec.kernels.op import OPS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def largest(op):
    """The accepted size whose tensors have the most elements."""
    return max(
        accepted(op), key=lambda size: sum(t.numel() for t in tensors_of(arguments(op, size)).values())
    )


def size_with(op, *names):
    """The last accepted size in which all of these have elements; None: there is none."""
    for size in reversed(accepted(op)):
        given = arguments(op, size)
        if all(given[name] is not None and given[name].numel() for name in names):
            return size
    return None


LARGEST = {op: largest(op) for op in OPS}
TENSORS = [(op, name) for op in OPS for name in tensors_of(arguments(op, LARGEST[op]))]
FLOATS = [(op, name) for op, name in TENSORS if arguments(op, LARGEST[op])[name].is_floating_point()]
WRITING = [op for op in OPS if WRITTEN[op]]
OF_FLOATS = {op for op, name in FLOATS if name in WRITTEN[op]}
UPDATES = [
    (op, name)
    for op, name in FLOATS
    if op in WRITING and not OPS[op].has_derivative and (op, name) not in CONSTANT
]
PAIRS = [
    (op, target, other)
    for op, other in TENSORS
    for target in WRITTEN[op]
    if other not in WRITTEN[op][: WRITTEN[op].index(target) + 1] and size_with(op, target, other)
]


def given_of(op, **changes):
    given = arguments(op, LARGEST[op]) | changes
    return given, {name: each.clone() for name, each in tensors_of(given).items()}


def assert_unwritten(given, before):
    for name, each in before.items():
        if each.device.type == "cpu":
            assert torch.equal(given[name].detach().nan_to_num(7.5), each.detach().nan_to_num(7.5)), name


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_what_is_no_tensor_is_refused(op, name):
    value = arguments(op, LARGEST[op])[name]
    for other in (value.tolist(), value.numpy()):
        given, before = given_of(op, **{name: other})
        kind = "|".join(("list", "numpy.ndarray", "int", "float"))
        with pytest.raises(TypeError, match=rf"^{name} must be a torch.Tensor, got ({kind})"):
            OPS[op](*given.values(), impl="cpu")
        assert_unwritten(given, before)
    if not next(str(each.type) for each in SCHEMAS[op] if each.name == name).startswith("Optional"):
        given, _ = given_of(op, **{name: None})
        with pytest.raises(TypeError, match=rf"^{name} must be a torch.Tensor, got None$"):
            OPS[op](*given.values(), impl="cpu")


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_another_device_or_layout_is_refused(op, name):
    """Also by the op of ``torch.ops``, whose fake would run: a result would be memory nobody wrote."""
    value = arguments(op, LARGEST[op])[name]
    for call in (OPS[op].registered, lambda *values: OPS[op](*values[:-1], impl=values[-1])):
        if len(tensors_of(arguments(op, LARGEST[op]))) > 1:
            given, before = given_of(op, **{name: value.to("meta")})
            message = r"^\w+ is on (cpu|meta), \w+ on (cpu|meta): move one of them"
            with pytest.raises(ValueError, match=message) as caught:
                call(*given.values(), "cpu")
            assert name in str(caught.value) or name == next(iter(tensors_of(given)))
            assert_unwritten(given, before)
        if value.dim():
            given, _ = given_of(op, **{name: value.to_sparse()})
            with pytest.raises(ValueError, match=rf"^{name} is torch.sparse_coo: give {name}.to_dense"):
                call(*given.values(), "cpu")


def another_dtype(value):
    return value.double() if not value.is_floating_point() else value.long()


CHANGES = {
    "another_dtype": another_dtype,
    "int32": lambda value: None if value.is_floating_point() else value.int(),
    "complex": lambda value: value.to(torch.complex64),
    "bfloat16": lambda value: value.bfloat16() if value.is_floating_point() else None,
    "a_dimension_more": lambda value: value[None].clone(),
    "a_dimension_less": lambda value: value[0].clone() if len(value.shape) and len(value) else None,
    "a_row_less": lambda value: value[:-1].clone() if value.dim() and len(value) else None,
    "a_row_more": lambda value: torch.cat([value, value[:1]]) if value.dim() and len(value) else None,
    "a_column_less": lambda value: value[..., :-1].clone() if value.dim() > 1 and value.shape[-1] else None,
    "no_rows": lambda value: value[:0].clone() if value.dim() and len(value) else None,
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("op", OPS)
def test_what_does_not_fit_is_refused_or_computed(op, change):
    """By the name of an argument, in the same words for each implementation, or with the same result."""
    for name, value in tensors_of(arguments(op, LARGEST[op])).items():
        other = CHANGES[change](value)
        if other is None:
            continue
        ways = []
        for impl in ("cpu", "reference"):
            given, before = given_of(op, **{name: other.clone()})
            try:
                ways.append(results(op, given, impl))
            except Exception as error:
                ways.append(f"{type(error).__name__}: {error}")
                assert isinstance(error, ValueError | TypeError | IndexError), (name, ways[-1])
                assert judge_refusal(by_names(op), error, given)[0] == "refused", (name, ways[-1])
                assert_unwritten(given, before)
        if isinstance(ways[0], str) or isinstance(ways[1], str):
            assert ways[0] == ways[1], name
        else:
            assert change not in ("complex", "a_dimension_more") or op in ANY_SHAPE or name in UNREAD
            assert compare(by_names(op), *ways) == ("accepted", ""), name


ANY_SHAPE = {
    "silu", "to_fixed_point", "to_fixed_point_status", "from_fixed_point", "sum_of_squares", "gather_rows",
    "scatter_rows",
}  # fmt: skip


UNREAD = {"attn_scale", "seq_offsets"}  # flattened; and read by the derivative of `linear` alone


@pytest.mark.parametrize(("op", "target", "other"), PAIRS)
def test_memory_that_is_written_is_shared_with_no_argument(op, target, other):
    given = arguments(op, size_with(op, target, other))
    sizes = [given[name].numel() * given[name].itemsize for name in (target, other)]
    buffer = torch.zeros(max(sizes) + 16, dtype=torch.uint8)
    for name in (target, other):
        value = given[name]
        size = value.numel() * value.itemsize
        given[name] = buffer[:size].view(value.dtype).view(value.shape).copy_(value)
    before = buffer.clone()
    for call in (OPS[op].launch, OPS[op]):
        with pytest.raises(ValueError, match=f"^{target} is written to and shares memory with {other}: give"):
            call(*given.values(), impl="cpu")
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("op", WRITING)
def test_a_negated_view_is_not_written_to(op):
    for name in WRITTEN[op]:
        given, _ = given_of(op)
        if given[name] is None:
            continue
        given[name] = given[name]._neg_view()
        with pytest.raises(ValueError, match=f"^{name} is written to and is a negated or conjugated view"):
            OPS[op](*given.values(), impl="cpu")


@pytest.mark.parametrize(("op", "name"), FLOATS)
def test_a_tangent_is_refused(op, name):
    given, before = given_of(op)
    with forward_ad.dual_level():
        given[name] = forward_ad.make_dual(given[name], torch.ones_like(given[name]))
        with pytest.raises(
            NotImplementedError, match=f"tritonrec::{op} has no .* {name} came with a tangent"
        ):
            OPS[op](*given.values(), impl="cpu")
    assert_unwritten(given, before)


@pytest.mark.parametrize(("op", "name"), UPDATES)
def test_an_op_that_writes_has_no_derivative_unseen(op, name):
    """One that writes to floats refuses a gradient; integers have none."""
    given, before = given_of(op)
    given[name] = given[name].requires_grad_()
    if op in OF_FLOATS:
        with pytest.raises(RuntimeError, match=rf"tritonrec::{op} writes to .*, and {name} requires a grad"):
            OPS[op](*given.values(), impl="cpu")
        assert_unwritten(given, before)
    with torch.no_grad() if op in OF_FLOATS else torch.enable_grad():
        found = results(op, given, "cpu")
    expected = results(op, given_of(op)[0], "cpu")
    assert compare(by_names(op), found, expected) == ("accepted", "")


def test_every_op_that_writes_is_met():
    assert {op for op, *_ in PAIRS} == set(WRITING) and len(WRITING) > 15
    assert {op for op, _ in TENSORS} == set(OPS) == {op for op, _ in CASES} == set(NAMES)
    assert isinstance(outcome("silu", {"x": np.ones(3)}, "cpu"), str)


OFFSETS = [(op, name) for op, name in TENSORS if name.endswith("offsets") and op != "linear"]
"""Of all ops that read them: `linear` gives its own to the gradient's."""


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize(("op", "name"), OFFSETS)
def test_offsets_that_do_not_cut_the_tokens_are_refused(op, name, impl):
    """By their name and the first bad entry, before anything is written; and so are longer sequences."""
    given, _ = given_of(op)
    offsets, last = given[name], len(given[name]) - 1
    changes = [
        (offsets + 1, rf"{name}\[0\] must be 0, got 1"),
        (torch.cat([offsets[:-1], offsets[-1:] + 1]), rf"{name} must end at the {int(offsets[-1])} tokens"),
        (torch.cat([offsets[:-1], -offsets[-1:] - 1]), rf"{name}\[{last}\] = -\d+ comes after"),
    ]
    for other, message in changes:
        given, before = given_of(op, **{name: other})
        with pytest.raises(ValueError, match=f"^{message}"):
            OPS[op](*given.values(), impl=impl)
        assert_unwritten(given, before)
    if "max_seq_len" in NAMES[op]:
        tables = {"bias", "pos_weights"} & {*NAMES[op]}  # have its size
        given, before = given_of(op, max_seq_len=0, **dict.fromkeys(tables))
        with pytest.raises(ValueError, match=r"sequence \d+ has \d+ tokens, more than max_seq_len=0"):
            OPS[op](*given.values(), impl=impl)
        assert_unwritten(given, before)


NAN, INF = float("nan"), float("inf")
NUMBERS = {
    "fraction_bits": (-1, 63), "p": (-0.1, 1.0, NAN), "world_size": (0, 2**31), "num_buckets": (0, 2**31),
    "num_segments": (-1,), "first_row": (-1, 2**31), "max_seq_len": (-1, 2**27 + 1), "divisor": (0.0, INF),
    "target_group_size": (0,), "max_attn_len": (-1,), "min_full_attn_seq_len": (-1,), "table": (-1, 2**32),
    "attn_prefix_len": (-1,), "scaling_seqlen": (0,), "dim": (-1,), "upper": (0, 2**32 + 1), "count": (-4,),
    "weight_decay": (-1.0, NAN), "eps": (-1.0,),
}  # fmt: skip
"""Argument -> numbers that no op with it takes."""
MOMENTUM = {"step": (0,), "beta1": (-1.0, 1.0, NAN)}
BETAS = MOMENTUM | {"beta2": (-1.0, 1.0, NAN)}
NUMBERS_OF = {
    "initial_rows": {"scale": (-1.0, INF, NAN)}, "sparse_ftrl": {"lr": (0.0, NAN), "beta1": (-1.0, NAN)},
    "sparse_lars_sgd": {"beta2": (-1.0, NAN)}, "sparse_lazy_decay": {"step": (0, 2**24 + 1)},
    "sparse_momentum_sgd": MOMENTUM, "sparse_nesterov_sgd": MOMENTUM, "sparse_adam": BETAS,
    "sparse_adamw": BETAS, "sparse_rowwise_adam": BETAS, "sparse_lamb": BETAS, "sparse_rowwise_lamb": BETAS,
}  # fmt: skip
CALLED = {
    "p": "dropout|p", "first_row": "next_row", "lr": "FTRL divides by lr,", "step": "step",
    "beta1": "betas|momentum|FTRL .* l1", "beta2": "betas|eta",
}  # fmt: skip
"""The name of such a number where its message has another one."""
OUTSIDE = [
    (op, each.name, number)
    for op in OPS
    for each in SCHEMAS[op]
    if str(each.type) in ("int", "float", "Optional[int]")
    for number in dict.fromkeys(
        [
            *(NUMBERS | NUMBERS_OF.get(op, {})).get(each.name, ()),
            *((INF, -INF, NAN) if str(each.type) == "float" else ()),
        ]
    )
]


@pytest.mark.parametrize(("op", "name", "number"), OUTSIDE)
def test_a_number_outside_its_range_is_refused(op, name, number):
    given, before = given_of(op, **{name: number})
    with pytest.raises(ValueError, match=f"^({CALLED.get(name, name)}|{name} must be finite,) .*{number}"):
        OPS[op](*given.values(), impl="cpu")
    assert_unwritten(given, before)


ROWS = {"rows", "indices", "segments", "source", "buckets"}
NUMBERED = [(op, name) for op, name in TENSORS if name in ROWS and not op.startswith(("hash", "sampled"))]
NUMBERED = [(op, n) for op, n in NUMBERED if (op, n) != ("gather_rows", "source")]


@pytest.mark.parametrize("impl", ["reference", "cpu", HOST_TRITON])
@pytest.mark.parametrize(("op", "name"), NUMBERED)
def test_the_first_row_outside_is_refused_before_anything_is_written(op, name, impl):
    for row in (-1, 1000, 2**32, -(2**63), 2**63 - 1):
        given, _ = given_of(op)
        given |= {"count": None} if "count" in given else {}
        given[name][-2:] = row
        first = max(len(given[name]) - 2, 0)
        before = {n: each.clone() for n, each in tensors_of(given).items()}
        with pytest.raises(IndexError, match=rf"^{name}\[{first}\] = {row} is outside \[0, "):
            OPS[op](*given.values(), impl=impl)
        assert_unwritten(given, before)


def test_rows_are_numbered_in_these():
    assert {"gather_rows", "scatter_rows", "segment_sum_into", "pack_rows", "add_packed_rows", "sparse_adam",
            "counting_sort"} <= {op for op, _ in NUMBERED}  # fmt: skip
    assert {"hstu_attention", "softmax_attention", "relative_aggregate", "linear_weight_grad"} <= {
        op for op, _ in OFFSETS
    }
