"""Rows of embeddings moved and summed."""
