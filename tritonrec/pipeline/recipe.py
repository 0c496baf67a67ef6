"""What bits depend on beside the data: saved with a checkpoint, and compared when a training loads it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ..embedding import HashTableCollection, RowOptimizer
from ..embedding.learning_rate import PROBED, rate_at
from .dense import DenseModel
from .window import WindowConfig

RECIPE = "recipe"
"""The key of `recipe_of` among a checkpoint's metadata."""

Recipe = dict[str, dict[str, Any]]
"""By name of a setting, as `Trainer.load` has it in ``changed=``, its values by place."""

Described = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""What `HashTableCollection.describe` gives."""

SETTINGS = {
    "seed": "of the tables' initial values",
    "scale": "of the tables' initial values",
    "rule": "of the rows' and the parameters' optimizers, without their rates",
    "lr": "learning rates",
    "policy": "of the tables",
    "scheduler": "of the parameters' rates",
    "average": "of the parameters: how a step counts in it",
    "dropout_seed": "of the dropout",
    "consistency": "of sums",
    "accumulate": "batches of an update",
    "clipping": "of gradients",
    "precision": "of the model's arithmetic and of exchanged rows",
}
_OF_SCHEDULERS = {
    parameter
    for each in [*vars(torch.optim.lr_scheduler).values(), torch.optim.swa_utils.SWALR]
    if isinstance(each, type) and issubclass(each, torch.optim.lr_scheduler.LRScheduler)
    for parameter in inspect.signature(each).parameters
} - {"optimizer", "schedulers", "last_epoch"} | {"schedule_phases", "total_size", "step_ratio", "max_lrs"}
"""Arguments of torch's schedulers, and what these make of them: in a state they do not move."""
_OF_SPEED = {"params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"}


def recipe_of(tables: HashTableCollection, dense: DenseModel, config: WindowConfig) -> Recipe:
    """As JSON keeps it."""
    found: Recipe = {name: {} for name in SETTINGS}
    for group in tables.groups:
        for name, scale in zip(group.layout.names, group.table.scales, strict=True):
            place = f"table {name}"
            found["seed"][place] = group.table.seed
            found["scale"][place] = scale
            found["policy"][place] = _plain(tables.policy_of(name))
            rule = {name: _plain(value) for name, value in group.optimizer.settings.items()}
            if "results" in rule:  # in a place of their own, which checkpoints of before do not have
                found["rule"][f"{place}, its function's results"] = rule.pop("results")
            found["rule"][place] = rule
            found["lr"][place] = _rate(group.optimizer)
    for number, (optimizer, groups) in enumerate(zip(dense.optimizers, dense.settings, strict=True)):
        found["rule"][f"optimizer {number}"] = type(optimizer).__name__
        for at, values in enumerate(groups):
            place = f"optimizer {number}, group {at}"
            found["rule"][place] = {
                name: _plain(value) for name, value in values.items() if name not in _OF_SPEED
            }
            found["lr"][place] = _plain(values.get("initial_lr", values.get("lr")))
    for number, scheduler in enumerate(dense.schedulers):
        found["scheduler"][f"scheduler {number}"] = type(scheduler).__name__
        found["scheduler"] |= _settings(scheduler.state_dict(), f"scheduler {number}")
        found["scheduler"] |= functions_of(scheduler, f"scheduler {number}")
    if dense.average is not None:
        found["average"][""] = average_of(dense.average)
    found["dropout_seed"][""] = config.seed
    found["consistency"][""] = config.consistency
    if config.consistency == "batch":
        found["consistency"]["fraction_bits"] = config.fraction_bits
    found["consistency"]["average_every"] = config.average_every
    found["consistency"]["moment_scaling"] = config.moment_scaling
    found["consistency"]["late_states"] = config.late_states
    found["consistency"]["average_holders"] = config.average_holders
    found["accumulate"][""] = config.accumulate
    for name in ("max_grad_norm", "max_grad_value", "skip_nonfinite"):
        found["clipping"][name] = str(getattr(config, name))
    found["precision"] = {"model": config.precision, "exchange": config.exchange.precision}
    if config.precision == "fp16":
        found["precision"]["loss_scaling"] = asdict(config.loss_scaling)
    return found


def require_same(
    saved: Any, here: Recipe, changed: Collection[str] = (), where: str = "the checkpoint"
) -> None:
    """Raise ValueError naming each setting that differs, with both values and what lets it differ.

    Args:
        saved: None for a checkpoint of a version that saved none: a warning says that nothing is compared.
        changed: names of settings that may differ.
    """
    unknown = [name for name in changed if name not in SETTINGS]
    if unknown:
        raise ValueError(f"changed= has {unknown[0]!r}, and takes {', '.join(SETTINGS)}")
    if saved is None:
        warnings.warn(
            f"{where} does not say with which {', '.join(SETTINGS)} it was made: this training's are taken",
            stacklevel=4,
        )
        return
    different: list[str] = []
    names: list[str] = []
    for name in SETTINGS:
        there = saved.get(name, {}) if isinstance(saved, Mapping) else {}
        for place, value in here[name].items():
            if name in changed or not isinstance(there, Mapping) or place not in there:
                continue  # a table or a group that is there or here alone is found by its columns
            if there[place] != value:
                what = " of ".join(part for part in (name, place) if part)
                different.append(f"{what} is {_short(there[place])} in {where} and {_short(value)} here")
                names.append(name)
    if different:
        given = "{" + ", ".join(f'"{name}"' for name in sorted({*names, *changed})) + "}"
        raise ValueError(
            f"{'; '.join(different)}: give this training the same, or go on with other values by "
            f"changed={given}, which changes what it computes from here on"
        )


