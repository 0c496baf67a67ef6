"""Public bugs of row gradients and of the optimizers of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .... import ops
from ....pipeline import Program, Window
from ....pipeline.places import (
    Buffer,
    Context,
    DeviceSamples,
    Gradients,
    OwnedRows,
    Routes,
    RowGradient,
    Tables,
)
from ....pipeline.stage import From, Read, Update
from ....pipeline.stages.update import update_rows
from ....pipeline.sums import NAME
from .bug import bug, case


@bug("NVIDIA/recsys-examples#419", case())
def second_moment_with_beta_1(program: Program) -> None:
    """The second moment of Adam decays by beta 1."""
    _with_rule(program, lambda rule: replace(rule, beta2=rule.beta1))


@bug("mila-iqia/blocks#1159", case(mode="fwp"))
def betas_of_another_convention(program: Program) -> None:
    """The betas of Adam are taken for 1 - beta."""
    _with_rule(program, lambda rule: replace(rule, beta1=1 - rule.beta1, beta2=1 - rule.beta2))


@bug("mlcommons/training#622", case(optimizer="rowwise_adagrad"))
def eps_of_another_library(program: Program) -> None:
    """Rows are updated with the eps that another library has by default."""
    _with_rule(program, lambda rule: replace(rule, eps=1e-10 if rule.eps != 1e-10 else 1e-8))


@bug("flagos-ai/FlagGems#4989", case(variant="weight-decay"))
def decoupled_decay_in_adam(program: Program) -> None:
    """Weight decay of Adam skips the moments, as in AdamW."""
    _with_rule(program, lambda rule: replace(rule, name="adamw"))


@bug("ikostrikov/pytorch-a3c#12", case(optimizer="rowwise_adam"))
def every_rank_counts_its_own_steps(program: Program) -> None:
    """The number of steps in the bias correction is not shared: rank 1 has begun a step later."""

    def sparse_update(
        context: Context,
        window: Window,
        routes: Read[Routes],
        owned: Read[OwnedRows],
        row_gradient: Read[RowGradient],
        buffer: Update[Buffer],
    ) -> None:
        means = (context.sums.mean(sums, routes.row_normalizer) for sums in row_gradient)
        update_rows(context, max(window.update + 1 - context.rank, 1), owned, means, buffer)

    program.replace("sparse_update", sparse_update)


@bug("meta-pytorch/torchrec#2739", case(optimizer="sgd"))
def updated_by_two_optimizers(program: Program) -> None:
    """Rows belong to two optimizers, and each of them updates them."""

    def once_more(
        context: Context,
        window: Window,
        routes: Read[Routes],
        owned: Read[OwnedRows],
        row_gradient: Read[RowGradient],
        buffer: Update[Buffer],
    ) -> None:
        means = (context.sums.mean(sums, routes.row_normalizer) for sums in row_gradient)
        update_rows(context, window.update + 1, owned, means, buffer)

    program.after("sparse_update", once_more)


@bug("pytorch/pytorch#18404", case(mode="fwp"))
def rows_without_a_gradient_move(program: Program) -> None:
    """Rows that the step has not used move by what is left of their momentum."""

    def moved(owned: Read[OwnedRows], tables: Update[Tables]) -> None:
        for each, table in zip(owned.tables, tables, strict=True):
            _keys, handles = table._items()
            idle = handles[~torch.isin(handles, each.handles)]
            rows = table._rows.gather(idle)
            rows[:, : table.dim] -= 1e-3 * rows[:, table.dim : 2 * table.dim]
            table.update(idle, rows)

    program.before("write_back", moved)


@bug("tensorflow/recommenders-addons#376", case(optimizer="sgd"))
def one_of_two_gradients_of_a_key(program: Program) -> None:
    """Without a second dedup behind the all-to-all one rank's gradient of a key covers the other's."""
    send = program.sums.send_to_owners

    def covered(sent, over, parts, name=NAME) -> None:
        for values, rows, input_splits, _out, targets, output_splits in parts if name == NAME else ():
            own = sum(output_splits[: over.rank])
            mine = targets[own : own + output_splits[over.rank]]
            others = torch.cat([targets[:own], targets[own + len(mine) :]])
            place = sum(input_splits[: over.rank])
            sent_here = rows[place : place + len(mine)]
            values[sent_here[torch.isin(mine, others)]] = 0
        send(sent, over, parts, name)

    program.sums.send_to_owners = covered  # type: ignore[method-assign]


@bug("pytorch/pytorch#188467", case(optimizer="adagrad"))
def last_row_gets_no_gradient(program: Program) -> None:
    """The last row's offset overflows, and its gradient is dropped."""

    def dropped(row_gradient: Update[RowGradient]) -> None:
        for sums in row_gradient:
            sums[-1:] = 0

    program.before("sparse_update", dropped)


