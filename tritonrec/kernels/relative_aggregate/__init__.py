"""Causal sums with a learned weight for each relative place or time, over sequences stored end to end."""
