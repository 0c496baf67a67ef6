"""The file of a measurement's ``--json``: where its figures come from, its options, and what was found."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tritonrec.files import save_json
from tritonrec.harness.environment import environment_of_times


def record(options: argparse.Namespace, environment: dict[str, Any] | None = None, **found: Any) -> None:
    """Write it if the options name a file; `environment` is that of the machine unless given."""
    if options.json:
        plan = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
        whence = {**(environment or environment_of_times()), "plan": plan}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        save_json({"environment": whence, **found}, options.json)
