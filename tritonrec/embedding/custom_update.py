"""A user's own update of rows: torch code on rows side by side, of which none may see another.

The same rule may be given for numba and for Triton too. The torch code says what is right: before another one
updates rows of a dimension, both update random rows, and every bit has to agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import sha256
from importlib import import_module
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch

from ..kernels import launch
from ..kernels.dispatch import implementation
from ..kernels.padding import padding
from ..kernels.row_layout import check_rows
from .learning_rate import PROBED

UpdateFunction = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, int, float], tuple[torch.Tensor, torch.Tensor]
]
PROBED_ROWS, PROBED_STEPS, PROBED_VALUES = 37, (1, 2, 3, 10, 1000), 1 << 17
"""Of the checks: an odd number of rows, so that vectors end inside a row, and updates late enough for a rule
that changes its formula after the first ones."""


@dataclass(frozen=True)
class CustomUpdate:
    """An update function and its number of state columns. Ranks compare name, function's name, widths and
    `results`, since two functions of one name may differ in a constant; checkpoints the last two.

    `numba` and `triton` are the same update of one row and of a tile of rows (`RowOptimizer.custom`).
    """

    name: str
    function_name: str
    widths: tuple[int, ...]
    results: str
    function: UpdateFunction = field(repr=False, hash=False)
    state_width: int | Callable[[int], int] = field(repr=False, hash=False)
    numba: Callable[..., None] | None = field(default=None, repr=False, hash=False)
    triton: Any = field(default=None, repr=False, hash=False)

    @classmethod
    def of(
        cls,
        function: UpdateFunction,
        state_width: int | Callable[[int], int],
        name: str,
        numba: Callable[..., None] | None = None,
        triton: Any = None,
    ) -> CustomUpdate:
        """Raises ValueError for a width that is no whole number >= 0 or a function of another kind."""
        widths = tuple(_width(state_width, dim, name) for dim in (1, 2, 64))
        plain = isinstance(getattr(numba, "py_func", numba), FunctionType | None)
        if not callable(function) or not plain:
            raise ValueError(
                f"update {name!r}: its update in torch, and in numba if given, must be functions"
            )
        if triton is not None and not hasattr(triton, "fn"):
            raise ValueError(f"update {name!r}: its update in Triton must be decorated with triton.jit")
        one, two, many = widths
        if triton is not None and (two < one or 2 * one < two or many != one + 63 * (two - one)):
            raise ValueError(
                f"update {name!r}: for Triton the state's width is a multiple of dim and a constant, and it "
                f"is {one}, {two} and {many} for dim 1, 2 and 64"
            )
        named = function if hasattr(function, "__qualname__") else type(function)
        qualified = f"{named.__module__}.{named.__qualname__}"
        return cls(name, qualified, widths, _results(function, widths), function, state_width, numba, triton)

    def __getstate__(self) -> dict[str, Any]:
        """pickle takes functions by name, and under its name `triton.jit` has put an object of its own."""
        fn = self.triton and self.triton.fn
        return {**self.__dict__, "triton": fn and (fn.__module__, fn.__qualname__)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["triton"]:
            module, name = state["triton"]
            state["triton"] = attrgetter(name)(import_module(module))
        self.__dict__.update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> CustomUpdate:
        return self

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

        Raises ValueError where the function returns other shapes, or bits that depend on the other rows, and
        where the numba or Triton function gives other bits.
        """
        dim = gradient.shape[1]
        if len(indices) == 0:
            return
        check_independent(self, dim, rows.device)
        chosen = implementation("auto", rows)
        compiled = self.compiled(chosen)
        if compiled is not None and dim:
            check_compiled(self, dim, rows.device, chosen)
            check_rows("indices", indices, len(rows), count)
            compiled(rows, indices, gradient, step, lr, count)
            return
        own = launch.gather_rows(rows, indices, count)
        if count is not None:  # what lies there may be anything
            gradient = gradient.masked_fill(padding(len(indices), count).unsqueeze(1), 0.0)
        updated = self(own[:, :dim].contiguous(), own[:, dim:].contiguous(), gradient, step, lr)
        launch.scatter_rows(rows, indices, torch.cat(updated, 1), None, count)

    def compiled(self, implementation: str) -> Callable[..., None] | None:
        """The update of rows in place, in numba or Triton; None where there is only torch."""
        if implementation == "cpu" and self.numba is not None:
            from ..kernels.sparse_optimizers.numba_sparse_optimizers import update_of_rows

            return update_of_rows(self.numba)
        if implementation == "triton" and self.triton is not None:
            from ..kernels.sparse_optimizers.triton_sparse_optimizers import update_of_tiles

            wide = self.widths[1] - self.widths[0]
            return partial(update_of_tiles, function=self.triton, wide=wide, narrow=self.widths[0] - wide)
        return None

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
    weight, state, draw = _probe(update, dim, device)
    num_rows = len(weight)
    copies = 1 + PROBED_VALUES // (num_rows * max(dim, 1))
    for step in PROBED_STEPS:
        gradient = draw()

        def updated(places: torch.Tensor, w: Any = weight, s: Any = state, g: Any = gradient) -> Any:
            return update(w[places], s[places], g[places], step, 1.0)  # noqa: B023 (called in its round)

        everywhere = torch.arange(num_rows, device=device)
        weight, state = updated(everywhere)
        beside = torch.cat([weight, state], 1)
        alone = [torch.cat(updated(place), 1) for place in everywhere.split(1)]
        _check_same(update, torch.cat(alone), beside)
        for part in torch.cat(updated(everywhere.repeat(copies)), 1).split(num_rows):
            _check_same(update, part, beside)


