"""The gate of the HSTU layer, fused: layer norm, product with u, dropout."""
