"""Public bugs of dense gradients, parameters and their groups of ranks."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....pipeline import Program
from ....pipeline.clipping import scale_of
from ....pipeline.places import Context, DenseGradient, DenseMeans, GradientNorm, Routes
from ....pipeline.stage import Read, Update
from .bug import bug, case

FOUR = {"world_size": 4, "replicas": 2}


@bug("NVIDIA/Megatron-LM#844", case(mode="sequential", **FOUR), says="has parameter ")
def dense_sums_over_the_wrong_group(program: Program) -> None:
    """Dense gradients are added up over the ranks of a shard instead of over all."""
    reduce, shard = program.communicators.reduce, program.communicators.shard_control
    reduce.group, reduce.rank, reduce.world_size = shard.group, shard.rank, shard.world_size


@bug("NVIDIA/Megatron-LM#1685", case())
def dense_gradients_not_exchanged(program: Program) -> None:
    """Every rank updates the dense parameters from its own gradients."""
    reduce = program.communicators.reduce
    reduce.group, reduce.rank, reduce.world_size = None, 0, 1


@bug("PaddlePaddle/Paddle#30437", case(mode="dbp", optimizer="sgd"))
def dense_gradients_added_up_twice(program: Program) -> None:
    """The sum over the ranks is added up over the ranks again."""

    def again(context: Context, means: Read[DenseMeans]) -> DenseMeans:
        return replace(means, gradients=means.gradients * program.communicators.world_size)

    program.after("dense_reduce", again)


@bug("pytorch/pytorch#128949", case(mode="fwp"), says="has optimizer state ")
def one_parameter_not_exchanged(program: Program) -> None:
    """A parameter that not every rank expects is updated from each rank's own gradient."""

    def own(context: Context, routes: Read[Routes], means: Read[DenseMeans]) -> DenseMeans:
        size = next(iter(program.dense.parameters.values())).numel()
        mine = context.sums.divide(means.sums[:size], routes.loss_normalizer)
        return replace(means, gradients=torch.cat([mine, means.gradients[size:]]))

    program.after("dense_reduce", own)


@bug("pytorch/pytorch#69031", case(optimizer="sgd"))
def only_the_last_micro_batch_exchanged(program: Program) -> None:
    """Of one parameter only the gradient of the last micro-batch reaches the other ranks."""

    def forgotten(micro_batch: int, dense_gradient: Update[DenseGradient]) -> None:
        if micro_batch == program.config.micro_batches - 1:
            size = next(iter(program.dense.parameters.values())).numel()
            dense_gradient.flight.accumulator._flat[:size] = 0

    program.before("compute", forgotten)


@bug("NVIDIA-NeMo/Automodel#3822", case(mode="dbp"), says="rank 1 has parameter ")
def ranks_begin_with_other_parameters(program: Program) -> None:
    """Parameters that all ranks share are not broadcast after they are made."""
    if program.context.rank:
        with torch.no_grad():
            next(iter(program.dense.parameters.values())).mul_(1.5)


@bug("flashlight/flashlight#143", case(), says="state step of parameter ")
def step_counted_for_each_parameter(program: Program) -> None:
    """The counter of Adam moves with every parameter instead of with every step."""
    step = program.dense.step

    def counted(gradients) -> None:
        step(gradients)
        for number, parameter in enumerate(program.dense.parameters.values()):
            program.dense._state_of(parameter)["step"].add_(number)

    program.dense.step = counted  # type: ignore[method-assign]


@bug("NVIDIA/Megatron-LM#4641", case(mode="fwp"), says="rank 1 has parameter ")
def a_copy_updated_by_another_rule(program: Program) -> None:
    """One rank's copy of a shared parameter belongs to an optimizer of another kind."""
    step = program.dense.step

    def by_sgd(gradients) -> None:
        name, parameter = next(iter(program.dense.parameters.items()))
        before = parameter.detach().clone()
        step(gradients)
        if program.context.rank:
            with torch.no_grad():
                parameter.copy_(before - 1e-3 * gradients[name])

    program.dense.step = by_sgd  # type: ignore[method-assign]


@bug("SWivid/F5-TTS#631", case(variant="recipe"))
def average_follows_micro_batches(program: Program) -> None:
    """Averaged weights are updated after each micro-batch instead of after each step."""
    average = program.dense.average
    assert average is not None
    update = average.update_parameters

    def often(model) -> None:
        for _ in range(program.config.micro_batches):
            update(model)

    average.update_parameters = often  # type: ignore[method-assign]


@bug("pytorch/pytorch#88955", case(variant="recipe"))
def norm_counts_copies(program: Program) -> None:
    """The squares of parameters that every rank holds are added up over the ranks."""

    def counted(context: Context, means: Read[DenseMeans], norm: Read[GradientNorm]) -> GradientNorm:
        others = program.communicators.world_size - 1
        total = norm.norm**2 + others * (means.gradients.double() ** 2).sum()
        return GradientNorm(total.sqrt(), scale_of(total.sqrt(), context.config))

    program.after("gradient_norm", counted)


@bug("ByteDance-Seed/VeOmni#184", case(variant="recipe", replicas=2))
def norm_over_replicas_too(program: Program) -> None:
    """The norm is added up over the replicas as well as over the shards."""
    reduce = program.communicators.reduce
    all_reduce = reduce.all_reduce

    def replicated(values: torch.Tensor, name: str, bounded: bool = False) -> torch.Tensor:
        values = all_reduce(values, name, bounded)
        return values * 2 if name == "squares of the gradients" else values

    reduce.all_reduce = replicated  # type: ignore[method-assign]
