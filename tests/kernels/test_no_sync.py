"""No op on keys and rows makes the host wait for the device, alone or in the chain of a training step."""

import no_sync
import pytest
import torch
from conformance.drawn import NAMES, accepted, arguments
from impls import GPU
from no_sync import HostWaitsError, recorded_launches

from tritonrec import ops
from tritonrec.kernels.deferred import DeferredErrors
from tritonrec.kernels.op import OPS

DEVICE = torch.device("cuda" if GPU else "cpu")
WORLD, DIM, SLOTS = 3, 5, 64


def parameters(device):
    """A table and all that a step changes."""
    return {
        "slot_keys": torch.zeros(SLOTS, dtype=torch.int64, device=device),
        "slot_rows": torch.full((SLOTS,), -1, dtype=torch.int32, device=device),
        "next_row": torch.zeros((), dtype=torch.int64, device=device),
        "weight": torch.full((SLOTS, DIM), float("nan"), device=device),
        "momentum": torch.zeros(SLOTS, 1, device=device),
        "full": torch.zeros((), dtype=torch.int64, device=device),
        "lost": torch.zeros((), dtype=torch.int64, device=device),
        "before": torch.zeros(0, dtype=torch.int64, device=device),
        "num_before": torch.zeros((), dtype=torch.int64, device=device),
    }


def step(state, keys, gradients, impl="triton"):
    """Dedup, route, insert, initialise, look up, sum by key, update; and the keys of the last step."""
    table = state["slot_keys"], state["slot_rows"]
    distinct, inverse, times, found = ops.unique(keys, impl=impl, padded=True)
    permutation, splits = ops.bucketize(distinct, WORLD, impl=impl, count=found)
    routed = distinct[permutation]
    place = torch.empty_like(permutation).scatter_(
        0, permutation, torch.arange(len(keys), device=keys.device)
    )
    rows, inserted = ops.hash_insert(
        *table, routed, state["next_row"], impl=impl, count=found, status=state["full"]
    )
    live = torch.where(state["full"] == 0, found, 0)  # a refused step is an empty one
    fresh = ops.initial_rows(7, 1, routed, DIM, 0.1, impl=impl)
    stored = ops.gather_rows(state["weight"], rows, impl=impl, count=live)
    weights = torch.where(inserted[:, None], fresh, stored)
    ops.scatter_rows(state["weight"], rows, weights, impl=impl, count=live)
    looked_up = ops.gather_rows(weights, place[inverse], impl=impl)
    sums = ops.segment_sum(
        gradients, place[inverse], len(keys), consistency="batch", impl=impl, status=state["lost"]
    )
    live = torch.where(state["lost"] == 0, live, 0)
    means = ops.from_fixed_point(sums, 3.0, impl=impl)
    ops.sparse_rowwise_adagrad(state["weight"], state["momentum"], rows, means, 0.1, impl=impl, count=live)
    shared = ops.intersect(
        state["before"], routed, impl=impl, padded=True, left_count=state["num_before"], right_count=found
    )
    state["before"], state["num_before"] = routed, found
    again = ops.hash_find(*table, routed, impl=impl, count=found)
    return looked_up, splits, times, again, shared


def plain_step(state, keys, gradients):
    """The same with results as long as they are, on the CPU, the host looking at all it likes."""
    table = state["slot_keys"], state["slot_rows"]
    distinct, inverse, times = ops.unique(keys)
    permutation, splits = ops.bucketize(distinct, WORLD)
    routed, place = distinct[permutation], torch.argsort(permutation)
    rows, inserted = ops.hash_insert(*table, routed, int(state["next_row"]))
    state["next_row"] += int(inserted.sum())
    weights = state["weight"][rows]
    weights[inserted] = ops.initial_rows(7, 1, routed[inserted], DIM, 0.1)
    state["weight"][rows] = weights
    sums = ops.segment_sum(gradients, place[inverse], len(distinct), consistency="batch")
    means = ops.from_fixed_point(sums, 3.0)
    ops.sparse_rowwise_adagrad(state["weight"], state["momentum"], rows, means, 0.1)
    shared = ops.intersect(state["before"], routed)
    state["before"] = routed
    return weights[place[inverse]], splits, times, rows, shared


