"""Slipstream: training without the inputs whose embeddings no longer change. **Approximate.**

E. Maboud, D. Mahajan, M. Adnan and P. J. Nair, "Slipstream: Semantic-Based Training Acceleration for
Recommendation Models". All other features of this library give the bits of synchronous training; this one
does not, unless the threshold is 0. The dropped inputs depend on data, seed and settings only: they are the
same in every mode and at every world size.
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
