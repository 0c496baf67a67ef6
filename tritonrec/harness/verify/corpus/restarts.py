"""Public bugs of checkpoints and restarts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .... import ops
from ....data import Batch
from ....pipeline import Program, Window
from ..kept_state import load_rows_as
from ..variants import RESTART
from .bug import bug, case

SAVED = {"variant": RESTART, "steps": 8}


@bug("KempnerInstitute/KempnerForge#115", case(restart=2, **SAVED))
def moments_lost_at_a_restart(program: Program) -> None:
    """The optimizer's moments start from zero after a restart."""
    _loads(program, lambda table, rows: _cut(table, rows["rows"]))


@bug("tensorflow/recommenders-addons#364", case(restart=1, **SAVED))
def every_restored_row_is_the_first(program: Program) -> None:
    """Every row that is restored gets the values of the first one."""
    _loads(program, lambda table, rows: rows["rows"][:1].expand(len(rows["rows"]), -1).contiguous())


@bug("pytorch/pytorch#91205", case(restart=1, **SAVED))
def states_stay_on_their_old_rank(program: Program) -> None:
    """At another world size the optimizer states of rows that move are not found."""

    def of_rank_0(table: Any, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        moved = ops.owner_of(rows["keys"], 2) == 1
        return torch.where(moved.unsqueeze(1), _cut(table, rows["rows"]), rows["rows"])

    _loads(program, of_rank_0)


@bug("meta-pytorch/torchrec#1591", case(restart=3, world_size=2, **SAVED))
def remainder_lost_in_resharding(program: Program) -> None:
    """Keys beyond a multiple of the shards are left out when the tables are dealt out anew."""

    def without_remainder(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        size = (len(rows["keys"]) - 1) // 3 * 3
        return {name: each[:size] for name, each in rows.items()}

    for group in program.tables.groups:
        load_rows_as(group.table, without_remainder)


@bug("TrenTorch/TrenTorch#187", case(restart=2, **SAVED))
def bias_correction_begins_anew(program: Program) -> None:
    """The number of steps is not saved, so that Adam's bias correction begins anew."""
    load_state_dict = program.dense.load_state_dict

    def from_one(state) -> None:
        for each in state["optimizers"]:
            for values in each["state"].values():
                values["step"] = torch.zeros_like(values["step"])
        load_state_dict(state)

    program.dense.load_state_dict = from_one  # type: ignore[method-assign]


@bug("modelscope/ms-swift#10050", case(restart=2, **SAVED))
def samples_trained_again(program: Program) -> None:
    """After a restart samples are trained again that the epoch has had already."""
    _repeats(program, after=2)


@bug("KempnerInstitute/KempnerForge#57", case(mode="dbp", steps=6))
def loader_falls_back(program: Program) -> None:
    """The loader forgets how many batches it has given, and gives one of them again."""
    _repeats(program, after=3)


def _repeats(program: Program, after: int) -> None:
    """The batch after so many has the samples of the one before it."""
    given: list[Batch] = []

    def again(window: Window) -> None:
        given.append(window.batches[0])
        if len(given) == after:
            window.batches[0] = replace(given[-2], step=given[-1].step)

    program.before("prefetch", again)


def _cut(table: Any, rows: torch.Tensor) -> torch.Tensor:
    """The rows with states of zeros."""
    return torch.cat([rows[:, : table.dim], torch.zeros_like(rows[:, table.dim :])], 1)


def _loads(program: Program, change: Callable[[Any, dict[str, torch.Tensor]], torch.Tensor]) -> None:
    """A checkpoint's rows are loaded as ``change(table, columns)``."""
    for group in program.tables.groups:

        def changed(rows: dict[str, torch.Tensor], table: Any = group.table) -> dict[str, torch.Tensor]:
            return {**rows, "rows": change(table, rows)}

        load_rows_as(group.table, changed)
