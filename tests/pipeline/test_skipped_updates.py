"""Promise: an update whose gradients are not finite is left out by all ranks alike, where asked for."""

import math
from itertools import product

import pytest
import torch
from speeds import slow_except
from trainer_parts import EVERY, JOB, Ranker, assert_part_of, batches, of_rank, parts, same, trained, trainer

from tritonrec.distributed import Communicators
from tritonrec.pipeline import StageFailedError, WindowConfig

BAD = {
    "infinite rows' gradient": lambda losses, hidden: losses * math.inf,
    "infinite dense gradient": lambda losses, hidden: losses + (hidden * 1e30 * 1e30).sum() * 1e-30,
    "a loss that is not a number": lambda losses, hidden: losses + math.nan,
    "a gradient beyond fixed point": lambda losses, hidden: losses * 1e12,
}


QUICK = "infinite rows' gradient", "a loss that is not a number"


class Spoiled(Ranker):
    """One sample of step 1 spoils it."""

    def __init__(self, spoil):
        super().__init__()
        self.spoil = spoil

    def forward(self, batch, rows, seed):
        hidden = []
        own = self.mix.forward
        self.mix.forward = lambda *arguments: hidden.append(own(*arguments)) or hidden[-1]
        try:
            losses = super().forward(batch, rows, seed)
        finally:
            del self.mix.forward
        first = batch.sample_ids == batches()[1].sample_ids[2]
        if batch.step != 1 or not bool(first.any()):
            return losses
        return torch.where(first, self.spoil(losses, hidden[0]), losses)


def run(mode, consistency="batch", spoil="infinite rows' gradient", count=4, **window):
    made = parts(lambda: Spoiled(BAD[spoil]))
    got, results = trained(made, mode, consistency, batches(count), skip_nonfinite=True, **window)
    return got, [(result.skipped, result.grad_norm) for result in results]


# "window" has no fixed point to go beyond, and takes the ordinary gradient of a loss that is not a number.
OF_BATCH = "a gradient beyond fixed point", "a loss that is not a number"


def spoiled(ways, spoils):
    return [(*way, each) for way, each in product(ways, spoils) if way[1] == "batch" or each not in OF_BATCH]


WAYS = [getattr(each, "values", each) for each in EVERY]
QUICK_WAYS = [each for each in EVERY if each in WAYS]
SPOILED = slow_except(spoiled(QUICK_WAYS, QUICK), spoiled(WAYS, BAD))


@pytest.mark.parametrize(("mode", "consistency", "spoil"), SPOILED)
def test_the_update_is_left_out_in_every_mode(mode, consistency, spoil):
    expected, ends = run("reference" if consistency == "batch" else "sequential", consistency, spoil)
    got, found = run(mode, consistency, spoil)
    assert same(got, expected) and found == ends
    assert [skipped for skipped, _ in found] == [False, True, False, False]
    assert [math.isinf(norm) for _, norm in found] == [False, True, False, False]


def test_it_is_the_run_without_that_update():
    """Rows count the update that was left out (bias correction), the dense optimizer does not."""
    got, _ = run("nestpipe", count=2)
    before, _ = run("nestpipe", count=1)
    once = parts(lambda: Spoiled(BAD["infinite rows' gradient"]))
    with trainer(once, skip_nonfinite=True) as training:
        results = list(training.run(batches(2)))
    assert results[1].skipped and math.isnan(results[1].loss) and results[1].losses.isinf().any()
    assert len(got[0]) > len(before[0])  # keys of the update have their rows
    known = torch.isin(got[0], before[0])
    assert torch.equal(got[1][known], before[1]) and same(got[2:], before[2:])
    fresh = once[1].initial_rows("item", got[0][~known])
    assert torch.equal(got[1][~known], fresh)


@pytest.mark.parametrize(
    "mode", slow_except(["reference", "nestpipe"], ["reference", "sequential", "nestpipe"])
)
def test_without_it_the_step_fails(mode):
    made = parts(lambda: Spoiled(BAD["infinite rows' gradient"]))
    errors = (ArithmeticError, StageFailedError)
    with pytest.raises(errors, match="is not finite"):
        trained(made, mode, "batch", batches(3))


def spoil_the_last(model, communicators):
    forward = model.forward

    def spoiled(batch, rows, seed):
        last = communicators.rank == communicators.world_size - 1
        return forward(batch, rows, seed) * (math.inf if batch.step == 1 and last else 1)

    model.forward = spoiled


@pytest.mark.multi_rank
@pytest.mark.parametrize("replicas", [1, 2])
def test_all_ranks_leave_it_out(pool, replicas):
    window = WindowConfig(3, skip_nonfinite=True, seed=4)
    options = "nestpipe", 3, JOB, "adam", spoil_the_last
    whole = of_rank(Communicators.local(), window, *options)
    for found in pool.run(of_rank, 2, window, *options, replicas=replicas):
        assert [end[1:] for end in found[0]] == [end[1:] for end in whole[0]]
        assert [end[2] for end in found[0]] == [False, True, False]
        assert_part_of((whole[0], *found[1:]), whole)
