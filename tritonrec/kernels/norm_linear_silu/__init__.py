"""The front of the HSTU layer, fused: layer norm, linear layer, SiLU."""
