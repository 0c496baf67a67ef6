"""Optimizers that touch only the rows of one step."""
