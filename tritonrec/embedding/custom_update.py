"""A user's own update of rows: torch code on rows side by side, of which none may see another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from ..kernels import launch
from ..kernels.padding import padding

UpdateFunction = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, int, float], tuple[torch.Tensor, torch.Tensor]
]
PROBED_ROWS, PROBED_STEPS, PROBED_VALUES = 37, 3, 1 << 17
"""Of the check that rows do not depend on each other: an odd number, so that vectors end inside a row."""


@dataclass(frozen=True)
class CustomUpdate:
    """An update function and its number of state columns. Ranks compare name, function's name and widths."""

    name: str
    function_name: str
    widths: tuple[int, ...]
    function: UpdateFunction = field(repr=False, hash=False)
    state_width: int | Callable[[int], int] = field(repr=False, hash=False)

    @classmethod
    def of(cls, function: UpdateFunction, state_width: int | Callable[[int], int], name: str) -> CustomUpdate:
        """Raises ValueError for a width that is negative or no whole number."""
        widths = tuple(_width(state_width, dim, name) for dim in (1, 2, 64))
        named = function if hasattr(function, "__qualname__") else type(function)
        return cls(name, f"{named.__module__}.{named.__qualname__}", widths, function, state_width)

    def width(self, dim: int) -> int:
        """State columns of a row of `dim` weights."""
        return _width(self.state_width, dim, self.name)

    def update(
        self,
        rows: torch.Tensor,
        indices: torch.Tensor,
        gradient: torch.Tensor,
        step: int,
        lr: float,
        count: torch.Tensor | None,
    ) -> None:
        """Update ``rows[indices]`` (K, dim + width) in place, those before the count.

        Raises ValueError where the function returns other shapes, or bits that depend on the other rows.
        """
        dim = gradient.shape[1]
        if len(indices) == 0:
            return
        check_independent(self, dim, rows.device)
        own = launch.gather_rows(rows, indices, count)
        if count is not None:  # what lies there may be anything
            gradient = gradient.masked_fill(padding(len(indices), count).unsqueeze(1), 0.0)
        updated = self(own[:, :dim].contiguous(), own[:, dim:].contiguous(), gradient, step, lr)
        launch.scatter_rows(rows, indices, torch.cat(updated, 1), None, count)

    def __call__(
        self, weight: torch.Tensor, state: torch.Tensor, gradient: torch.Tensor, step: int, lr: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New weight (K, dim) and state (K, S)."""
        with torch.no_grad():
            updated = self.function(weight, state, gradient, step, lr)
        if not isinstance(updated, tuple) or len(updated) != 2:
            found = type(updated).__name__
            raise ValueError(f"update {self.name!r} must return weight and state, got {found}")
        for what, before, after in zip(("weight", "state"), (weight, state), updated, strict=True):
            if after.shape != before.shape or after.dtype != before.dtype:
                raise ValueError(
                    f"update {self.name!r} must return {what} {tuple(before.shape)} {before.dtype}, got "
                    f"{tuple(after.shape)} {after.dtype}"
                )
        return updated


@lru_cache(maxsize=256)
def check_independent(update: CustomUpdate, dim: int, device: torch.device) -> None:
    """Raise ValueError where a row's bits depend on the rows beside it, or on its place among them.

    Each row of a few steps is computed alone, beside `PROBED_ROWS`, and among so many that torch's threads
    share them.
    """
    generator = torch.Generator().manual_seed(0)
    num_rows = max(2, min(PROBED_ROWS, PROBED_VALUES // max(dim, 1)))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    # of all magnitudes, since a small change would be lost in a large weight
    weight = (draw(num_rows, dim) * 10.0 ** draw(num_rows, 1).mul(2).clamp(-5, 2)).to(device)
    state = torch.zeros(num_rows, update.width(dim), dtype=torch.float32, device=device)
    copies = 1 + PROBED_VALUES // (num_rows * max(dim, 1))
    for step in range(1, PROBED_STEPS + 1):
        gradient = draw(num_rows, dim).to(device)

        def updated(places: torch.Tensor, w: Any = weight, s: Any = state, g: Any = gradient) -> Any:
            return update(w[places], s[places], g[places], step, 1.0)  # noqa: B023 (called in its round)

        everywhere = torch.arange(num_rows, device=device)
        weight, state = updated(everywhere)
        beside = torch.cat([weight, state], 1)
        alone = [torch.cat(updated(place), 1) for place in everywhere.split(1)]
        _check_same(update, torch.cat(alone), beside)
        for part in torch.cat(updated(everywhere.repeat(copies)), 1).split(num_rows):
            _check_same(update, part, beside)


def _check_same(update: CustomUpdate, rows: torch.Tensor, beside: torch.Tensor) -> None:
    differs = (rows.view(torch.int32) != beside.view(torch.int32)).nonzero()
    if len(differs):
        row, column = differs[0].tolist()
        raise ValueError(
            f"update {update.name!r} ({update.function_name}) gives row {row} of {len(rows)} "
            f"{float(beside[row, column])!r} in column {column}, and {float(rows[row, column])!r} where "
            "fewer or more rows are beside it: a row must not depend on other rows, nor on its place. Sums "
            "over rows do; on a CPU so do torch.sigmoid, silu, softplus and pow, whose vectors round "
            "otherwise than the elements that are left over"
        )


def _width(state_width: int | Callable[[int], int], dim: int, name: str) -> int:
    width = state_width(dim) if callable(state_width) else state_width
    if not isinstance(width, int) or isinstance(width, bool) or width < 0:
        raise ValueError(f"update {name!r}: the state width must be a whole number >= 0, got {width!r}")
    return width
