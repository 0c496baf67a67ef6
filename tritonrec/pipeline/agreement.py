"""What ranks that train together must have in common, compared when their trainers are made.

What the caller may change later is compared again when a run begins (`run_agreement`).
"""

from __future__ import annotations

import hashlib
import os
import platform
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from ..distributed import Communicators, RanksDisagreeError, check_ranks_agree
from ..embedding import HashTableCollection
from ..kernels.checksums import as_bytes
from ..ops import Impl
from ..settings import values_by_option
from ..version import __version__
from .dense import DenseModel
from .dense_checks import is_sharded
from .recipe import average_of, functions_of
from .run_agreement import compared_buffers, modules_of, thread_settings, without_addresses
from .schedule import Schedule
from .window import WindowConfig

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


CHOICES = (
    "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA",
    "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_OPT", "TRITON_INTERPRET",
)  # fmt: skip
"""Variables by which libraries choose other instructions, or another order of sums."""


def validate_same_training(
    communicators: Communicators,
    tables: HashTableCollection,
    dense: DenseModel,
    mode: str,
    config: WindowConfig,
    schedule: Schedule | None,
    device: torch.device,
    impl: Impl,
) -> None:
    """Raise `RanksDisagreeError` on every rank where model, tables, optimizers or settings differ.

    Collective; nothing is done for one rank. What changes no bit may differ, as a table's slots. Processors
    of another kind are an error with consistency ``"batch"``, and a warning without it.
    """
    if communicators.world_size == 1:
        return
    check_ranks_agree(
        communicators.control,
        {
            **settings_of(tables, dense, mode, config, schedule, device, impl),
            **thread_settings(),
            **(processor() if config.consistency == "batch" else {}),
        },
    )
    if config.consistency != "batch":
        try:
            check_ranks_agree(communicators.control, processor())
        except RanksDisagreeError as error:
            warnings.warn(f"results depend on which rank has which samples: {error}", stacklevel=3)


def processor() -> dict[str, object]:
    """What chooses libraries' instructions, and so the last bits of exp and of products of matrices."""
    given = {name: os.environ.get(name) for name in CHOICES}
    return {
        "torch.backends.cpu.get_cpu_capability()": torch.backends.cpu.get_cpu_capability(),
        "architecture": platform.machine(),
        **{f"environment variable {name}": value for name, value in given.items() if value is not None},
    }


def settings_of(
    tables: HashTableCollection,
    dense: DenseModel,
    mode: str,
    config: WindowConfig,
    schedule: Schedule | None,
    device: torch.device,
    impl: Impl,
) -> dict[str, object]:
    """All that ranks must have in common, by name; tensors by SHA-256.

    Buffers that a forward has changed are left out: each rank's follow its own samples.
    """
    settings: dict[str, object] = {
        "tritonrec": __version__,
        "torch": torch.__version__,
        **_of_libraries(device, impl),
        "mode": mode,
        **values_by_option(config),
        "schedule": schedule and f"{schedule.name} {_digest(repr(schedule).encode())}",
        "device": device.type,
        "impl": impl,
        **_of_tables(tables),
        "training": dense.model.training,
        **modules_of(dense.model),
        **_of_optimizer(dense),
    }
    for number, (name, parameter) in enumerate(dense.model.named_parameters()):
        # With its number: sums of all parameters are exchanged in one tensor, in this order.
        settings[f"parameter {name}"] = f"number {number}, {_of(parameter)}"
    for name, values in dense.tensors().items():
        if name not in dense.parameters:
            settings[f"optimizer state {name}"] = _of(values)
    for name, values in compared_buffers(dense.model).items():
        settings[f"buffer {name}"] = _of(values)
    return settings


def _of_libraries(device: torch.device, impl: Impl) -> dict[str, object]:
    """Versions of the compilers of kernels that run."""
    compiler = "triton" if device.type != "cpu" or impl == "triton" else "numba"
    try:
        return {compiler: version(compiler)}
    except PackageNotFoundError:  # kernels that were compiled ahead
        return {}


def _of_tables(tables: HashTableCollection) -> dict[str, object]:
    """Features and how they share tables, without what says only how a shard is stored."""
    settings: dict[str, object] = {"seed of the tables": tables.seed, "merge": tables.merge}
    for name, feature in tables.features.items():
        settings[f"feature {name}"] = feature
    for group in tables.groups:
        names = ", ".join(group.layout.names)
        settings[f"optimizer of table {names}"] = group.optimizer
        settings[f"rows of table {names}"] = "trained" if group.table.requires_grad else "frozen"
    return settings


def _of_optimizer(dense: DenseModel) -> dict[str, object]:
    """Classes and settings of optimizers and schedulers."""
    settings: dict[str, object] = {"averaged": dense.average and average_of(dense.average)}
    for place, optimizer in enumerate(dense.optimizers):
        named = "optimizer" if len(dense.optimizers) == 1 else f"optimizer {place}"
        settings[named] = type(optimizer).__qualname__
        for number, group in enumerate(optimizer.param_groups):
            values = {name: value for name, value in group.items() if name != "params"}
            settings[f"group {number} of {named}"] = f"{len(group['params'])} parameters, {values}"
    for place, scheduler in enumerate(dense.schedulers):
        kind = type(scheduler).__qualname__
        functions = functions_of(scheduler, kind)
        settings[f"scheduler {place}"] = f"{kind} {without_addresses(scheduler.state_dict())}, {functions}"
    return settings


def _of(values: torch.Tensor) -> str:
    """dtype, shape and digest, or how it is sharded."""
    if is_sharded(values):
        return f"{values.dtype} {tuple(values.shape)} as {values.placements}"  # type: ignore[attr-defined]
    digest = _digest(as_bytes(values.cpu()).numpy().data) if values.numel() else "none"
    trains = ", frozen" if isinstance(values, torch.nn.Parameter) and not values.requires_grad else ""
    dtype = str(values.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(values.shape)}{trains} with SHA-256 {digest}"


def _digest(data: Buffer) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
