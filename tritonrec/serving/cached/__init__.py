"""Inference with cached keys and values, with the bits of recomputation (arXiv 2402.17152, section 3.4)."""

from .pages import CacheMemoryError
from .predictor import CachedPredictor, CacheStats

__all__ = ["CacheMemoryError", "CacheStats", "CachedPredictor"]
