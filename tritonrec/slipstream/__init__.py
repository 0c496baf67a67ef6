"""Slipstream: train on without the inputs whose embeddings no longer move. **Approximate.**

E. Maboud, D. Mahajan, M. Adnan and P. J. Nair, "Slipstream: Semantic-Based Training Acceleration for
Recommendation Models". Everything else in this library computes what synchronous training computes; this does
not, unless the threshold is 0. What it drops depends on data, seed and settings alone: it is the same in
every mode and at every world size.
"""

from .classify import Classification, Judgement
from .remaining import RemainingLoader
from .rows import HotRows, hot_rows
from .runtime import Slipstream, SlipstreamConfig
from .threshold import Interval, Threshold, find_threshold, interval, t_quantile

__all__ = [
    "Classification",
    "HotRows",
    "Interval",
    "Judgement",
    "RemainingLoader",
    "Slipstream",
    "SlipstreamConfig",
    "Threshold",
    "find_threshold",
    "hot_rows",
    "interval",
    "t_quantile",
]
