"""Exact int64 rows in the bytes they need."""

from tritonrec.kernels.packed_rows.op import FLOAT, add_packed_rows, pack_rows, packed_bytes

__all__ = ["FLOAT", "add_packed_rows", "pack_rows", "packed_bytes"]
