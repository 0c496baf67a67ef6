"""No op makes the host wait for the device; a whole step is run by `tests/emulator/test_host_waits.py`."""

import pytest
import torch
from conformance.drawn import NAMES, accepted, arguments
from impls import GPU
from no_sync import HostWaitsError, no_sync, on_device

from tritonrec.kernels.deferred import DeferredErrors
from tritonrec.kernels.op import OPS

WAITING = {"unique", "intersect", "pack_rows", "add_packed_rows"}
"""Results are as long as values say, and so are packed bytes."""


def launches(op, size):
    """How many kernels a call launches on a device, where errors go to a status or are put off."""
    given = arguments(op, size) | ({"status": torch.tensor(0)} if "status" in NAMES[op] else {})
    given = [on_device(each) if isinstance(each, torch.Tensor) else each for each in given.values()]
    if GPU:  # compiled once before
        with DeferredErrors().active():
            OPS[op].launch(*given, impl="triton")
    with no_sync(kernels=False) as gpu, DeferredErrors().active():
        OPS[op].launch(*given, impl="triton")
    return gpu.launches.total() if gpu else 1


@pytest.mark.parametrize("op", [op for op in OPS if op not in WAITING])
def test_the_host_never_waits_in_one_call(op):
    """Kernels are launched and, but on a GPU, do nothing."""
    assert sum(launches(op, size) for size in accepted(op))


@pytest.mark.parametrize("op", sorted(WAITING))
def test_an_op_whose_results_have_any_length_waits(op):
    with pytest.raises((HostWaitsError, RuntimeError), match=r"waits|synchroniz"):
        launches(op, "ample")


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
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x.repeat_interleave(x),
        lambda x: torch.tensor([1, 2], device=x.device),
    ],
)
def test_a_look_is_seen(look):
    """What the tests above rest on: each way to wait is noticed."""
    x = on_device(torch.arange(3))
    with pytest.raises((HostWaitsError, RuntimeError), match=r"waits|synchroniz"), no_sync():
        look(x)
