"""The stages of a batch, each a function beside its declaration; `tritonrec.pipeline.schedule` draws them."""

from .input_dist import route, route_over_nodes
from .retrieval import copy_kept_rows, retrieve, retrieve_new_rows
from .samples import h2d, prefetch
from .update import (
    dense_reduce,
    dense_update,
    early_dense_reduce,
    gradient_norm,
    sparse_update,
    write_back,
    write_back_dropped_rows,
)
from .window import (
    compute,
    early_gradients,
    exchange,
    exchange_over_nodes,
    gradient_exchange,
    gradient_exchange_over_nodes,
    replica_reduce,
    represent,
    window_loss,
)

__all__ = [
    "compute",
    "copy_kept_rows",
    "dense_reduce",
    "dense_update",
    "early_dense_reduce",
    "early_gradients",
    "exchange",
    "exchange_over_nodes",
    "gradient_exchange",
    "gradient_exchange_over_nodes",
    "gradient_norm",
    "h2d",
    "prefetch",
    "replica_reduce",
    "represent",
    "retrieve",
    "retrieve_new_rows",
    "route",
    "route_over_nodes",
    "sparse_update",
    "window_loss",
    "write_back",
    "write_back_dropped_rows",
]
