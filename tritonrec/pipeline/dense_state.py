"""Checks of a saved state of model, optimizers, schedulers and average, before any of it is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..embedding.state_check import check_values
from .dense_checks import LEAST, validate_shapes
from .precision import validate_scaler

SHAPED = {
    "acc_delta", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev",
    "square_avg", "step_size", "sum",
}  # fmt: skip
"""What optimizers of torch keep for each value of a parameter."""

NUMBERS = (bool, int, float, torch.Tensor)

SQUARES = {
    "acc_delta", "col_var", "exp_avg_sq", "exp_inf", "max_exp_avg_sq", "row_var", "square_avg", "variance",
}  # fmt: skip
"""What they keep that is never below 0; NaN may be, which is what a run that diverged has."""


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
            for name, each in state[part].items():
                if each.is_floating_point() != own[part][name].is_floating_point():
                    raise ValueError(f"{name} of the {part} is {each.dtype}, here {own[part][name].dtype}")
    averaged = state["average"]["n_averaged"] if "average" in own else 0
    if not _is_count(averaged):
        raise ValueError(f"the average is of {averaged} models")
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
        _validate_scheduler(given, expected, f"scheduler {place}")
    if "scaler" in own:
        validate_scaler(state["scaler"])


def _require_tensors(part: str, values: Any) -> None:
    if not isinstance(values, Mapping):
        raise ValueError(f"the state of the {part} is no mapping, but {type(values).__name__}")
    for name, each in values.items():
        check_values(each, f"{name} of the {part}")


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
        # switches that torch has added since may be missing, which it fills in itself; numbers it does not
        if lacking := [name for name, value in own.items() if name not in group and _is_setting(value)]:
            raise ValueError(f"group {number} of the optimizer lacks {', '.join(sorted(lacking))}")
        for name, value in own.items():
            given = group.get(name, value)
            if not _fits(given, value):
                raise ValueError(f"{name} of group {number} is {str(given)[:40]!r}, where {value} is here")
    unknown_names = packed["state"].keys() - {name for group in known for name in group}
    if unknown_names:
        raise ValueError(f"the optimizer's state is also of {', '.join(map(str, unknown_names))}")


def _fits(given: Any, own: Any) -> bool:
    """Whether a setting can stand in the place of one's own: a finite number of one, a pair of a pair.

    None of torch's is below 0 where another value of it is not.
    """
    if isinstance(own, (list, tuple)):
        same = isinstance(given, (list, tuple)) and len(given) == len(own)
        return same and all(map(_fits, given, own))
    if isinstance(own, bool):
        return given is None or isinstance(given, bool)
    if own is None:
        return not isinstance(given, str)
    if not isinstance(own, NUMBERS):
        return True
    return _is_number(given) and bool(given == own or (_is_finite(given) and (own < 0 or given >= LEAST)))


def _is_setting(own: Any) -> bool:
    return isinstance(own, (*NUMBERS, list, tuple)) and not isinstance(own, bool)


def _is_number(given: Any) -> bool:
    return given.numel() == 1 if isinstance(given, torch.Tensor) else isinstance(given, (int, float))


def _is_finite(given: Any) -> bool:
    """Whether it is one finite number, of Python's or in a tensor."""
    return _is_number(given) and math.isfinite(given)


def _is_count(given: Any, least: int = 0) -> bool:
    return _is_finite(given) and bool(given >= least) and bool(given == int(given))


def _validate_scheduler(given: Any, own: Any, where: str) -> None:
    """Raise ValueError for a rate that is none, a step that is none, or no number where one is kept."""
    if isinstance(own, dict) and isinstance(given, Mapping):
        for name in own.keys() & given.keys():
            counts = name in ("last_epoch", "_step_count")  # -1 is before the first
            if counts and not _is_count(given[name], -1):
                raise ValueError(f"{name} of {where} is {str(given[name])[:40]!r}")
            rates = given[name] if name in ("base_lrs", "_last_lr") and isinstance(given[name], list) else ()
            if wrong := [each for each in rates if not _is_finite(each) or each < LEAST]:
                raise ValueError(f"{name} of {where} has the rate {str(wrong[0])[:40]!r}")
            _validate_scheduler(given[name], own[name], f"{name} of {where}")
    elif isinstance(own, list) and isinstance(given, list):
        for each, mine in zip(given, own, strict=False):
            _validate_scheduler(each, mine, where)
    elif isinstance(own, NUMBERS) and not (
        (_is_finite(given) or given == own)  # the best of none is infinite
        and isinstance(own, bool) == isinstance(given, bool)
    ):
        raise ValueError(f"{where} is {str(given)[:40]!r}, where {own} is here")


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
        if not _is_count(values.get("step", 0)):
            raise ValueError(f"step of {name} is {str(values['step'])[:40]}: an optimizer counts from 0")
        for key, found in values.items():
            if isinstance(found, torch.Tensor):
                check_values(found, f"{key} of {name}")
        for key in SQUARES & values.keys():
            found = values[key]
            if isinstance(found, torch.Tensor) and bool((found < 0).any()):
                raise ValueError(
                    f"{key} of {name} has {float(found[found < 0][0])}, and is never below 0: it is damaged"
                )
        for key in SHAPED & values.keys():
            found = values[key]
            if found is None and key == "momentum_buffer":  # of SGD without momentum
                continue
            if not isinstance(found, torch.Tensor) or found.shape != parameters[name].shape:
                shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
                raise ValueError(f"{key} of {name} is {shape}, the parameter {tuple(parameters[name].shape)}")
