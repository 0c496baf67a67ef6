"""Random numbers that are a function of what they are for, never of when they are drawn."""

from tritonrec.kernels.philox.device_seed import DeviceSeed, DeviceSeeds, Seed, in_kernel
from tritonrec.kernels.philox.op import derive_seed, initial_rows, random_indices
from tritonrec.kernels.philox.reference import DROPOUT

__all__ = [
    "DROPOUT",
    "DeviceSeed",
    "DeviceSeeds",
    "Seed",
    "derive_seed",
    "in_kernel",
    "initial_rows",
    "random_indices",
]
