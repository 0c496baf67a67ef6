"""Where a job computes: its device, and whether its Triton kernels have to be emulated."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch

from ..distributed import RankPool
from ..distributed.environment import rank_here
from ..distributed.launch import Mesh
from ..kernels import dispatch
from ..ops import Impl
from ..settings import setting

Device = Literal["cpu", "cuda"]
BACKENDS: dict[Device, str] = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Of the groups, by the device whose tensors they exchange beside the host's."""
ARCHITECTURE: Literal["sm_90"] = "sm_90"
"""That kernels are compiled for where they are emulated."""


@dataclass(frozen=True)
class Target:
    """What a job computes on.

    Args:
        impl: of every op of a step (`tritonrec.ops.use_impl`). device: of the model and the buffers.
    """

    impl: Impl = setting("auto", "Of every op; triton on the CPU is emulated.")
    device: Device = setting("cpu", "Of the model and the buffers; each rank takes a GPU of its own.")

    @property
    def emulated(self) -> bool:
        """Whether Triton kernels run without a GPU."""
        return self.impl == "triton" and self.device == "cpu"

    @property
    def is_slow(self) -> bool:
        """Whether a step takes long: kernels are emulated, or plain loops."""
        return self.emulated or self.impl == "reference"


@contextmanager
def kernels_of(target: Target) -> Iterator[None]:
    """Inside, this process can compute on `target`: Triton on the CPU is emulated, unless it is already.

    Raises ValueError where ``TRITON_INTERPRET=1`` is set.
    """
    if not target.emulated or dispatch.emulated is not None:
        yield
        return
    from .emulator import Emulation, emulated

    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as on a GPU; Triton warns where it is not said
    with emulated(Emulation(ARCHITECTURE)):
        yield


def validate_device(device: Device, ranks: int) -> None:
    """Raise ValueError where this machine has not as many devices as ranks."""
    if device == "cuda" and (count := torch.cuda.device_count()) < ranks:
        raise ValueError(f"{ranks} ranks need a GPU each, and torch finds {count} here")


def rank_pool(device: Device, meshes: Iterable[Mesh], timeout: timedelta) -> RankPool:
    """Ranks that compute on `device`; on GPUs each has one of its own."""
    return RankPool(
        meshes, timeout, enter=take_own_gpu if device == "cuda" else None, backend=BACKENDS[device]
    )


def take_gpu_here(device: Device) -> None:
    """`take_own_gpu` of a rank that a launcher started; nothing for a process alone.

    Raises ValueError where the launcher does not say the rank's number on its machine.
    """
    here = rank_here()
    if device == "cpu" or here.world_size == 1:
        return
    if here.local_rank is None:
        raise ValueError(
            f"{here.launcher} does not say which rank of this machine rank {here.rank} is, so that its GPU "
            "is unknown: set LOCAL_RANK, as torchrun does"
        )
    take_own_gpu(here.local_rank)


def take_own_gpu(rank: int) -> None:
    """Hide all GPUs but one from this process, before CUDA has started; `rank` is that on its machine.

    A launcher may have done so: where one GPU is visible, it stays. Raises ValueError where it has too few.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(visible) > 1 and rank >= len(visible):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES names {len(visible)} GPUs, and rank {rank} of this machine needs its own"
        )
    if len(visible) > 1 or not visible[0]:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[rank] if visible[0] else str(rank)
