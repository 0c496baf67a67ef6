"""Checks of a saved state of model, optimizers, schedulers and average, before any of it is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .dense_checks import validate_shapes
from .precision import LEAST_SCALE, MOST_SCALE

SHAPED = {
    "acc_delta", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev",
    "square_avg", "step_size", "sum",
}  # fmt: skip
"""What optimizers of torch keep for each value of a parameter."""


def validate_state(state: Any, own: Mapping[str, Any]) -> None:
    """Raise ValueError where `DenseModel.load_state_dict` could not load `state` in the place of `own`.

    Args:
        own: the state of the `DenseModel` that loads.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"expected the states of {', '.join(own)}, got {type(state).__name__}")
    if state.keys() != own.keys():
        raise ValueError(
            f"expected the states of {', '.join(own)}, got those of {', '.join(map(str, state))}"
        )
    for part in ("optimizers", "schedulers"):
        given = state[part]
        if not isinstance(given, list) or len(given) != len(own[part]):
            count = len(given) if isinstance(given, list) else given
            raise ValueError(f"expected the states of {len(own[part])} {part}, got {count}")
    for part in ("model", "average"):
        if part in own:
            _require_tensors(part, state[part])
            validate_shapes(state[part], own[part])
    for place, (packed, expected) in enumerate(zip(state["optimizers"], own["optimizers"], strict=True)):
        try:
            _validate_optimizer(packed, expected)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the state of optimizer {place} has another form: {error!r}") from None
    for place, (given, expected) in enumerate(zip(state["schedulers"], own["schedulers"], strict=True)):
        if not isinstance(given, Mapping) or given.keys() - expected.keys():
            names = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
            raise ValueError(
                f"scheduler {place} keeps {', '.join(expected)}, the state has {names}; was it saved with "
                "another scheduler?"
            )
    if "scaler" in own:
        _validate_scaler(state["scaler"])


def _require_tensors(part: str, values: Any) -> None:
    if not isinstance(values, Mapping):
        raise ValueError(f"the state of the {part} is no mapping, but {type(values).__name__}")
    for name, each in values.items():
        if not isinstance(each, torch.Tensor):
            raise ValueError(f"{name} of the {part} is no tensor, but {type(each).__name__}")


def _validate_optimizer(packed: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    groups, known = ([group["params"] for group in each["param_groups"]] for each in (packed, expected))
    if groups != known:
        raise ValueError(f"expected an optimizer with the groups {known}, got {groups}")
    for number, (group, own) in enumerate(zip(packed["param_groups"], expected["param_groups"], strict=True)):
        unknown = group.keys() - own.keys() - {"initial_lr"}  # of a scheduler
        if unknown:
            raise ValueError(
                f"group {number} of the optimizer has no {', '.join(sorted(unknown))}, but "
                f"{', '.join(sorted(own.keys() - {'params'}))}: was it saved with another optimizer?"
            )
        for name, value in own.items():
            given = group.get(name, value)
            if not _fits(given, value):
                raise ValueError(f"{name} of group {number} is {str(given)[:40]!r}, where {value} is here")
    unknown_names = packed["state"].keys() - {name for group in known for name in group}
    if unknown_names:
        raise ValueError(f"the optimizer's state is also of {', '.join(map(str, unknown_names))}")


def _fits(given: Any, own: Any) -> bool:
    """Whether a setting can stand in the place of one's own: a finite number of one, a pair of a pair."""
    if isinstance(own, (list, tuple)):
        same = isinstance(given, (list, tuple)) and len(given) == len(own)
        return same and all(map(_fits, given, own))
    if isinstance(own, (bool, int, float)):
        return isinstance(given, torch.Tensor) or (isinstance(given, (int, float)) and math.isfinite(given))
    return True


def validate_kept(
    state: Mapping[str, Any], parameters: Mapping[str, torch.nn.Parameter], kept: Mapping[Any, Any]
) -> None:
    """Raise ValueError where an optimizer keeps other values for a parameter, or of other shapes.

    Args:
        state: by name of a parameter what was saved. kept: by parameter what the optimizer has, once in use.
    """
    for name, values in state.items():
        own = kept.get(parameters[name])
        if not isinstance(values, Mapping) or (own and own.keys() != values.keys()):
            keys = list(values) if isinstance(values, Mapping) else type(values).__name__
            raise ValueError(
                f"{name}: the optimizer keeps {', '.join(own or ('a mapping',))}, the state has {keys}; "
                "was it saved with another optimizer?"
            )
        for key in SHAPED & values.keys():
            found = values[key]
            if found is None:
                continue
            if not isinstance(found, torch.Tensor) or found.shape != parameters[name].shape:
                shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
                raise ValueError(f"{key} of {name} is {shape}, the parameter {tuple(parameters[name].shape)}")


def _validate_scaler(state: Any) -> None:
    scale = state.get("scale") if isinstance(state, Mapping) else None
    steps = state.get("growth_tracker") if isinstance(state, Mapping) else None
    if not isinstance(scale, (int, float)) or not LEAST_SCALE <= scale <= MOST_SCALE:
        raise ValueError(f"the scale of the loss is {scale!r}, and lies from {LEAST_SCALE} to {MOST_SCALE}")
    if type(steps) is not int or steps < 0:
        raise ValueError(f"the scaler has made {steps!r} updates without an overflow")
