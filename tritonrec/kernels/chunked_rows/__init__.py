"""Copies of rows that lie in chunks of memory: gather and scatter by location, in one pass."""

from tritonrec.kernels.address_table import addresses
from tritonrec.kernels.chunked_rows.op import LOW, Chunks, fits, read_rows, write_rows

__all__ = ["LOW", "Chunks", "addresses", "fits", "read_rows", "write_rows"]
