"""torch's optimizer interface for the rows of hash embeddings."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch

from ..distributed.communicator import Communicator
from ..kernels import launch
from .features import HashTableCollection
from .learning_rate import Constant, rate_at
from .row_gradients import RowGradients, RowsParameter
from .row_optimizer import RowOptimizer
from .state_check import check_distinct, check_values

EPS = 1e-6
"""Beside the norm in the divisor, as in `torch.nn.utils.clip_grad_norm_`."""


OF_THE_RULE = {"weight_decay", "betas", "momentum", "eps", "nesterov", "maximize", "amsgrad", "dampening"}


class HashOptimizer(torch.optim.Optimizer):
    """Updates the rows of all hash embeddings of a model, beside the optimizer of its parameters.

    Gradients of all backward passes since `zero_grad` add up by key, and `step` applies each table's
    `RowOptimizer` once to each row with a gradient. `torch.amp.GradScaler` and `torch.optim.lr_scheduler`
    take it as any optimizer. Ranks of a process group make the same calls.

    Args:
        model: a module; its embeddings that are `fused` have their own optimizer and are left out.

    Attributes:
        param_groups: one for each merged table, with ``"lr"``, which is settable unless the rule has a
            schedule, and the names of its ``"tables"``.
        updates: made so far. Adam's bias correction and schedules count them.

    Raises ValueError for a model without such embeddings, and where two of them have one table.
    """

    def __init__(self, model: torch.nn.Module):
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                "HashOptimizer takes the model, whose hash embeddings it finds, got "
                f"{type(model).__name__}: HashOptimizer(model)"
            )
        found = [(path, each) for path, each in model.named_modules() if isinstance(each, HasRows)]
        self._owners = [(path, each) for path, each in found if each.fused_optimizer is None]
        if not self._owners:
            fused = "only fused hash embeddings, which update themselves" if found else "no hash embeddings"
            raise ValueError(f"{type(model).__name__} has {fused}")
        tables = [id(group.table) for _, owner in self._owners for group in owner.tables.groups]
        if len(set(tables)) < len(tables):
            raise ValueError(
                f"two hash embeddings of {type(model).__name__} have the same table, whose rows would be "
                "updated twice a step: give them one HashEmbeddingCollection, with a feature for each"
            )
        _warn_of_twins(type(model).__name__, found)
        self.updates = 0
        self.gradients = [each for _, owner in self._owners for each in owner.row_gradients]
        for each in self.gradients:
            each.has_optimizer = True
        groups: list[dict[str, Any]] = [
            {
                "params": [each.parameter],
                "lr": rate_at(each.group.optimizer.lr, 1),
                "tables": list(each.group.layout.names),
            }
            for each in self.gradients
        ]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the rows with a gradient.

        Raises RuntimeError without a backward pass since `zero_grad`, FloatingPointError for a gradient that
        is not finite, ValueError for a learning rate that was set although the rule has a schedule, and for
        settings of groups that belong to the rule. Frozen rows stay as they are.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _validate_groups(self.param_groups)
        if not any(each.pending for each in self.gradients):
            if not any(owner.rows.requires_grad for _, owner in self._owners):
                return loss
            raise RuntimeError(
                "step() without gradients of rows: call loss.backward() before it, on a loss that was "
                "computed from the embeddings in training mode and with gradients enabled"
            )
        number = self.updates + 1
        rules = [
            _rule_at(each.group.optimizer, group, number)
            for each, group in zip(self.gradients, self.param_groups, strict=True)
        ]
        for each, rule in zip(self.gradients, rules, strict=True):
            if each.pending:
                each.update(rule, number)
                each.applied = True
        self.updates = number
        for each, group in zip(self.gradients, self.param_groups, strict=True):
            if callable(each.group.optimizer.lr):
                # `param_groups` shows the rate of the next update, as torch's schedulers leave it.
                group["lr"] = rate_at(each.group.optimizer.lr, number + 1)
        return loss

    def __copy__(self) -> HashOptimizer:
        raise TypeError("a HashOptimizer has no copy: make one of the model, and load its state_dict")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only at the start, one for each table: ValueError for another one, which nothing would update."""
        if len(getattr(self, "param_groups", ())) == len(self.gradients):
            raise ValueError(
                "HashOptimizer updates rows of the model's hash embeddings alone: give parameters to an "
                "optimizer of torch, and make a new HashOptimizer of a model with more embeddings"
            )
        super().add_param_group(param_group)

    @property
    def rates(self) -> list[float]:
        """The learning rate of each of `param_groups`."""
        return [float(group["lr"]) for group in self.param_groups]

    @rates.setter
    def rates(self, values: list[float]) -> None:
        for group, lr in zip(self.param_groups, values, strict=True):
            group["lr"] = lr

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; they are None then, whatever `set_to_none`."""
        for each in self.gradients:
            each.clear()

    @torch.no_grad()
    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Scale the gradients of `parameters` and of all ranks' rows to a norm of at most `max_norm`.

        `torch.nn.utils.clip_grad_norm_` of both together; with one rank that function can be used as well.
        The parameters' gradients have to be the same on all ranks, as DDP leaves them, or those of FSDP2. The
        rows' part is exact: its bits depend on no number of ranks.

        Returns:
            () float32, the norm before; nothing is scaled where it is not finite, which raises
            FloatingPointError.
        """
        dense = [each.grad for each in parameters if each.grad is not None]
        # Dense gradients are the same on all ranks and count once; rows are summed over the ranks, exactly.
        whole: Any = torch.nn.utils.get_total_norm(dense)  # of FSDP2's shards a DTensor, of nothing 0
        total = getattr(whole, "full_tensor", lambda: whole)().cpu().double() ** 2
        rows: list[torch.Tensor] = []
        for _, owner in self._owners:
            own = [each.mean for each in owner.row_gradients if each.mean is not None]
            total += _sum_of_squares(own, owner.communicator)
            rows += own
        if not bool(torch.isfinite(total)):
            raise FloatingPointError("the norm of the gradients is not finite")
        norm = total.sqrt()
        scale = float((max_norm / (norm + EPS)).clamp(max=1.0).float())
        for gradient in [*dense, *rows]:
            gradient.mul_(scale)
        return norm.float()

    def state_dict(self) -> dict[str, Any]:
        """Optimizer state by table: ``keys`` (n,) int64 and ``state`` (n, width), learning rates, updates.

        Of this rank's rows; the weights are in the modules' ``state_dict``.
        """
        groups = [
            {"rule": each.group.optimizer.name, "settings": _settings(each)}
            | {name: value for name, value in group.items() if name != "params"}
            for each, group in zip(self.gradients, self.param_groups, strict=True)
        ]
        return {"state": self._tables(), "param_groups": groups, "updates": self.updates}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`, or the part of it whose ids this rank owns; before or after the modules'.

        An id without a row gets its initial weights, a row without a state a state of zeros. Tables may be
        merged otherwise than they were.

        Raises ValueError naming what differs: a table, the width of its state, its rule and its settings, or
        rates of tables that are merged here. Nothing is loaded then.
        """
        try:
            saved, updates = dict(state_dict["state"]), state_dict["updates"]
            every = [(table, group) for group in state_dict["param_groups"] for table in group["tables"]]
            if not all(isinstance(table, str) for table, _ in every):
                raise TypeError("the name of a table")
        except (KeyError, TypeError) as error:
            raise ValueError(f"it is no state of a HashOptimizer: {error!r} is not there") from None
        settings = dict(every)
        if len(settings) < len(every):
            raise ValueError(f"a table is in two groups of the state: {', '.join(name for name, _ in every)}")
        if type(updates) is not int or updates < 0:
            raise ValueError(f"the number of updates must be a whole number from 0, got {updates!r}")
        groups = [
            _group_of(group, settings, each)
            for group, each in zip(self.param_groups, self.gradients, strict=True)
        ]
        for name, own in self._tables(empty=True).items():
            _check_table(name, saved.pop(name, None), own["state"].shape[1])
        if saved:
            raise ValueError(f"the state has tables {', '.join(saved)}, which the model does not have")
        loads = [
            _prepared(
                owner,
                {name: state_dict["state"][_join(path, name)] for name in owner.tables.table_names},
            )
            for path, owner in self._owners
        ]
        for load in loads:
            load()
        for group, old in zip(self.param_groups, groups, strict=True):
            group.update(old)
        self.updates = updates

    def _tables(self, empty: bool = False) -> dict[str, dict[str, torch.Tensor]]:
        """By table ids (n,) int64 of this rank, ascending, and their optimizer state (n, width) float32.

        ``empty``: no rows, for the width.
        """
        found, none = {}, torch.empty(0, dtype=torch.int64, device="cpu")
        for path, owner in self._owners:
            tables = owner.tables
            exported = {} if empty else tables.export()  # once for all tables: it walks all rows
            for name in tables.table_names:
                ids, rows = exported.get(name) or (none, tables.initial_rows(name, none))
                state = rows[:, tables.dim_of(name) :].contiguous()
                found[_join(path, name)] = {"keys": ids, "state": state}
        return found


@runtime_checkable
class HasRows(Protocol):
    """A module that looks rows up and collects their gradients: `HashEmbeddingCollection`."""

    tables: HashTableCollection
    communicator: Communicator
    row_gradients: list[RowGradients]
    rows: RowsParameter
    fused_optimizer: HashOptimizer | None

    def owns(self, ids: torch.Tensor) -> torch.Tensor:
        """(n,) bool, which of `ids` (n,) have their rows on this rank."""


def _prepared(owner: HasRows, states: Mapping[str, Mapping[str, torch.Tensor]]) -> Callable[[], None]:
    """Check the optimizer state of all tables, ``keys`` (n,) and ``state`` (n, width) of each; the function
    returned loads it.

    It is the state of all rows of a table: other rows get zeros. Raises ValueError for an id that is given
    twice or does not fit.
    """
    tables, checked = owner.tables, {}
    for table in tables.table_names:
        ids, state = states[table]["keys"].cpu(), states[table]["state"].cpu()
        here, where = owner.owns(ids), f"the optimizer's state of table {table!r}"
        ids, state = checked[table] = ids[here], state[here]
        check_distinct(ids, where)
        tables.check_ids(table, ids)
        tables.rule_of(table).check_state(state, tables.dim_of(table), where)

    def load() -> None:
        for table, (own_ids, rows) in tables.export().items():
            ids, state = checked[table]
            dim = tables.dim_of(table)
            rows[:, dim:] = 0.0
            tables.load(table, own_ids, rows)
            # Initial weights where an id has no row yet.
            loaded = tables.current_rows(table, ids)
            loaded[:, dim:] = state.to(loaded.device)
            tables.load(table, ids, loaded)

    return load


def _group_of(
    group: Mapping[str, Any], saved: Mapping[str, Mapping[str, Any]], own: RowGradients
) -> dict[str, Any]:
    """The saved settings of a group, whose tables may have been in others; ValueError where these differ."""
    found: dict[str, Any] = {}
    for table in group["tables"]:
        if table not in saved:
            raise ValueError(f"the state has no table {table!r}, but {', '.join(saved)}")
        each = {name: value for name, value in saved[table].items() if name not in ("tables", "params")}
        rule = each.pop("rule", own.group.optimizer.name)
        if rule != own.group.optimizer.name:
            raise ValueError(
                f"table {table!r} was updated by the rule {rule!r}, and here by {own.group.optimizer.name!r}"
            )
        settings = each.pop("settings", _settings(own))
        if settings != _settings(own):
            raise ValueError(
                f"table {table!r} was updated with {settings}, and here with {_settings(own)}: give its "
                'RowOptimizer the same, or leave "settings" out of the state\'s param_groups for other values'
            )
        lr: Any = each.get("lr")
        if isinstance(lr, torch.Tensor) and lr.numel() == 1:
            lr = float(lr)
        if type(lr) not in (int, float) or not 0 <= lr < math.inf:
            raise ValueError(f"the learning rate of table {table!r} is {lr!r}")
        _validate_groups([dict(saved[table])])
        if found and each != found:
            raise ValueError(
                f"tables {', '.join(group['tables'])} are merged here, and were updated at {found} and "
                f"{each}: keep them apart (merge=False), or load a state of equal rates"
            )
        # Merged tables are one parameter group here; it can take one rate.
        found = each
    return found


def _settings(gradients: RowGradients) -> str:
    """Those of the rows' rule, as a state has them."""
    return ", ".join(f"{name}={value}" for name, value in gradients.group.optimizer.settings.items())


def _check_table(name: str, saved: Any, width: int) -> None:
    """Raise ValueError unless it is ids (n,) and states (n, width)."""
    if saved is None:
        raise ValueError(f"the state has no table {name!r}")
    try:
        keys, state = saved["keys"], saved["state"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"the state of table {name!r} has no keys and state: {error}") from None
    for column, values in ("keys", keys), ("state", state):
        check_values(values, f"{column} of table {name!r} of the state")
    found = (keys.dtype, keys.dim(), state.dtype, tuple(state.shape))
    if found != (torch.int64, 1, torch.float32, (len(keys), width)):
        raise ValueError(
            f"table {name!r} takes keys (n,) int64 and a state (n, {width}) float32, got {tuple(keys.shape)} "
            f"{keys.dtype} and {tuple(state.shape)} {state.dtype}; was it saved with another optimizer or "
            "dimension?"
        )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _validate_groups(groups: Iterable[dict[str, Any]]) -> None:
    """Raise ValueError for settings that a group of torch's optimizers has, and these rows' rule."""
    for group in groups:
        for name in OF_THE_RULE & group.keys():
            raise ValueError(
                f"{name} of table {', '.join(group['tables'])} was set in param_groups, and only lr is read "
                f"there: give it to the table's RowOptimizer"
            )


def _rule_at(rule: RowOptimizer, group: dict[str, Any], number: int) -> RowOptimizer:
    """`rule` with the learning rate of its parameter group; ValueError where it cannot have that."""
    if isinstance(group["lr"], str):
        raise TypeError(f"lr of table {', '.join(group['tables'])} must be a number, got {group['lr']!r}")
    lr, own = float(group["lr"]), rate_at(rule.lr, number)
    if lr == own:
        return rule
    tables = ", ".join(group["tables"])
    if callable(rule.lr):
        raise ValueError(
            f"the rate of table {tables} was set to {lr}, but its RowOptimizer has the schedule {rule.lr}: "
            "give it a number and leave the rate to torch.optim.lr_scheduler, or keep the schedule only"
        )
    if rule.lazy_weight_decay:
        raise ValueError(
            f"the rate of table {tables} was set to {lr}, but its lazy weight decay makes up for updates at "
            f"the rate {own}: give RowOptimizer(lr=...) a schedule"
        )
    return replace(rule, lr=Constant(lr))


def _sum_of_squares(gradients: list[torch.Tensor], over: Communicator) -> torch.Tensor:
    """() float64 of all ranks' gradients; infinite where one is not finite or the sum reaches 2**50."""
    limbs = torch.zeros(3, dtype=torch.int64, device="cpu")
    for gradient in gradients:
        limbs += launch.sum_of_squares(gradient).cpu()
    # sum = high + middle * 2**-32 + low * 2**-64, of integers, whose sums over ranks have no order.
    high, middle, low = over.all_reduce(limbs, "squares of the gradients", bounded=True).double().unbind()
    total = high + (middle + low * 2.0**-32) * 2.0**-32
    return torch.where(high < 2.0**50, total, torch.inf)


def _warn_of_twins(model: str, found: Sequence[tuple[str, HasRows]]) -> None:
    """Warn where tables of two modules begin with the same values: an id's rows are equal there."""
    known: dict[tuple[int, int, int, float], tuple[str, str]] = {}
    for path, owner in found:
        for name, table in owner.tables.describe()["tables"].items():
            drawn = table["seed"], table["table_id"], table["dim"], table["scale"]
            other, _ = known.setdefault(drawn, (path, name))
            if other != path:
                warnings.warn(
                    f"tables {name!r} of {other} and {path} in {model} have one name, seed and size, so an "
                    "id begins with the same row in both: give each its own name=, or seed=",
                    UserWarning,
                    stacklevel=4,
                )
