"""Promise: a window's micro-batches lay out each weight once, and the next window sees what it has become."""

import pytest
import torch
from trainer_parts import batches, parts, trainer

from tritonrec.kernels.linear import numba_linear


@pytest.fixture
def laid_out(monkeypatch):
    """Shapes of the weights that were laid out."""
    shapes, lay_out = [], numba_linear._lay_out
    monkeypatch.setattr(
        numba_linear, "_lay_out", lambda weight: shapes.append(weight.shape) or lay_out(weight)
    )
    return shapes


@pytest.mark.parametrize("mode", ["sequential", "nestpipe"])
@pytest.mark.parametrize("consistency", ["batch", "window"])
def test_weights_are_laid_out_once_a_window(laid_out, mode, consistency):
    with trainer(parts(), mode, consistency, micro_batches=3, trust_model=True) as training:
        list(training.run(batches(4)))
    assert len(laid_out) == 4 * 2  # for the forward and the backward pass


@pytest.mark.parametrize("trained", [True, False])
def test_what_a_caller_changes_between_steps_is_seen(trained):
    """`data` counts no versions, nor does an update of a frozen parameter."""
    found = []
    for micro_batches in (1, 3):
        made = parts()
        weight = made[0].mix.weight.requires_grad_(trained)
        with trainer(made, "sequential", micro_batches=micro_batches) as training:
            for batch in batches(4):
                found.append(training.step(batch).losses)
                weight.data.mul_(0.5)
    for one, other in zip(found[:4], found[4:], strict=True):
        assert torch.equal(one, other)
