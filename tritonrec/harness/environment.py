"""Where recorded figures come from."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ..version import __version__


def environment() -> dict[str, Any]:
    """Versions and machine."""
    return {
        "tritonrec": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
    }


def environment_of_times() -> dict[str, Any]:
    """`environment`, with what decides about times: the processor's name and its load, and the date."""
    return {
        **environment(),
        "processor": processor(),
        "load": [round(each, 2) for each in os.getloadavg()],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def processor() -> str:
    """The name of the processor's model, or of its architecture where the system does not tell the model."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line for line in lines if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()
