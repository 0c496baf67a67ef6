"""Recorded figures on one page: `tritonrec report`."""

from .digest import contract_digest
from .history import Step, steps

__all__ = ["Step", "contract_digest", "steps"]
