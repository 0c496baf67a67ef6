"""The rule for float kernels: an error against float64 at most twice that of plain float32 torch."""

import torch


def assert_error_at_most_twice(
    got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, what: str = "", largest: float = 0.0
) -> None:
    """`exact` is float64. The message names the worst element.

    Beside twice the plain error, half a unit in the last place of the largest element is allowed, for a plain
    result that happens to be exact; `largest` stands for it where numbers on the way are larger.
    """
    assert got.shape == exact.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    for name, values in (
        ("", got),
        (" of plain float32", plain),
        (" of float64", exact),
    ):  # else all is allowed
        assert torch.isfinite(values).all(), f"{what}: a result{name} is not finite"
    if got.numel() == 0:
        return
    error = (got.cpu().double() - exact).abs()
    allowed = 2 * (plain.cpu().double() - exact).abs().max() + 2.0**-24 * max(
        largest, float(exact.abs().max())
    )
    if error.max() > allowed:
        place = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
        one, other = got.flatten()[error.argmax()].item(), exact.flatten()[error.argmax()].item()
        raise AssertionError(
            f"{what}{place} = {one!r}, exact {other!r}: error {error.max():.3g}, allowed {allowed:.3g}, "
            f"root mean square {error.square().mean().sqrt():.3g}"
        )
