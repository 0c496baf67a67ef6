"""Common keys of two buffers."""
