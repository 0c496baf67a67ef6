"""Jagged HSTU attention: pointwise SiLU instead of softmax, over sequences stored end to end."""
