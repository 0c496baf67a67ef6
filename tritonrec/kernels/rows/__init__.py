"""Rows of embeddings moved and summed."""

from tritonrec.kernels.rows.op import IndexedRows, gather_rows, scatter_rows, segment_sum

__all__ = ["IndexedRows", "gather_rows", "scatter_rows", "segment_sum"]
