"""Samples: cut into micro-batches, and moved to the device (NestPipe, section IV.A, stages 1 and 2)."""

from __future__ import annotations

import torch

from ...data import split
from ..places import Context, DeviceSamples, Samples
from ..stage import Edge, Read, stage
from ..window import Window


@stage(lane="prefetch")
def prefetch(context: Context, window: Window) -> Samples:
    """Cut this rank's samples into micro-batches, in page-locked memory for an accelerator."""
    config, parts = context.config, []
    for batch in window.batches:
        batch.validate()
        if context.device.type != "cpu":  # keys are made there, and their values are not looked at
            context.tables.validate(batch.lookups())
        cut = split(
            batch, config.micro_batches, config.clustering, config.exchange.taper, config.clustering_swaps
        )
        parts += batch.parts(cut)
    missing = config.window_micro_batches - len(parts)  # a run's last window
    # Every window has the same tasks, which the proof and all ranks' collectives count on: a last window with
    # fewer batches is filled up with micro-batches of no sample.
    nothing = window.batches[-1].select(torch.arange(0, device="cpu"))
    parts += [nothing] * missing
    return Samples(parts if context.device.type == "cpu" else [part.pin_memory() for part in parts])


@stage(lane="h2d", after=(Edge("prefetch"),))
def h2d(context: Context, samples: Read[Samples]) -> DeviceSamples:
    """Move the micro-batches to the device."""
    if context.device.type == "cpu":
        return DeviceSamples(list(samples))
    return DeviceSamples([part.to(context.device, non_blocking=True) for part in samples])
