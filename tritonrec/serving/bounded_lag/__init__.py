"""All-to-all whose ranks may be up to a bound of exchanges apart (arXiv 2512.19342), and its c10d backend."""

from .backend import BoundedLagGroup, BoundedLagOptions, register
from .exchange import BoundedLagAllToAll
from .transport import Exchange

__all__ = ["BoundedLagAllToAll", "BoundedLagGroup", "BoundedLagOptions", "Exchange", "register"]
