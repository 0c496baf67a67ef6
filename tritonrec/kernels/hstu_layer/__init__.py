"""A whole HSTU layer in one call of the CPU, for trainers: see `cpu_hstu_layer`."""
