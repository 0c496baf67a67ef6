"""A device without values: torch's meta tensors, on which whatever waits for a value or mixes devices fails.

Ops give tensors of the right shape. Streams and page-locked memory are pretended.
"""

from contextlib import contextmanager
from unittest import mock

import torch

from tritonrec.embedding.device_numbers import DeviceNumbers
from tritonrec.kernels import chunked_rows
from tritonrec.kernels.op import Op

DEVICE = torch.device("meta")


class NoStream:
    def record_event(self):
        return "event"

    def wait_event(self, event):
        pass


def _launch(op, *arguments, impl="auto"):
    return op.registered(*arguments, *(None,) * (op._size - len(arguments)), impl)


def _add(numbers, change, rise):
    numbers.values += change
    numbers._rises.append(rise)


def _addresses(chunks, device):
    return torch.empty(len(chunks), dtype=torch.int64, device=device)


def _copy(name, chunks, locations, rows, name_of_rows, impl):
    devices = {each.device for each in (chunks.full, chunks.low, locations, rows)}
    assert devices == {DEVICE}, f"{name} of tensors on {devices}"
    assert rows.is_contiguous() and rows.shape == (len(locations), chunks.width)


def _without_pinning(make):
    def made(*arguments, pin_memory=False, **options):
        return make(*arguments, **options)

    return made


@contextmanager
def device_without_values():
    """Inside, tables and stages can be made for `DEVICE`."""
    changes = [
        mock.patch.object(torch.accelerator, "current_stream", lambda device=None: NoStream()),
        mock.patch.object(torch.Tensor, "record_stream", lambda self, stream: None, create=True),
        mock.patch.object(torch.Tensor, "pin_memory", lambda self: self),
        mock.patch.object(torch, "empty", _without_pinning(torch.empty)),
        mock.patch.object(torch, "zeros", _without_pinning(torch.zeros)),
        mock.patch.object(Op, "launch", _launch),
        mock.patch.object(DeviceNumbers, "add", _add),
        mock.patch.object(chunked_rows, "addresses", _addresses),
        mock.patch.object(chunked_rows.op, "_copy", _copy),
        mock.patch("tritonrec.embedding.stored_table.usable_device", torch.device),
    ]
    for change in changes:
        change.start()
    try:
        yield
    finally:
        for change in reversed(changes):
            change.stop()
