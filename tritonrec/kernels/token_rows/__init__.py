"""Rows of tokens as a next-item model takes them, in one call of the CPU, for trainers."""
