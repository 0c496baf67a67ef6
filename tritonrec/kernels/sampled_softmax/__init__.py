"""Sampled-softmax cross entropy of each token: its label against K sampled items."""
