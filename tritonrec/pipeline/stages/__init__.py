"""The stages of a batch, each a function beside its declaration.

batch t       prefetch  h2d  route  retrieve  copy_kept_rows
window of t   exchange[i]  compute[i]  gradient_exchange[i]  replica_reduce[i]     i = 0 .. N-1
end of t      dense_reduce  gradient_norm  sparse_update  dense_update  write_back
"""

from .input_dist import route
from .retrieval import copy_kept_rows, retrieve, retrieve_new_rows
from .samples import h2d, prefetch
from .update import (
    clipped_dense_update,
    clipped_sparse_update,
    dense_reduce,
    dense_update,
    gradient_norm,
    gradient_norm_of_replicas,
    sparse_update,
    sparse_update_of_replicas,
    write_back,
    write_back_dropped_rows,
)
from .window import compute, exchange, gradient_exchange, replica_reduce

__all__ = [
    "clipped_dense_update",
    "clipped_sparse_update",
    "compute",
    "copy_kept_rows",
    "dense_reduce",
    "dense_update",
    "exchange",
    "gradient_exchange",
    "gradient_norm",
    "gradient_norm_of_replicas",
    "h2d",
    "prefetch",
    "replica_reduce",
    "retrieve",
    "retrieve_new_rows",
    "route",
    "sparse_update",
    "sparse_update_of_replicas",
    "write_back",
    "write_back_dropped_rows",
]
