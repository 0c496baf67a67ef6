"""Dedup of embedding keys."""
