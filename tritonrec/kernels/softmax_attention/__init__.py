"""Softmax attention over sequences stored end to end."""
