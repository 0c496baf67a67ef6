"""Exact int64 rows in the bytes they need."""

from tritonrec.kernels.packed_rows.op import add_packed_rows, pack_rows, packed_bytes
from tritonrec.kernels.packed_rows.reference import FLOAT

__all__ = ["FLOAT", "add_packed_rows", "pack_rows", "packed_bytes"]
