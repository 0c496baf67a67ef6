"""Promise: pooled features are pooled from rows where they lie, with the bits and errors of the reference."""

import pytest
import torch
from test_placements import Clicks, batch, parts, trained
from trainer_parts import same, state

from tritonrec import ops
from tritonrec.distributed import Communicators
from tritonrec.pipeline import StageFailedError, Trainer, WindowConfig
from tritonrec.settings import with_values

MODES = ["sequential", "nestpipe"]


@pytest.fixture
def pooled(monkeypatch):
    """The number of bags of each pooled lookup."""
    seen, plain = [], ops.IndexedRows.pooled

    def counted(self, bags, num_bags):
        seen.append(num_bags)
        return plain(self, bags, num_bags)

    monkeypatch.setattr(ops.IndexedRows, "pooled", counted)
    return seen


@pytest.mark.parametrize("consistency", ["batch", "window"])
@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_pools_rows_where_they_lie(mode, consistency, pooled):
    """Three of its four features are pooled; float sums of gradients need the order of the gathered rows."""
    made = parts()
    trained(made, mode, [batch(step) for step in range(3)], micro_batches=2, consistency=consistency)
    assert len(pooled) == (3 * 3 * 2 if consistency == "batch" else 0)


class Infinite(torch.autograd.Function):
    """Adds 0, and its gradient is infinite."""

    @staticmethod
    def forward(ctx, x):
        return x * 0

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, torch.inf)


@pytest.fixture
def infinite(monkeypatch):
    """Steps 1 and 2 have an infinite gradient of a pooled feature."""
    plain = Clicks.forward

    def forward(self, given, rows, seed):
        losses = plain(self, given, rows, seed)
        return losses + Infinite.apply(rows["user"]).sum(1) if given.step in (1, 2) else losses

    monkeypatch.setattr(Clicks, "forward", forward)


def run(mode, **options):
    made, micro_batches = parts(), 1 if mode == "reference" else 2
    config = with_values(WindowConfig(micro_batches, seed=4), options)
    with Trainer(*made, Communicators.local(), mode, config) as training:
        skipped = [result.skipped for result in training.run(batch(step, size=9) for step in range(4))]
    return [*state(made), skipped]


@pytest.mark.parametrize("mode", MODES)
def test_an_update_that_is_not_finite_is_left_out(mode, pooled, infinite):
    expected, found = run("reference", skip_nonfinite=True), run(mode, skip_nonfinite=True)
    assert expected[-1] == found[-1] == [False, True, True, False]
    assert same(found[:-1], expected[:-1]) and pooled


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_without_an_exact_sum_is_named(mode, pooled, infinite):
    # a schedule tells its stage; sequential training has the caller's own stack
    kind = ops.ExactSumError if mode == "sequential" else StageFailedError
    with pytest.raises(kind, match=r"gradient of embedding rows 1\[0, 0\] = inf is not finite"):
        run(mode)
    assert pooled
