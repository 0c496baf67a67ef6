"""Optimizers, schedulers and averages that a trainer refuses, and whether an optimizer's bits hold."""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from ..embedding import RowsParameter
from ..kernels.dispatch import on_host

T = TypeVar("T")
NUMBERS_OF_GROUPS = {"lr", "weight_decay", "eps", "betas", "momentum", "alpha", "rho"}
LEAST = -1e-12
"""Of a number that must not be below 0: torch's `LinearLR` to 0 ends a rounding below it."""
PARAMETER_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"
"""torch does not list them in public."""
LONG = 32_768
"""Values from which on torch cuts a tensor between threads."""
PROBE_ELEMENTS = 3 * LONG
"""Values of a probe at most."""
PIECES, UPDATES = 7, 8
"""How a parameter is cut, and how often updated, to see whether an optimizer looks at the whole."""


def listed(one_or_many: T | Sequence[T] | None) -> tuple[T, ...]:
    """A tuple of one, of many or of none."""
    if one_or_many is None:
        return ()
    return tuple(one_or_many) if isinstance(one_or_many, Sequence) else (one_or_many,)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is distributed; only then is its class imported, which takes half a second."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def reshard(model: torch.nn.Module) -> None:
    """Give a model of FSDP2 its shards, where its last call has left it whole."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    if loaded is not None:
        for module in model.modules():
            if isinstance(module, loaded.FSDPModule):
                module.reshard()


def validate_optimizers(model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Parameter]:
    """The optimizers' parameters by their names in the model, in the model's order.

    Raises:
        TypeError: something else than an optimizer, one whose step needs a closure, or a parameter that is
            not float32.
        ValueError: a parameter or buffer of a lazy module that has no shape yet, a trained parameter that no
            optimizer has or two have, one of theirs that the model lacks, or one with gaps in memory under a
            fused optimizer.
    """
    held: dict[int, tuple[Parameter, Mapping[str, Any]]] = {}
    twice = set()
    for optimizer in optimizers:
        _validate_optimizer(optimizer)
        for group in optimizer.param_groups:
            twice |= held.keys() & {id(parameter) for parameter in group["params"]}
            held |= {id(parameter): (parameter, group) for parameter in group["params"]}
    found, named = {}, list(model.named_parameters())
    for name, tensor in [*named, *model.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(
                f"{name} has no shape before the first call of its lazy module: call the model once, with a "
                "batch and rows of its sizes, before there are an optimizer and a trainer"
            )
    for name, parameter in named:
        if isinstance(parameter, RowsParameter):
            raise ValueError(
                f"the model has rows of its own ({name}), which a trainer would not update: give their "
                "features to the trainer's HashTableCollection, and let the model read them from `rows`"
            )
        if id(parameter) in twice:
            raise ValueError(f"parameter {name} is given to two optimizers: share the parameters out")
        if id(parameter) in held:
            # `held` keeps what no name of the model has claimed.
            found[name] = parameter
            _validate_parameter(name, parameter, held.pop(id(parameter))[1])
        elif parameter.requires_grad:
            raise ValueError(
                f"parameter {name} is not given to the optimizer: make the optimizer of model.parameters(), "
                "after whatever replaces parameters, or freeze the parameter with requires_grad_(False)"
            )
    if held:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter, _ in held.values())
        raise ValueError(
            f"the optimizer has parameters that are not in the model, of shapes {shapes}: make it of "
            "model.parameters(), after whatever replaces parameters"
        )
    return found


def validate_hooks(model: torch.nn.Module) -> None:
    """Raise ValueError for a hook on a parameter's gradient, where autograd does not see that."""
    for name, parameter in model.named_parameters():
        if any(getattr(parameter, hooks, None) for hooks in PARAMETER_HOOKS):
            raise ValueError(
                f"parameter {name} has a hook on its gradient, which consistency='batch' adds up without "
                "autograd, so that it would not be called: change gradients in a hook of the optimizer "
                "(optimizer.register_step_pre_hook), which finds them in parameter.grad, or limit them by "
                "WindowConfig(max_grad_norm=..., max_grad_value=...)"
            )


@lru_cache  # a trainer looks at each result
def _needs_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _validate_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"the optimizer must be a torch.optim.Optimizer of model.parameters(), got "
            f"{type(optimizer).__name__}"
        )
    if _needs_closure(getattr(optimizer.step, "__func__", optimizer.step)):
        raise TypeError(
            f"{type(optimizer).__name__}.step needs a closure that computes the loss again, and the trainer "
            "has the gradient of a window once: take an optimizer whose step needs none"
        )


