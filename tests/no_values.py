"""A device without values: torch's meta tensors, on which whatever waits for a value or mixes devices fails.

Ops give tensors of the right shape. Streams and page-locked memory are pretended.
"""

from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import torch

from tritonrec.embedding.device_numbers import DeviceNumbers
from tritonrec.embedding.optimizer import DenseOptimizer
from tritonrec.kernels import chunked_rows, launch
from tritonrec.kernels.op import OPS, Op
from tritonrec.pipeline.model_call import CallerSettings

DEVICE = torch.device("meta")


class NoStream:
    def record_event(self):
        return "event"

    def wait_event(self, event):
        pass


def _launch(op, *arguments, impl="auto"):
    size = len(op.registered.default._schema.arguments) - 1
    return op.registered(*arguments, *(None,) * (size - len(arguments)), impl)


def _add(numbers, change, rise):
    numbers.values += change
    numbers._rises.append(rise)


_real_addresses, _real_copy = chunked_rows.addresses, chunked_rows.op._copy


def _addresses(chunks, device):
    if device != DEVICE:
        return _real_addresses(chunks, device)
    return torch.empty(len(chunks), dtype=torch.int64, device=device)


def _copy(name, chunks, locations, rows, name_of_rows, impl):
    devices = {each.device for each in (chunks.full, chunks.low, locations, rows)}
    if DEVICE not in devices:
        return _real_copy(name, chunks, locations, rows, name_of_rows, impl)
    assert devices == {DEVICE}, f"{name} of tensors on {devices}"
    assert rows.is_contiguous() and rows.shape == (len(locations), chunks.width)
    return None


def _without_pinning(make):
    def made(*arguments, pin_memory=False, **options):
        return make(*arguments, **options)

    return made


@contextmanager
def device_without_values():
    """Inside, tables, models and trainers can be made for `DEVICE`."""
    settings = CallerSettings.of_this_thread
    with ExitStack() as stack:

        def change(owner, name, value):
            stack.enter_context(mock.patch.object(owner, name, value))

        change(torch.accelerator, "current_stream", lambda device=None: NoStream())
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", lambda *_: None, create=True))
        change(torch.Tensor, "pin_memory", lambda self: self)
        change(torch, "empty", _without_pinning(torch.empty))
        change(torch, "zeros", _without_pinning(torch.zeros))
        change(Op, "launch", _launch)
        for op in OPS.values():
            if hasattr(launch, op.name):
                change(launch, op.name, partial(_launch, op))
        change(DeviceNumbers, "add", _add)
        change(chunked_rows, "addresses", _addresses)
        change(chunked_rows.op, "_copy", _copy)
        change(CallerSettings, "of_this_thread", lambda device: settings(torch.device("cpu")))
        change(DenseOptimizer, "check_unchanged", lambda self: None)  # waits for the update before
        for module in ("embedding.stored_table", "pipeline.trainer"):
            stack.enter_context(mock.patch(f"tritonrec.{module}.usable_device", torch.device))
        yield
