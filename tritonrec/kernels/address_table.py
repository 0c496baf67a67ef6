"""Tables of addresses: memory of many tensors that a kernel reaches through one tensor of their pointers."""

from __future__ import annotations

import weakref

import torch

_behind: dict[int, list[torch.Tensor]] = {}  # by the id of a table that lives


def addresses(chunks: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """(n,) int64 on `device`, the addresses of the first elements of n contiguous tensors.

    Kernels on an accelerator can follow them to its own memory, and to pinned memory of the host. The table
    keeps the chunks alive. It must itself live until the kernels that reach pinned chunks through it have
    run: torch waits for no kernel before it uses pinned memory for something else.

    Raises:
        ValueError: a chunk is not contiguous, or lies where kernels on `device` cannot read it.
    """
    # "cuda" is "cuda:0" once something lies there
    device = torch.empty(0, dtype=torch.int64, device=device).device
    for number, chunk in enumerate(chunks):
        if not chunk.is_contiguous():
            raise ValueError(f"chunk {number} of shape {tuple(chunk.shape)} has strides {chunk.stride()}")
        if chunk.device != device and (device.type == "cpu" or not chunk.is_pinned()):
            raise ValueError(f"chunk {number} on {chunk.device} has no address for kernels on {device}")
    pointers = torch.tensor([chunk.data_ptr() for chunk in chunks], dtype=torch.int64, device="cpu")
    table = pointers if device.type == "cpu" else pointers.pin_memory().to(device, non_blocking=True)
    _behind[id(table)] = list(chunks)
    weakref.finalize(table, _behind.pop, id(table)).atexit = False
    return table


def chunks_behind(table: torch.Tensor) -> list[torch.Tensor]:
    """The tensors whose addresses a table holds, none for a tensor that `addresses` did not make."""
    return _behind.get(id(table), [])
