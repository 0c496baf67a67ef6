"""Sampled replay: other ranks compute a share of each rank's work again, and bits are compared."""

from .plan import Plan, Unit
from .replay import Replay

__all__ = ["Plan", "Replay", "Unit"]
