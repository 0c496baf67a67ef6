"""What `Job.wrapping` puts around the layers of a dense model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ...distributed import Communicators
from ..job import Job


def wrap(job: Job, communicators: Communicators, model: torch.nn.Module) -> None:
    """Change the model in place. One rank alone has nothing to shard."""
    layers: Any = model.get_submodule("layers") if job.wrapping else ()
    if job.wrapping == "checkpoint":
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    elif job.wrapping == "fully_shard" and communicators.world_size > 1:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        group = communicators.checkpoint.group  # which no lane uses
        assert group is not None and communicators.replicas == 1
        mesh = DeviceMesh.from_group(group, torch.device(job.target.device).type)
        for each in (*layers, model):
            fully_shard(each, mesh=mesh)
