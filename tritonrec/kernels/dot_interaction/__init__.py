"""Dot products of all pairs of a sample's vectors."""