def batch(name, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randint(-8, 8, (45,), generator=generator)
    keys = {
        "one": torch.tensor([-(2**63)]),
        "all_equal": torch.full((33,), -7),
        "none_equal": torch.arange(-15, 15) * (2**58 + 7),
        "skewed": draw,
        "extremes": torch.tensor([2**63 - 1, -(2**63), 0, -1, 2**63 - 1, 1]),
    }[name]
    return keys, torch.randn(len(keys), DIM, generator=generator)


def bits(tensor):
    """Rows nobody owns are NaN, which equals nothing."""
    return tensor.cpu().view(torch.int32) if tensor.dtype == torch.float32 else tensor.cpu()


def check_padding(part, length, fill):
    part = part.cpu()
    assert (part[length:] == fill).all()
    return part[:length]


@pytest.mark.parametrize("impl", ["cpu", "reference", "triton"])
def test_a_step_of_padded_lists_has_the_bits_of_a_plain_one(impl):
    device = DEVICE if impl == "triton" else "cpu"
    state, expected = parameters(device), parameters("cpu")
    for seed, name in enumerate(["skewed", "one", "extremes", "all_equal", "skewed", "none_equal"]):
        keys, gradients = batch(name, seed)
        looked_up, splits, times, rows, shared = step(state, keys.to(device), gradients.to(device), impl)
        theirs = plain_step(expected, keys, gradients)
        length = len(theirs[2])
        assert torch.equal(looked_up.cpu(), theirs[0]) and torch.equal(splits.cpu(), theirs[1])
        assert torch.equal(check_padding(times, length, 0), theirs[2])
        assert torch.equal(check_padding(rows, length, -1), theirs[3])
        for ours, other in zip(shared, theirs[4], strict=False):
            assert torch.equal(check_padding(ours, len(theirs[4][0]), -1), other)
        assert int(shared[2]) == len(theirs[4][0])
        assert int(state["next_row"]) == int(expected["next_row"]) and not state["full"] and not state["lost"]
        assert torch.equal(bits(state["weight"]), bits(expected["weight"]))
        assert torch.equal(state["momentum"].cpu(), expected["momentum"])


@pytest.mark.parametrize("name", ["one", "all_equal", "none_equal", "skewed", "extremes"])
def test_the_host_never_waits_in_a_step(name):
    state = parameters(DEVICE)
    keys, gradients = (part.to(DEVICE) for part in batch(name))
    step(state, keys, gradients)  # compiles, where there is a GPU
    with no_sync.no_sync():
        step(state, keys, gradients)


def test_a_step_that_is_refused_changes_nothing_and_says_so_later():
    state = parameters(DEVICE)
    keys, gradients = (part.to(DEVICE) for part in batch("skewed"))
    step(state, keys, gradients)
    held = {name: part.clone() for name, part in state.items()}
    many = torch.arange(100, 100 + SLOTS, device=DEVICE)
    with no_sync.no_sync():
        step(state, many, torch.ones(SLOTS, DIM, device=DEVICE))
    for name in ("slot_keys", "slot_rows", "next_row", "weight", "momentum"):
        assert torch.equal(bits(state[name]), bits(held[name])), name
    with pytest.raises(ops.HashTableFullError, match="64 new keys did not fit into a table of 64 slots"):
        ops.check_inserted(state["full"], state["slot_rows"])
    state["full"].zero_()
    step(state, many[:20], torch.ones(20, DIM, device=DEVICE))
    ops.check_inserted(state["full"], state["slot_rows"])
    assert int(state["next_row"]) == int(held["next_row"]) + 20


def test_a_sum_that_is_not_finite_updates_nothing_and_is_named_later():
    state = parameters(DEVICE)
    keys, gradients = (part.to(DEVICE) for part in batch("skewed"))
    step(state, keys, gradients)
    held = bits(state["weight"]).clone()
    gradients[17, 3] = float("inf")
    with no_sync.no_sync():
        step(state, keys, gradients)
    assert torch.equal(bits(state["weight"]), held)
    with pytest.raises(ops.ExactSumError, match=r"gradient\[17, 3\] .* not finite or leaves int64") as caught:
        ops.check_summed(state["lost"], gradients.shape, name="gradient")
    assert caught.value.index == (17, 3)


WAITING = {"unique", "intersect", "pack_rows", "add_packed_rows"}
"""Results are as long as values say, and so are packed bytes."""


def call_of(op, size, device):
    """A call on an accelerator, where errors go to a status or are put off."""
    given = arguments(op, size) | ({"status": torch.tensor(0)} if "status" in NAMES[op] else {})
    given = [each.to(device) if isinstance(each, torch.Tensor) else each for each in given.values()]

    def call():
        with DeferredErrors().active():
            OPS[op].launch(*given, impl="triton")

    return call


@pytest.mark.parametrize("op", [op for op in OPS if op not in WAITING])
def test_the_host_never_waits_in_one_call(op):
    """Tensors without values take the path that is taken on a GPU; kernels are launched and do nothing."""
    seen = []
    for size in accepted(op):
        call = call_of(op, size, "meta")
        with recorded_launches() as launched:
            call()
        seen += launched
        if GPU:
            call = call_of(op, size, DEVICE)
            call()
            with no_sync.no_sync():
                call()
    assert seen


@pytest.mark.parametrize("op", sorted(WAITING))
def test_an_op_whose_results_have_any_length_waits(op):
    call = call_of(op, "ample", "meta")
    with pytest.raises(HostWaitsError), recorded_launches():
        call()


def test_nothing_is_copied_to_or_from_another_device_in_a_step():
    with recorded_launches() as launched:
        keys = torch.empty(40, dtype=torch.int64, device="meta")
        step(parameters(torch.device("meta")), keys, torch.empty(40, DIM, device="meta"))
    assert launched


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x[-1].item(),
        lambda x: int(x[-1]),
        lambda x: bool((x > 0).all()),
        lambda x: x[x > 0],
        lambda x: torch.nonzero(x),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x.repeat_interleave(x),
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: ops.unique(x, impl="triton"),
        lambda x: ops.intersect(x, x, impl="triton"),
        lambda x: ops.segment_sum(
            torch.ones(3, 2, device=x.device), x, 3, consistency="batch", impl="triton"
        ),
        lambda x: ops.to_fixed_point(torch.ones(3, device=x.device), impl="triton"),
        lambda x: ops.hash_insert(
            x.new_zeros(8), torch.full((8,), -1, dtype=torch.int32, device=x.device), x, 0, impl="triton"
        ),
    ],
)
def test_a_look_is_seen(look):
    """What the tests above rest on: each way to wait is noticed, and so are the ops that have to raise."""
    x = torch.arange(3, device=DEVICE)
    with pytest.raises((HostWaitsError, RuntimeError), match=r"wait|synchroniz"), no_sync.no_sync():
        look(x)
