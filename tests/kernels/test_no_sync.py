"""No op makes the host wait for the device; a whole step is run by `tests/emulator/test_host_waits.py`."""

import no_sync
import pytest
import torch
from conformance.drawn import NAMES, accepted, arguments
from impls import GPU
from no_sync import HostWaitsError, recorded_launches

from tritonrec.kernels.deferred import DeferredErrors
from tritonrec.kernels.op import OPS

DEVICE = torch.device("cuda" if GPU else "cpu")

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
    ],
)
def test_a_look_is_seen(look):
    """What the tests above rest on: each way to wait is noticed."""
    x = torch.arange(3, device=DEVICE)
    with pytest.raises((HostWaitsError, RuntimeError), match=r"wait|synchroniz"), no_sync.no_sync():
        look(x)
