"""Seeds that lie in device memory, for work that is recorded once and repeated with other seeds.

What a graph has recorded keeps its numbers, so it would draw from a seed that is a Python integer for ever. A
`DeviceSeed` stands in its place: kernels load it from a tensor, which `DeviceSeeds.write` fills before each
replay. What is derived from it is computed on the host, as for any seed, so no bit changes.
"""

from __future__ import annotations

import torch

from tritonrec.kernels.philox.reference import derive_seed

Path = tuple[tuple[int, int], ...]
"""The pairs of stream and step by which a seed was derived, one after the other."""


class DeviceSeeds:
    """The seeds that a recording draws from, all derived from one.

    Args:
        device: of the tensor. most: different seeds that kernels may draw from.

    Attributes:
        values: (most,) int64.
    """

    def __init__(self, device: torch.device, most: int):
        self.values = torch.zeros(most, dtype=torch.int64, device=device)
        self._paths: list[Path] = []

    def root(self) -> DeviceSeed:
        """The seed that `write` gets."""
        return DeviceSeed(self, ())

    def place(self, path: Path) -> torch.Tensor:
        """() int64, a view of `values`, for a seed; RuntimeError for more seeds than there is space for."""
        if path not in self._paths:
            if len(self._paths) == len(self.values):
                raise RuntimeError(f"a recording has space for {len(self.values)} seeds, and draws from more")
            self._paths.append(path)
        return self.values[self._paths.index(path)]

    def write(self, seed: int) -> None:
        """Fill `values` for a seed; no wait."""
        numbers = []
        for path in self._paths:
            number = seed
            for stream, step in path:
                number = derive_seed(number, stream, step)
            numbers.append(number)
        if not numbers:
            return
        given = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        if not self.values.is_cpu:
            given = given.pin_memory()
        self.values[: len(numbers)].copy_(given, non_blocking=True)


class DeviceSeed:
    """A seed that kernels load, in the place of an int."""

    def __init__(self, seeds: DeviceSeeds, path: Path):
        self._seeds, self._path = seeds, path

    def derived(self, stream: int, step: int) -> DeviceSeed:
        """What `derive_seed` makes of it."""
        return DeviceSeed(self._seeds, (*self._path, (stream, step)))

    def tensor(self) -> torch.Tensor:
        """() int64, where its value is."""
        return self._seeds.place(self._path)


Seed = int | DeviceSeed


def in_kernel(seed: Seed, p: float) -> tuple[int, torch.Tensor | None]:
    """A kernel's arguments for dropout with probability p: the seed, and where it lies if it is loaded."""
    if not p:
        return 0, None
    return (0, seed.tensor()) if isinstance(seed, DeviceSeed) else (seed, None)
