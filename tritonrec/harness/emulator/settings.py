"""How kernels are emulated."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from ...settings import KEY, seed_setting, setting

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
        True, "Look for reads of what torch.empty left as it was: it is filled with a NaN."
    )
    assemble: bool = setting(
        False,
        "Also compile each kernel for the GPU itself, into Triton's cache, where a run there finds it.",
    )
    patience: int = setting(4_000_000, "Accesses that change nothing after which warps hang.", 1_000, 10**12)

    @property
    def capability(self) -> tuple[int, int]:
        """NVIDIA's compute capability."""
        return divmod(int(self.arch.removeprefix("sm_")), 10)


def pytest_options(settings: Emulation) -> list[str]:
    """The options of `plugin` that stand for settings."""
    found = ["--emulate", settings.arch]
    for name, default, _ in options():
        value = getattr(settings, name)
        if isinstance(default, bool):
            found += [flag(name, default)] if value != default else []
        else:
            found += [flag(name, default), str(value)]
    return found


def options() -> list[tuple[str, bool | int, str]]:
    """(name, default, help) of the settings besides the architecture."""
    return [(each.name, each.default, each.metadata[KEY].help) for each in fields(Emulation)[1:]]  # type: ignore


def flag(name: str, default: bool | int) -> str:
    """Of pytest: ``--emulate-schedules``, ``--emulate-no-races``."""
    return f"--emulate-{'no-' if default is True else ''}{name}"
