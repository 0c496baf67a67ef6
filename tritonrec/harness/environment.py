"""Where recorded figures come from."""

from __future__ import annotations

import os
import platform
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
