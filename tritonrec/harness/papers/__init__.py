"""The figures of the five texts made again: `tritonrec reproduce`, and the tables of docs/papers.md."""

from . import bounded_lag, mtgrboost, nestpipe, slipstream, two_dimensional
from .page import Made

TEXTS: dict[str, Made] = {
    "nestpipe": nestpipe.FIGURES,
    "mtgrboost": mtgrboost.FIGURES,
    "2d": two_dimensional.FIGURES,
    "bounded lag": bounded_lag.FIGURES,
    "slipstream": slipstream.FIGURES,
}
"""By the text's name, which marks its table on the page."""