def _validate_parameter(name: str, parameter: Parameter, group: Mapping[str, object]) -> None:
    if parameter.dtype != torch.float32:
        raise TypeError(
            f"parameter {name} is {parameter.dtype}: the trainer takes float32 parameters; convert the model "
            "with .float(), and use torch.autocast for lower precision"
        )
    # torch's fused optimizers walk through the memory, and would write into the gaps. Shards have none.
    own = not is_sharded(parameter)
    if own and group.get("fused") and torch.empty_like(parameter).stride() != parameter.stride():
        raise ValueError(
            f"parameter {name} has gaps in memory (strides {parameter.stride()}), and a fused optimizer "
            "would write into them: make the parameter dense, or pass fused=False"
        )


def validate_schedulers(schedulers: Sequence[LRScheduler], optimizers: Sequence[Optimizer]) -> None:
    """Raise TypeError for another object or one that needs a metric, ValueError for another optimizer's."""
    for scheduler in schedulers:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError(
                "ReduceLROnPlateau needs a metric, which the trainer does not have: call its step(metric) "
                "yourself after list(trainer.run([])), and give the trainer no scheduler"
            )
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(
                f"the scheduler must be one of torch.optim.lr_scheduler, got {type(scheduler).__name__}"
            )
        if not any(scheduler.optimizer is optimizer for optimizer in optimizers):
            raise ValueError("the scheduler has another optimizer than the trainer")


def validate_numbers(optimizers: Sequence[Optimizer]) -> None:
    """Raise ValueError for a rate, decay and so on of a group that would make parameters NaN, or rise.

    Those on a device are not looked at: that would wait for it in each update.
    """
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for name in NUMBERS_OF_GROUPS & group.keys():
                given = group[name]
                for each in given if isinstance(given, (list, tuple)) else (given,):
                    if isinstance(each, torch.Tensor) and not (on_host(each) and each.numel() == 1):
                        continue
                    if isinstance(each, (int, float, torch.Tensor)):
                        least, most = LEAST <= each < math.inf, name != "betas" or each < 1
                        if least and most:
                            continue
                    elif not isinstance(each, str):  # None, or a function of an optimizer's own
                        continue
                    raise ValueError(
                        f"{name} of group {number} of {type(optimizer).__name__} is {given!r}, and must be "
                        f"finite and >= 0{' and < 1' if name == 'betas' else ''}: set it so, or mend the "
                        "scheduler that sets it"
                    )


def validate_average(average: AveragedModel | None, model: torch.nn.Module) -> None:
    """Raise TypeError for another object, ValueError for the average of another model."""
    if average is None:
        return
    if not isinstance(average, AveragedModel):
        raise TypeError(
            f"the average must be a torch.optim.swa_utils.AveragedModel, got {type(average).__name__}"
        )
    validate_shapes(average.module.state_dict(), model.state_dict())


def validate_sharded(optimizers: Sequence[Optimizer], average: AveragedModel | None) -> None:
    """Raise ValueError for what cannot be updated shard by shard.

    That is a fused optimizer, whose vectors end where a shard does and round otherwise there; one that gives
    a part of a parameter other bits than it has in the whole, as Muon and Adafactor do; and the average of a
    model that is not sharded itself.
    """
    for optimizer in optimizers:
        if any(group.get("fused") for group in optimizer.param_groups):
            raise ValueError(
                f"{type(optimizer).__name__}(fused=True) rounds the last values of a tensor otherwise, so "
                "its bits would depend on where shards end: pass fused=False for sharded parameters"
            )
        with torch.device("cpu"):  # whatever the caller's default is
            # Seven pieces of a drawn parameter have the values of the whole (`drawn` chunks one tensor).
            # Eight updates: an optimizer that looks at norms may need some steps to show it.
            every = [_probe(optimizer, 0, pieces, UPDATES) for pieces in (1, PIECES)]
        for number, (one, other) in enumerate(zip(*every, strict=True)):
            if not torch.equal(one.view(torch.int32), other.view(torch.int32)):
                raise ValueError(
                    f"{type(optimizer).__name__} with the settings of its group {number} updates a part of a "
                    "parameter otherwise than the whole, so it cannot update shards: take an elementwise "
                    "optimizer, such as AdamW, or leave fully_shard away"
                )
    if average is not None and not any(is_sharded(each) for each in average.module.parameters()):
        raise ValueError(
            "the model is sharded and its average is not: make the AveragedModel of the whole model, then "
            "call fully_shard on the model and in the same way on average.module"
        )


