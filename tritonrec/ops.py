"""The user's door to the kernels: every public op, typed and documented, one import away.

Each op takes ``impl="auto" | "triton" | "cpu" | "reference"``; `implementation` tells which one runs,
and inside `use_impl` all run on one.
docs/ops.md draws what the ops on keys and rows return, and how they run without the host waiting.
"""

from .kernels.accumulator import GradientAccumulator
from .kernels.bucketize.op import bucketize, counting_sort, owner_of
from .kernels.dispatch import Impl, implementation, use_impl
from .kernels.dot_interaction.op import dot_interaction
from .kernels.dropout.op import dropout
from .kernels.fixed_point.errors import FRACTION_BITS, ExactSumError
from .kernels.fixed_point.op import check_summed, from_fixed_point, to_fixed_point
from .kernels.hash_table.errors import HashTableFullError
from .kernels.hash_table.op import check_inserted, hash_erase, hash_find, hash_grow, hash_insert
from .kernels.hstu_attention.call import HSTUBias, HSTUMask
from .kernels.hstu_attention.op import hstu_attention
from .kernels.intersect.op import intersect
from .kernels.linear.op import linear, linear_weight_grad
from .kernels.norm_linear_silu.op import norm_linear_silu
from .kernels.norm_mul_dropout.op import norm_mul_dropout
from .kernels.packed_rows.op import add_packed_rows, pack_rows, packed_bytes
from .kernels.philox.op import derive_seed, initial_rows, initial_rows_of_tables, random_indices
from .kernels.relative_aggregate.op import relative_aggregate
from .kernels.rows.op import IndexedRows, gather_rows, scatter_rows, segment_sum
from .kernels.sampled_softmax.op import sampled_softmax
from .kernels.silu.op import silu
from .kernels.softmax_attention.op import softmax_attention
from .kernels.sparse_optimizers.op import (
    sparse_adagrad,
    sparse_adam,
    sparse_adamw,
    sparse_ftrl,
    sparse_lamb,
    sparse_lars_sgd,
    sparse_lazy_decay,
    sparse_momentum_sgd,
    sparse_rowwise_adagrad,
    sparse_rowwise_adagradw,
    sparse_rowwise_adam,
    sparse_rowwise_lamb,
    sparse_sgd,
)
from .kernels.sum_of_squares.op import sum_of_squares
from .kernels.unique.op import unique

__all__ = [
    "FRACTION_BITS",
    "ExactSumError",
    "GradientAccumulator",
    "HSTUBias",
    "HSTUMask",
    "HashTableFullError",
    "Impl",
    "IndexedRows",
    "add_packed_rows",
    "bucketize",
    "check_inserted",
    "check_summed",
    "counting_sort",
    "derive_seed",
    "dot_interaction",
    "dropout",
    "from_fixed_point",
    "gather_rows",
    "hash_erase",
    "hash_find",
    "hash_grow",
    "hash_insert",
    "hstu_attention",
    "implementation",
    "initial_rows",
    "initial_rows_of_tables",
    "intersect",
    "linear",
    "linear_weight_grad",
    "norm_linear_silu",
    "norm_mul_dropout",
    "owner_of",
    "pack_rows",
    "packed_bytes",
    "random_indices",
    "relative_aggregate",
    "sampled_softmax",
    "scatter_rows",
    "segment_sum",
    "silu",
    "softmax_attention",
    "sparse_adagrad",
    "sparse_adam",
    "sparse_adamw",
    "sparse_ftrl",
    "sparse_lamb",
    "sparse_lars_sgd",
    "sparse_lazy_decay",
    "sparse_momentum_sgd",
    "sparse_rowwise_adagrad",
    "sparse_rowwise_adagradw",
    "sparse_rowwise_adam",
    "sparse_rowwise_lamb",
    "sparse_sgd",
    "sum_of_squares",
    "to_fixed_point",
    "unique",
    "use_impl",
]