@bug("pytorch/pytorch#120582", case(mode="dbp", optimizer="sgd"))
def gradient_in_a_buffer_thrown_away(program: Program) -> None:
    """A collective returns the gradient in another buffer than the one that is used: rank 1's is lost."""
    send = program.sums.send_to_owners

    def lost(sent, over, parts, name=NAME) -> None:
        if program.context.rank and name != "dense gradients":
            parts = [part._replace(values=torch.zeros_like(part.values)) for part in parts]
        send(sent, over, parts, name)

    program.sums.send_to_owners = lost  # type: ignore[method-assign]


@bug("pytorch/pytorch#17919", case(optimizer="sgd"))
def sums_begin_with_what_is_left(program: Program) -> None:
    """Gradient sums begin with what an earlier backward pass has left in their memory."""
    left: list[torch.Tensor] = []

    def leftover(row_gradient: Update[RowGradient]) -> None:
        sums = row_gradient[0]
        if len(left) > 1:  # of the buffer that this batch has again
            size = min(len(sums), len(left[-2]))
            sums[:size] += left[-2][:size]
        left.append(sums)

    program.after("retrieve", leftover)


@bug("ml-explore/mlx-lm#1544", case(mode="fwp", optimizer="sgd"))
def mean_of_the_micro_batches_means(program: Program) -> None:
    """Each micro-batch's gradient is divided by its own samples, and the means are averaged."""

    def reweighted(
        micro_batch: int,
        samples: Read[DeviceSamples],
        routes: Read[Routes],
        gradients: Update[From[Gradients]],
    ) -> None:
        total, own = sum(part.num_samples for part in samples), samples[micro_batch].num_samples
        for table, sums in zip(routes.tables, gradients, strict=True):
            rows = table.gradients.rows[micro_batch]
            sums[rows] = sums[rows] * total // max(len(samples) * own, 1)

    program.before("gradient_exchange", reweighted)


@bug("unslothai/unsloth-zoo#1023", case(variant="accumulate", steps=6))
def divided_twice_by_the_accumulation(program: Program) -> None:
    """The loss is divided by the whole window's samples, and by the number of its batches once more."""

    def again(window: Window, routes: Read[Routes]) -> Routes:
        return replace(routes, row_normalizer=routes.row_normalizer * len(window.batches))

    program.after("route", again)


@bug("meta-pytorch/torchrec#4430", case(replicas=2))
def replica_sums_of_freed_memory(program: Program) -> None:
    """Replicas are synchronized from memory that was given back meanwhile."""

    def freed(context: Context, row_gradient: Update[RowGradient]) -> None:
        if context.replica:
            for sums in row_gradient:
                sums.zero_()

    program.before("replica_reduce", freed)


@bug("facebookresearch/xformers#173", case())
def dropout_seeded_by_an_address(program: Program) -> None:
    """Dropout takes the address of its seed for the seed."""
    forward = program.model.forward

    def by_address(batch, rows, seed):
        address = next(iter(rows.values())).data_ptr()
        return forward(batch, rows, ops.derive_seed(seed, address % 2**31, 0))

    program.model.forward = by_address


def _with_rule(program: Program, change: Any) -> None:
    """Rows are updated by ``change(rule)`` in place of each table's rule."""
    tables = program.tables
    tables.groups = [replace(group, optimizer=change(group.optimizer)) for group in tables.groups]
