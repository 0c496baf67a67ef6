"""Dropout whose mask is a function of what an element is, never of the batch."""
