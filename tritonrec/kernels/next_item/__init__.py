"""A small micro-batch of a next-item model on the CPU, with exact sums: see `cpu_next_item`."""