@lru_cache(maxsize=256)
def check_compiled(update: CustomUpdate, dim: int, device: torch.device, implementation: str) -> None:
    """Raise ValueError where a row's bits are not those of the update in torch."""
    weight, state, draw = _probe(update, dim, device)
    places, compiled = torch.arange(len(weight), device=device), update.compiled(implementation)
    assert compiled is not None
    for step in PROBED_STEPS:
        gradient, rows = draw(), torch.cat([weight, state], 1)
        weight, state = update(weight, state, gradient.clone(), step, 0.7)
        if implementation == "cpu":
            _check_bounds(update, rows.clone(), places, gradient, step)
        compiled(rows, places, gradient, step, 0.7, None)
        expected = torch.cat([weight, state], 1)
        differs = (rows.view(torch.int32) != expected.view(torch.int32)).nonzero()
        if len(differs):
            row, column = differs[0].tolist()
            raise ValueError(
                f"update {update.name!r} gives {float(rows[row, column])!r} on {implementation!r} and "
                f"{float(expected[row, column])!r} in torch ({update.function_name}), in column {column} of "
                f"a row of {dim} weights and {update.width(dim)} of state: the order of operations must be "
                "the same, each rounded to float32 (in numba write np.float32(0.9) for 0.9, a float64; "
                "in torch x.double().sqrt().float() for x.sqrt(), which a CPU may round otherwise)"
            )


def _check_bounds(update: CustomUpdate, rows: torch.Tensor, *given: Any) -> None:
    from ..kernels.sparse_optimizers.numba_sparse_optimizers import update_of_rows

    try:
        update_of_rows(update.numba, boundscheck=True)(rows, *given, 0.7, None)
    except IndexError as error:
        raise ValueError(
            f"update {update.name!r} in numba reaches beyond the row's weight, state or gradient: {error}"
        ) from error


def _probe(
    update: CustomUpdate, dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, Callable[[], torch.Tensor]]:
    """Random weights, states of zeros, and a function that draws gradients, of which a row has zeros."""
    generator = torch.Generator().manual_seed(0)
    num_rows = max(2, min(PROBED_ROWS, PROBED_VALUES // max(dim, 1)))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    def rows(zeros: int) -> torch.Tensor:
        """Of all magnitudes: a small change is lost in a large weight, a term like eps in a large sum."""
        found = draw(num_rows, dim) * 10.0 ** draw(num_rows, 1).mul(2).clamp(-5, 2)
        found[:zeros] = 0.0
        return found.to(device)

    state = torch.zeros(num_rows, update.width(dim), dtype=torch.float32, device=device)
    return rows(0), state, lambda: rows(1)


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


def _results(function: UpdateFunction, widths: tuple[int, ...]) -> str:
    """A digest of what updates `PROBED` make of a weight and its state, by gradients of all magnitudes.

    Of three digits, which processors have in common and another constant changes; numbers that are not round
    seldom end between two of these. Empty where the function does not take them: its first update says why.
    """
    sizes, found = (0.97313, -0.31729, 1.0371e-3, 1.0193e-8, 0.0), list[float]()
    try:
        with torch.no_grad(), torch.device("cpu"):
            weight = torch.full((len(sizes), 1), 0.51739, dtype=torch.float32, device="cpu")
            state = torch.zeros(len(sizes), widths[0], dtype=torch.float32, device="cpu")
            for number, step in enumerate(PROBED, 1):
                gradient = torch.tensor(sizes, dtype=torch.float32, device="cpu")[:, None] / number
                weight, state = function(weight, state, gradient, step, 0.10327)
                found += torch.cat([weight, state], 1).flatten().tolist()
    except Exception:
        return ""
    return sha256(" ".join(f"{value:.3g}" for value in found).encode()).hexdigest()[:8]


def _width(state_width: int | Callable[[int], int], dim: int, name: str) -> int:
    width = state_width(dim) if callable(state_width) else state_width
    if not isinstance(width, int) or isinstance(width, bool) or width < 0:
        raise ValueError(f"update {name!r}: the state width must be a whole number >= 0, got {width!r}")
    return width