def require_described(saved: Described, here: Described, changed: Collection[str], where: str) -> None:
    """Raise ValueError where a description of tables is of others, whatever the settings beside it say."""
    for name, own in here["tables"].items():
        for key, value in saved["tables"].get(name, {}).items():
            if key not in changed and value != own.get(key):
                raise ValueError(
                    f"{key} of table {name} is {_short(value)} in the description of {where} and "
                    f"{_short(own.get(key))} here: it was altered, or is of other tables"
                )


def keep_settings(dense: DenseModel, changed: Collection[str]) -> Callable[[], None]:
    """The function returned gives the parameters' groups what they have now of ``"lr"`` and ``"rule"``.

    Raises ValueError where a scheduler sets the rates, whose state would contradict.
    """
    if dense.schedulers and "lr" in changed:
        raise ValueError(
            "the learning rates follow a scheduler, whose state the checkpoint has: load without "
            'changed={"lr"}, or without a scheduler'
        )
    kept = [
        {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name not in ("params", "initial_lr") and ("lr" if name == "lr" else "rule") in changed
        }
        for optimizer in dense.optimizers
        for group in optimizer.param_groups
    ]

    def give_back() -> None:
        groups = (group for optimizer in dense.optimizers for group in optimizer.param_groups)
        for group, values in zip(groups, kept, strict=True):
            group.update(values)

    return give_back


def with_own_settings(saved: Any, own: Any) -> Any:
    """The state `saved` of a scheduler, or several, with the settings of the state `own`."""
    if isinstance(saved, list) and isinstance(own, list) and len(saved) == len(own):
        return [with_own_settings(*both) for both in zip(saved, own, strict=True)]
    if not isinstance(saved, dict) or not isinstance(own, dict):
        return saved
    return {
        name: own[name] if name in own and _is_setting(name) else with_own_settings(value, own.get(name))
        for name, value in saved.items()
    }


def _settings(state: Any, place: str) -> dict[str, Any]:
    """By place and name what a scheduler was made with, and those that it is made of."""
    found: dict[str, Any] = {}
    for name, value in state.items() if isinstance(state, dict) else ():
        if _is_setting(name):
            found[f"{place}, {name.lstrip('_')}"] = _plain(value)
        for number, each in enumerate(value if isinstance(value, list) else ()):
            found |= _settings(each, f"{place}, part {number}")
    return found


def functions_of(scheduler: Any, place: str) -> dict[str, Any]:
    """By name what functions that a scheduler was given, and those inside it, return: its state has none."""
    found: dict[str, Any] = {}
    for name in ("lr_lambdas", "_scale_fn_custom"):
        given = getattr(scheduler, name, None)
        for number, function in enumerate(given if isinstance(given, list) else [given]):
            if callable(function):
                found[f"{place}, {name.strip('_')} {number}"] = _results(function, PROBED)
    for number, each in enumerate(getattr(scheduler, "_schedulers", ())):
        found |= functions_of(each, f"{place}, part {number}")
    return found


def average_of(average: torch.optim.swa_utils.AveragedModel) -> list[Any]:
    """What it makes of an average and a new value, as a few updates after each other are counted.

    A function such as `get_ema_multi_avg_fn` gives says its decay to nobody.
    """

    def averaged(count: int) -> list[float]:
        old, new = torch.eye(2, dtype=torch.float64, device="cpu")
        done = torch.tensor(count, dtype=torch.int64, device="cpu")
        if average.multi_avg_fn is not None:
            average.multi_avg_fn([old], [new], done)
        elif average.avg_fn is not None:
            old = average.avg_fn(old, new, done)
        else:
            return []  # the mean of all
        return [round(each, 9) for each in old.tolist()]

    return [_results(averaged, PROBED), average.use_buffers]


def _results(function: Callable[[int], Any], at: Sequence[int]) -> Any:
    """As JSON has them, or the kind of function where it takes no such numbers."""
    try:
        return [_plain(function(each)) for each in at]
    except Exception:
        return type(function).__name__


def _is_setting(name: Any) -> bool:
    return isinstance(name, str) and name.lstrip("_") in _OF_SCHEDULERS


def _rate(rule: RowOptimizer) -> Any:
    """A number, or those of a schedule at some updates."""
    return rule.lr if isinstance(rule.lr, float) else [rate_at(rule.lr, update) for update in PROBED]


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else repr(value)
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return _plain(value.item())
    return repr(value) if "object at 0x" not in repr(value) else type(value).__name__


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
