"""Rows of embeddings moved and summed."""

from tritonrec.kernels.rows.op import gather_rows, scatter_rows, segment_sum

__all__ = ["gather_rows", "scatter_rows", "segment_sum"]
