"""The stages of a batch, each a function beside its declaration; `tritonrec.pipeline.schedule` draws them."""

from .input_dist import route
from .retrieval import copy_kept_rows, retrieve, retrieve_new_rows
from .samples import h2d, prefetch
from .update import (
    dense_reduce,
    dense_update,
    gradient_norm,
    sparse_update,
    write_back,
    write_back_dropped_rows,
)
from .window import compute, exchange, gradient_exchange, replica_reduce

__all__ = [
    "compute",
    "copy_kept_rows",
    "dense_reduce",
    "dense_update",
    "exchange",
    "gradient_exchange",
    "gradient_norm",
    "h2d",
    "prefetch",
    "replica_reduce",
    "retrieve",
    "retrieve_new_rows",
    "route",
    "sparse_update",
    "write_back",
    "write_back_dropped_rows",
]
