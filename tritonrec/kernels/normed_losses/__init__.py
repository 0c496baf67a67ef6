"""Norm and sampled softmax of a next-item model in one call of the CPU: see `cpu_normed_losses`."""
