"""Streaming metrics of clicks and of ranked lists, exact at any number of ranks."""

from .clicks import ClickMetrics
from .ranking import RankingMetrics

__all__ = ["ClickMetrics", "RankingMetrics"]
