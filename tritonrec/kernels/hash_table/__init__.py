"""The key structure of a dynamic embedding table."""
