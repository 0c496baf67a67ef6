"""Random numbers that are a function of what they are for, never of when they are drawn."""

from tritonrec.kernels.philox.op import derive_seed, initial_rows, random_indices
from tritonrec.kernels.philox.reference import DROPOUT

__all__ = ["DROPOUT", "derive_seed", "initial_rows", "random_indices"]
