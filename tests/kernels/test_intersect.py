"""Common keys of two buffers, in order of the left position, whichever buffer is larger."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonrec.kernels.intersect import intersect

GPU = torch.cuda.is_available()
TRITON = pytest.param("triton", marks=pytest.mark.gpu if GPU else pytest.mark.interpreter)
IMPLS = ["reference", "cpu", TRITON]
EXTREMES = [-(2**63), 2**63 - 1, -1, 0, 1]


def on(impl, tensor):
    return tensor.cuda() if impl == "triton" and GPU else tensor


def case(name):
    rng = np.random.default_rng(3)
    left, right = {
        "both_empty": lambda: ([], []),
        "left_empty": lambda: ([], [1, 2]),
        "right_empty": lambda: ([1, 2], []),
        "nothing_common": lambda: (range(0, 50, 2), range(1, 50, 2)),
        "the_same": lambda: (rng.permutation(200), rng.permutation(200)),
        "extremes": lambda: (EXTREMES, [3, *EXTREMES[::-1]]),
        "small_left": lambda: (rng.permutation(20) - 10, rng.permutation(500) - 250),
        "small_right": lambda: (rng.permutation(500) - 250, rng.permutation(20) - 10),
        "blocks": lambda: (rng.permutation(700)[:257], rng.permutation(700)[:129]),
    }[name]()
    return tuple(torch.tensor(np.asarray(list(keys), np.int64)) for keys in (left, right))


NAMES = [
    "both_empty",
    "left_empty",
    "right_empty",
    "nothing_common",
    "the_same",
    "extremes",
    "small_left",
    "small_right",
    "blocks",
]


def check(left, right, result):
    """The contract itself: every match is one, none is missing, the left positions ascend."""
    left_positions, right_positions = (part.cpu() for part in result)
    assert torch.equal(left[left_positions], right[right_positions])
    assert torch.equal(left_positions, torch.from_numpy(np.flatnonzero(np.isin(left.numpy(), right.numpy()))))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("impl", IMPLS)
def test_common_keys(impl, name):
    left, right = case(name)
    check(left, right, intersect(on(impl, left), on(impl, right), impl))


@settings(max_examples=40, deadline=None)
@given(*[st.sets(st.one_of(st.sampled_from(EXTREMES), st.integers(-20, 20)))] * 2)
def test_all_implementations_agree(left, right):
    left, right = (torch.tensor(list(keys), dtype=torch.int64) for keys in (left, right))
    expected = intersect(left, right, "reference")
    for impl in ["cpu"] if GPU else ["cpu", "triton"]:
        for ours, theirs in zip(intersect(left, right, impl), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_refuses_other_keys():
    keys = torch.arange(3)
    with pytest.raises(ValueError, match=r"left must be 1-D int64, got shape \(3, 1\)"):
        intersect(keys[:, None], keys)
    with pytest.raises(ValueError, match=r"right must be 1-D int64, got shape \(3,\) torch.float32"):
        intersect(keys, keys.float())


def test_compiles_without_a_graph_break():
    left, right = case("blocks")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(lambda a, b: intersect(a + 1, b + 1), fullgraph=True, backend="aot_eager")
        check(left, right, compiled(left, right))


def test_registration():
    torch.library.opcheck(torch.ops.tritonrec.intersect, (*case("blocks"), "cpu"))
