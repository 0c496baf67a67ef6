"""The digest of a contract: what two runs of one version must agree on, whatever the machine."""

from __future__ import annotations

import hashlib
import json
from typing import Any

DIFFERS = ("seconds", "bytes_compared")
"""Of a case: time, and rows of later batches that the comparison meets, which depends on the schedule."""


def contract_digest(report: dict[str, Any]) -> str:
    """SHA-256, in hexadecimal, of the version, cases and faults of a report that ``verify --json`` wrote.

    Of a case everything counts but `DIFFERS`, of a fault its name and whether it was caught. Machine,
    versions of other packages and times do not. KeyError where `report` is none.
    """
    contract = {
        "version": report["environment"]["tritonrec"],
        "cases": [
            {name: value for name, value in case.items() if name not in DIFFERS} for case in report["cases"]
        ],
        "faults": [{"name": fault["name"], "caught": fault["caught"]} for fault in report["faults"]],
    }
    text = json.dumps(contract, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