def validate_shapes(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError naming a tensor that is missing, in excess, or of another shape."""
    for name in {**expected, **found}:
        if name not in found or name not in expected:
            state = "missing" if name in expected else "not in the model"
            raise ValueError(f"{name} is {state}: was it saved with another model?")
        if found[name].shape != expected[name].shape:
            raise ValueError(
                f"{name}: expected shape {tuple(expected[name].shape)}, got {tuple(found[name].shape)}; was "
                "it saved with another model size?"
            )


def validate_invariant(optimizer: Optimizer) -> None:
    """Raise ValueError where the optimizer's bits depend on the place in memory or the number of threads.

    Two updates of random parameters of the same shapes, as long as `PROBE_ELEMENTS` at most, are made in
    fresh memory and again at odd addresses, where they are long with another number of threads. Ranks of
    another world size, or the reference run, differ in both.
    """
    if any(p.is_meta for group in optimizer.param_groups for p in group["params"]):
        return
    threads = torch.get_num_threads()
    try:
        with torch.device("cpu"):  # whatever the caller's default is
            expected = _probe(optimizer, 0)
            if any(each.numel() > LONG for each in expected):
                # Tensors of `LONG` values and more are cut between threads,
                # and a vector loop's last values are elsewhere then.
                torch.set_num_threads(1 if threads > 1 else 2)
            # One value further in memory: vector loops begin and end at other values of the parameter.
            found = _probe(optimizer, 1)
    finally:
        torch.set_num_threads(threads)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if not torch.equal(one.view(torch.int32), other.view(torch.int32)):
            raise ValueError(
                f"{type(optimizer).__name__} with the settings of its group {number} gives other bits at "
                "another place in memory or with another number of threads, so consistency='batch' cannot "
                "hold: pass fused=False and foreach=False, take another optimizer, or consistency='window'"
            )


def _probe(optimizer: Optimizer, offset: int, pieces: int = 1, updates: int = 2) -> list[torch.Tensor]:
    """For each group the values after some updates of copies of its shapes, `offset` values into memory.

    Each is cut into so many `pieces`, which are parameters of their own.
    """
    probe = copy.copy(optimizer)  # without hooks, as torch copies an optimizer
    for name, value in vars(optimizer).items():
        if not hasattr(type(optimizer), name):  # a scheduler replaces `step`, for the original
            vars(probe).setdefault(name, value)
    probe.state = defaultdict(dict)
    random = torch.Generator().manual_seed(7)

    def placed(values: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(values.numel() + offset, dtype=torch.float32, device="cpu")
        return memory[offset:].view(values.shape).copy_(values)

    def drawn(shape: torch.Size) -> list[torch.Tensor]:
        values = torch.randn(shape, dtype=torch.float32, generator=random, device="cpu")
        return [placed(part) for part in (values.chunk(pieces) if shape else (values,))]

    groups = []
    every: list[tuple[torch.Size, list[Parameter]]] = []
    for group in optimizer.param_groups:
        device, params = group["params"][0].device, []
        for shape in dict.fromkeys(_capped(parameter.shape) for parameter in group["params"]):
            parts = [Parameter(part.to(device)) for part in drawn(shape)]
            every.append((shape, parts))
            params += parts
        groups.append({**group, "params": params})
    probe.param_groups = groups
    if isinstance(optimizer, torch.optim.Adagrad):
        _begin_adagrad(probe)
    for _ in range(updates):
        for shape, parts in every:
            for each, gradient in zip(parts, drawn(shape), strict=True):
                each.grad = gradient.to(each.device)
        probe.step()
    return [torch.cat([each.detach().reshape(-1) for each in group["params"]]) for group in groups]


def _begin_adagrad(probe: Optimizer) -> None:
    """The state that torch before 2.13 makes with the optimizer, and later ones at the first update."""
    for group in probe.param_groups:
        for each in group["params"]:
            device = each.device if group["fused"] else torch.device("cpu")
            probe.state[each] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "sum": torch.full_like(each, group["initial_accumulator_value"]),
            }


def _capped(shape: torch.Size) -> torch.Size:
    """The shape with fewer rows, so that it has `PROBE_ELEMENTS` at most."""
    if shape.numel() <= PROBE_ELEMENTS:
        return shape
    row = shape[1:].numel()
    return torch.Size((max(1, PROBE_ELEMENTS // row), *shape[1:]))
