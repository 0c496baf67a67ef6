"""Exact int64 rows in the bytes they need."""
