"""Memory that nobody wrote shows: tensors that torch leaves as they are begin with NaN, True or 77."""

from __future__ import annotations

import contextlib

import pytest
import torch


def _filled(allocate):
    def filled(*args, **kwargs):
        out = allocate(*args, **kwargs)
        return out.fill_(float("nan") if out.is_floating_point() else out.dtype == torch.bool or 77)

    return filled


@contextlib.contextmanager
def poisoned_memory():
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, _filled(getattr(owner, name)))
        yield
