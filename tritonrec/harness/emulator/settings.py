"""How kernels are emulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...settings import seed_setting, setting

Architecture = Literal["sm_80", "sm_90"]


@dataclass(frozen=True)
class Emulation:
    """Settings of the emulator."""

    arch: Architecture = setting("sm_90", "The GPU's architecture.")
    schedules: int = setting(
        1, "Orders of the warps in which each launch runs, which must agree in every bit.", 1, 64
    )
    seed: int = seed_setting()
    races: bool = setting(True, "Look for races, and for reads of shared memory that nobody wrote.")
    uninitialised: bool = setting(
        False, "Look for reads of what torch.empty left as it was: it is filled with a NaN."
    )
    lockstep: bool = setting(
        True, "Lanes of a warp that agree where to go stay together, as on the hardware."
    )
    patience: int = setting(4_000_000, "Accesses that change nothing after which warps hang.", 1_000, 10**12)

    @property
    def capability(self) -> tuple[int, int]:
        """NVIDIA's compute capability."""
        return divmod(int(self.arch.removeprefix("sm_")), 10)
