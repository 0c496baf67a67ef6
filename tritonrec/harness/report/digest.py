"""The digest of a contract: what two runs of one version must agree on, whatever the machine."""

from __future__ import annotations

import hashlib
import json
from typing import Any

DIFFERS = ("seconds", "bytes_compared", "tensors_compared")
"""Of a case: time, and what the comparison meets of later batches and answers, which depends on the schedule.

That there is some counts.
"""
TIMES = "_microseconds"
"""How the counts of a case that are times end."""


def contract_digest(report: dict[str, Any]) -> str:
    """SHA-256, in hexadecimal, of the version, cases and faults of a report that ``verify --json`` wrote.

    Of a case everything counts but the size of `DIFFERS` and `TIMES`, of a fault its name and whether it was
    caught, in whatever order. Machine, versions of other packages and times do not. KeyError where `report`
    is none.
    """
    contract = {
        "version": report["environment"]["tritonrec"],
        "cases": [
            {name: bool(value) if name in DIFFERS else _without_times(value) for name, value in case.items()}
            for case in report["cases"]
        ],
        "faults": sorted((fault["name"], fault["caught"]) for fault in report["faults"]),
    }
    text = json.dumps(contract, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _without_times(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: each for name, each in value.items() if not name.endswith(TIMES)}
