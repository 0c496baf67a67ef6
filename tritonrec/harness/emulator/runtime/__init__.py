"""What compiled programs call, in numba: memory, instructions of a whole warp, the scheduler."""
