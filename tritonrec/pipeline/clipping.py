"""Limits on the gradients of an update: by value, and by the norm of all of them together, which is exact.

The norm is that of the gradient of the mean loss over dense parameters and rows. Its square is a sum of
whole numbers (`ops.sum_of_squares`), so that its bits depend neither on micro-batches nor on ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ..kernels import launch
from ..kernels.deferred import NONE, current, first_bad
from ..kernels.dispatch import on_host
from ..kernels.padding import report
from .window import WindowConfig

OVERFLOW = 2**50
"""From here on the first limb of a sum of squares says that it has none."""
EPS = 1e-6
"""Beside the norm in the divisor, as in `torch.nn.utils.clip_grad_norm_`."""


def clamp(gradient: torch.Tensor, config: WindowConfig) -> torch.Tensor:
    """The gradient with every value in [-max_grad_value, max_grad_value]; 0 stands for no limit."""
    limit = config.max_grad_value
    return gradient.clamp(-limit, limit) if limit else gradient


def squares(gradients: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """(3,) int64, the limbs of the sum of squares of all these float32 gradients."""
    total = torch.zeros(3, dtype=torch.int64, device=device)
    for gradient in gradients:
        total += launch.sum_of_squares(gradient)
    return total


def norm_of(total: torch.Tensor) -> torch.Tensor:
    """() float64, the norm from the limbs (3,) of all gradients' squares; infinite where one is not finite.

    Raises FloatingPointError, unless errors are dropped (`kernels.deferred`), where a gradient is not finite,
    or the norm is 2**25 or more.
    """
    high, middle, low = total.double().unbind()
    # The first limb carries the news that a gradient is not finite through every sum over ranks.
    overflow = torch.where(total[0] >= OVERFLOW, 0, NONE).view(1)

    def error(code: int) -> FloatingPointError:
        return FloatingPointError("the norm of the gradients is not finite, or above 2**25")

    report(first_bad(overflow) if on_host(overflow) else overflow, None, error, error)
    norm = (high + (middle + low * 2.0**-32) * 2.0**-32).sqrt()
    return torch.where(total[0] >= OVERFLOW, math.inf, norm)


def dropped(device: torch.device) -> torch.Tensor:
    """(3,) int64 limbs that say that errors were dropped on this thread's behalf, zeros where none were."""
    collecting = current()
    limbs = torch.zeros(3, dtype=torch.int64, device=device)
    if collecting is not None and collecting.drops:
        # Errors that only one rank has seen reach all ranks as
        # an infinite norm, so all skip the update together.
        limbs[0] = collecting.dropped(device) * OVERFLOW
    return limbs


def scale_of(norm: torch.Tensor, config: WindowConfig) -> torch.Tensor:
    """() float32, the factor of all gradients: 1 up to a norm of ``max_grad_norm``."""
    return ((config.max_grad_norm or math.inf) / (norm + EPS)).clamp(max=1.0).float()
