"""Mixed precision: the model's arithmetic in 16 bits, the scale of its loss, and rows exchanged in 16 bits.

Parameters, optimizer states and tables stay float32 (Micikevicius et al. 2018, "Mixed Precision Training").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.autocast import DTYPES, Precision, autocast
from ..settings import MOST, setting, typed

__all__ = ["DTYPES", "LossScaler", "LossScaling", "Precision", "autocast"]

LEAST_SCALE, MOST_SCALE = 2.0**-60, 2.0**60
"""Of a loss. Beyond them no gradient of a 16-bit float is in its range."""
MOST_AT_START = 2.0**32
MOST_FACTOR = 1024.0
"""By which a scale changes at once."""


@typed
@dataclass(frozen=True)
class LossScaling:
    """Dynamic loss scaling of precision ``"fp16"``, by the rule and the defaults of `torch.amp.GradScaler`.

    All are powers of two, so that scaling and unscaling round nothing.

    Args:
        init_scale: of the mean loss at the start.
        growth_factor: of the scale after `growth_interval` updates in a row with finite gradients.
        backoff_factor: of the scale after an update that is left out because a gradient was not finite.
    """

    init_scale: float = setting(2.0**16, "fp16: scale of the mean loss at the start.", 1, MOST_AT_START)
    growth_factor: float = setting(2.0, "fp16: of the scale, after enough finite updates.", 2, MOST_FACTOR)
    backoff_factor: float = setting(0.5, "fp16: of the scale, after an overflow.", 1 / MOST_FACTOR, 0.5)
    growth_interval: int = setting(2000, "fp16: finite updates in a row before the scale grows.", 1, MOST)

    def __post_init__(self) -> None:
        for name in ("init_scale", "growth_factor", "backoff_factor"):
            if math.frexp(getattr(self, name))[0] != 0.5:
                raise ValueError(f"{name} must be a power of two, got {getattr(self, name)}")


class LossScaler:
    """The scale of the loss, as `torch.amp.GradScaler` moves it; all ranks move theirs alike.

    Attributes:
        scale: of the mean loss in the next update, a power of two.
        growth_tracker: finite updates in a row so far.
    """

    def __init__(self, settings: LossScaling):
        self.settings, self.scale, self.growth_tracker = settings, settings.init_scale, 0

    def exponent(self, terms: int, fraction_bits: int) -> int:
        """e: backward starts from each sample's loss times ``2**e``.

        The mean loss over `terms` is scaled by ``scale``: that is each loss by ``scale / terms``, here with
        the power of two at or above `terms`. Gradients times ``2**-e`` fit fixed point for any e between
        ``fraction_bits - 62`` and `fraction_bits`.
        """
        # log2(scale) - ceil(log2(terms)): powers of two alone, so that scaling rounds nothing.
        e = math.frexp(self.scale)[1] - 1 - (max(terms, 1) - 1).bit_length()
        return min(max(e, fraction_bits - 62), fraction_bits)

    def update(self, found_inf: bool) -> None:
        """After an update, or one left out because a gradient was not finite."""
        if found_inf:
            self.scale = max(self.scale * self.settings.backoff_factor, LEAST_SCALE)
            self.growth_tracker = 0
            return
        self.growth_tracker += 1
        if self.growth_tracker >= self.settings.growth_interval:
            self.scale = min(self.scale * self.settings.growth_factor, MOST_SCALE)
            self.growth_tracker = 0

    def state_dict(self) -> dict[str, Any]:
        """Scale and growth count."""
        return {"scale": self.scale, "growth_tracker": self.growth_tracker}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave; ValueError for anything else, and nothing is loaded then."""
        validate_scaler(state)
        self.scale, self.growth_tracker = float(state["scale"]), int(state["growth_tracker"])


def validate_scaler(state: Any) -> None:
    """Raise ValueError for what is no state of a `LossScaler`."""
    scale = state.get("scale") if isinstance(state, Mapping) else None
    steps = state.get("growth_tracker") if isinstance(state, Mapping) else None
    if not isinstance(scale, (int, float)) or not LEAST_SCALE <= scale <= MOST_SCALE:
        raise ValueError(f"the scale of the loss is {scale!r}, and lies from {LEAST_SCALE} to {MOST_SCALE}")
    if type(steps) is not int or steps < 0:
        raise ValueError(f"the scaler has made {steps!r} updates without an overflow")


def unscaled(gradients: torch.Tensor, scale_exponent: int) -> torch.Tensor:
    """Gradients of losses that were scaled by ``2**scale_exponent``, exact but for underflow."""
    return gradients * 2.0**-scale_exponent if scale_exponent else gradients


def rounded_rows(rows: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Rows (n, dim) float32 as they are exchanged: rounded to nearest even, beyond the range its end.

    So do FBGEMM's quantized communications (``fp32_to_fp16_with_clamp``). A NaN stays one.
    """
    dtype = DTYPES[precision]
    if dtype == rows.dtype:
        return rows
    most = torch.finfo(dtype).max
    return rows.clamp(-most, most).to(dtype)
