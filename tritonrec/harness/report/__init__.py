"""Recorded figures on one page: `tritonrec report`."""

from .digest import contract_digest

__all__ = ["contract_digest"]
